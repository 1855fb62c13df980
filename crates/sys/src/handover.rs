//! Handing descriptors to other processes: SOCK_SEQPACKET sockets of the abstract namespace, unix(7).
//!
//! Abstract names belong to a network namespace and vanish with their socket: nothing is left behind.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};

/// Descriptors in one message at most; the kernel's limit is 253.
pub const DESCRIPTORS_MAX: usize = 240;

/// Who is at the other end, as of the connection.
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

fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

impl Listener {
    /// Errors: EADDRINUSE when the name is taken.
    pub fn bind(name: &str) -> io::Result<Listener> {
        let socket = socket()?;
        rustix::net::bind(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        )?;
        rustix::net::listen(&socket, 64)?;
        Ok(Listener { socket })
    }

    /// Waits for a connection.
    pub fn accept(&self) -> io::Result<Connection> {
        let socket = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(Connection { socket })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Connects to a listener. Sends and receives give up after `timeout` (EAGAIN). Errors: ECONNREFUSED
    /// when nobody listens (in this network namespace).
    pub fn connect(name: &str, timeout: Duration) -> io::Result<Connection> {
        let socket = socket()?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
        rustix::net::connect(
            &socket,
            &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        )?;
        Ok(Connection { socket })
    }

    /// Limits how long sends and receives take (EAGAIN).
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Send, Some(timeout))?;
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(timeout))?;
        Ok(())
    }

    /// Who is at the other end. Errors: ESRCH when the process has ended already; ENODATA likewise.
    pub fn peer(&self) -> io::Result<Peer> {
        let cred = sockopt::socket_peercred(&self.socket)?;
        let pid = cred.pid.as_raw_nonzero().get() as u32;
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
            // SAFETY: the kernel has just made it for us.
            unsafe { OwnedFd::from_raw_fd(fd) }
        } else {
            // Before 6.5. The peer waits for our answer, so its number is still its own.
            rustix::process::pidfd_open(
                rustix::process::Pid::from_raw(pid as i32)
                    .ok_or(io::Error::from(rustix::io::Errno::SRCH))?,
                rustix::process::PidfdFlags::empty(),
            )?
        };
        Ok(Peer {
            pid,
            uid: cred.uid.as_raw(),
            pidfd,
        })
    }

    /// Sends one message with at most `DESCRIPTORS_MAX` descriptors. Errors: EPIPE, EAGAIN, EINVAL for too
    /// many.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > DESCRIPTORS_MAX {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(rustix::io::Errno::INVAL.into());
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    /// Receives one message: its length and the descriptors that came with it (close-on-exec). Length 0:
    /// the other end has closed. Errors: EAGAIN after the timeout; EMFILE when descriptors did not fit
    /// into this process's limit.
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
            return Err(rustix::io::Errno::MFILE.into());
        }
        Ok((message.bytes, fds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_goes_from_process_to_process_and_the_peer_is_known() {
        let name = format!("jericho-test-{}", std::process::id());
        let listener = Listener::bind(&name).unwrap();
        assert!(Listener::bind(&name).is_err(), "the name is taken");
        let client = std::thread::spawn({
            let name = name.clone();
            move || {
                let c = Connection::connect(&name, Duration::from_secs(10)).unwrap();
                c.send(b"hello", &[]).unwrap();
                let mut bytes = [0; 16];
                let (len, fds) = c.receive(&mut bytes).unwrap();
                assert_eq!((&bytes[..len], fds.len()), (&b"three"[..], 3));
                // Among them is the other end itself.
                drop(fds);
                let (len, fds) = c.receive(&mut bytes).unwrap();
                assert_eq!((len, fds.len()), (0, 0), "closed");
            }
        });
        let c = listener.accept().unwrap();
        let peer = c.peer().unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, crate::process::effective_uid());
        let ended =
            crate::process::wait_readable(peer.pidfd.as_fd(), Some(Duration::ZERO)).unwrap();
        assert!(!ended);
        let mut bytes = [0; 16];
        assert_eq!(c.receive(&mut bytes).unwrap().0, 5);
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
}
