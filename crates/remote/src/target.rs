//! The target: frames, timers and ended operations in; frames and operations out. No I/O, no clock and no threads.
//!
//! `Slots` has the requests of a session, `Channel` the frames of a pair of links, and `Export` what outlives a session. This file joins them.

mod connect;
mod send;

use std::collections::{BTreeMap, HashMap, VecDeque};

use jericho_format::wire::{
    FINGERPRINT_BYTES, FLAG_FROM_TARGET, FrameHeader, Mac, NAME_BYTES, POOL_PAGES_MAX, Refused,
    RequestRecord, SLOTS_MAX, frame_kind, name_field, payload_max_of, reason,
};
use zerocopy::FromBytes;

use crate::Time;
use crate::attachment::{Arrived, Attachment, rebalance};
use crate::channel::NeverSent;
use crate::content::RequestId;
use crate::cookie::Cookies;
use crate::export::{Asked, Export, ExportConfig, Owner};
use crate::frame::{Entropy, Frame, Link, lane_of, nodes_of, random_id};
use crate::operation::{Action, Operation};
use crate::pages::Run;
use crate::requests::POOL_PAGES_MIN;
use crate::slots::{Begun, Limits, Slots, Violation};

/// Frames that an initiator sends on a channel, besides ACK.
const KINDS: [u8; 4] = [
    frame_kind::REQUESTS,
    frame_kind::DATA,
    frame_kind::PING,
    frame_kind::CLOSE,
];

/// Counters of forged HANDSHAKEs. An address belongs to one of them.
const FORGED_BUCKETS: usize = 64;

/// How a target serves.
#[derive(Clone, Debug)]
pub struct TargetConfig {
    /// Name of this host.
    pub host: String,
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Slots of a session, at most `wire::SLOTS_MAX`.
    pub slots: u16,
    /// Pages of the pool of a session, from 256 to `wire::POOL_PAGES_MAX`.
    pub pool_pages: u32,
    /// Frames that use one key: `wire::FRAMES_PER_KEY`, except in tests.
    pub frames_per_key: u64,
}

/// An operation that the device must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// For a request of a session.
    Request {
        /// Session.
        session: u64,
        /// Slot.
        slot: u16,
        /// Sequence in the slot.
        sequence: u32,
        /// Index of the export.
        export: usize,
        /// What to do.
        operation: Operation,
        /// Pages of the data in the session's pool.
        run: Run,
    },
    /// Flush an export.
    Flush {
        /// Index of the export.
        export: usize,
    },
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkError {
    /// An errno.
    pub errno: u16,
    /// Completed writes may be lost: the device failed to flush.
    pub loses_writes: bool,
}

/// What the caller must do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetOutput {
    /// Send a frame.
    Send(Frame),
    /// Make a pool, all zero.
    OpenPool {
        /// The session whose pool it is.
        session: u64,
        /// Its pages.
        pages: u32,
        /// The target's name for the client; empty without keys.
        client: String,
    },
    /// Free a pool. No operation uses it.
    ClosePool {
        /// The session whose pool it is.
        session: u64,
    },
    /// Begin an operation. `Target::ended` takes its end.
    Execute(Work),
    /// Record the owner of the export durably. If the owner is attached, call `Target::owner_recorded` then.
    RecordOwner {
        /// Index of the export.
        export: usize,
        /// The owner.
        owner: Owner,
    },
    /// Tell the administrator that a client with a key that is not on the list was refused. At most once a second.
    Stranger {
        /// Its address.
        mac: Mac,
        /// The fingerprint of its key; zeros: it has none.
        key: [u8; FINGERPRINT_BYTES],
        /// Why it was refused.
        why: Strange,
    },
}

/// Why a client was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strange {
    /// It wants another kind of protection than the target: somebody may have changed the target's offer.
    OtherSecurity,
    /// Its key is not on the list.
    UnknownKey,
    /// It names a key that is on the list, and has not used it: somebody else may have made or changed the frame.
    Forged,
}

/// Where the payload of a frame must be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPlace {
    /// The session whose pool it is.
    pub session: u64,
    /// Slot and sequence of the request. `TargetOutput::Execute` with them must wait until the payload is copied.
    pub request: (u16, u32),
    /// Offset in the pool.
    pub at_bytes: u64,
}

