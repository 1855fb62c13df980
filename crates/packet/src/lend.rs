//! The program: opens a socket, gives its capabilities up, and sends the socket to its caller.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

use jericho_sys::handshake::Connection;
use jericho_sys::packet::{PacketError, PacketSocket};
use jericho_sys::process;

use crate::answer::Answer;
use crate::request::Request;

/// Does all that the program does. Its standard input is one end of a pair of Unix sockets; the caller has the other end.
///
/// Its environment and its other descriptors are of no use to it: nothing here reads them.
pub fn lend(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let opened = match Request::parse(arguments) {
        Ok(request) => open(&request),
        Err(error) => Err(Answer::Failed(error.to_string())),
    };
    let sent = process::drop_capabilities().and_then(|()| send(&opened));
    match (sent, opened) {
        (Ok(()), Ok(_)) => ExitCode::SUCCESS,
        (Ok(()), Err(_)) => ExitCode::from(1),
        (Err(error), _) => {
            // Standard error may be closed, and no other place is left for the message.
            let _ = writeln!(
                io::stderr(),
                "jericho-packet: nothing was opened: {error}; jericho starts this program, and it is of no use in a shell"
            );
            ExitCode::from(2)
        }
    }
}

fn open(request: &Request) -> Result<PacketSocket, Answer> {
    let Request {
        interface,
        ethertype,
        receive_bytes,
    } = request;
    let opened = PacketSocket::open_restricted(interface, *ethertype, *receive_bytes);
    opened.map_err(|error| match error {
        PacketError::Denied(_) => Answer::Denied,
        error => Answer::Failed(error.to_string()),
    })
}

/// Sends the answer, with the socket if there is one. Does not wait for a caller that reads nothing.
fn send(opened: &Result<PacketSocket, Answer>) -> io::Result<()> {
    let caller = Connection::from(io::stdin().as_fd().try_clone_to_owned()?);
    match opened {
        Ok(socket) => caller.send_now(&Answer::Socket.to_bytes(), &[socket.as_fd()]),
        Err(answer) => caller.send_now(&answer.to_bytes(), &[]),
    }
}
