//! The server: accepts connections, runs a thread for each, and ends them.

use std::collections::HashMap;
use std::io::{self, BufReader, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_storage::IoError;
use jericho_sys::service;
use parking_lot::{Condvar, Mutex};

use crate::ended::Ended;
use crate::export::Export;
use crate::negotiation::negotiate;
use crate::socket::{Listener, Stream};
use crate::transmission::transmit;

/// Maximum number of connections. With the budget of each, their buffers take at most 1 GiB.
const CONNECTIONS_MAX: usize = 32;
/// Limit of a negotiation, so that clients that send nothing do not hold all connections.
const NEGOTIATION_MAX: Duration = Duration::from_secs(30);
/// Time that requests in progress have at the end of the server.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after a connection could not be accepted, for example because there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the thread that accepts connections: {0}")]
pub struct ServeError(#[from] io::Error);

#[derive(Default)]
struct Connections {
    open: HashMap<u64, Arc<Stream>>,
    last_id: u64,
}

struct Shared {
    export: Export,
    listener: Listener,
    connections: Mutex<Connections>,
    ended: Condvar,
}

/// A running server.
pub struct Server {
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl Server {
    /// Serves an export to all clients that connect.
    pub fn start(export: Export, listener: Listener) -> Result<Server, ServeError> {
        let shared = Arc::new(Shared {
            export,
            listener,
            connections: Mutex::default(),
            ended: Condvar::new(),
        });
        let accepting = service::spawn("nbd-accept", {
            let shared = Arc::clone(&shared);
            move || accept(&shared)
        })?;
        Ok(Server { shared, accepting })
    }

    /// Returns the URI that clients use.
    pub fn uri(&self) -> String {
        let shared = &self.shared;
        shared.listener.uri(shared.export.name())
    }

    /// Ends the server: accepts no more connections, refuses new requests, waits some seconds for those in progress, and flushes the
    /// device. Removes the socket file. The error says that data may not be durable.
    pub fn stop(self) -> Result<(), IoError> {
        let shared = &self.shared;
        shared.export.end();
        match shared.listener.end() {
            // The thread ends only when accept(2) fails; a panic of it has ended the process.
            Ok(()) => drop(self.accepting.join()),
            Err(error) => tracing::warn!(%error, "cannot end listening"),
        }
        // Requests that have arrived are answered; the sockets take no more of them.
        for how in [Shutdown::Read, Shutdown::Both] {
            let mut connections = shared.connections.lock();
            for stream in connections.open.values() {
                // An error is ignored: the client has disconnected.
                let _ = stream.shutdown(how);
            }
            let are_open = |connections: &mut Connections| !connections.open.is_empty();
            (shared.ended).wait_while_for(&mut connections, are_open, GRACE);
        }
        let left = shared.connections.lock().open.len();
        if left > 0 {
            tracing::warn!("{left} connections still wait for the device");
        }
        shared.export.disk.flush()
    }
}

/// Removes a connection from the list when its thread ends, also by a panic.
struct Registered<'s> {
    shared: &'s Shared,
    id: u64,
    stream: Arc<Stream>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // The list's copy may be in use: without this the client would not notice the end.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.shared.connections.lock().open.remove(&self.id);
        self.shared.ended.notify_all();
    }
}

fn accept(shared: &Arc<Shared>) {
    loop {
        match shared.listener.accept() {
            _ if shared.export.is_ending() => return,
            Ok((stream, client)) => {
                if let Err(error) = start(shared, stream, &client) {
                    tracing::warn!(client, %error, "cannot serve the client");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Starts a thread for a connection.
fn start(shared: &Arc<Shared>, stream: Stream, client: &str) -> io::Result<()> {
    let mut connections = shared.connections.lock();
    if connections.open.len() >= CONNECTIONS_MAX {
        return Err(io::Error::other(format!(
            "there are {CONNECTIONS_MAX} connections already"
        )));
    }
    connections.last_id += 1;
    let id = connections.last_id;
    let stream = Arc::new(stream);
    let client = format!("{client}, connection {id}");
    let shared_of_thread = Arc::clone(shared);
    let stream_of_thread = Arc::clone(&stream);
    let thread = std::thread::Builder::new().name("nbd-client".into());
    // The new thread cannot end before the connection is in the list, because the list is locked.
    thread.spawn(move || {
        let registered = Registered {
            shared: &shared_of_thread,
            id,
            stream: stream_of_thread,
        };
        tracing::debug!(client, "connected");
        match serve(&shared_of_thread.export, &registered.stream, &client) {
            Ok(()) => tracing::debug!(client, "disconnected"),
            Err(ended) => tracing::warn!("the connection of {client} ended: {ended}"),
        }
    })?;
    connections.open.insert(id, stream);
    Ok(())
}

/// Reads of a connection, which fail after a deadline.
struct Timed<'s> {
    stream: &'s Stream,
    deadline: Option<Instant>,
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(deadline) = self.deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.limit_reads(Some(left))?;
        }
        (&mut &*self.stream).read(bytes)
    }
}

fn serve(export: &Export, stream: &Stream, client: &str) -> Result<(), Ended> {
    let failed = |source| Ended::Io {
        action: "prepare its socket",
        source,
    };
    let mut input = BufReader::new(Timed {
        stream,
        deadline: Some(Instant::now() + NEGOTIATION_MAX),
    });
    let prepared = stream.prepare();
    let prepared = prepared.and_then(|()| stream.limit_writes(Some(NEGOTIATION_MAX)));
    prepared.map_err(failed)?;
    let Some(agreed) = negotiate(export, &mut input, stream)? else {
        return Ok(());
    };
    // A client may be idle, or stopped for some time.
    input.get_mut().deadline = None;
    stream.limit_reads(None).map_err(failed)?;
    stream.limit_writes(None).map_err(failed)?;
    transmit(export, agreed, client, &mut input, stream)
}
