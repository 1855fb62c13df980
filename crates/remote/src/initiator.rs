//! The initiator: frames, timers and requests in; frames and events out. No I/O, no clock and no threads.
//!
//! `Requests` has the requests, `Channel` the frames of a pair of links, and `Dial` the search for a target on a link. This file joins them.

mod connect;
mod send;

use std::collections::VecDeque;
use std::time::Duration;

use jericho_format::PAGE_BYTES;
use jericho_format::wire::{
    CompletionRecord, FLAG_FROM_TARGET, FrameHeader, Mac, NAME_BYTES, PLACE_BYTES, Refused,
    frame_kind, mac_text, name_field, parse_mac, payload_max_of, reason,
};
use zerocopy::FromBytes;

use crate::Time;
use crate::attachment::{Arrived, Attachment, rebalance};
use crate::batch::Batch;
use crate::channel::{ChannelStatus, State};
use crate::content::RequestId;
use crate::dial::Dial;
use crate::errno::{EACCES, EBUSY, ECANCELED, ENOTUNIQ, EPROTO, EPROTONOSUPPORT, ESTALE};
use crate::frame::{Entropy, Frame, Link, lane_of, nodes_of, random_id, random_index};
use crate::key::{Key, Security};
use crate::noise::Question;
use crate::operation::Operation;
use crate::pages::Run;
use crate::requests::{Event, POOL_PAGES_MIN, Requests};
use crate::schedule::{Schedule, Scheduler};

/// Frames that a target sends on a channel, besides ACK.
const KINDS: [u8; 4] = [
    frame_kind::COMPLETIONS,
    frame_kind::DATA,
    frame_kind::PING,
    frame_kind::CLOSE,
];
/// How long a channel is suspect before its link looks for a new one.
const REDIAL_AFTER: Duration = Duration::from_secs(1);
/// How long the target may answer after somebody has given a reason why there is no session.
const EXCUSE_TIME: Duration = Duration::from_secs(1);
/// Requests of at most this length may wait for others.
const SMALL_BYTES: u32 = 16 << 10;
/// Least time between two hints.
const HINT_INTERVAL: Duration = Duration::from_secs(60);

/// The error of requests that waited for `dead_after`. A completion has errors of 16 bits, so no target sends this one.
pub const UNREACHABLE: i32 = 1 << 16;

/// What an initiator connects to, and how.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// Name of the target's host, or one of its MAC addresses; empty: any.
    pub host: String,
    /// Name of the export.
    pub export: String,
    /// Identifies the client, of those with its key. Sessions of one client replace each other.
    pub client: [u8; 16],
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Take the export from another client.
    pub take_over: bool,
    /// Keep what is not flushed, and send it again to a target that has lost it.
    pub replay: bool,
    /// Pages of the pool for the bytes of writes, at least 256.
    pub pool_pages: u32,
    /// How long requests wait for a target that does not answer. `None`: for ever.
    pub dead_after: Option<Duration>,
    /// How requests are distributed over channels.
    pub scheduler: Scheduler,
    /// Small requests wait for each other, if that increases the throughput.
    pub batches: bool,
    /// The key that the target knows. `None`: use an export without keys.
    pub key: Option<Key>,
    /// Frames that use one key: `wire::FRAMES_PER_KEY`, except in tests.
    pub frames_per_key: u64,
}

/// What a target says of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Size of the device.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// How frames are protected.
    pub security: Security,
}

