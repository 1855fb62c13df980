//! A target: starts its threads, and ends them. `serving` has what the threads share.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_format::wire::FRAMES_PER_KEY;
use jericho_remote::{Client, ExportConfig, Owner, Security, Target, TargetConfig};
use jericho_storage::Device;
use jericho_sys::service;
use jericho_topology::Topology;

use crate::links::{LinkError, Links, entropy};
use crate::outbox::Mode;
use crate::owner::{OwnerRecord, label_of};
use crate::recorder::Recorder;
use crate::reserve::reserve;
use crate::serving::{Receiving, Serving};
use crate::socket::{LinkChoice, Opening, Side};
use crate::url::Remote;
use crate::workers::Workers;

/// Slots of a session.
const SLOTS: u16 = 256;
/// Pages of the pool of a session: 64 MiB.
const POOL_PAGES: u32 = 16_384;

/// What a target serves, and how.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Name of this host.
    pub host: String,
    /// Name of the export.
    pub name: String,
    /// Names of network interfaces.
    pub interfaces: Vec<String>,
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Which sockets carry frames.
    pub link: LinkChoice,
    /// Refuse writes.
    pub is_read_only: bool,
    /// Do not answer a search for all exports.
    pub is_hidden: bool,
    /// How frames are protected.
    pub security: Security,
    /// Clients that the target admits, with their keys. Every client is admitted if `security` is `None`.
    pub clients: Vec<Client>,
    /// The machine's NUMA nodes.
    pub topology: Arc<Topology>,
    /// Who sends frames.
    pub mode: Mode,
    /// Directory of the record of the export's owner. `None`: no record, so that no initiator can go on after a restart.
    pub state: Option<PathBuf>,
}

