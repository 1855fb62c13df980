//! Hosts, a target and its device on a simulated wire, in simulated time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use jericho_format::wire::{FRAMES_PER_KEY, FrameHeader, frame_kind};
use jericho_remote::{
    Action, Body, Client, Ended, Entropy, ExportConfig, Frame, Initiator, InitiatorConfig,
    InitiatorOutput, Key, Link, Operation, Owner, Run, Scheduler, Security, Target, TargetConfig,
    TargetOutput, Work, WorkError,
};
use jericho_sim::{Arrival, Random, Wire, WireFaults};

use crate::disk::{BLOCK, Disk};
use crate::oracle::Oracle;

/// The target's place on the wire; hosts have the next ones.
const TARGET: u16 = 0;
/// Longest time without an event that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(600);

pub struct Settings {
    pub links: Vec<WireFaults>,
    pub mtu: usize,
    pub slots: u16,
    pub pool_pages: u32,
    pub credit: u16,
    pub blocks: usize,
    pub replay: bool,
    pub dead_after: Option<Duration>,
    /// Longest time of an operation of the device.
    pub operation: Duration,
    pub security: Security,
    pub frames_per_key: u64,
    /// NUMA nodes of the links, of both sides; the others' are not known.
    pub nodes: Vec<u32>,
    pub scheduler: Scheduler,
    /// Channels of an initiator on each link.
    pub channels: u16,
    /// Longest time between a frame and its departure. It takes its bytes from the pool when it departs.
    pub lateness: Duration,
    /// Some writes are copied before they are submitted.
    pub reserves: bool,
    /// Small requests wait for each other.
    pub batches: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        let faults = WireFaults {
            delay: Duration::from_micros(10),
            ..WireFaults::default()
        };
        Settings {
            links: vec![faults],
            mtu: 9000,
            slots: 16,
            pool_pages: 512,
            credit: 64,
            blocks: 64,
            replay: true,
            dead_after: None,
            operation: Duration::from_micros(200),
            security: Security::None,
            frames_per_key: FRAMES_PER_KEY,
            nodes: Vec::new(),
            scheduler: Scheduler::Affinity,
            channels: 1,
            lateness: Duration::ZERO,
            reserves: false,
            batches: true,
        }
    }
}

/// Returns the key of a client.
pub fn key(client: u8) -> Key {
    Key::new([client; 32])
}

fn client(number: u8) -> Client {
    Client {
        id: format!("client {number}"),
        key: key(number),
    }
}

/// A request that has not ended.
pub struct Asked {
    operation: Operation,
    /// Bytes of a write; where the bytes of a read go.
    memory: Vec<u8>,
    /// Of a change: its number in each block. Of a read: the least number.
    numbers: Vec<usize>,
    /// Of a flush: what had completed before it.
    completed: Vec<usize>,
}

pub struct Host {
    pub initiator: Initiator,
    pool: Vec<u8>,
    asked: HashMap<u64, Asked>,
    pub results: HashMap<u64, Result<(), i32>>,
    pub ended: Option<Ended>,
    pub hint: Option<Ended>,
    pub size_bytes: Option<u64>,
    pub replayed: u64,
    pub is_reachable: bool,
    is_dead: bool,
}

/// An operation that the device executes.
struct Executing {
    work: Work,
    end: Duration,
    /// Its effect is at its beginning, not at its end.
    is_early: bool,
    result: Result<(), WorkError>,
}

/// A frame that waits to be sent.
struct Outgoing {
    departure: Duration,
    /// The host whose pool has its bytes; `None`: the target.
    host: Option<usize>,
    frame: Frame,
    to: u16,
}