#[derive(Debug)]
struct Session {
    export: usize,
    id: [u8; 16],
    salt: u32,
    client: [u8; 16],
    instance: [u8; 16],
    continues: bool,
    /// Generation of the export for which the cookie of its first HANDSHAKE was given.
    cookie_generation: u64,
    slots: Slots,
    channels: Vec<Attachment>,
    /// Operations that the device has not ended.
    executing: u32,
    /// It has lost the export, and ends with its operations.
    is_fenced: bool,
}

/// All exports of a host, and their sessions.
pub struct Target {
    config: TargetConfig,
    host: [u8; NAME_BYTES],
    instance: [u8; 16],
    cookies: Cookies,
    entropy: Entropy,
    links: Vec<Link>,
    /// Distinct nodes of the links. The pool of a session has the same number of pages for each.
    nodes: Vec<u32>,
    exports: Vec<Export>,
    /// In the order in which they began, so that runs with the same seed are the same.
    sessions: BTreeMap<u64, Session>,
    sessions_begun: u64,
    /// Own index of a channel -> its session.
    indexes: HashMap<u32, u64>,
    /// Answers to unknown indexes in this second.
    unknown: (u64, u32),
    /// The index that was answered last, and when.
    last_unknown: (u32, Time),
    /// The second of the last `Stranger`.
    stranger: u64,
    /// HANDSHAKEs in this second that no holder of a key has made, by the senders' addresses.
    forged: (u64, [u16; FORGED_BUCKETS]),
    outputs: VecDeque<TargetOutput>,
}

impl Target {
    /// Returns a target without sessions. Returns `None` if a name is too long, a link's MTU is below `wire::MTU_MIN`, or a number is out of its
    /// range.
    pub fn new(
        config: TargetConfig,
        links: &[Link],
        exports: Vec<ExportConfig>,
        mut entropy: Entropy,
    ) -> Option<Target> {
        let is_possible = (1..=SLOTS_MAX).contains(&config.slots)
            && (POOL_PAGES_MIN..=POOL_PAGES_MAX).contains(&config.pool_pages)
            && links.iter().all(|link| payload_max_of(link.mtu).is_some());
        if !is_possible {
            return None;
        }
        let exports = exports
            .into_iter()
            .map(|export| Export::new(export, entropy()))
            .collect::<Option<Vec<Export>>>()?;
        Some(Target {
            host: name_field(&config.host)?,
            config,
            instance: random_id(&mut entropy),
            cookies: Cookies::new(random_id(&mut entropy)),
            entropy,
            links: links.to_vec(),
            nodes: nodes_of(links),
            exports,
            sessions: BTreeMap::new(),
            sessions_begun: 0,
            indexes: HashMap::new(),
            unknown: (0, 0),
            last_unknown: (0, Time::ZERO),
            stranger: 0,
            forged: (0, [0; FORGED_BUCKETS]),
            outputs: VecDeque::new(),
        })
    }

    /// Returns the next output.
    pub fn next_output(&mut self) -> Option<TargetOutput> {
        self.outputs.pop_front()
    }

    /// Returns the number of sessions, of which some may only wait for their operations.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Returns the nodes of the links, and the pages of a pool that belong to each. None: no link has a known node.
    pub fn own_pages(&self) -> Vec<(u32, std::ops::Range<u32>)> {
        let nodes = self.nodes.iter();
        nodes.map(|&node| (node, self.near(Some(node)))).collect()
    }

    /// Returns the pages of a pool that belong to a node; none if it has no link.
    fn near(&self, node: Option<u32>) -> std::ops::Range<u32> {
        let pages = self.config.pool_pages / self.nodes.len().max(1) as u32;
        let lane = lane_of(&self.nodes, node).map(u32::from);
        lane.map_or(0..0, |lane| lane * pages..(lane + 1) * pages)
    }

