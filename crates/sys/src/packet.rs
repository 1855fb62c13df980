//! Packet sockets: frames of one Ethertype on one network interface (packet(7)).

use std::ffi::{CStr, CString};
use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::packet_filter;

/// A socket that sends and receives whole Ethernet frames on one interface: those of one Ethertype, or all for a port. It does not receive
/// the frames that this host sends out of the interface.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    index: i32,
    mac: [u8; 6],
    mtu: usize,
    receive_bytes: usize,
}

/// Memory for frames that are received together.
#[derive(Debug)]
pub struct Frames {
    bytes: Vec<u8>,
    stride: usize,
    /// Length of each frame that was received; 0: left out.
    lengths: Vec<usize>,
}

impl Frames {
    /// Returns memory for `count` frames of at most `frame_bytes`.
    pub fn new(count: usize, frame_bytes: usize) -> Frames {
        Frames {
            bytes: vec![0; count * frame_bytes],
            stride: frame_bytes,
            lengths: Vec::with_capacity(count),
        }
    }

    /// Returns the frames that were received last, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let places = self.bytes.chunks_exact(self.stride).zip(&self.lengths);
        places
            .map(|(place, length)| &place[..*length])
            .filter(|frame| !frame.is_empty())
    }

    /// Forgets the frames.
    pub(crate) fn clear(&mut self) {
        self.lengths.clear();
    }

    /// Returns the place of the next frame, if there is one.
    pub(crate) fn place(&mut self) -> Option<&mut [u8]> {
        let mut places = self.bytes.chunks_exact_mut(self.stride);
        places.nth(self.lengths.len())
    }

    /// Adds the frame in the place. Leaves out one that is longer than its place.
    pub(crate) fn add(&mut self, length: usize) {
        self.lengths
            .push(if length <= self.stride { length } else { 0 });
    }

    /// Returns the same frames, to be changed in place.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let places = self.bytes.chunks_exact_mut(self.stride);
        places
            .zip(&self.lengths)
            .map(|(place, length)| &mut place[..*length])
            .filter(|frame| !frame.is_empty())
    }
}

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// There is no such interface.
    #[error("there is no network interface {0}; `ip link` shows those that exist")]
    Missing(String),
    /// The interface is no Ethernet interface.
    #[error("the network interface {0} is not an Ethernet interface")]
    Kind(String),
    /// The interface is down.
    #[error("the network interface {0} is down; bring it up with `ip link set {0} up`")]
    Down(String),
    /// The process may not use packet sockets.
    #[error(
        "no permission to send raw frames on {0}: it needs the capability CAP_NET_RAW; run as root, or in a network namespace of your own"
    )]
    Denied(String),
    /// Another error.
    #[error("cannot {action} on the network interface {interface}: {source}")]
    Io {
        /// For example "open a packet socket".
        action: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl PacketError {
    /// Returns what makes the error of an action from the kernel's reason.
    pub(crate) fn of(
        interface: &str,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> PacketError {
        let interface = interface.to_owned();
        move |source| match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => PacketError::Denied(interface),
            _ => PacketError::Io {
                action,
                interface,
                source,
            },
        }
    }
}

impl PacketSocket {
    /// Opens a non-blocking socket on an interface. Asks for a receive buffer of `receive_bytes`; the kernel may give less.
    pub fn open(
        interface: &str,
        ethertype: u16,
        receive_bytes: usize,
    ) -> Result<PacketSocket, PacketError> {
        let socket = PacketSocket::unbound(interface, receive_bytes)?;
        let failed = PacketError::of(interface, "receive frames");
        socket.bind(ethertype).map_err(failed)?;
        Ok(socket)
    }

    /// Opens a socket for another process, which may not open one. The socket receives frames of this Ethertype on this interface only, whatever that process does with it:
    /// a locked filter refuses all others. Otherwise the process could bind the socket to another Ethertype or interface. It can still send any frame.
    pub fn open_restricted(
        interface: &str,
        ethertype: u16,
        receive_bytes: usize,
    ) -> Result<PacketSocket, PacketError> {
        let socket = PacketSocket::unbound(interface, receive_bytes)?;
        let restricted = packet_filter::restrict(socket.as_fd(), ethertype, socket.index);
        restricted.map_err(PacketError::of(interface, "restrict the frames"))?;
        let failed = PacketError::of(interface, "receive frames");
        socket.bind(ethertype).map_err(failed)?;
        Ok(socket)
    }

    /// Takes a socket on an interface that another process has opened. Needs no capability.
    pub fn received(fd: OwnedFd, interface: &str) -> Result<PacketSocket, PacketError> {
        let failed = PacketError::of(interface, "read the number");
        let answer = request(&fd, interface, libc::SIOCGIFINDEX).map_err(failed)?;
        // SAFETY: SIOCGIFINDEX has filled this member of the union.
        let index = unsafe { answer.ifr_ifru.ifru_ifindex };
        PacketSocket::described(fd, interface, index)
    }

    /// Opens a socket that receives nothing before `bind`.
    pub(crate) fn unbound(
        interface: &str,
        receive_bytes: usize,
    ) -> Result<PacketSocket, PacketError> {
        let failed = |action| PacketError::of(interface, action);
        let index = index_of(interface)?;
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // Protocol 0: no frame arrives before `bind`, from whatever interface.
        // SAFETY: the call takes numbers only.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(failed("open a packet socket")(io::Error::last_os_error()));
        }
        // SAFETY: `fd` is a descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut socket = PacketSocket::described(fd, interface, index)?;
        socket
            .set_option(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            .map_err(failed("ignore outgoing frames"))?;
        // SO_RCVBUF is doubled by the kernel, and limited by net.core.rmem_max. Only CAP_NET_ADMIN may exceed the limit.
        let wanted = i32::try_from(receive_bytes / 2).unwrap_or(i32::MAX);
        socket
            .set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, wanted)
            .or_else(|_| socket.set_option(libc::SOL_SOCKET, libc::SO_RCVBUF, wanted))
            .map_err(failed("set the receive buffer"))?;
        // Without it, a burst of frames of 8 KiB finds no room.
        socket
            .set_option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, wanted)
            .or_else(|_| socket.set_option(libc::SOL_SOCKET, libc::SO_SNDBUF, wanted))
            .map_err(failed("set the send buffer"))?;
        socket.receive_bytes = socket
            .receive_buffer()
            .map_err(failed("read the size of the receive buffer"))?;
        Ok(socket)
    }

    /// Asks the kernel what must be known of a socket and its interface. Fails if the interface cannot be used.
    fn described(fd: OwnedFd, interface: &str, index: i32) -> Result<PacketSocket, PacketError> {
        let failed = |action| PacketError::of(interface, action);
        let flags =
            request(&fd, interface, libc::SIOCGIFFLAGS).map_err(failed("read the flags"))?;
        // SAFETY: SIOCGIFFLAGS has filled this member of the union.
        let flags = i32::from(unsafe { flags.ifr_ifru.ifru_flags });
        if flags & libc::IFF_UP == 0 {
            return Err(PacketError::Down(interface.to_owned()));
        }
        let address =
            request(&fd, interface, libc::SIOCGIFHWADDR).map_err(failed("read the address"))?;
        // SAFETY: SIOCGIFHWADDR has filled this member of the union.
        let address = unsafe { address.ifr_ifru.ifru_hwaddr };
        if address.sa_family != libc::ARPHRD_ETHER {
            return Err(PacketError::Kind(interface.to_owned()));
        }
        let mtu = request(&fd, interface, libc::SIOCGIFMTU).map_err(failed("read the MTU"))?;
        // SAFETY: SIOCGIFMTU has filled this member of the union.
        let mtu = unsafe { mtu.ifr_ifru.ifru_mtu };
        let mut socket = PacketSocket {
            fd,
            index,
            mac: std::array::from_fn(|byte| address.sa_data[byte] as u8),
            mtu: mtu.max(0) as usize,
            receive_bytes: 0,
        };
        socket.receive_bytes = socket
            .receive_buffer()
            .map_err(failed("read the size of the receive buffer"))?;
        Ok(socket)
    }

    /// Returns the interface's MAC address.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Returns the interface's MTU in bytes.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    /// Returns the size of the receive buffer as the kernel counts it: each frame uses more than its length.
    pub fn receive_bytes(&self) -> usize {
        self.receive_bytes
    }

    /// Sends frames with one system call, each in two pieces. Returns the number of frames that the kernel took: the kernel stops at a frame that it refuses. Fails if
    /// the kernel refuses the first frame: with EAGAIN or ENOBUFS when the interface's queue is full, with ENETDOWN when the interface is down, and with EMSGSIZE when the
    /// frame is longer than the MTU allows.
    pub fn send_many(&self, frames: &[[IoSlice<'_>; 2]]) -> io::Result<usize> {
        let message = |pieces: &[IoSlice<'_>; 2]| {
            // SAFETY: all zeros are a valid mmsghdr.
            let mut message: libc::mmsghdr = unsafe { MaybeUninit::zeroed().assume_init() };
            // The kernel only reads the pieces. An IoSlice has the layout of an iovec.
            message.msg_hdr.msg_iov = pieces.as_ptr().cast::<libc::iovec>().cast_mut();
            message.msg_hdr.msg_iovlen = pieces.len() as _;
            message
        };
        let mut messages: Vec<libc::mmsghdr> = frames.iter().map(message).collect();
        // SAFETY: each message has no address and no control data, and its pieces live as long as `frames`.
        let sent = unsafe {
            libc::sendmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                messages.len() as u32,
                libc::MSG_DONTWAIT as _,
            )
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives frames with one system call, each with its Ethernet header, into `frames`, whose former ones are lost. Leaves out frames for other hosts, which an
    /// interface in promiscuous mode or with VLANs sees. Returns whether more may have arrived. Fails with ENETDOWN, once, when the interface went down.
    pub fn receive_many(&self, frames: &mut Frames) -> io::Result<bool> {
        frames.lengths.clear();
        let stride = frames.stride;
        let places = frames.bytes.len() / stride;
        // SAFETY: all zeros are a valid sockaddr_ll.
        let zero: libc::sockaddr_ll = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut addresses = vec![zero; places];
        let mut pieces: Vec<libc::iovec> = (frames.bytes.chunks_exact_mut(stride))
            .map(|place| libc::iovec {
                iov_base: place.as_mut_ptr().cast(),
                iov_len: place.len(),
            })
            .collect();
        let message = |(address, piece): (&mut libc::sockaddr_ll, &mut libc::iovec)| {
            // SAFETY: all zeros are a valid mmsghdr.
            let mut message: libc::mmsghdr = unsafe { MaybeUninit::zeroed().assume_init() };
            message.msg_hdr.msg_name = (&raw mut *address).cast();
            message.msg_hdr.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (&raw mut *piece, 1);
            message
        };
        let mut messages: Vec<libc::mmsghdr> =
            addresses.iter_mut().zip(&mut pieces).map(message).collect();
        // SAFETY: each message points to its own address and piece, which live until the call ends, and each piece to a place of its own in `frames`.
        let received = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                messages.len() as u32,
                (libc::MSG_DONTWAIT | libc::MSG_TRUNC) as _,
                std::ptr::null_mut(),
            )
        };
        let Ok(received) = usize::try_from(received) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            };
        };
        let lengths = messages.iter().map(|message| message.msg_len as usize);
        for (length, address) in lengths.zip(&addresses).take(received) {
            // A frame that was cut off is longer than any frame of the protocol.
            let is_ours = address.sll_pkttype != libc::PACKET_OTHERHOST && length <= stride;
            frames.lengths.push(if is_ours { length } else { 0 });
        }
        Ok(received == places)
    }

    /// Returns the number of the interface.
    pub(crate) fn index(&self) -> i32 {
        self.index
    }

    /// Sets an option that is a number.
    pub(crate) fn set_option(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        let length = size_of::<i32>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `value`.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                length,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn receive_buffer(&self) -> io::Result<usize> {
        let mut value = 0_i32;
        let mut length = size_of::<i32>() as libc::socklen_t;
        // SAFETY: the pointers are those of `value` and of its length.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUF,
                (&raw mut value).cast(),
                &raw mut length,
            )
        };
        match result {
            0 => Ok(value.max(0) as usize),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Begins to receive frames of an Ethertype, or of all with ETH_P_ALL.
    pub(crate) fn bind(&self, ethertype: u16) -> io::Result<()> {
        // SAFETY: all zeros are a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { MaybeUninit::zeroed().assume_init() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = ethertype.to_be();
        address.sll_ifindex = self.index;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `address`.
        let result =
            unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), length) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for PacketSocket {
    /// Returns the socket, which is readable when a frame has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the Ethernet interfaces of this network namespace that are up, by name and MTU. sysfs may show those of another namespace.
pub fn interfaces() -> io::Result<Vec<(String, usize)>> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a descriptor that nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the call takes nothing.
    let list = unsafe { libc::if_nameindex() };
    if list.is_null() {
        return Err(io::Error::last_os_error());
    }
    let mut names = Vec::new();
    let mut entry = list;
    // SAFETY: the list ends with an entry whose index is 0, and each earlier entry has a string that ends in a zero.
    unsafe {
        while (*entry).if_index != 0 {
            names.push(CStr::from_ptr((*entry).if_name).to_owned());
            entry = entry.add(1);
        }
        libc::if_freenameindex(list);
    }
    // An interface that is gone meanwhile is left out.
    let usable = |name: CString| {
        let name = name.into_string().ok()?;
        let flags = request(&fd, &name, libc::SIOCGIFFLAGS).ok()?;
        let address = request(&fd, &name, libc::SIOCGIFHWADDR).ok()?;
        let mtu = request(&fd, &name, libc::SIOCGIFMTU).ok()?;
        // SAFETY: the requests have filled these members of the unions.
        let (flags, kind, mtu) = unsafe {
            (
                i32::from(flags.ifr_ifru.ifru_flags),
                address.ifr_ifru.ifru_hwaddr.sa_family,
                mtu.ifr_ifru.ifru_mtu,
            )
        };
        let is_usable = flags & libc::IFF_UP != 0 && kind == libc::ARPHRD_ETHER;
        is_usable.then_some((name, mtu.max(0) as usize))
    };
    Ok(names.into_iter().filter_map(usable).collect())
}

