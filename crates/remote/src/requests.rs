//! The requests of an initiator: slots, order, pools, and the replay. No frames and no channels.
//! The rules are in `docs/formats/wire.md`, sections *Requests* and *Nothing flushed is lost*.
//!
//! A request is *waiting* (`waiting`) until `start` gives it a slot; then it is *active* until its completion, and for a READ all of its data,
//! have arrived (`finish`). Phases:
//!
//! ```text
//! Detached ── begin_session ──> Running ── another verifier (`verifier_seen`) ──> Draining
//! Draining ── nothing active ──> Replaying, or Running if nothing is kept
//! Replaying ── all kept changes and the flush completed ──> Running
//! Replaying ── another verifier, or a failure (`replay_failed`) ──> Draining
//! ```

use std::collections::VecDeque;
use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_format::wire::{CompletionRecord, FLAG_FUA, RequestRecord, TRANSFER_BYTES_MAX};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::content::{Content, Part, RequestId};
use crate::errno::{EINVAL, EIO};
use crate::lanes::{Lanes, Sources};
use crate::log::{Kept, Log};
use crate::operation::{Action, Operation};
use crate::pages::{Pages, Run};
use crate::pieces::Pieces;
use crate::ranges::Ranges;

/// Changes in the log that cause a flush.
const KEPT_MAX: u64 = 1 << 15;
/// Least number of pages of a pool: the largest transfer must fit.
pub(crate) const POOL_PAGES_MIN: u32 = TRANSFER_BYTES_MAX / PAGE_BYTES as u32;

/// Who waits for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    /// The caller, with its tag.
    Caller(u64),
    /// The caller has had an error already.
    Nobody,
    /// A flush that makes room for writes.
    Room,
    /// A replay.
    Replay,
}

#[derive(Debug)]
struct Request {
    /// Order of submission.
    number: u64,
    waiter: Waiter,
    operation: Operation,
    /// Bytes of a write in this side's pool, once they are copied.
    local: Option<Run>,
    /// `local` is of `reserve`, and nothing was sent.
    is_reserved: bool,
    /// A flush has failed once.
    has_failed: bool,
    lane: u16,
}

#[derive(Debug)]
struct Active {
    request: Request,
    /// Pages in the target's pool.
    remote: Run,
    /// What has arrived of the data of a READ.
    pieces: Pieces,
    completion: Option<CompletionRecord>,
    /// FLUSH: it covers the changes in the log below this number.
    covers: u64,
}

#[derive(Debug, Default)]
struct Slot {
    /// Sequence of the latest request.
    sequence: u32,
    active: Option<Active>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Detached,
    Running,
    Draining,
    /// `next`: number of the next change in the log. `is_flushing`: all changes completed, and the FLUSH was sent.
    Replaying {
        next: u64,
        is_flushing: bool,
    },
}

/// What the caller must do or learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Copy the bytes of the write to this run of the pool, before anything is sent.
    Fill { tag: u64, run: Run },
    /// The request has ended. The error is an errno.
    Done { tag: u64, result: Result<(), i32> },
    /// A replay begins, of this many changes.
    Replay { changes: u64 },
}

/// All requests of an initiator.
#[derive(Debug)]
pub(crate) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u16>,
    active: usize,
    waiting: VecDeque<Request>,
    submitted: u64,
    /// This side's pool: bytes of writes from their start until they are flushed.
    local: Pages,
    local_pages: u32,
    lanes: u32,
    /// The target's pool.
    remote: Pages,
    /// Ranges of active changes.
    changing: Ranges,
    log: Log,
    has_replay: bool,
    phase: Phase,
    /// The export's verifier, when there has been a session.
    verifier: Option<u64>,
    /// Each FLUSH fails with it.
    flush_error: Option<i32>,
    /// Each request fails with it.
    stopped: Option<i32>,
    /// A flush that makes room is active.
    makes_room: bool,
    records: Lanes<RequestId>,
    parts: Lanes<Part>,
    /// Pages of the target's pool that are near each lane's channels.
    near: Vec<Range<u32>>,
    events: VecDeque<Event>,
    /// Requests of callers that have not ended.
    callers: usize,
}