/// Why a target could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A network interface cannot be used.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A name is empty or too long.
    #[error(
        "{0}: the name of a host or an export needs 1 to 64 bytes, without slashes and control characters"
    )]
    Name(String),
    /// Another target of this host has the name.
    #[error(
        "another `jericho serve` of this host uses the name {0}, or the same --state directory; choose another name or directory"
    )]
    NameTaken(String),
    /// The record cannot be read or written.
    #[error("cannot keep the record of the export's owner in {}: {source}; choose a directory with --state", .path.display())]
    State {
        /// The directory.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Another target of this network namespace uses an interface.
    #[error(
        "another `jericho serve` uses {interface} with the Ethertype {ethertype:#06x}; choose another one with --ethertype, also on the other host"
    )]
    Claimed {
        /// The interface.
        interface: String,
        /// The Ethertype.
        ethertype: u16,
    },
    /// Another error.
    #[error("cannot {action}: {source}")]
    Io {
        /// For example "start threads".
        action: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// A running target.
pub struct Server {
    serving: Arc<Serving>,
    workers: Arc<Workers>,
    /// Ends the threads that receive when it is closed.
    stop: Option<UnixStream>,
    receivers: Vec<JoinHandle<()>>,
    /// Threads that make the device's calls.
    calling: Vec<JoinHandle<()>>,
    _claims: Vec<UnixListener>,
}

impl Server {
    /// Serves a device. The caller holds the device's claim for as long as the server runs, so that no other process uses it.
    pub fn start(device: Arc<dyn Device>, config: &ServeConfig) -> Result<Server, ServeError> {
        let failed = |action| move |source| ServeError::Io { action, source };
        for name in [&config.name, &config.host] {
            if !Remote::is_name(name) {
                return Err(ServeError::Name(name.clone()));
            }
        }
        // Before the sockets: the XDP program of a target takes the frames of all initiators.
        let claims = claim_interfaces(config)?;
        let opening = Opening {
            ethertype: config.ethertype,
            choice: config.link,
            side: Side::Target,
        };
        let links = Links::open(&config.interfaces, opening, &config.topology, 1)?;
        let record = open_record(&*device, config)?;
        let last_owner = match &record {
            Some(record) => {
                record
                    .read(label_of(&*device))
                    .map_err(|source| ServeError::State {
                        path: record.path().to_owned(),
                        source,
                    })?
            }
            None => None,
        };
        let target = target_of(&*device, config, &links, last_owner)?;
        let (stop, stopped) = UnixStream::pair().map_err(failed("make a socket"))?;
        let start = |record| Recorder::start(record, Arc::clone(&device));
        let recorder = record.map(start).transpose();
        let (recorder, bell) = recorder.map_err(failed("start threads"))?.unzip();
        let topology = &config.topology;
        let outboxes = links.outboxes(config.mode);
        let started = outboxes.start(topology, links.nodes());
        started.map_err(failed("start threads"))?;
        let workers = Arc::new(Workers::new(device, links.nodes(), &target.own_pages()));
        let serving = Serving::new(
            target,
            links.clock(),
            outboxes,
            Arc::clone(&workers),
            recorder,
            Arc::clone(topology),
        );
        let serving = Arc::new(serving.map_err(failed("make a timer"))?);
        let mut server = Server {
            serving: Arc::clone(&serving),
            workers: Arc::clone(&workers),
            stop: Some(stop),
            receivers: Vec::new(),
            calling: Vec::new(),
            _claims: claims,
        };
        let ended = Arc::clone(&serving);
        let calling = workers.start(topology, move |end| ended.ended(end));
        server.calling = calling.map_err(failed("start threads"))?;
        let receiving = Receiving::new(&links, &serving, bell, &stopped);
        for one in receiving.map_err(failed("watch sockets"))? {
            let serving = Arc::clone(&serving);
            let thread = service::spawn(one.name(), move || one.run(&serving));
            server
                .receivers
                .push(thread.map_err(failed("start threads"))?);
        }
        Ok(server)
    }
}

impl Drop for Server {
    /// Waits for the operations that the device has begun. Initiators find the target again when it is back.
    fn drop(&mut self) {
        drop(self.stop.take());
        self.workers.close();
        // A panic in a thread has ended the process.
        for thread in self.receivers.drain(..).chain(self.calling.drain(..)) {
            let _ = thread.join();
        }
        self.serving.stop();
    }
}

fn target_of(
    device: &dyn Device,
    config: &ServeConfig,
    links: &Links,
    last_owner: Option<Owner>,
) -> Result<Target, ServeError> {
    let export = ExportConfig {
        name: config.name.clone(),
        size_bytes: device.size_bytes(),
        is_read_only: config.is_read_only || device.is_read_only(),
        is_hidden: config.is_hidden,
        last_owner,
        security: config.security,
        clients: config.clients.clone(),
    };
    let target_config = TargetConfig {
        host: config.host.clone(),
        ethertype: config.ethertype,
        slots: SLOTS,
        pool_pages: POOL_PAGES,
        frames_per_key: FRAMES_PER_KEY,
    };
    let random = entropy().map_err(|source| ServeError::Io {
        action: "get random numbers",
        source,
    })?;
    let target = Target::new(target_config, &links.links(), vec![export], random);
    target.ok_or_else(|| ServeError::Name(config.name.clone()))
}

fn open_record(
    device: &dyn Device,
    config: &ServeConfig,
) -> Result<Option<OwnerRecord>, ServeError> {
    let Some(directory) = &config.state else {
        return Ok(None);
    };
    // The size is no part of it: a device that has grown is the same one.
    let name = PathBuf::from(&*device.name());
    let path = std::fs::canonicalize(&name).unwrap_or(name);
    let record = OwnerRecord::open(directory, &config.name, &path.to_string_lossy());
    record.map(Some).map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => ServeError::NameTaken(config.name.clone()),
        _ => ServeError::State {
            path: directory.clone(),
            source,
        },
    })
}

/// Reserves the interfaces: two targets with one Ethertype on one interface would each answer for the other's sessions.
fn claim_interfaces(config: &ServeConfig) -> Result<Vec<UnixListener>, ServeError> {
    let mut claims = Vec::new();
    // One that is named twice is refused later.
    for interface in config.interfaces.iter().collect::<BTreeSet<_>>() {
        let name = format!("jericho/serve/{interface}/{:04x}", config.ethertype);
        let claim = reserve(&name);
        claims.push(claim.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::Claimed {
                interface: interface.clone(),
                ethertype: config.ethertype,
            },
            _ => ServeError::Io {
                action: "reserve the network interface",
                source,
            },
        })?);
    }
    Ok(claims)
}
