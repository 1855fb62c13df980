//! Sockets that clients connect to.
//!
//! A socket file whose server is dead is replaced, and one whose server lives is not. Two servers that start at a time lock the
//! directory one after the other, so that neither removes the other's file.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jericho_sys::sockets;

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another server listens there.
    #[error("a server already listens at {}: end it first, or choose another path", .path.display())]
    Live {
        /// The socket file.
        path: PathBuf,
    },
    /// The path is in use by something else.
    #[error("{} exists and is not a socket: remove it, or choose another path", .path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// Another error.
    #[error("cannot {action} {address}: {source}")]
    Io {
        /// For example "listen at".
        action: &'static str,
        /// A path, or an address and port.
        address: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// A listening socket. Dropping it removes its file.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Unix {
        listener: UnixListener,
        path: PathBuf,
        /// Device and inode of the socket file.
        identity: (u64, u64),
    },
    Tcp {
        listener: TcpListener,
        address: SocketAddr,
    },
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Listener {
    /// Listens at a path. A user needs write permission for the socket file to connect.
    pub fn unix(path: &Path) -> Result<Listener, ListenError> {
        let failed = |action| {
            move |source| ListenError::Io {
                action,
                address: path.display().to_string(),
                source,
            }
        };
        // Another directory must not be meant later, when the file is removed.
        let path = std::path::absolute(path).map_err(failed("find the directory of"))?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        let lock = File::open(directory).map_err(failed("open the directory of"))?;
        lock.lock().map_err(failed("lock the directory of"))?;
        remove_stale(&path)?;
        let listener = UnixListener::bind(&path).map_err(failed("listen at"))?;
        let metadata = fs::symlink_metadata(&path).map_err(failed("examine"))?;
        Ok(Listener {
            socket: Socket::Unix {
                listener,
                path,
                identity: identity(&metadata),
            },
        })
    }

    /// Listens at an address and port. Port 0 is replaced by a free one.
    pub fn tcp(address: SocketAddr) -> Result<Listener, ListenError> {
        let failed = |source| ListenError::Io {
            action: "listen at",
            address: address.to_string(),
            source,
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Listener {
            socket: Socket::Tcp { listener, address },
        })
    }

    /// Returns the URI that clients use for the export of this name (doc/uri.md of the protocol).
    pub fn uri(&self, name: &str) -> String {
        let name = percent_encoded(name.as_bytes());
        match &self.socket {
            Socket::Unix { path, .. } => {
                let path = percent_encoded(path.as_os_str().as_encoded_bytes());
                format!("nbd+unix:///{name}?socket={path}")
            }
            Socket::Tcp { address, .. } => format!("nbd://{address}/{name}"),
        }
    }

    /// Waits for a client. Returns its connection and its address.
    pub(crate) fn accept(&self) -> io::Result<(Stream, String)> {
        match &self.socket {
            Socket::Unix { listener, .. } => {
                let (stream, _) = listener.accept()?;
                Ok((Stream::Unix(stream), "a local client".into()))
            }
            Socket::Tcp { listener, .. } => {
                let (stream, peer) = listener.accept()?;
                Ok((Stream::Tcp(stream), peer.to_string()))
            }
        }
    }

    /// Makes `accept` fail from now on, and removes the socket file.
    pub(crate) fn end(&self) -> io::Result<()> {
        self.remove_file();
        match &self.socket {
            Socket::Unix { listener, .. } => sockets::end_listening(listener),
            Socket::Tcp { listener, .. } => sockets::end_listening(listener),
        }
    }

    /// Removes the socket file, unless it is another server's.
    fn remove_file(&self) {
        let Socket::Unix {
            path,
            identity: own,
            ..
        } = &self.socket
        else {
            return;
        };
        if fs::symlink_metadata(path).is_ok_and(|metadata| identity(&metadata) == *own)
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the socket file");
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove_file();
    }
}

/// Removes a socket file that no server listens at.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |action| {
        move |source| ListenError::Io {
            action,
            address: path.display().to_string(),
            source,
        }
    };
    let path_buf = path.to_path_buf();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("examine")(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NoSocket { path: path_buf });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ListenError::Live { path: path_buf }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("remove the socket of a dead server at"))
        }
        // The queue of its server is full.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(ListenError::Live { path: path_buf })
        }
        Err(error) => Err(failed("connect to the socket at")(error)),
    }
}

/// Returns bytes as a part of a URI: all but letters, digits and `-._~/` as %XX.
fn percent_encoded(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'-' | b'.' | b'_' | b'~' | b'/' => text.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(*byte)),
            byte => text += &format!("%{byte:02X}"),
        }
    }
    text
}

/// A connection.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Makes a TCP connection send replies at once, and notice a client's host that has gone.
    pub fn prepare(&self) -> io::Result<()> {
        if let Stream::Tcp(stream) = self {
            stream.set_nodelay(true)?;
            sockets::keep_alive(stream)?;
        }
        Ok(())
    }

    /// Limits the time of each later read (`None`: no limit).
    pub fn limit_reads(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.set_read_timeout(limit),
            Stream::Tcp(stream) => stream.set_read_timeout(limit),
        }
    }

    /// Limits the time of each later write (`None`: no limit).
    pub fn limit_writes(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.set_write_timeout(limit),
            Stream::Tcp(stream) => stream.set_write_timeout(limit),
        }
    }

    /// Ends the reads of all threads, or the writes, or both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.shutdown(how),
            Stream::Tcp(stream) => stream.shutdown(how),
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).read(bytes),
            Stream::Tcp(stream) => (&mut &*stream).read(bytes),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).write(bytes),
            Stream::Tcp(stream) => (&mut &*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a socket");
        // The standard library's listener leaves its file.
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::unix(&path).unwrap();
        let refused = Listener::unix(&path).unwrap_err();
        assert!(matches!(refused, ListenError::Live { .. }), "{refused}");
        assert!(
            listener
                .uri("x y")
                .starts_with("nbd+unix:///x%20y?socket=/")
        );
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "text").unwrap();
        let refused = Listener::unix(&path).unwrap_err();
        assert!(matches!(refused, ListenError::NoSocket { .. }), "{refused}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }

    #[test]
    fn a_server_does_not_remove_the_file_of_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let first = Listener::unix(&path).unwrap();
        fs::rename(&path, dir.path().join("moved")).unwrap();
        let _second = Listener::unix(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
