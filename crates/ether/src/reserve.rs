//! Reserves a name in this network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Reserves a name against other processes of this network namespace, until the listener is dropped or the process ends. Fails with EADDRINUSE
/// if another process has it, and with EINVAL if the name has more than 107 bytes.
pub(crate) fn reserve(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}
