//! Why a connection ended.

use std::io;

/// Why a connection ended before the client disconnected in good order.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The client does not follow the protocol, or asks for more than the server gives.
    #[error("it sent {0}")]
    Protocol(String),
    /// The client has closed the connection in the middle of a message.
    #[error("it closed the connection {0}")]
    Closed(&'static str),
    /// The negotiation has taken too long.
    #[error("it did not end the negotiation in time")]
    Slow,
    /// The kernel ended the connection.
    #[error("cannot {action}: {source}")]
    Io {
        /// For example "read from it".
        action: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl Ended {
    /// Returns the reason for a read that failed. `place` is for example "in the middle of a request".
    pub(crate) fn reading(place: &'static str) -> impl FnOnce(io::Error) -> Ended {
        move |source| match source.kind() {
            io::ErrorKind::UnexpectedEof => Ended::Closed(place),
            // Blocking sockets with a time limit fail with EAGAIN.
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Ended::Slow,
            _ => Ended::Io {
                action: "read from it",
                source,
            },
        }
    }

    /// Returns the reason for a write that failed.
    pub(crate) fn writing(source: io::Error) -> Ended {
        match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Ended::Slow,
            _ => Ended::Io {
                action: "send to it",
                source,
            },
        }
    }
}
