//! Reports the daemon's state to the service manager (the protocol of sd_notify(3)): one datagram to the socket named by
//! NOTIFY_SOCKET. Does nothing without a service manager.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Reports that the daemon serves. systemctl shows `status`.
pub fn ready(status: &str) {
    send(&format!("READY=1\nSTATUS={status}"));
}

/// Reports that unmounting has begun.
pub fn stopping() {
    send("STOPPING=1\nSTATUS=writing everything back");
}

fn send(message: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| {
        UnixDatagram::unbound()?
            .send_to_addr(message.as_bytes(), &address)
            .map(|_| ())
    });
    if let Err(error) = sent {
        tracing::warn!(%error, socket = ?name, "cannot tell the service manager");
    }
}