/// Socket option of SOL_PACKET (linux/if_packet.h), which the crate `libc` lacks for some targets.
const PACKET_IGNORE_OUTGOING: i32 = 23;

/// The kernel's struct ethtool_channels (linux/ethtool.h).
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    most: [u32; 4],
    receive: u32,
    send: u32,
    other: u32,
    combined: u32,
}

const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Returns the number of receive queues of an interface. A driver that does not tell has one.
pub(crate) fn receive_queues(interface: &str) -> io::Result<u32> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a descriptor that nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut channels = Channels {
        command: ETHTOOL_GCHANNELS,
        ..Channels::default()
    };
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: for this command, the kernel reads and writes a whole struct ethtool_channels at the address in the ifreq.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if result == 0 {
        return Ok(channels.receive + channels.combined);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Ok(1),
        _ => Err(error),
    }
}

/// Returns the number of an interface.
pub(crate) fn index_of(interface: &str) -> Result<i32, PacketError> {
    let missing = || PacketError::Missing(interface.to_owned());
    let text = CString::new(interface).map_err(|_| missing())?;
    // SAFETY: `text` is a string that ends in a zero.
    let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
    if index == 0 || interface.len() >= libc::IFNAMSIZ {
        return Err(missing());
    }
    Ok(index as i32)
}

/// Asks the kernel about an interface (netdevice(7)).
fn request(fd: &OwnedFd, interface: &str, what: libc::Ioctl) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: these requests read the name from an ifreq and write their answer to it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), what, &raw mut request) };
    match result {
        0 => Ok(request),
        _ => Err(io::Error::last_os_error()),
    }
}