impl Requests {
    /// Returns requests without a session. This side's pool has `local_pages`, at least `POOL_PAGES_MIN`, the same number for each of at least one
    /// lane.
    pub fn new(local_pages: u32, lanes: usize, has_replay: bool) -> Requests {
        assert!(local_pages >= POOL_PAGES_MIN, "{local_pages}");
        Requests {
            slots: Vec::new(),
            free: Vec::new(),
            active: 0,
            waiting: VecDeque::new(),
            submitted: 0,
            local: Pages::new(local_pages),
            local_pages,
            lanes: lanes as u32,
            remote: Pages::new(0),
            changing: Ranges::default(),
            log: Log::default(),
            has_replay,
            phase: Phase::Detached,
            verifier: None,
            flush_error: None,
            stopped: None,
            makes_room: false,
            records: Lanes::new(lanes),
            parts: Lanes::new(lanes),
            near: vec![0..0; lanes],
            events: VecDeque::new(),
            callers: 0,
        }
    }

    /// Returns pages for the bytes of a write of a lane. Returns `None` while requests wait, which may need the room.
    pub fn reserve(&mut self, operation: Operation, lane: u16) -> Option<Run> {
        // A replay that was given up has given its pages back, and still sends them.
        let is_running = self.phase == Phase::Running && self.waiting.is_empty();
        let is_write = matches!(operation.action, Action::Write { .. });
        if !is_running || !is_write || !operation.is_valid(u64::MAX) {
            return None;
        }
        let own = self.own_pages(lane);
        self.local.take(operation.data_pages(), own)
    }

    /// Takes back the pages of a write that is not submitted.
    pub fn give_back(&mut self, run: Option<Run>) {
        if let Some(run) = run {
            self.local.give_back(run);
        }
    }

    /// Takes a request of a lane. Its end is an event with the tag. `run`: pages of `reserve`, with the bytes of a write.
    pub fn submit(&mut self, tag: u64, operation: Operation, lane: u16, run: Option<Run>) {
        let error = match self.stopped {
            None if !operation.is_valid(u64::MAX) => Some(EINVAL),
            None if operation.action == Action::Flush || operation.is_durable() => self.flush_error,
            stopped => stopped,
        };
        if let Some(error) = error {
            self.give_back(run);
            let result = Err(error);
            return self.events.push_back(Event::Done { tag, result });
        }
        self.submitted += 1;
        self.callers += 1;
        self.waiting.push_back(Request {
            number: self.submitted,
            waiter: Waiter::Caller(tag),
            operation,
            local: run,
            is_reserved: run.is_some(),
            has_failed: false,
            lane,
        });
        self.start();
    }

    /// Returns whether a caller's request was not started.
    pub fn is_waiting(&self, tag: u64) -> bool {
        let of_caller = |request: &Request| request.waiter == Waiter::Caller(tag);
        self.waiting.iter().any(of_caller)
    }

    /// Returns whether a caller waits for a request.
    pub fn has_callers(&self) -> bool {
        self.callers > 0
    }

    /// Returns whether a request was sent whose caller has had an error, and has not ended. After `stop` there is none: the target has taken the export from the session.
    pub fn has_abandoned(&self) -> bool {
        let is_abandoned = |slot: &Slot| {
            let active = slot.active.as_ref();
            active.is_some_and(|active| active.request.waiter == Waiter::Nobody)
        };
        self.stopped.is_none() && self.slots.iter().any(is_abandoned)
    }

    /// Returns whether a request was sent and has not ended.
    pub fn is_active(&self) -> bool {
        self.active > 0
    }

    /// Returns the next event.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the number of records that wait to be sent.
    pub fn waiting_records(&self) -> usize {
        self.records.len()
    }

    /// Returns the number of requests that have a slot and have not ended.
    pub fn in_progress(&self) -> usize {
        self.active
    }

    /// Returns what the next frame should carry. `holds`: records must still wait.
    pub fn next_content(
        &mut self,
        from: Sources<'_>,
        payload_max: u16,
        holds: bool,
    ) -> Option<Content> {
        let most = match holds {
            true => 0,
            false => usize::from(payload_max) / size_of::<RequestRecord>(),
        };
        let mut names = Vec::new();
        while names.len() < most
            && let Some(name) = self.records.pop(from)
        {
            if self.active(name).is_some() {
                names.push(name);
            }
        }
        if !names.is_empty() {
            return Some(Content::Records(names));
        }
        while let Some(mut part) = self.parts.pop(from) {
            let Some(active) = self.active(part.name) else {
                continue;
            };
            let lane = active.request.lane;
            let first = part.take_first(payload_max);
            if !part.is_empty() {
                self.parts.of(lane).push_front(part);
            }
            return Some(Content::Data(first));
        }
        None
    }