pub struct World {
    pub settings: Settings,
    pub random: Random,
    pub time: Duration,
    pub wire: Wire,
    pub target: Option<Target>,
    pools: HashMap<u64, Vec<u8>>,
    pub disk: Disk,
    /// Sender and network interface -> frames in order.
    outgoing: BTreeMap<(u16, u16), VecDeque<Outgoing>>,
    executing: BTreeMap<u64, Executing>,
    executed: u64,
    pub last_owner: Option<Owner>,
    /// So many records of an owner fail.
    pub fails_records: u32,
    pub hosts: Vec<Host>,
    /// Name of the target's host, from its next start on.
    pub target_host: &'static str,
    /// Whom the target allows to use the export.
    pub clients: Vec<Client>,
    /// Node of the threads that submit; none: they differ.
    pub submits_on: Option<u32>,
    /// The key of the next host, if it is another one than its client's.
    pub next_key: Option<Option<Key>>,
    /// All frames that were sent, if it is there.
    pub sent: Option<Vec<Arrival>>,
    /// How often the target has told of a client that is not allowed.
    pub strangers: u32,
    pub oracle: Oracle,
    tags: u64,
    seed: u64,
    starts: u64,
    /// A frame for which it returns `true` is kept in `caught`. It gets the header and the whole frame.
    pub catch: Option<fn(&FrameHeader, &[u8]) -> bool>,
    pub caught: Vec<Arrival>,
    /// The frame with this number is lost.
    pub lose: Option<u64>,
    /// Number of frames sent, except for those that were caught.
    pub frames: u64,
    pub frames_to_target: Vec<FrameHeader>,
    /// Link -> frames that were sent with content and without.
    pub carried: BTreeMap<u16, [u64; 2]>,
}

impl World {
    pub fn new(seed: u64, settings: Settings) -> World {
        let mut world = World {
            random: Random::of(seed, &[1]),
            time: Duration::from_secs(1000),
            wire: Wire::new(seed, settings.links.clone()),
            target: None,
            pools: HashMap::new(),
            disk: Disk::new(settings.blocks),
            outgoing: BTreeMap::new(),
            executing: BTreeMap::new(),
            executed: 0,
            last_owner: None,
            fails_records: 0,
            hosts: Vec::new(),
            target_host: "hostb",
            clients: (0..8).map(client).collect(),
            submits_on: None,
            next_key: None,
            sent: None,
            strangers: 0,
            oracle: Oracle::new(settings.blocks),
            tags: 0,
            seed,
            starts: 0,
            catch: None,
            caught: Vec::new(),
            lose: None,
            frames: 0,
            frames_to_target: Vec::new(),
            carried: BTreeMap::new(),
            settings,
        };
        world.start_target();
        world
    }

    fn entropy(&mut self) -> Entropy {
        self.starts += 1;
        let mut random = Random::of(self.seed, &[2, self.starts]);
        Box::new(move || random.next_u64())
    }

    fn links(&self, place: u16) -> Vec<Link> {
        let link = |number| Link {
            mac: mac(place, number),
            mtu: self.settings.mtu,
            credit: self.settings.credit,
            node: self.settings.nodes.get(usize::from(number)).copied(),
            nic: number,
        };
        let all = 0..self.settings.links.len() as u16;
        let channels = match place {
            TARGET => 1,
            _ => self.settings.channels,
        };
        (0..channels).flat_map(|_| all.clone().map(link)).collect()
    }

    pub fn start_target(&mut self) {
        let config = TargetConfig {
            host: self.target_host.into(),
            ethertype: 0x88B5,
            slots: self.settings.slots,
            pool_pages: self.settings.pool_pages,
            frames_per_key: self.settings.frames_per_key,
        };
        let export = ExportConfig {
            name: "data".into(),
            size_bytes: self.disk.size_bytes(),
            is_read_only: false,
            is_hidden: false,
            last_owner: self.last_owner,
            security: self.settings.security,
            clients: self.clients.clone(),
        };
        let (links, entropy) = (self.links(TARGET), self.entropy());
        self.target = Target::new(config, &links, vec![export], entropy);
        assert!(self.target.is_some());
    }

    /// Kills the target's process. Operations that its device has begun end first, or never begin. `is_reset`: the host is reset, and loses
    /// what was not flushed.
    pub fn kill_target(&mut self, is_reset: bool) {
        self.target = None;
        for (_, mut executing) in std::mem::take(&mut self.executing) {
            if self.random.below(2) == 0 && !executing.is_early {
                self.take_effect(&mut executing);
            }
        }
        self.pools.clear();
        self.outgoing.retain(|(place, _), _| *place != TARGET);
        if is_reset {
            self.disk.reset(&mut self.random);
            for block in 0..self.settings.blocks {
                self.oracle.reset(block, self.disk.block(block));
            }
        }
    }