/// Why an initiator cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// The export's name leads to two targets.
    #[error("two targets offer it: {} and {}", mac_text(.0), mac_text(.1))]
    TwoTargets(Mac, Mac),
    /// Another client has the export.
    #[error(
        "another client uses it, or this one has used it with another key: end that session, or take the device from it with --take-over"
    )]
    InUse,
    /// Another session has taken the export.
    #[error(
        "another session has taken it, and unflushed changes may be lost: unmount the volume, and mount it again"
    )]
    Fenced,
    /// The client's key is not on the target's list.
    #[error(
        "its host does not know this key: add it there with --client, or give another one with --key; if it has the key, somebody on the network changes frames"
    )]
    NotAllowed,
    /// The target demands a key, and the initiator has none.
    #[error("its host demands a key: give it with --key FILE or JERICHO_KEY=FILE")]
    NeedsKey,
    /// The initiator has a key, and the target demands none.
    #[error(
        "only a host without keys offers it: if the device is served with --no-auth, start `jericho serve` there with --client; otherwise another machine answers in the name of the host"
    )]
    NoKeys,
    /// The target speaks other versions only.
    #[error(
        "its host speaks another version of the protocol: use one version of jericho on both hosts"
    )]
    Version,
    /// A frame broke a rule.
    #[error("a frame broke a rule of the protocol")]
    Protocol,
    /// The initiator ended the session.
    #[error("it was detached")]
    Detached,
}

/// What the caller must do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitiatorOutput {
    /// Send a frame.
    Send(Frame),
    /// Copy the bytes of the write with the tag to the pool.
    Fill {
        /// The request.
        tag: u64,
        /// Where.
        run: Run,
    },
    /// A request has ended. The error is an errno, or `UNREACHABLE`.
    Done {
        /// The request.
        tag: u64,
        /// Its end.
        result: Result<(), i32>,
    },
    /// A session has begun, or has got a further channel.
    Attached(Attached),
    /// Changes that the target may have lost are sent again.
    Replay {
        /// How many.
        changes: u64,
    },
    /// No channel answers, or one answers again.
    Reachable(bool),
    /// Somebody, perhaps the target, gives a reason why no channel can be had. At most once a minute.
    Hint(Ended),
    /// The initiator cannot go on. All requests fail from now on.
    Ended(Ended),
}

/// Where the payload of a frame must be copied before the outputs are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPlace {
    /// The request.
    pub tag: u64,
    /// Offset in its data.
    pub at_bytes: u32,
}

#[derive(Debug)]
struct LinkState {
    link: Link,
    lane: u16,
    dial: Dial,
    channel: Option<Attachment>,
    /// With keys: the HANDSHAKE that is repeated until its answer arrives.
    question: Option<Question>,
    /// Instance and address of the target that answered last.
    answered: Option<([u8; 16], Mac)>,
    /// How often two targets have answered one search.
    conflicts: u32,
    /// Until then, no frame without proof makes the link doubt its channel.
    doubts_from: Time,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    id: [u8; 16],
    /// Instance of the target, as far as an OFFER has told it.
    target: [u8; 16],
}

#[derive(Clone, Copy, Debug)]
enum Leaving {
    No,
    Closing { closes: u32, next: Time },
    Left,
}

/// One use of an export.
pub struct Initiator {
    config: InitiatorConfig,
    instance: [u8; 16],
    host: [u8; NAME_BYTES],
    /// An address of the target, if the caller gave it in place of its host.
    address: Option<Mac>,
    export: [u8; NAME_BYTES],
    entropy: Entropy,
    links: Vec<LinkState>,
    /// Nodes of the links, in the order of their lanes.
    nodes: Vec<u32>,
    schedule: Schedule,
    batch: Batch,
    /// The link that sends next, if they send in turn.
    turn: usize,
    session: Option<Session>,
    requests: Requests,
    /// When `dead_after` starts: the last answer, or the first request after it.
    alive: Time,
    is_reachable: bool,
    /// Requests fail at once, because no channel has answered for `dead_after`.
    is_dead: bool,
    /// Before the first session, with a key: why there is none, and since when. The frame that said so may be forged, and the target may answer later.
    excuse: Option<(Ended, Time)>,
    /// When the caller got the last hint.
    hinted: Option<Time>,
    leaving: Leaving,
    outputs: VecDeque<InitiatorOutput>,
}