    /// Returns the lane of the request of some content.
    pub fn lane_of_content(&self, content: &Content) -> Option<u16> {
        let name = match content {
            Content::Records(names) => names.first()?,
            Content::Data(part) => &part.name,
        };
        Some(self.active(*name)?.request.lane)
    }

    /// Returns the bytes of writes and the requests, as bytes of their records, that wait in a lane for channels. `holds`: records wait for others.
    pub fn waiting_bytes(&mut self, lane: u16, holds: bool) -> u64 {
        let parts = self
            .parts
            .of(lane)
            .iter()
            .map(|part| u64::from(part.length_bytes()));
        let parts: u64 = parts.sum();
        match holds {
            true => parts,
            false => parts + (self.records.of(lane).len() * size_of::<RequestRecord>()) as u64,
        }
    }

    /// Takes what an ACCEPT says of the target's pool: the pages that are near the channels of a lane.
    pub fn set_near(&mut self, lane: u16, near: Range<u32>) {
        if let Some(known) = self.near.get_mut(usize::from(lane)) {
            *known = near;
        }
    }

    /// Returns this side's pages of a lane.
    pub fn own_pages(&self, lane: u16) -> Range<u32> {
        let pages = self.local_pages / self.lanes;
        let lane = u32::from(lane);
        lane * pages..(lane + 1) * pages
    }

    /// Returns the lane whose pages have the bytes of a write.
    fn lane_of(&self, run: Option<Run>) -> u16 {
        let pages = self.local_pages / self.lanes;
        run.map_or(0, |run| (run.page / pages).min(self.lanes - 1) as u16)
    }

    /// Returns the record of a request for a frame.
    pub fn record(&self, name: RequestId) -> Option<RequestRecord> {
        let active = self.active(name)?;
        let operation = active.request.operation;
        Some(RequestRecord {
            op: operation.op(),
            flags: if operation.is_durable() { FLAG_FUA } else { 0 },
            slot: U16::new(name.slot),
            sequence: U32::new(name.sequence),
            offset_bytes: U64::new(operation.offset_bytes),
            length_bytes: U32::new(operation.length_bytes),
            pool_page: U32::new(active.remote.page),
            reserved: [0; 8],
        })
    }

    /// Returns the pages of a write: in this side's pool, and in the target's.
    pub fn runs(&self, name: RequestId) -> Option<(Run, Run)> {
        let active = self.active(name)?;
        Some((active.request.local?, active.remote))
    }

    /// Takes content that was lost, to send it again.
    pub fn lost(&mut self, lost: Vec<Content>) {
        lost.into_iter().for_each(|content| self.requeue(content));
    }

    fn requeue(&mut self, content: Content) {
        match content {
            Content::Records(names) => {
                for name in names {
                    let Some(active) = self.active(name) else {
                        continue;
                    };
                    let lane = active.request.lane;
                    self.records.of(lane).push_back(name);
                }
            }
            Content::Data(part) => {
                if let Some(active) = self.active(part.name) {
                    let lane = active.request.lane;
                    self.parts.of(lane).push_front(part);
                }
            }
        }
    }

    /// Takes a part of the data of a READ. Returns the tag of the request, if the part must be copied to the caller's memory, or an
    /// error if the target broke a rule.
    pub fn on_data(
        &mut self,
        name: RequestId,
        place: u16,
        length: usize,
    ) -> Result<Option<u64>, ()> {
        let Some(active) = self.active_mut(name) else {
            return Ok(None);
        };
        let operation = active.request.operation;
        if operation.action != Action::Read
            || !active.pieces.take(place, length)
            || !active.pieces.are_within(operation.length_bytes)
        {
            return Err(());
        }
        let tag = match active.request.waiter {
            Waiter::Caller(tag) => Some(tag),
            _ => None,
        };
        self.finish_if_complete(name);
        Ok(tag)
    }

    /// Takes a completion.
    pub fn on_completion(&mut self, record: CompletionRecord) {
        let name = RequestId {
            slot: record.slot.get(),
            sequence: record.sequence.get(),
        };
        if let Some(active) = self.active_mut(name) {
            active.completion.get_or_insert(record);
            self.finish_if_complete(name);
        }
    }