    /// Starts an initiator of a client. Returns its index.
    pub fn start_host(&mut self, client: u8, take_over: bool) -> usize {
        let place = self.hosts.len() as u16 + 1;
        let config = InitiatorConfig {
            host: "hostb".into(),
            export: "data".into(),
            client: [client; 16],
            ethertype: 0x88B5,
            take_over,
            replay: self.settings.replay,
            pool_pages: self.settings.pool_pages,
            dead_after: self.settings.dead_after,
            scheduler: self.settings.scheduler,
            batches: self.settings.batches,
            key: match self.settings.security {
                _ if self.next_key.is_some() => self.next_key.take().flatten(),
                Security::None => None,
                _ => Some(key(client)),
            },
            frames_per_key: self.settings.frames_per_key,
        };
        let (links, entropy) = (self.links(place), self.entropy());
        let initiator = Initiator::new(config, &links, entropy, self.time);
        self.hosts.push(Host {
            initiator: initiator.expect("an initiator"),
            pool: vec![0; self.settings.pool_pages as usize * BLOCK],
            asked: HashMap::new(),
            results: HashMap::new(),
            ended: None,
            hint: None,
            size_bytes: None,
            replayed: 0,
            is_reachable: false,
            is_dead: false,
        });
        self.hosts.len() - 1
    }

    /// Returns whether the device executes an operation.
    pub fn is_executing(&self) -> bool {
        !self.executing.is_empty()
    }

    /// Kills an initiator's process.
    pub fn kill_host(&mut self, host: usize) {
        self.hosts[host].is_dead = true;
        let dead = host as u16 + 1;
        self.outgoing.retain(|(place, _), _| *place != dead);
    }

    /// Submits an operation that may lie beyond the end of the device. The oracle does not hear of it.
    pub fn submit_unchecked(
        &mut self,
        host: usize,
        action: Action,
        block: usize,
        blocks: usize,
    ) -> u64 {
        self.tags += 1;
        let operation = Operation {
            action,
            offset_bytes: (block * BLOCK) as u64,
            length_bytes: (blocks * BLOCK) as u32,
        };
        let asked = Asked {
            operation,
            memory: vec![0; blocks * BLOCK],
            numbers: Vec::new(),
            completed: Vec::new(),
        };
        let (tag, node) = (self.tags, self.node());
        self.hosts[host].asked.insert(tag, asked);
        self.hosts[host]
            .initiator
            .submit(self.time, tag, operation, node);
        self.settle_host(host);
        tag
    }

    /// Submits an operation. Returns its tag.
    pub fn submit(&mut self, host: usize, action: Action, block: usize, blocks: usize) -> u64 {
        let asked = self.ask(action, block, blocks);
        let is_early = self.settings.reserves && self.random.below(2) == 0;
        let run = match is_early {
            true => self.copy_early(host, &asked),
            false => None,
        };
        self.submit_reserved(host, (asked, run))
    }

    /// Copies the bytes of a write to the pool, before `submit_reserved`.
    pub fn reserve(&mut self, host: usize, block: usize, blocks: usize) -> (Asked, Option<Run>) {
        let asked = self.ask(Action::Write { is_durable: false }, block, blocks);
        let run = self.copy_early(host, &asked);
        assert!(run.is_some());
        (asked, run)
    }

    /// Submits an operation, whose bytes may be in the pool already. Returns its tag.
    pub fn submit_reserved(&mut self, host: usize, (asked, run): (Asked, Option<Run>)) -> u64 {
        self.tags += 1;
        let (tag, node, operation) = (self.tags, self.node(), asked.operation);
        let state = &mut self.hosts[host];
        state.asked.insert(tag, asked);
        state
            .initiator
            .submit_filled(self.time, tag, operation, node, run);
        self.settle_host(host);
        tag
    }

    pub fn copy_early(&mut self, host: usize, asked: &Asked) -> Option<Run> {
        let node = self.node();
        let state = &mut self.hosts[host];
        let run = state.initiator.reserve(asked.operation, node)?;
        state.pool[run.bytes()].copy_from_slice(&asked.memory);
        Some(run)
    }