impl Initiator {
    /// Returns an initiator that looks for its target on all links. Returns `None` if a name is too long, or a link's MTU is below
    /// `wire::MTU_MIN`.
    pub fn new(
        config: InitiatorConfig,
        links: &[Link],
        mut entropy: Entropy,
        now: Time,
    ) -> Option<Initiator> {
        let mut states = Vec::new();
        let nodes = nodes_of(links);
        let lanes = nodes.len().max(1);
        for &link in links {
            payload_max_of(link.mtu)?;
            let mut dial = Dial::Idle;
            dial.seek(now, || random_index(&mut entropy));
            states.push(LinkState {
                link,
                lane: lane_of(&nodes, link.node).unwrap_or(0),
                dial,
                channel: None,
                question: None,
                answered: None,
                conflicts: 0,
                doubts_from: now,
            });
        }
        Some(Initiator {
            instance: random_id(&mut entropy),
            host: match parse_mac(&config.host) {
                Some(_) => [0; NAME_BYTES],
                None => name_field(&config.host)?,
            },
            address: parse_mac(&config.host),
            export: name_field(&config.export)?,
            requests: Requests::new(config.pool_pages.max(POOL_PAGES_MIN), lanes, config.replay),
            schedule: Schedule::new(config.scheduler, lanes, now),
            batch: Batch::new(config.batches, now),
            nodes,
            config,
            entropy,
            links: states,
            turn: 0,
            session: None,
            alive: now,
            is_reachable: false,
            is_dead: false,
            excuse: None,
            hinted: None,
            leaving: Leaving::No,
            outputs: VecDeque::new(),
        })
    }

    /// Takes a request of a thread on a NUMA node, if that is known. `InitiatorOutput::Done` has its tag.
    pub fn submit(&mut self, now: Time, tag: u64, operation: Operation, node: Option<u32>) {
        self.submit_filled(now, tag, operation, node, None);
    }

    /// As `submit`, with the pages that have the bytes of a write already, from `reserve`.
    pub fn submit_filled(
        &mut self,
        now: Time,
        tag: u64,
        operation: Operation,
        node: Option<u32>,
        run: Option<Run>,
    ) {
        if !self.requests.has_callers() {
            self.alive = self.alive.max(now);
        }
        if self.is_dead {
            self.requests.give_back(run);
            let result = Err(UNREACHABLE);
            return self
                .outputs
                .push_back(InitiatorOutput::Done { tag, result });
        }
        let bytes = u64::from(operation.data_pages()) * PAGE_BYTES;
        let lane = self.schedule.ask(lane_of(&self.nodes, node), bytes);
        match operation.length_bytes {
            1..=SMALL_BYTES => self.batch.asked(now),
            _ => self.batch.release(),
        }
        self.requests.submit(tag, operation, lane, run);
        self.take_events();
    }

    /// Returns pages of this side's pool for the bytes of a write, which the caller copies there before `submit_filled`. Returns `None` if other requests need
    /// the room: the write is then submitted without.
    pub fn reserve(&mut self, operation: Operation, node: Option<u32>) -> Option<Run> {
        let lane = lane_of(&self.nodes, node).unwrap_or(0);
        self.requests.reserve(operation, lane)
    }

    /// Returns whether a request waits for others or for room.
    pub fn is_waiting(&self, tag: u64) -> bool {
        self.requests.is_waiting(tag)
    }

    /// Ends the session. The caller flushes first. Ends with `Ended::Detached`.
    pub fn detach(&mut self, now: Time) {
        if let Leaving::No = self.leaving {
            self.leaving = Leaving::Closing {
                closes: 0,
                next: now,
            };
            for state in &mut self.links {
                state.dial = Dial::Idle;
            }
        }
    }

    /// Returns the next output.
    pub fn next_output(&mut self) -> Option<InitiatorOutput> {
        self.outputs.pop_front()
    }