    /// Begins a new session. `continues`: no other instance has had the export since this one had it. Returns `false` if the export may have
    /// been changed by others: then all requests must fail.
    pub fn begin_session(
        &mut self,
        slots: u16,
        pool_pages: u32,
        verifier: u64,
        continues: bool,
    ) -> bool {
        if self.verifier.is_some() && !continues {
            return false;
        }
        self.take_back_active();
        self.slots = (0..slots).map(|_| Slot::default()).collect();
        self.free = (0..slots).rev().collect();
        self.remote = Pages::new(pool_pages);
        self.changing.clear();
        self.records.clear();
        self.parts.clear();
        if self.verifier.is_none_or(|known| known == verifier) {
            self.phase = match self.phase {
                Phase::Detached | Phase::Running => Phase::Running,
                _ => Phase::Draining,
            };
        } else {
            self.phase = Phase::Draining;
        }
        self.verifier = Some(verifier);
        self.proceed();
        true
    }

    /// Fails all requests of callers with an errno. Those that were sent keep their slots until the target answers: rule 18.
    pub fn fail_all(&mut self, error: i32) {
        for request in std::mem::take(&mut self.waiting) {
            self.end(request, Err(error));
        }
        for slot in 0..self.slots.len() {
            if let Some(active) = &mut self.slots[slot].active
                && let Waiter::Caller(tag) = active.request.waiter
            {
                active.request.waiter = Waiter::Nobody;
                self.done(tag, Err(error));
            }
        }
    }

    /// Fails all requests, also later ones, with an errno.
    pub fn stop(&mut self, error: i32) {
        if self.stopped.is_none() {
            self.stopped = Some(error);
            self.fail_all(error);
            self.records.clear();
            self.parts.clear();
        }
    }

    fn active(&self, name: RequestId) -> Option<&Active> {
        let slot = self.slots.get(usize::from(name.slot))?;
        let active = slot.active.as_ref()?;
        (slot.sequence == name.sequence).then_some(active)
    }

    fn active_mut(&mut self, name: RequestId) -> Option<&mut Active> {
        let slot = self.slots.get_mut(usize::from(name.slot))?;
        let active = slot.active.as_mut()?;
        (slot.sequence == name.sequence).then_some(active)
    }

    /// Starts waiting requests, in order, as far as there is room.
    fn start(&mut self) {
        while self.phase == Phase::Running && self.stopped.is_none() {
            let numbers = self.log.numbers();
            let is_half = self.log.pages() >= self.local_pages / 2;
            if is_half || numbers.end - numbers.start >= KEPT_MAX {
                self.make_room();
            }
            let Some(mut request) = self.waiting.pop_front() else {
                break;
            };
            if self.start_one(&mut request).is_err() {
                self.waiting.push_front(request);
                if self.active > 0 {
                    break;
                }
                // The pool has room, but not in one piece.
                self.make_room();
                if self.makes_room || !self.take_back_reserved() {
                    break;
                }
            }
        }
    }

    /// Takes back the pages of writes that wait: the request before them needs the room, and nothing else will give it. Their bytes are copied again when they start. Returns
    /// whether there were any.
    fn take_back_reserved(&mut self) -> bool {
        let mut any = false;
        for request in &mut self.waiting {
            if std::mem::take(&mut request.is_reserved)
                && let Some(run) = request.local.take()
            {
                self.local.give_back(run);
                any = true;
            }
        }
        any
    }

    /// Flushes, so that the log gives its pages back.
    fn make_room(&mut self) {
        if self.makes_room || self.log.is_empty() {
            return;
        }
        let mut flush = Request {
            number: 0,
            waiter: Waiter::Room,
            operation: Operation::flush(),
            local: None,
            is_reserved: false,
            has_failed: false,
            lane: 0,
        };
        self.makes_room = self.start_one(&mut flush).is_ok();
    }

