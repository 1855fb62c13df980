//! The caller of the program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use jericho_sys::handshake::Connection;
use jericho_sys::packet::{PacketError, PacketSocket};

use crate::answer::{ANSWER_BYTES_MAX, Answer};
use crate::request::Request;

/// Name of the program's file.
const PROGRAM: &str = "jericho-packet";
/// Where the program is, from the directory of this process's executable. Nothing else is searched: no PATH, and no variable.
const PLACES: [&str; 2] = [".", "../libexec/jericho"];
/// The program's answer takes some milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why no socket could be borrowed.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// The program is not installed.
    #[error(
        "no permission to send raw frames on {interface}: it needs the capability CAP_NET_RAW; run as root, or in a network namespace of your own, \
         or let root install jericho-packet, which opens the socket for the users of a group (`make install`): it is not in {searched}"
    )]
    Missing {
        /// The interface.
        interface: String,
        /// The directories.
        searched: String,
    },
    /// The program cannot be started, most likely because of its mode.
    #[error(
        "no permission to send raw frames on {interface}: it needs the capability CAP_NET_RAW, and {program}, which opens the socket for the users of \
         its group, cannot be run: {source}; root can add you to the group of that file (`usermod -aG`), then log in again"
    )]
    Start {
        /// The interface.
        interface: String,
        /// The program.
        program: String,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The program has no capability.
    #[error(
        "no permission to send raw frames on {interface}: it needs the capability CAP_NET_RAW, and {program} does not have it either: as root, \
         `setcap cap_net_raw+ep {program}`; this has no effect in a user namespace, with no_new_privs, or on a filesystem mounted with nosuid"
    )]
    Denied {
        /// The interface.
        interface: String,
        /// The program.
        program: String,
    },
    /// The program opens no such socket.
    #[error("{program} opens no socket on {interface}: {reason}")]
    Refused {
        /// The interface.
        interface: String,
        /// The program.
        program: String,
        /// Its reason.
        reason: String,
    },
    /// The program ended or hangs without an answer, or has another version.
    #[error(
        "{program} gave no usable answer: {reason}; install the one that was built with this jericho"
    )]
    Answer {
        /// The program.
        program: String,
        /// What happened.
        reason: String,
    },
    /// The socket cannot be used.
    #[error(transparent)]
    Packet(#[from] PacketError),
}

/// Lets the program open a socket on an interface. The socket is like one of [`PacketSocket::open`], but can never receive other frames.
pub fn borrow(
    interface: &str,
    ethertype: u16,
    receive_bytes: usize,
) -> Result<PacketSocket, BorrowError> {
    let directory = std::env::current_exe().unwrap_or_default();
    let directory = directory.parent().unwrap_or(Path::new("/"));
    let request = Request {
        interface: interface.to_owned(),
        ethertype,
        receive_bytes,
    };
    borrow_from(directory, &request)
}

/// Does the same for an executable in some directory.
fn borrow_from(directory: &Path, request: &Request) -> Result<PacketSocket, BorrowError> {
    let interface = || request.interface.clone();
    let places: [PathBuf; 2] = PLACES.map(|place| directory.join(place).components().collect());
    let path = places.iter().map(|place| place.join(PROGRAM));
    let Some(path) = path.into_iter().find(|path| path.is_file()) else {
        let searched: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        return Err(BorrowError::Missing {
            interface: interface(),
            searched: searched.join(" or "),
        });
    };
    let program = || path.display().to_string();
    let (connection, mut child) = start(&path, request).map_err(|source| BorrowError::Start {
        interface: interface(),
        program: program(),
        source,
    })?;
    let mut bytes = [0; ANSWER_BYTES_MAX];
    let received = loop {
        match connection.receive(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            received => break received,
        }
    };
    if received.is_err() {
        // It may hang. If it has ended already, there is nothing to kill.
        let _ = child.kill();
    }
    let ended = child.wait();
    let nothing = |reason: String| BorrowError::Answer {
        program: program(),
        reason,
    };
    let (length, mut fds) = received.map_err(|error| nothing(error.to_string()))?;
    match Answer::from_bytes(&bytes[..length]) {
        Some(Answer::Socket) if fds.len() == 1 => {
            let fd = fds.remove(0);
            Ok(PacketSocket::received(fd, &request.interface)?)
        }
        Some(Answer::Denied) => Err(BorrowError::Denied {
            interface: interface(),
            program: program(),
        }),
        Some(Answer::Failed(reason)) => Err(BorrowError::Refused {
            interface: interface(),
            program: program(),
            reason,
        }),
        None if length == 0 => Err(nothing(match ended {
            Ok(status) => format!("it ended with {status}"),
            Err(error) => error.to_string(),
        })),
        _ => Err(nothing("its answer is unknown here".to_owned())),
    }
}

/// Starts the program. Its environment is empty, and it gets no descriptors but its end of the connection.
fn start(program: &Path, request: &Request) -> io::Result<(Connection, Child)> {
    let (ours, theirs) = Connection::pair()?;
    ours.set_timeout(TIMEOUT)?;
    let child = Command::new(program)
        .args(request.arguments())
        .env_clear()
        .stdin(theirs)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok((ours, child))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn borrowed(directory: &Path) -> String {
        let request = Request {
            interface: "nowhere0".into(),
            ethertype: 0x88b5,
            receive_bytes: 8192,
        };
        let error = borrow_from(directory, &request).expect_err("nothing to borrow");
        error.to_string()
    }

    /// Makes a shell script the program.
    fn program(path: &Path, mode: u32, script: &str) {
        fs::create_dir_all(path).expect("a directory");
        let path = path.join(PROGRAM);
        // A file that another thread's child has open for writing cannot be run.
        let partial = path.with_extension("partial");
        fs::write(&partial, format!("#!/bin/sh\n{script}\n")).expect("a file");
        fs::set_permissions(&partial, Permissions::from_mode(mode)).expect("a mode");
        fs::rename(partial, path).expect("a program");
    }

    #[test]
    fn each_failure_names_the_program_and_what_to_do() {
        let root = tempfile::tempdir().expect("a directory");
        let bin = root.path().join("bin");
        let libexec = root.path().join("libexec/jericho");
        let said = borrowed(&bin);
        for text in ["nowhere0", "CAP_NET_RAW", "jericho-packet", "make install"] {
            assert!(said.contains(text), "{said}");
        }
        assert!(said.contains("bin or "), "{said}");
        fs::create_dir_all(&bin).expect("a directory");
        program(&libexec, 0o644, "");
        let said = borrowed(&bin);
        assert!(said.contains("usermod"), "{said}");
        program(&libexec, 0o755, "exit 7");
        let said = borrowed(&bin);
        assert!(said.contains("no usable answer"), "{said}");
        // The one beside the executable comes first. Its message cannot be sent by a shell.
        program(&bin, 0o644, "");
        let said = borrowed(&bin);
        assert!(said.contains("bin/jericho-packet"), "{said}");
    }
}