    /// Returns what the oracle must know of an operation.
    pub fn ask(&mut self, action: Action, block: usize, blocks: usize) -> Asked {
        let operation = match action {
            Action::Flush => Operation::flush(),
            action => Operation {
                action,
                offset_bytes: (block * BLOCK) as u64,
                length_bytes: (blocks * BLOCK) as u32,
            },
        };
        let mut asked = Asked {
            operation,
            memory: Vec::new(),
            numbers: Vec::new(),
            completed: self.oracle.completed_now(),
        };
        for block in block..block + blocks {
            match action {
                Action::Read => {
                    asked.numbers.push(self.oracle.floor(block));
                    asked.memory.extend_from_slice(&[0xEE; BLOCK]);
                }
                Action::Write { .. } | Action::WriteZeroes { .. } => {
                    let is_zeros = matches!(action, Action::WriteZeroes { .. });
                    let (number, bytes) = self.oracle.submit(block, is_zeros);
                    asked.numbers.push(number);
                    asked.memory.extend_from_slice(&bytes);
                }
                Action::Discard | Action::Flush => {}
            }
        }
        asked
    }

    /// Returns the node of the thread that submits the latest request: each in turn, or the one that the test has chosen.
    fn node(&self) -> Option<u32> {
        let nodes = &self.settings.nodes;
        let turn = self.tags as usize % nodes.len().max(1);
        self.submits_on.or(nodes.get(turn).copied())
    }

    /// Returns the link of the wire that a frame goes to: an initiator may have several links on one network interface.
    fn nic(&self, frame: &Frame) -> u16 {
        frame.link % self.settings.links.len() as u16
    }

    /// Returns how many requests of a host have not ended.
    pub fn in_progress(&self, host: usize) -> usize {
        self.hosts[host].asked.len()
    }

    /// Runs until a condition holds.
    ///
    /// # Panics
    /// Panics if it does not hold within `PATIENCE`.
    pub fn run_until(&mut self, what: &str, mut is_true: impl FnMut(&World) -> bool) {
        let end = self.time + PATIENCE;
        while !is_true(self) {
            assert!(self.step(end), "not within {PATIENCE:?}: {what}");
        }
    }

    /// Runs until a request has ended, and returns its result.
    pub fn result(&mut self, host: usize, tag: u64) -> Result<(), i32> {
        self.run_until("the end of a request", |world| {
            world.hosts[host].results.contains_key(&tag)
        });
        self.hosts[host].results[&tag]
    }