    /// Takes a frame that arrived on a network interface, and decrypts it in place. Returns its payload and where the caller must copy it, before the
    /// caller performs the outputs.
    pub fn on_frame<'f>(
        &mut self,
        now: Time,
        nic: u16,
        frame: &'f mut [u8],
    ) -> Option<(ReadPlace, &'f [u8])> {
        let (header, payload) = FrameHeader::split(frame)?;
        let of_nic = |state: &LinkState| state.link.nic == nic;
        let is_for_us = header.ethertype.get() == self.config.ethertype
            && header.flags & FLAG_FROM_TARGET != 0
            && self
                .links
                .iter()
                .any(|state| of_nic(state) && state.link.mac == header.destination);
        if !is_for_us {
            return None;
        }
        if matches!(
            header.kind,
            frame_kind::OFFER | frame_kind::ACCEPT | frame_kind::REFUSED
        ) {
            if header.is_sealed(0, payload) {
                self.on_answer(now, nic, &header, payload);
            }
            return None;
        }
        let channels = self.links.iter_mut().filter(|state| of_nic(state));
        let mut channels = channels.filter_map(|state| state.channel.as_mut());
        let attachment = channels.find(|one| one.own_index == header.index.get())?;
        let payload = attachment.open(&header, frame)?;
        let mut lost = Vec::new();
        let arrived = attachment.arrived(now, &header, payload, &KINDS, &mut lost)?;
        self.requests.lost(lost);
        let Ok(Arrived {
            is_new,
            is_progress,
        }) = arrived
        else {
            self.end(now, Ended::Protocol);
            return None;
        };
        if is_new || is_progress {
            self.answers(now);
            self.batch.release();
        }
        let place = match is_new {
            true => self.on_content(now, &header, payload),
            false => None,
        };
        self.take_events();
        Some((place?, payload))
    }

    /// Does what is due, and sends what can be sent.
    pub fn poll(&mut self, now: Time) {
        if let Leaving::Left = self.leaving {
            return;
        }
        self.leave(now);
        if let Some((why, since)) = self.excuse
            && since + EXCUSE_TIME <= now
        {
            return self.end(now, why);
        }
        for link in 0..self.links.len() {
            self.on_link_timer(now, link);
        }
        let was_reachable = self.is_reachable;
        rebalance(
            self.links
                .iter_mut()
                .filter_map(|state| state.channel.as_mut()),
        );
        let mut channels = self.links.iter().filter_map(|state| state.channel.as_ref());
        self.is_reachable = channels.any(Attachment::is_up);
        if self.is_reachable != was_reachable {
            self.outputs
                .push_back(InitiatorOutput::Reachable(self.is_reachable));
        }
        if self.dies_at().is_some_and(|time| time <= now) {
            self.is_dead = true;
            self.requests.fail_all(UNREACHABLE);
        }
        self.take_events();
        self.transmit(now);
    }

    /// Returns whether a request that has failed with `UNREACHABLE` was sent and has not ended: the target may still execute it.
    pub fn has_abandoned(&self) -> bool {
        self.requests.has_abandoned()
    }

    /// Returns the status of each link's channel, if the link has one.
    pub fn channels(&self) -> Vec<Option<ChannelStatus>> {
        let status = |state: &LinkState| {
            let attachment = state.channel.as_ref()?;
            Some(ChannelStatus {
                local_bytes: attachment.load.own_bytes,
                remote_bytes: attachment.load.other_bytes,
                ..attachment.channel.status()
            })
        };
        self.links.iter().map(status).collect()
    }

    /// Returns whether all channels carry requests of all nodes at present, and how often this has changed.
    pub fn schedule(&self) -> (bool, u64) {
        (self.schedule.is_open(), self.schedule.changes())
    }

    /// Returns the node of each lane, and the pages of this side's pool that belong to it. None: no link has a known node.
    pub fn own_pages(&self) -> Vec<(u32, std::ops::Range<u32>)> {
        let lanes = (0_u16..).zip(&self.nodes);
        lanes
            .map(|(lane, &node)| (node, self.requests.own_pages(lane)))
            .collect()
    }

    /// Returns when `poll` should be called next, if no frame arrives and no request is submitted.
    pub fn timer(&self) -> Option<Time> {
        if let Leaving::Left = self.leaving {
            return None;
        }
        let mut timers: Vec<Time> = Vec::new();
        for state in &self.links {
            timers.extend(state.dial.timer());
            if let Some(attachment) = &state.channel {
                timers.extend(attachment.channel.timer());
                let waits = self.requests.is_active();
                timers.extend(attachment.channel.silent_at().filter(|_| waits));
                if let (State::Suspect { since, .. }, Dial::Idle, Leaving::No) =
                    (attachment.channel.state(), &state.dial, self.leaving)
                {
                    timers.push(since + REDIAL_AFTER);
                }
            }
        }
        if let Leaving::Closing { next, .. } = self.leaving {
            timers.push(next);
        }
        timers.extend(self.batch.timer());
        timers.extend(self.excuse.map(|(_, since)| since + EXCUSE_TIME));
        timers.extend(self.dies_at());
        timers.into_iter().min()
    }

    /// Returns when the requests of callers fail, if no channel answers until then.
    fn dies_at(&self) -> Option<Time> {
        let after = self.config.dead_after?;
        let waits = !self.is_reachable && self.requests.has_callers();
        waits.then_some(self.alive + after)
    }

    /// Takes an unauthenticated reason why there is no channel. The reason ends the initiator only before the first session, and only if no target accepts in time.
    fn doubt(&mut self, now: Time, why: Ended) {
        let is_told = self.hinted.is_some_and(|at| now < at + HINT_INTERVAL);
        if self.session.is_none() {
            self.excuse.get_or_insert((why, now));
        } else if !is_told && !self.is_reachable {
            self.hinted = Some(now);
            self.outputs.push_back(InitiatorOutput::Hint(why));
        }
    }

    /// Notes that the target answers.
    fn answers(&mut self, now: Time) {
        (self.alive, self.is_dead) = (now, false);
    }

    fn take_events(&mut self) {
        while let Some(event) = self.requests.next_event() {
            self.outputs.push_back(match event {
                Event::Fill { tag, run } => InitiatorOutput::Fill { tag, run },
                Event::Done { tag, result } => InitiatorOutput::Done { tag, result },
                Event::Replay { changes } => InitiatorOutput::Replay { changes },
            });
        }
    }

    fn end(&mut self, now: Time, why: Ended) {
        if let Leaving::Left = self.leaving {
            return;
        }
        if let Ended::Protocol = why {
            self.send_close(now, reason::PROTOCOL);
        }
        (self.leaving, self.excuse) = (Leaving::Left, None);
        // Requests fail with the reason from now on, not because the target is away.
        self.is_dead = false;
        for state in &mut self.links {
            (state.dial, state.channel) = (Dial::Idle, None);
            state.question = None;
        }
        self.requests.stop(match why {
            Ended::TwoTargets(..) => ENOTUNIQ,
            Ended::InUse => EBUSY,
            Ended::Fenced => ESTALE,
            Ended::NotAllowed | Ended::NeedsKey | Ended::NoKeys => EACCES,
            Ended::Version => EPROTONOSUPPORT,
            Ended::Protocol => EPROTO,
            Ended::Detached => ECANCELED,
        });
        self.take_events();
        self.outputs.push_back(InitiatorOutput::Ended(why));
    }

    /// Takes COMPLETIONS, DATA or CLOSE of the session.
    fn on_content(&mut self, now: Time, header: &FrameHeader, payload: &[u8]) -> Option<ReadPlace> {
        match header.kind {
            frame_kind::COMPLETIONS => {
                let Ok(records) = <[CompletionRecord]>::ref_from_bytes(payload) else {
                    self.end(now, Ended::Protocol);
                    return None;
                };
                for record in records {
                    self.requests.on_completion(*record);
                }
                self.batch.ended(now, records.len() as u64);
                None
            }
            frame_kind::DATA => {
                let name = RequestId {
                    slot: header.slot.get(),
                    sequence: header.sequence.get(),
                };
                let place = header.place.get();
                match self.requests.on_data(name, place, payload.len()) {
                    Ok(tag) => tag.map(|tag| ReadPlace {
                        tag,
                        at_bytes: u32::from(place) * PLACE_BYTES,
                    }),
                    Err(()) => {
                        self.end(now, Ended::Protocol);
                        None
                    }
                }
            }
            frame_kind::CLOSE => {
                if let Ok((refused, _)) = Refused::read_from_prefix(payload) {
                    match refused.reason.get() {
                        reason::FENCED => self.end(now, Ended::Fenced),
                        reason::PROTOCOL => self.end(now, Ended::Protocol),
                        // The links find the target again, or another one in its place.
                        _ => {}
                    }
                }
                None
            }
            _ => None,
        }
    }
}