    /// Takes a frame that arrived on a link, and decrypts it in place. Returns its payload and where the caller must copy it, before the
    /// request is executed.
    pub fn on_frame<'f>(
        &mut self,
        now: Time,
        link: u16,
        frame: &'f mut [u8],
    ) -> Option<(PoolPlace, &'f [u8])> {
        let (header, payload) = FrameHeader::split(frame)?;
        let own = self.links.get(usize::from(link))?;
        let is_hello = header.kind == frame_kind::HELLO;
        let is_for_us =
            header.destination == own.mac || is_hello && header.destination == [0xff; 6];
        let is_from_target = header.flags & FLAG_FROM_TARGET != 0;
        if header.ethertype.get() != self.config.ethertype || !is_for_us || is_from_target {
            return None;
        }
        if header.index.get() == 0 {
            if header.is_sealed(0, payload) {
                self.on_outside(now, link, &header, payload);
            }
            return None;
        }
        let Some(&number) = self.indexes.get(&header.index.get()) else {
            // An answer to an answer would never end.
            let is_of_channel = (frame_kind::REQUESTS..=frame_kind::CLOSE).contains(&header.kind);
            if is_of_channel && header.kind != frame_kind::COMPLETIONS {
                self.on_unknown(now, link, &header);
            }
            return None;
        };
        let session = self.sessions.get_mut(&number)?;
        let of_frame = |channel: &&mut Attachment| channel.own_index == header.index.get();
        let attachment = session.channels.iter_mut().find(of_frame)?;
        let (lane, is_first) = (attachment.lane, !attachment.channel.has_received());
        let payload = attachment.open(&header, frame)?;
        let mut lost = Vec::new();
        let arrived = attachment.arrived(now, &header, payload, &KINDS, &mut lost)?;
        session.slots.lost(lost);
        if is_first {
            self.confirmed(number, header.index.get());
        }
        let place = match arrived {
            Err(NeverSent) => Err(Violation),
            Ok(Arrived { is_new: true, .. }) => {
                self.on_content(now, (number, lane), &header, payload)
            }
            Ok(_) => Ok(None),
        };
        let place = place.unwrap_or_else(|Violation| {
            self.fence(now, number, reason::PROTOCOL);
            None
        });
        Some((place?, payload))
    }

    /// Takes the end of an operation that `TargetOutput::Execute` began.
    pub fn ended(&mut self, work: Work, result: Result<(), WorkError>) {
        let (Work::Request { export, .. } | Work::Flush { export }) = work;
        if result.is_err_and(|error| error.loses_writes) {
            self.exports[export].verifier = (self.entropy)();
        }
        let verifier = self.exports[export].verifier;
        let error = result.err().map_or(0, |error| error.errno.max(1));
        match work {
            Work::Flush { .. } => {
                for (number, name) in self.exports[export].flushes.ended() {
                    if let Some(session) = self.sessions.get_mut(&number) {
                        session.slots.ended(name, error, verifier);
                    }
                }
                self.begin_flush(export);
            }
            Work::Request {
                session: number,
                slot,
                sequence,
                ..
            } => {
                let Some(session) = self.sessions.get_mut(&number) else {
                    return;
                };
                if session
                    .slots
                    .ended(RequestId { slot, sequence }, error, verifier)
                {
                    session.executing -= 1;
                }
                if session.is_fenced && session.executing == 0 {
                    self.remove(number);
                }
            }
        }
    }

    /// Handles the success of `TargetOutput::RecordOwner`.
    pub fn owner_recorded(&mut self, now: Time, export: usize) {
        let Some(pending) = self.exports[export].pending.take_if(|p| p.is_recording) else {
            return;
        };
        let (client, instance) = (pending.client, pending.handshake.instance);
        let last_owner = &mut self.exports[export].config.last_owner;
        let is_same = |owner: Owner| owner.instance == instance && owner.client == client;
        let continues = last_owner.is_some_and(is_same);
        *last_owner = Some(Owner {
            client,
            instance,
            is_attached: true,
        });
        self.sessions_begun += 1;
        let number = self.sessions_begun;
        let limits = Limits {
            pool_pages: self.config.pool_pages,
            size_bytes: self.exports[export].config.size_bytes,
            is_read_only: self.exports[export].config.is_read_only,
        };
        let session = Session {
            export,
            id: random_id(&mut self.entropy),
            salt: (self.entropy)() as u32,
            client,
            instance,
            continues,
            cookie_generation: pending.cookie_generation,
            slots: Slots::new(self.config.slots, limits),
            channels: Vec::new(),
            executing: 0,
            is_fenced: false,
        };
        self.sessions.insert(number, session);
        self.exports[export].owner = Some(number);
        self.outputs.push_back(TargetOutput::OpenPool {
            session: number,
            pages: self.config.pool_pages,
            client: self.exports[export]
                .client(&pending.handshake.key)
                .map_or(String::new(), |client| client.id.clone()),
        });
        self.add_channel(number, &pending.handshake, (pending.link, pending.mac));
        self.transmit(now, number);
    }

    /// Handles the failure of `TargetOutput::RecordOwner`. The initiator asks again.
    pub fn owner_failed(&mut self, export: usize) {
        self.exports[export].pending.take_if(|p| p.is_recording);
    }

    /// Does what is due, and sends what can be sent.
    pub fn poll(&mut self, now: Time) {
        let numbers: Vec<u64> = self.sessions.keys().copied().collect();
        for number in numbers {
            if let Some(session) = self.sessions.get_mut(&number) {
                rebalance(session.channels.iter_mut());
            }
            self.on_session_timer(now, number);
            self.transmit(now, number);
        }
    }

    /// Returns when `poll` should be called next, if no frame arrives and no operation ends.
    pub fn timer(&self) -> Option<Time> {
        let channels = self.sessions.values().flat_map(|session| &session.channels);
        channels.filter_map(|channel| channel.channel.timer()).min()
    }

    /// Takes REQUESTS, DATA or CLOSE of a session.
    fn on_content(
        &mut self,
        now: Time,
        (number, lane): (u64, u16),
        header: &FrameHeader,
        payload: &[u8],
    ) -> Result<Option<PoolPlace>, Violation> {
        let session = self.sessions.get_mut(&number).ok_or(Violation)?;
        let export = session.export;
        let verifier = self.exports[export].verifier;
        match header.kind {
            frame_kind::REQUESTS => {
                let records = <[RequestRecord]>::ref_from_bytes(payload).map_err(|_| Violation)?;
                for record in records {
                    let session = self.sessions.get_mut(&number).ok_or(Violation)?;
                    let begun = session.slots.on_record(*record, verifier, lane)?;
                    self.execute(number, begun);
                }
                Ok(None)
            }
            frame_kind::DATA => {
                let name = RequestId {
                    slot: header.slot.get(),
                    sequence: header.sequence.get(),
                };
                let part = (header.place.get(), payload.len());
                let page = header.pool_page.get();
                let (place, begun) = session.slots.on_data(name, part, page, verifier, lane)?;
                self.execute(number, begun);
                Ok(place.map(|at_bytes| PoolPlace {
                    session: number,
                    request: (name.slot, name.sequence),
                    at_bytes,
                }))
            }
            frame_kind::CLOSE => {
                let has_left = Refused::read_from_prefix(payload)
                    .is_ok_and(|(refused, _)| refused.reason.get() == reason::DETACHED);
                if let Some(owner) = &mut self.exports[export].config.last_owner
                    && has_left
                {
                    owner.is_attached = false;
                    let owner = *owner;
                    let output = TargetOutput::RecordOwner { export, owner };
                    self.outputs.push_back(output);
                }
                self.fence(now, number, reason::DETACHED);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn execute(&mut self, number: u64, begun: Option<Begun>) {
        let Some(Begun {
            name,
            operation,
            run,
        }) = begun
        else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        let export = session.export;
        if operation.action == Action::Flush {
            let asked: Asked = (number, name);
            if self.exports[export].flushes.add(asked) {
                let work = Work::Flush { export };
                self.outputs.push_back(TargetOutput::Execute(work));
            }
            return;
        }
        session.executing += 1;
        self.outputs.push_back(TargetOutput::Execute(Work::Request {
            session: number,
            slot: name.slot,
            sequence: name.sequence,
            export,
            operation,
            run,
        }));
    }

    fn begin_flush(&mut self, export: usize) {
        if self.exports[export].flushes.begin() {
            let work = Work::Flush { export };
            self.outputs.push_back(TargetOutput::Execute(work));
        }
    }

    /// Takes the export from a session: its indexes are unknown from now on, and it ends with its operations.
    fn fence(&mut self, now: Time, number: u64, reason: u16) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        if session.is_fenced {
            return;
        }
        session.is_fenced = true;
        let (export, is_idle) = (session.export, session.executing == 0);
        let indexes: Vec<u32> = session.channels.iter().map(|c| c.own_index).collect();
        if reason != reason::DETACHED {
            for channel in 0..indexes.len() {
                self.send((number, channel), |channel, sender| {
                    channel.close(now, sender, reason)
                });
            }
        }
        for index in indexes {
            self.indexes.remove(&index);
        }
        if let Some(session) = self.sessions.get_mut(&number) {
            session.channels.clear();
        }
        (0..self.links.len() as u16).for_each(|link| self.share_credit(link));
        self.exports[export].owner = None;
        self.exports[export].generation += 1;
        if is_idle {
            self.remove(number);
        }
    }

    /// Removes a session without operations, and lets the next one begin.
    fn remove(&mut self, number: u64) {
        if let Some(session) = self.sessions.remove(&number) {
            self.outputs
                .push_back(TargetOutput::ClosePool { session: number });
            self.record_if_free(session.export);
        }
    }
}