    /// Gives a request a slot, and queues what must be sent. Fails, without effect, if there is no room.
    fn start_one(&mut self, request: &mut Request) -> Result<(), ()> {
        let operation = request.operation;
        let range = operation.range();
        // A read beside a change may return it. If the change is then lost and repeated, a later read must not return what was before.
        let must_be_alone = operation.action != Action::Flush;
        if self.free.is_empty() || must_be_alone && self.changing.overlap(&range) {
            return Err(());
        }
        let pages = operation.data_pages();
        let is_write = matches!(operation.action, Action::Write { .. });
        let near = self.near.get(usize::from(request.lane));
        let near = near.cloned().unwrap_or(0..0);
        let remote = self.remote.take(pages, near).ok_or(())?;
        if is_write && request.local.is_none() {
            let own = self.own_pages(request.lane);
            let Some(run) = self.local.take(pages, own) else {
                self.remote.give_back(remote);
                return Err(());
            };
            request.local = Some(run);
            if let Waiter::Caller(tag) = request.waiter {
                self.events.push_back(Event::Fill { tag, run });
            }
        }
        let slot = self.free.pop().ok_or(())?;
        if operation.is_change() {
            self.changing.add(range);
        }
        let covers = self.log.numbers().end;
        let place = &mut self.slots[usize::from(slot)];
        place.sequence = place.sequence.wrapping_add(1);
        let name = RequestId {
            slot,
            sequence: place.sequence,
        };
        request.is_reserved = false;
        place.active = Some(Active {
            request: Request { ..*request },
            remote,
            pieces: Pieces::default(),
            completion: None,
            covers,
        });
        self.active += 1;
        if self.records.len() > 2 * self.slots.len() {
            // Stale entries accumulate only if a target completes requests before they are sent.
            let mut records = std::mem::replace(&mut self.records, Lanes::new(0));
            records.retain(|name| self.active(*name).is_some());
            self.records = records;
        }
        let lane = request.lane;
        self.records.of(lane).push_back(name);
        if is_write {
            if self.parts.len() > 2 * self.slots.len() {
                let mut parts = std::mem::replace(&mut self.parts, Lanes::new(0));
                parts.retain(|part| self.active(part.name).is_some());
                self.parts = parts;
            }
            self.parts.of(lane).push_back(Part {
                name,
                from_bytes: 0,
                to_bytes: pages * PAGE_BYTES as u32,
            });
        }
        Ok(())
    }

    fn finish_if_complete(&mut self, name: RequestId) {
        let Some(active) = self.active(name) else {
            return;
        };
        let Some(record) = active.completion else {
            return;
        };
        let operation = active.request.operation;
        let needs_data = operation.action == Action::Read && record.error.get() == 0;
        if needs_data && !active.pieces.are_all(operation.length_bytes) {
            return;
        }
        let slot = &mut self.slots[usize::from(name.slot)];
        let Some(active) = slot.active.take() else {
            return;
        };
        self.free.push(name.slot);
        self.active -= 1;
        self.remote.give_back(active.remote);
        if operation.is_change() {
            self.changing.remove(&operation.range());
        }
        self.verifier_seen(record.verifier.get());
        let is_current = matches!(self.phase, Phase::Running | Phase::Replaying { .. });
        let result = match record.error.get() {
            0 => Ok(()),
            error => Err(i32::from(error)),
        };
        match active.request.waiter {
            Waiter::Replay => self.replayed(is_current, result),
            _ => self.finish(active, is_current, result),
        }
        self.proceed();
    }

    /// Ends a request that is not part of a replay. `is_current`: the verifier has not changed.
    fn finish(&mut self, active: Active, is_current: bool, result: Result<(), i32>) {
        let Active {
            mut request,
            covers,
            ..
        } = active;
        let operation = request.operation;
        if request.waiter == Waiter::Room {
            self.makes_room = false;
        }
        match (operation.action, result) {
            // What it returned may be older than a completed write.
            (Action::Read, Ok(())) if !is_current => return self.repeat(request),
            // The replay may repair what the flush lost. A device that fails a flush again fails all.
            (Action::Flush, Err(error)) if request.has_failed => self.lose_log(error),
            (Action::Flush, _) if !is_current => {
                request.has_failed |= result.is_err();
                return self.repeat(request);
            }
            (Action::Flush, Ok(())) => self.forget_below(covers),
            (Action::Flush, Err(error)) => self.lose_log(error),
            (Action::Read, _) | (_, Err(_)) => {}
            (_, Ok(())) if !operation.is_durable() => {
                request.local = self.keep(operation, request.local);
            }
            (_, Ok(())) if self.log.may_overlap(&operation.range()) => {
                // A replay that stops after the older change would undo this write. So the caller waits until both are flushed.
                request.local = self.keep(operation, request.local);
                request.operation = Operation::flush();
                return self.repeat(request);
            }
            (_, Ok(())) => {}
        }
        self.end(request, result);
    }

    /// Ends a request: gives the pages of its bytes back, and tells the caller.
    fn end(&mut self, request: Request, result: Result<(), i32>) {
        self.give_back(request.local);
        if let Waiter::Caller(tag) = request.waiter {
            self.done(tag, result);
        }
    }

    fn done(&mut self, tag: u64, result: Result<(), i32>) {
        self.callers -= 1;
        self.events.push_back(Event::Done { tag, result });
    }

