//! Calls on sockets that the standard library does not offer.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with, sockopt,
};

/// Ends listening: accept(2) in other threads, and later calls of it, fail with EINVAL. The descriptor stays open.
pub fn end_listening(listener: impl AsFd) -> io::Result<()> {
    Ok(shutdown(listener, Shutdown::Both)?)
}

/// Makes the kernel probe an idle TCP connection, so that it fails after some hours if the other host has gone: SO_KEEPALIVE.
pub fn keep_alive(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_keepalive(socket, true)?)
}

/// Returns the process that listens at an abstract name of this network namespace (unix(7)). Returns `None` if no process does, if it
/// cannot be seen, or if it takes no connections.
pub fn listener_at(abstract_name: &[u8]) -> Option<u32> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    let address = SocketAddrUnix::new_abstract_name(abstract_name).ok()?;
    connect(&socket, &address).ok()?;
    let listener = sockopt::socket_peercred(&socket).ok()?;
    // Another namespace's process has the id 0 here.
    u32::try_from(listener.pid.as_raw_pid())
        .ok()
        .filter(|pid| *pid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_thread_that_waits_for_connections_returns_when_listening_ends() {
        let dir = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(dir.path().join("socket")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| unix.accept().map(|_| ()));
            let second = scope.spawn(|| tcp.accept().map(|_| ()));
            // Perhaps the threads do not wait yet: the next call must fail, too.
            std::thread::sleep(std::time::Duration::from_millis(20));
            end_listening(&unix).unwrap();
            end_listening(&tcp).unwrap();
            for thread in [first, second] {
                let error = thread.join().unwrap().unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            }
        });
        assert!(unix.accept().is_err());
    }
}