    /// Runs for a time.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.time + time;
        while self.step(end) {}
        self.time = end;
    }

    /// Performs the next event before `end`. Returns whether there was one.
    pub fn step(&mut self, end: Duration) -> bool {
        let host_timers = self.hosts.iter().filter(|host| !host.is_dead);
        let host_timers = host_timers.filter_map(|host| host.initiator.timer());
        let target_timer = self.target.as_ref().and_then(|target| target.timer());
        let departures = self.outgoing.values().filter_map(|queue| queue.front());
        let departures = departures.map(|outgoing| outgoing.departure);
        let ends = self.executing.values().map(|executing| executing.end);
        let next = host_timers
            .chain(target_timer)
            .chain(ends)
            .chain(departures)
            .chain(self.wire.next_time())
            .min();
        let Some(next) = next.filter(|next| *next <= end) else {
            return false;
        };
        self.time = self.time.max(next);
        self.depart();
        while let Some(arrival) = self.wire.receive(self.time) {
            self.arrive(&arrival);
        }
        let is_due = |(_, executing): &(&u64, &Executing)| executing.end <= self.time;
        let due: Vec<u64> = self.executing.iter().filter(is_due).map(|e| *e.0).collect();
        for number in due {
            let mut executing = self.executing.remove(&number).expect("it is due");
            if !executing.is_early {
                self.take_effect(&mut executing);
            }
            if let Some(target) = &mut self.target {
                target.ended(executing.work, executing.result);
            }
        }
        (0..self.hosts.len()).for_each(|host| self.settle_host(host));
        self.settle_target();
        true
    }

    /// Gives a frame to its receiver.
    pub fn arrive(&mut self, arrival: &Arrival) {
        let Arrival { link, to, frame } = arrival;
        if *to == TARGET {
            let Some(target) = &mut self.target else {
                return;
            };
            let mut frame = frame.clone();
            if let Some((place, payload)) = target.on_frame(self.time, *link, &mut frame) {
                // A pool that the target opens with this frame does not exist yet, and no frame has a place in it.
                let pool = self.pools.get_mut(&place.session).expect("a pool");
                let at = place.at_bytes as usize;
                pool[at..at + payload.len()].copy_from_slice(payload);
            }
            self.settle_target();
            return;
        }
        let host = usize::from(to - 1);
        // The address of a damaged HELLO is nobody's.
        if self.hosts.get(host).is_none_or(|host| host.is_dead) {
            return;
        }
        let state = &mut self.hosts[host];
        let mut frame = frame.clone();
        if let Some((place, payload)) = state.initiator.on_frame(self.time, *link, &mut frame) {
            let asked = state.asked.get_mut(&place.tag).expect("a request");
            let at = place.at_bytes as usize;
            asked.memory[at..at + payload.len()].copy_from_slice(payload);
        }
        self.settle_host(host);
    }

    fn settle_host(&mut self, host: usize) {
        if self.hosts[host].is_dead {
            return;
        }
        self.hosts[host].initiator.poll(self.time);
        while let Some(output) = self.hosts[host].initiator.next_output() {
            let state = &mut self.hosts[host];
            match output {
                InitiatorOutput::Send(frame) => {
                    self.frames_to_target.push(frame.header);
                    self.queue(Some(host), frame, TARGET);
                }
                InitiatorOutput::Fill { tag, run } => {
                    let memory = &state.asked[&tag].memory;
                    state.pool[run.bytes()].copy_from_slice(memory);
                }
                InitiatorOutput::Done { tag, result } => self.done(host, tag, result),
                InitiatorOutput::Attached(attached) => {
                    state.size_bytes = Some(attached.size_bytes);
                }
                InitiatorOutput::Replay { changes } => state.replayed += changes,
                InitiatorOutput::Reachable(is_reachable) => state.is_reachable = is_reachable,
                InitiatorOutput::Hint(why) => state.hint = Some(why),
                InitiatorOutput::Ended(why) => state.ended = Some(why),
            }
        }
    }

    fn done(&mut self, host: usize, tag: u64, result: Result<(), i32>) {
        let state = &mut self.hosts[host];
        let asked = state.asked.remove(&tag).expect("each request ends once");
        state.results.insert(tag, result);
        if result.is_err() {
            return;
        }
        let first = asked.operation.offset_bytes as usize / BLOCK;
        let blocks = (first..).zip(&asked.numbers);
        match asked.operation.action {
            Action::Read => {
                for ((block, floor), bytes) in blocks.zip(asked.memory.chunks_exact(BLOCK)) {
                    self.oracle.read(block, *floor, bytes);
                }
            }
            Action::Write { is_durable } | Action::WriteZeroes { is_durable } => {
                blocks.for_each(|(b, number)| self.oracle.completed(b, *number, is_durable));
            }
            Action::Flush => self.oracle.flushed(&asked.completed),
            Action::Discard => {}
        }
    }

    fn settle_target(&mut self) {
        let Some(target) = &mut self.target else {
            return;
        };
        target.poll(self.time);
        while let Some(output) = self.target.as_mut().and_then(|t| t.next_output()) {
            match output {
                TargetOutput::Send(frame) => {
                    let to = u16::from(frame.header.destination[4]);
                    self.queue(None, frame, to);
                }
                TargetOutput::Stranger { .. } => self.strangers += 1,
                TargetOutput::OpenPool { session, pages, .. } => {
                    self.pools.insert(session, vec![0; pages as usize * BLOCK]);
                }
                TargetOutput::ClosePool { session } => {
                    self.keep_bytes(session);
                    assert!(self.pools.remove(&session).is_some());
                    let uses = |executing: &Executing| matches!(executing.work, Work::Request { session: other, .. } if other == session);
                    assert!(!self.executing.values().any(uses), "a pool in use");
                }
                TargetOutput::Execute(work) => self.execute(work),
                TargetOutput::RecordOwner { export, .. } if self.fails_records > 0 => {
                    self.fails_records -= 1;
                    if let Some(target) = &mut self.target {
                        target.owner_failed(export);
                    }
                }
                TargetOutput::RecordOwner { export, owner } => {
                    self.last_owner = Some(owner);
                    if let Some(target) = &mut self.target
                        && owner.is_attached
                    {
                        target.owner_recorded(self.time, export);
                    }
                }
            }
        }
    }

    fn execute(&mut self, work: Work) {
        let longest = self.settings.operation.as_nanos() as u64;
        let time = Duration::from_nanos(self.random.below(longest));
        let mut executing = Executing {
            work,
            end: self.time + time,
            is_early: self.random.below(2) == 0,
            result: Ok(()),
        };
        // Nothing covers reads between the loss of a write and the report of the flush.
        executing.is_early &= !matches!(work, Work::Flush { .. });
        if executing.is_early {
            self.take_effect(&mut executing);
        }
        self.executed += 1;
        self.executing.insert(self.executed, executing);
    }

    fn take_effect(&mut self, executing: &mut Executing) {
        let result = match executing.work {
            Work::Flush { .. } => self.disk.perform(&Operation::flush(), &mut []),
            Work::Request {
                session,
                operation,
                run,
                ..
            } => {
                let pool = self.pools.get_mut(&session).expect("a pool");
                self.disk.perform(&operation, &mut pool[run.bytes()])
            }
        };
        executing.result = result.map_err(|errno| WorkError {
            errno,
            loses_writes: matches!(executing.work, Work::Flush { .. }),
        });
    }

    /// Sends a frame, at once or a little later.
    fn queue(&mut self, host: Option<usize>, frame: Frame, to: u16) {
        let longest = self.settings.lateness.as_nanos() as u64;
        let late = match longest {
            0 => 0,
            longest => self.random.below(longest),
        };
        let place = host.map_or(TARGET, |host| host as u16 + 1);
        let queue = self.outgoing.entry((place, self.nic(&frame)));
        queue.or_default().push_back(Outgoing {
            departure: self.time + Duration::from_nanos(late),
            host,
            frame,
            to,
        });
        if longest == 0 {
            self.depart();
        }
    }

    /// Sends the frames that depart now, in order.
    fn depart(&mut self) {
        let keys: Vec<(u16, u16)> = self.outgoing.keys().copied().collect();
        for key in keys {
            while let Some(queue) = self.outgoing.get_mut(&key)
                && queue.front().is_some_and(|one| one.departure <= self.time)
                && let Some(outgoing) = queue.pop_front()
            {
                let Outgoing {
                    host, frame, to, ..
                } = outgoing;
                let pool = match (&frame.body, host) {
                    (Body::Bytes(_), _) => &[][..],
                    (Body::Pool { .. }, Some(host)) => &self.hosts[host].pool,
                    (Body::Pool { session, .. }, None) => &self.pools[session],
                };
                let bytes = frame.to_bytes(pool);
                self.send(&frame, to, bytes);
            }
        }
    }

    /// Lets the frames that wait keep the bytes of a pool that ends.
    fn keep_bytes(&mut self, session: u64) {
        let Some(pool) = self.pools.get(&session) else {
            return;
        };
        let queues = self.outgoing.values_mut().flatten();
        for outgoing in queues.filter(|outgoing| outgoing.host.is_none()) {
            if let Body::Pool {
                session: other,
                offset_bytes,
                length_bytes,
            } = outgoing.frame.body
                && other == session
            {
                let bytes = &pool[offset_bytes as usize..][..length_bytes as usize];
                outgoing.frame.body = Body::Bytes(bytes.to_vec());
            }
        }
    }

    fn send(&mut self, frame: &Frame, to: u16, bytes: Vec<u8>) {
        let caught = self.catch.is_some_and(|catch| catch(&frame.header, &bytes));
        if caught {
            self.caught.push(Arrival {
                link: self.nic(frame),
                to,
                frame: bytes,
            });
            return;
        }
        let link = self.nic(frame);
        if let Some(sent) = &mut self.sent {
            let frame = bytes.clone();
            sent.push(Arrival { link, to, frame });
        }
        let has_content = matches!(
            frame.header.kind,
            frame_kind::REQUESTS | frame_kind::COMPLETIONS | frame_kind::DATA
        );
        self.carried.entry(link).or_default()[usize::from(!has_content)] += 1;
        self.frames += 1;
        if self.lose != Some(self.frames) {
            self.wire.send(self.time, link, to, bytes);
        }
    }
}

fn mac(place: u16, link: u16) -> [u8; 6] {
    [2, 0, 0, 0, place as u8, link as u8]
}