    /// Puts a request back to where it was in the order of submission.
    fn repeat(&mut self, request: Request) {
        if !matches!(request.waiter, Waiter::Caller(_)) {
            return self.end(request, Ok(()));
        }
        let place = self
            .waiting
            .partition_point(|other| other.number < request.number);
        self.waiting.insert(place, request);
    }

    /// Keeps a change until it is flushed. Returns the pages that the log does not need.
    fn keep(&mut self, operation: Operation, local: Option<Run>) -> Option<Run> {
        if self.flush_error.is_some() {
            return local;
        }
        // Without a replay, the log only records that unflushed changes exist.
        let run = local.filter(|_| self.has_replay);
        self.log.push(Kept { operation, run });
        local.filter(|_| !self.has_replay)
    }

    fn forget_below(&mut self, number: u64) {
        for run in self.log.remove_below(number) {
            self.local.give_back(run);
        }
    }

    /// Notes that no flush can succeed any more.
    fn lose_log(&mut self, error: i32) {
        self.flush_error.get_or_insert(error);
        self.forget_below(self.log.numbers().end);
        let error = self.flush_error.unwrap_or(error);
        let fails = |request: &Request| {
            request.operation.action == Action::Flush || request.operation.is_durable()
        };
        let waiting = std::mem::take(&mut self.waiting);
        let (failed, waiting): (VecDeque<_>, VecDeque<_>) = waiting.into_iter().partition(fails);
        self.waiting = waiting;
        for request in failed {
            self.end(request, Err(error));
        }
    }

    fn verifier_seen(&mut self, verifier: u64) {
        if self.verifier != Some(verifier) {
            self.verifier = Some(verifier);
            self.phase = Phase::Draining;
        }
    }

    /// Takes the next step of a replay, and starts what can start.
    fn proceed(&mut self) {
        if self.phase == Phase::Draining && self.active == 0 {
            let numbers = self.log.numbers();
            if !self.has_replay && !numbers.is_empty() {
                self.lose_log(EIO);
            }
            self.phase = match self.log.is_empty() {
                true => Phase::Running,
                false => {
                    let changes = numbers.end - numbers.start;
                    self.events.push_back(Event::Replay { changes });
                    Phase::Replaying {
                        next: numbers.start,
                        is_flushing: false,
                    }
                }
            };
        }
        while let Phase::Replaying {
            next,
            is_flushing: false,
        } = self.phase
        {
            let kept = self.log.get(next).cloned();
            if kept.is_none() && self.active > 0 {
                break;
            }
            let is_flushing = kept.is_none();
            let kept = kept.unwrap_or(Kept {
                operation: Operation::flush(),
                run: None,
            });
            let mut request = Request {
                number: 0,
                waiter: Waiter::Replay,
                operation: kept.operation,
                local: kept.run,
                is_reserved: false,
                has_failed: false,
                lane: self.lane_of(kept.run),
            };
            if self.start_one(&mut request).is_err() {
                break;
            }
            let next = next + u64::from(!is_flushing);
            self.phase = Phase::Replaying { next, is_flushing };
        }
        self.start();
    }

    /// Takes the end of a request of a replay.
    fn replayed(&mut self, is_current: bool, result: Result<(), i32>) {
        let Phase::Replaying { is_flushing, .. } = self.phase else {
            // The verifier has changed again: the next replay does it all.
            if let (Err(error), false) = (result, is_current) {
                self.replay_failed(error);
            }
            return;
        };
        match result {
            Err(error) => self.replay_failed(error),
            Ok(()) if is_flushing => {
                self.forget_below(self.log.numbers().end);
                self.phase = Phase::Running;
            }
            Ok(()) => {}
        }
    }

    /// Gives up the replay. What it has sent already ends by itself.
    fn replay_failed(&mut self, error: i32) {
        self.lose_log(error);
        self.phase = Phase::Draining;
    }

    /// Puts active requests back among the waiting ones, because their session is over.
    fn take_back_active(&mut self) {
        for slot in 0..self.slots.len() {
            let Some(active) = self.slots[slot].active.take() else {
                continue;
            };
            let request = active.request;
            match request.waiter {
                Waiter::Caller(_) => self.repeat(request),
                Waiter::Replay => {}
                Waiter::Room | Waiter::Nobody => self.end(request, Err(EIO)),
            }
        }
        self.active = 0;
        self.makes_room = false;
    }
}
