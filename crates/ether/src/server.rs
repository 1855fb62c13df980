//! A target: one thread that has the sockets and the protocol.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_format::wire::{FRAMES_PER_KEY, mac_text};
use jericho_remote::{
    Action, Client, ExportConfig, Owner, Security, Strange, Target, TargetConfig, TargetOutput,
    Work, hexadecimal,
};
use jericho_storage::{AlignedBuffer, Device};
use jericho_sys::poller::Poller;
use jericho_sys::service;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;

use crate::alarm;
use crate::links::{LinkError, Links, Receiver, entropy};
use crate::owner::OwnerRecord;
use crate::placement;
use crate::recorder::Recorder;
use crate::reserve::reserve;
use crate::url::Remote;
use crate::workers::{Ended, Job, Workers};

/// Slots of a session.
const SLOTS: u16 = 256;
/// Pages of the pool of a session: 64 MiB.
const POOL_PAGES: u32 = 16_384;
/// Key of the bell in the poller. Sockets have their number.
const BELL: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

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
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    bell: UnixStream,
    thread: Option<JoinHandle<()>>,
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
        let links = Links::open(&config.interfaces, config.ethertype, &config.topology, 1)?;
        let receiver = links.receiver((0..config.interfaces.len() as u16).collect());
        let claims = claim_interfaces(config)?;
        let record = open_record(&*device, config)?;
        let last_owner = match &record {
            Some(record) => record.read().map_err(|source| ServeError::State {
                path: record.path().to_owned(),
                source,
            })?,
            None => None,
        };
        let target = target_of(&*device, config, &links, last_owner)?;
        let (near, far) = UnixStream::pair().map_err(failed("make a socket"))?;
        for end in [&near, &far] {
            end.set_nonblocking(true).map_err(failed("make a socket"))?;
        }
        let poller = Poller::new().map_err(failed("watch sockets"))?;
        for (nic, socket) in receiver.sockets() {
            let added = poller.add(socket, nic.into());
            added.map_err(failed("watch sockets"))?;
        }
        poller.add(&near, BELL).map_err(failed("watch sockets"))?;
        let timer = Timer::new().map_err(failed("make a timer"))?;
        poller.add(&timer, TIMER).map_err(failed("watch a timer"))?;
        let bell = far.try_clone().map_err(failed("make a socket"))?;
        let recorder = match record {
            Some(record) => {
                let bell = far.try_clone().map_err(failed("make a socket"))?;
                Some(Recorder::start(record, bell).map_err(failed("start threads"))?)
            }
            None => None,
        };
        let workers = Workers::start(device, far).map_err(failed("start threads"))?;
        let (stop, stopped) = channel();
        let serving = Serving {
            target,
            links,
            receiver,
            topology: Arc::clone(&config.topology),
            poller,
            timer,
            timer_at: None,
            workers,
            bell: near,
            pools: HashMap::new(),
            recorder,
            stopped,
            _claims: claims,
        };
        // All interfaces of a target have one thread. It runs on their node if they have only one.
        let groups = placement::groups(serving.links.nodes());
        let node = match &groups[..] {
            [(node, _)] => *node,
            _ => None,
        };
        let thread = service::spawn("serve", move || {
            placement::pin(&serving.topology, node);
            serving.run();
        });
        Ok(Server {
            stop: Some(stop),
            bell,
            thread: Some(thread.map_err(failed("start threads"))?),
        })
    }
}

