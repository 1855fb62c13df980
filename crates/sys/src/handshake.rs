//! Passes descriptors to other processes: SOCK_SEQPACKET sockets of the abstract namespace, unix(7).
//!
//! Abstract names belong to a network namespace and vanish with their socket, so nothing has to be cleaned up.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};

/// Maximum number of descriptors in one message; the kernel's limit is 253.
pub const DESCRIPTORS_MAX: usize = 240;

/// Maximum number of connections that wait to be accepted. Further programs wait in connect(2).
const BACKLOG: i32 = 1024;
/// SO_PASSRIGHTS: whether a socket accepts descriptors from its peers. From asm-generic/socket.h, absent from `libc`; since Linux
/// 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;

/// The process at the other end, as of its connect(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id in this process's namespace; 0 when it has none there.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// The process at the other end, as of the connection, with a pidfd.
#[derive(Debug)]
pub struct Peer {
    /// Process id in this process's namespace; 0 when it has none there.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Readable once the process has ended.
    pub pidfd: OwnedFd,
}

/// Listens under an abstract name.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

fn socket(more: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | more,
        None,
    )?)
}

impl Listener {
    /// Listens on a socket whose operations, and those of its connections, never block. Peers cannot send descriptors: they
    /// get EPERM, and before Linux 6.16 the kernel drops the descriptors. Fails with EADDRINUSE when the name is taken.
    pub fn bind(name: &str) -> io::Result<Listener> {
        let socket = socket(SocketFlags::NONBLOCK)?;
        refuse_descriptors(&socket)?;
        rustix::net::bind(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        )?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(Listener { socket })
    }

    /// Accepts a connection whose calls never block. Returns `None` when no program is connecting.
    pub fn accept(&self) -> io::Result<Option<Connection>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(Connection { socket })),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Makes the kernel refuse messages with descriptors, because closing a received one could wait for the sender's filesystem.