impl Drop for Server {
    /// Waits for the operations that the device has begun. Sends nothing: initiators find the target again when it is back.
    fn drop(&mut self) {
        drop(self.stop.take());
        // EAGAIN: many bytes are there already.
        let _ = io::Write::write(&mut self.bell, &[1]);
        if let Some(thread) = self.thread.take() {
            // A panic in a thread has ended the process.
            let _ = thread.join();
        }
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

struct Serving {
    target: Target,
    links: Links,
    receiver: Receiver,
    topology: Arc<Topology>,
    poller: Poller,
    timer: Timer,
    /// When the timer ends.
    timer_at: Option<Duration>,
    workers: Workers,
    /// Readable when an operation has ended, or the server must stop.
    bell: UnixStream,
    /// Session -> its memory.
    pools: HashMap<u64, AlignedBuffer>,
    /// Writes the record of the owner, if there is one.
    recorder: Option<Recorder>,
    _claims: Vec<UnixListener>,
    /// Closed when the server must stop.
    stopped: mpsc::Receiver<()>,
}

impl Serving {
    fn run(mut self) {
        let mut ready = Vec::new();
        let mut has_more = false;
        loop {
            let (now, due) = (self.links.now(), self.target.timer());
            alarm::set(&self.timer, &mut self.timer_at, now, due);
            let timeout = has_more.then_some(Duration::ZERO);
            ready.clear();
            if let Err(error) = self.poller.wait(&mut ready, timeout) {
                tracing::error!(%error, "cannot wait for frames");
                std::thread::sleep(Duration::from_millis(10));
            }
            if ready.contains(&BELL) {
                let mut bytes = [0; 64];
                while matches!((&self.bell).read(&mut bytes), Ok(1..)) {}
                if let Err(mpsc::TryRecvError::Disconnected) = self.stopped.try_recv() {
                    return;
                }
            }
            if ready.contains(&TIMER) {
                self.timer.clear();
            }
            for ended in self.workers.take_ended() {
                self.ended(ended);
            }
            self.recorded();
            has_more = self.receive();
            let now = self.links.now();
            self.target.poll(now);
            while self.perform() {
                // Operations that ended meanwhile have completions to send.
                let now = self.links.now();
                self.target.poll(now);
            }
        }
    }

    /// Takes frames. Each one's payload is copied before what follows from it begins.
    fn receive(&mut self) -> bool {
        let has_more = self.receiver.receive();
        let (now, target, pools) = (self.links.now(), &mut self.target, &mut self.pools);
        self.receiver.take(|link, frame| {
            if let Some((place, payload)) = target.on_frame(now, link, frame)
                && let Some(pool) = pools.get_mut(&place.session)
            {
                let at = place.at_bytes as usize;
                pool.as_mut_slice()[at..at + payload.len()].copy_from_slice(payload);
            }
        });
        has_more
    }

    fn ended(&mut self, ended: Ended) {
        if let Work::Request {
            session,
            operation,
            run,
            ..
        } = ended.work
            && operation.action == Action::Read
            && ended.result.is_ok()
            && let Some(pool) = self.pools.get_mut(&session)
        {
            pool.as_mut_slice()[run.bytes()].copy_from_slice(ended.data.as_slice());
        }
        self.target.ended(ended.work, ended.result);
    }

    /// Performs the outputs of the protocol. Returns whether operations have ended meanwhile.
    fn perform(&mut self) -> bool {
        let mut has_ended = false;
        while let Some(output) = self.target.next_output() {
            match output {
                TargetOutput::Send(frame) => self.links.queue(frame),
                TargetOutput::Stranger { mac, key, why } => {
                    let (mac, key) = (mac_text(&mac), hexadecimal(&key));
                    let why = match why {
                        Strange::OtherSecurity => {
                            "it has no key, or was told of another protection than this host's"
                        }
                        Strange::UnknownKey => "no --client has its key",
                        Strange::Forged => {
                            "its frame was not made with the key; somebody may have changed it on the way"
                        }
                    };
                    tracing::warn!("the client at {mac} was refused: {why} (fingerprint {key})");
                }
                TargetOutput::OpenPool {
                    session,
                    pages,
                    client,
                } => {
                    tracing::info!(session, client, "a session begins");
                    let own = self.target.own_pages();
                    let pool = placement::pool(&self.topology, pages, &own);
                    self.pools.insert(session, pool);
                }
                TargetOutput::ClosePool { session } => {
                    let (work, ended) = self.workers.locks();
                    tracing::info!(
                        session,
                        ?work,
                        ?ended,
                        "a session has ended; these are the locks of operations that wait and that have ended"
                    );
                    self.send_queued();
                    self.pools.remove(&session);
                }
                TargetOutput::Execute(work) => has_ended |= self.execute(work),
                TargetOutput::RecordOwner { export, owner } => self.record_owner(export, owner),
            }
        }
        self.send_queued();
        has_ended
    }

    fn send_queued(&mut self) {
        let pools = &self.pools;
        let pool_of = |session| pools.get(&session).map_or(&[][..], AlignedBuffer::as_slice);
        self.links.send_queued(pool_of);
    }

    /// Begins an operation. Returns whether it has ended already.
    fn execute(&mut self, work: Work) -> bool {
        let mut data = AlignedBuffer::new(0);
        if let Work::Request {
            session,
            operation,
            run,
            ..
        } = work
            && operation.data_pages() > 0
        {
            data = AlignedBuffer::new(operation.length_bytes as usize);
            if operation.is_change()
                && let Some(pool) = self.pools.get(&session)
            {
                data.as_mut_slice()
                    .copy_from_slice(&pool.as_slice()[run.bytes()]);
            }
        }
        let Some(ended) = self.workers.submit(Job { work, data }) else {
            return false;
        };
        self.ended(ended);
        true
    }

    /// Records the owner, on a thread of its own: the target answers meanwhile.
    fn record_owner(&mut self, export: usize, owner: Owner) {
        match &self.recorder {
            Some(recorder) => recorder.submit(export, owner),
            None if owner.is_attached => {
                let now = self.links.now();
                self.target.owner_recorded(now, export);
            }
            None => {}
        }
    }

    /// Takes the records that were written.
    fn recorded(&mut self) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        for (export, owner, is_written) in recorder.take_written() {
            match is_written {
                true if owner.is_attached => {
                    let now = self.links.now();
                    self.target.owner_recorded(now, export);
                }
                false if owner.is_attached => self.target.owner_failed(export),
                _ => {}
            }
        }
    }
}

/// Reserves the interfaces: two targets with one Ethertype on one interface would each answer for the other's sessions.
fn claim_interfaces(config: &ServeConfig) -> Result<Vec<UnixListener>, ServeError> {
    let mut claims = Vec::new();
    for interface in &config.interfaces {
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