/// Kernels without this option drop the descriptors of a message that is received without room for them.
fn refuse_descriptors(socket: &OwnedFd) -> io::Result<()> {
    let no: libc::c_int = 0;
    // SAFETY: `no` is valid for reads of the length given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const no).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if set == 0 => Ok(()),
        Some(libc::ENOPROTOOPT) => Ok(()),
        _ => Err(error),
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Connection {
    /// Wraps one end of a pair.
    fn from(socket: OwnedFd) -> Connection {
        Connection { socket }
    }
}

impl Connection {
    /// Creates two connected ends: one for this process and one to pass on.
    pub fn pair() -> io::Result<(Connection, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Connection { socket: ours }, theirs))
    }

    /// Connects to a listener. Sends and receives fail with EAGAIN after `timeout`. Fails with ECONNREFUSED when no process
    /// listens in this network namespace.
    pub fn connect(name: &str, timeout: Duration) -> io::Result<Connection> {
        let socket = socket(SocketFlags::empty())?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
        rustix::net::connect(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        )?;
        Ok(Connection { socket })
    }

    /// Returns the process at the other end, as recorded by the kernel at connect(2). Receives nothing.
    pub fn credentials(&self) -> io::Result<Credentials> {
        let cred = sockopt::socket_peercred(&self.socket)?;
        Ok(Credentials {
            pid: cred.pid.as_raw_nonzero().get() as u32,
            uid: cred.uid.as_raw(),
            gid: cred.gid.as_raw(),
        })
    }

    /// Returns the process at the other end. Fails with ESRCH or ENODATA when the process has ended.
    pub fn peer(&self) -> io::Result<Peer> {
        let Credentials { pid, uid, .. } = self.credentials()?;
        let mut fd: libc::c_int = -1;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `fd` is valid for writes of `len` bytes; the option gives a new descriptor.
        let got = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERPIDFD,
                (&raw mut fd).cast(),
                &raw mut len,
            )
        };
        let pidfd = if got == 0 && fd >= 0 {
            // SAFETY: the kernel has just created the descriptor for this call.
            unsafe { OwnedFd::from_raw_fd(fd) }
        } else {
            // Before Linux 6.5. The peer waits for an answer, so its process id is still its own.
            rustix::process::pidfd_open(
                rustix::process::Pid::from_raw(pid as i32).ok_or(io::Error::from(Errno::SRCH))?,
                rustix::process::PidfdFlags::empty(),
            )?
        };
        Ok(Peer { pid, uid, pidfd })
    }

    /// Receives one message without descriptors; the kernel drops any that came with it. Length 0 means that the other end has
    /// closed or sent an empty message. Returns `None` when there is no message yet and the connection does not block.
    pub fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::net::recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((_, len)) => Ok(Some(len.min(bytes.len()))),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Shuts the connection down for both ends, even if this end's descriptor has duplicates.
    pub fn shut(&self) {
        // The connection may have ended already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Limits the time of each send and receive (EAGAIN).
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Send, Some(timeout))?;
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(timeout))?;
        Ok(())
    }

    /// Sends one message with at most `DESCRIPTORS_MAX` descriptors. Fails with EPIPE, EAGAIN, or EINVAL for too many
    /// descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, SendFlags::empty())
    }

    /// Does the same as `send` without blocking (EAGAIN).
    pub fn send_now(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, SendFlags::DONTWAIT)
    }

    fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        if fds.len() > DESCRIPTORS_MAX {
            return Err(Errno::INVAL.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL.into());
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            flags | SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    /// Receives one message. Returns its length and its descriptors (close-on-exec). Length 0 means that the other end has
    /// closed. Fails with EAGAIN after the timeout, and with EMFILE when the descriptors exceed this process's limit.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let mut fds = vec![];
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = part {
                fds.extend(received);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MFILE.into());
        }
        Ok((message.bytes, fds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until the listener has a connection.
    fn accept(listener: &Listener) -> Connection {
        crate::process::wait_readable(listener.as_fd(), None).unwrap();
        listener.accept().unwrap().expect("a connection")
    }

    fn receive_bytes(connection: &Connection, bytes: &mut [u8]) -> usize {
        crate::process::wait_readable(connection.as_fd(), None).unwrap();
        connection.receive_bytes(bytes).unwrap().expect("a message")
    }

    #[test]
    fn a_segment_goes_from_process_to_process_and_the_peer_is_known() {
        let name = format!("jericho-test-{}", std::process::id());
        let listener = Listener::bind(&name).unwrap();
        assert!(Listener::bind(&name).is_err(), "the name is taken");
        assert!(listener.accept().unwrap().is_none(), "no program connects");
        let client = std::thread::spawn({
            let name = name.clone();
            move || {
                let c = Connection::connect(&name, Duration::from_secs(60)).unwrap();
                c.send(b"hello", &[]).unwrap();
                let mut bytes = [0; 16];
                let (len, fds) = c.receive(&mut bytes).unwrap();
                assert_eq!((&bytes[..len], fds.len()), (&b"three"[..], 3));
                // Two of them are duplicates of the other end.
                drop(fds);
                let (len, fds) = c.receive(&mut bytes).unwrap();
                assert_eq!((len, fds.len()), (0, 0), "closed");
            }
        });
        let c = accept(&listener);
        let who = c.credentials().unwrap();
        assert_eq!(who.pid, std::process::id());
        assert_eq!(who.uid, crate::process::effective_uid());
        let peer = c.peer().unwrap();
        assert_eq!((peer.pid, peer.uid), (who.pid, who.uid));
        let ended =
            crate::process::wait_readable(peer.pidfd.as_fd(), Some(Duration::ZERO)).unwrap();
        assert!(!ended);
        let mut bytes = [0; 16];
        assert_eq!(receive_bytes(&c, &mut bytes), 5);
        assert!(c.receive_bytes(&mut bytes).unwrap().is_none());
        c.send(
            b"three",
            &[c.socket.as_fd(), c.socket.as_fd(), peer.pidfd.as_fd()],
        )
        .unwrap();
        drop(c);
        client.join().unwrap();
        drop(listener);
        let gone = Connection::connect(&name, Duration::from_secs(1)).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_listener_gets_no_descriptors_from_its_peers() {
        use std::os::unix::net::UnixStream;
        let name = format!("jericho-test-fds-{}", std::process::id());
        let listener = Listener::bind(&name).unwrap();
        let c = Connection::connect(&name, Duration::from_secs(60)).unwrap();
        let (far, near) = UnixStream::pair().unwrap();
        // The kernel refuses the message, or drops the descriptor when the message is received.
        let sent = c.send(b"hello", &[near.as_fd()]);
        drop(near);
        let accepted = accept(&listener);
        let mut bytes = [0; 16];
        match sent {
            Ok(()) => assert_eq!(receive_bytes(&accepted, &mut bytes), 5),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
        }
        // No process holds the other end.
        let closed =
            crate::process::wait_readable(far.as_fd(), Some(Duration::from_secs(60))).unwrap();
        assert!(closed, "the descriptor is held");
        // Descriptors can be sent in the other direction.
        accepted.send(b"down", &[far.as_fd()]).unwrap();
        assert_eq!(c.receive(&mut bytes).unwrap().1.len(), 1);
    }
}
