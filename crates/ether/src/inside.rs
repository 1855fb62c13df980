//! What the threads of an initiator share.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::Thread;
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_format::wire::HEADER_BYTES;
use jericho_remote::{
    Action, Attached, Body, ChannelStatus, Ended, Initiator, InitiatorOutput, Operation, Run,
};
use jericho_storage::{ChannelStat, NetworkStat, Segment, gather_to, scatter};
use jericho_sys::memory::Mapping;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;

use crate::alarm;
use crate::copies::{COPIED_LOCKED, Copies, await_turn};
use crate::links::{Clock, Links, Place, Receiver};
use crate::lock::{TimedGuard, TimedLock};
use crate::outbox::Outboxes;
use crate::placement;

/// How long after the last answer the target is asked whether it answers, before something depends on it.
const ASK_AFTER: Duration = Duration::from_secs(1);
/// How long that answer may take.
const ANSWER_TIME: Duration = Duration::from_millis(200);

/// A request of a caller.
struct Request {
    /// Bytes of a write that are not in the pool yet; where the bytes of a read go.
    bytes: Bytes,
    caller: Caller,
    /// Threads that copy bytes of the read at present.
    copying: u32,
    /// The result, if the request ended meanwhile.
    ended: Option<Result<(), i32>>,
}

impl Request {
    fn new(bytes: Bytes, caller: Caller) -> Request {
        Request {
            bytes,
            caller,
            copying: 0,
            ended: None,
        }
    }
}

enum Bytes {
    Own(Vec<u8>),
    /// Memory of a transfer, from an offset in it.
    Shared(Arc<[Segment]>, usize),
}

enum Caller {
    /// A thread that sleeps until the result is there.
    Thread(Thread, Option<Result<(), i32>>),
    /// Takes the result.
    Callback(End),
}

/// Takes the result of a request.
pub(crate) type End = Box<dyn FnOnce(Result<(), i32>) + Send>;

/// Operations of a transfer, with their places in its memory.
pub(crate) type Parts = Vec<(Operation, usize, End)>;

/// Bytes of a read that have arrived, and are to be copied without the lock.
struct Copy {
    tag: u64,
    memory: Arc<[Segment]>,
    at: usize,
    frame: Place,
    length: usize,
}

/// The protocol and its memory.
pub(crate) struct Core {
    initiator: Initiator,
    clock: Clock,
    outboxes: Arc<Outboxes>,
    pool: Arc<Mapping>,
    requests: HashMap<u64, Request>,
    /// Payloads of reads that are copied without the lock, by the tag of the request.
    copies: Copies,
    tags: u64,
    /// When the receiver's timer ends.
    timer_at: Option<Duration>,
    pub attached: Option<Attached>,
    pub ended: Option<Ended>,
    pub replayed: u64,
    /// The session is being ended.
    is_leaving: bool,
    /// No channel answers.
    is_silent: bool,
    /// Name of the device, for messages.
    name: Arc<str>,
    /// What the ends of requests cause, once the core is not locked any more: a thread that woke before would only wait for the lock.
    wakes: Vec<Wake>,
    /// Threads that wait for `attached` or `ended`.
    waiting: Vec<Thread>,
}

enum Wake {
    Thread(Thread),
    End(End, Result<(), i32>),
}

/// The core, and what its users need without its lock.
pub(crate) struct Inside {
    core: TimedLock<Core>,
    outboxes: Arc<Outboxes>,
    pool: Arc<Mapping>,
    links: Links,
    topology: Arc<Topology>,
    /// Requests belong to the nodes of the threads that ask.
    has_nodes: bool,
    /// No channel answers. Set with the core locked.
    is_silent: AtomicBool,
    /// When the last request ended, in milliseconds since `start`.
    answered_ms: AtomicU64,
    start: Instant,
    /// When the last question was asked, in milliseconds since `start`.
    asked_ms: AtomicU64,
    /// A question whether the target answers has had no answer yet.
    is_asking: Arc<AtomicBool>,
    timer: Timer,
}

/// The bytes of a request.
pub(crate) enum Data<'d> {
    None,
    Write(&'d [u8]),
    Read(usize),
}

impl Inside {
    /// Returns what the threads share. Fails if there is no memory for the pool.
    pub fn new(
        name: Arc<str>,
        initiator: Initiator,
        (links, outboxes): (Links, Arc<Outboxes>),
        pool_pages: u32,
        timer: Timer,
        topology: Arc<Topology>,
    ) -> io::Result<Arc<Inside>> {
        let own = initiator.own_pages();
        let pool = Arc::new(placement::pool(&topology, pool_pages, &own)?);
        Ok(Arc::new(Inside {
            topology,
            has_nodes: own.len() > 1,
            core: TimedLock::new(Core {
                initiator,
                clock: links.clock(),
                outboxes: Arc::clone(&outboxes),
                pool: Arc::clone(&pool),
                requests: HashMap::new(),
                copies: Copies::default(),
                tags: 0,
                timer_at: None,
                attached: None,
                ended: None,
                replayed: 0,
                is_leaving: false,
                is_silent: false,
                name,
                wakes: Vec::new(),
                waiting: Vec::new(),
            }),
            outboxes,
            pool,
            links,
            is_silent: AtomicBool::new(false),
            answered_ms: AtomicU64::new(0),
            start: Instant::now(),
            asked_ms: AtomicU64::new(0),
            is_asking: Arc::default(),
            timer,
        }))
    }

    /// Returns the core. Ends the process if a thread has panicked with it: nothing is known about its requests then.
    pub fn lock(&self) -> TimedGuard<'_, Core> {
        self.core.lock()
    }

    /// Returns the node of the calling thread, if that matters.
    fn node(&self) -> Option<u32> {
        let current = || placement::current_node(&self.topology);
        self.has_nodes.then(current).flatten()
    }

    /// Returns whether the target does not answer. Asks it if it had nothing to answer for a while: idle channels send nothing, so nothing else would
    /// tell that it has died meanwhile.
    pub fn is_silent(&self) -> bool {
        if self.is_silent.load(Ordering::Relaxed) {
            return true;
        }
        let answered = Duration::from_millis(self.answered_ms.load(Ordering::Relaxed));
        if self.start.elapsed().saturating_sub(answered) < ASK_AFTER {
            return false;
        }
        !self.answers()
    }

    /// Returns whether the target answers a small read in a short time. Does not ask again while a former question has no answer; another thread's question that
    /// is younger counts as answered.
    fn answers(&self) -> bool {
        let now_ms = self.start.elapsed().as_millis() as u64;
        if self.is_asking.swap(true, Ordering::AcqRel) {
            // Another thread has just asked, or the question has had no answer for long.
            let age_ms = now_ms.saturating_sub(self.asked_ms.load(Ordering::Relaxed));
            return age_ms < ANSWER_TIME.as_millis() as u64;
        }
        self.asked_ms.store(now_ms, Ordering::Relaxed);
        let (asking, (answer, has_answer)) = (Arc::clone(&self.is_asking), sync_channel(1));
        let end = move |_: Result<(), i32>| {
            asking.store(false, Ordering::Release);
            // The thread that asked may not wait any more.
            let _ = answer.try_send(());
        };
        let mut core = self.lock();
        let read = Operation {
            action: Action::Read,
            offset_bytes: 0,
            length_bytes: PAGE_BYTES as u32,
        };
        let bytes = Bytes::Own(vec![0; PAGE_BYTES as usize]);
        let request = Request::new(bytes, Caller::Callback(Box::new(end)));
        core.begin(read, request, None, None);
        core.perform(&mut None);
        self.leave(core);
        has_answer.recv_timeout(ANSWER_TIME).is_ok()
    }

    /// Returns whether a change that failed because the target did not answer may still take effect.
    pub fn has_abandoned(&self) -> bool {
        self.lock().initiator.has_abandoned()
    }

    /// Returns the timer, which the receiver watches.
    pub fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Begins an operation, and sends its frames from this thread. Returns its tag.
    pub fn submit(&self, operation: Operation, data: Data<'_>) -> u64 {
        let node = self.node();
        let own = match data {
            Data::Read(length) => vec![0; length],
            _ => Vec::new(),
        };
        let mut core = self.lock();
        let mut run = None;
        if let Data::Write(bytes) = data
            && bytes.len() > COPIED_LOCKED
        {
            run = core.initiator.reserve(operation, node);
            if let Some(run) = run {
                // Other threads use the protocol while this one copies.
                drop(core);
                self.pool.copy_in(run.bytes().start, bytes);
                core = self.lock();
            }
        }
        let tag = core.begin(
            operation,
            Request::new(
                Bytes::Own(own),
                Caller::Thread(std::thread::current(), None),
            ),
            node,
            run,
        );
        let mut bytes = match data {
            Data::Write(bytes) => Some((tag, bytes)),
            _ => None,
        };
        core.perform(&mut bytes);
        // There is no room in the pool. Another thread copies the bytes when there is.
        if let Some((_, bytes)) = bytes
            && core.initiator.is_waiting(tag)
            && let Some(request) = core.requests.get_mut(&tag)
        {
            request.bytes = Bytes::Own(bytes.to_vec());
        }
        self.leave(core);
        tag
    }

    /// Begins operations on the memory of transfers, each from an offset in it, and sends their frames from this thread.
    pub fn begin(&self, transfers: Vec<(Arc<[Segment]>, Parts)>) {
        let node = self.node();
        let mut core = self.lock();
        let mut runs = core.reserve(&transfers, node);
        if !runs.is_empty() {
            // Other threads use the protocol while this one copies.
            drop(core);
            let mut next = runs.iter();
            for (memory, parts) in &transfers {
                for ((operation, at, _), run) in parts.iter().zip(&mut next) {
                    let length = operation.length_bytes as usize;
                    gather_to(memory, *at, length, &self.pool, run.bytes().start);
                }
            }
            core = self.lock();
        }
        let mut runs = runs.drain(..);
        for (memory, parts) in transfers {
            for (operation, at, end) in parts {
                let bytes = Bytes::Shared(Arc::clone(&memory), at);
                let request = Request::new(bytes, Caller::Callback(end));
                core.begin(operation, request, node, runs.next());
            }
        }
        core.perform(&mut None);
        self.leave(core);
    }

    /// Sleeps until an operation has ended. Returns its result, with the bytes of a read.
    pub fn wait(&self, tag: u64) -> Result<Vec<u8>, i32> {
        loop {
            let mut core = self.lock();
            if let Some(Request {
                caller: Caller::Thread(_, Some(result)),
                ..
            }) = core.requests.get(&tag)
            {
                let result = *result;
                let data = match core.requests.remove(&tag).map(|request| request.bytes) {
                    Some(Bytes::Own(data)) => data,
                    _ => Vec::new(),
                };
                return result.map(|()| data);
            }
            drop(core);
            std::thread::park();
        }
    }

    /// Sleeps until `ready` returns a value, for at most a time. `ready` may look at `attached` and `ended`.
    pub fn wait_for<T>(&self, most: Duration, ready: impl Fn(&Core) -> Option<T>) -> Option<T> {
        let end = Instant::now() + most;
        loop {
            let mut core = self.lock();
            let value = ready(&core);
            let left = end.saturating_duration_since(Instant::now());
            if value.is_some() || left.is_zero() {
                return value;
            }
            core.waiting.push(std::thread::current());
            drop(core);
            std::thread::park_timeout(left);
        }
    }

    /// Takes what has arrived at a receiver, and does what is due. Returns whether more may have arrived.
    pub fn serve(&self, receiver: &mut Receiver) -> bool {
        // The kernel copies the frames without the lock.
        let has_more = receiver.receive();
        let mut core = self.lock();
        if let Some((number, copies)) = core.take(receiver) {
            // The read may be a repetition whose former bytes another thread still copies.
            core = await_turn(core, number, |core| &core.copies, || self.lock());
            // Other threads use the protocol while this one copies.
            drop(core);
            for copy in &copies {
                let payload = &receiver.frame(copy.frame)[HEADER_BYTES..][..copy.length];
                scatter(&copy.memory, copy.at, payload);
            }
            core = self.lock();
            core.copies.end(number);
            copies.iter().for_each(|copy| core.copied(copy.tag));
        }
        core.perform(&mut None);
        self.leave(core);
        has_more
    }

    /// Does what is due.
    pub fn poll(&self) {
        let mut core = self.lock();
        core.perform(&mut None);
        self.leave(core);
    }

    /// Returns what is known of the network.
    pub fn network(&self) -> NetworkStat {
        // Before the lock is acquired for this.
        let lock = self.core.status();
        let core = self.lock();
        let names = self.links.names();
        let nodes = self.links.nodes();
        let statuses = (0..).zip(core.initiator.channels());
        let channel = |(link, status): (usize, Option<ChannelStatus>)| {
            let nic = link % names.len();
            let known = status.as_ref();
            ChannelStat {
                nic: names[nic].clone(),
                node: nodes[nic],
                is_queueing: self.outboxes.is_queueing(nic),
                is_up: known.is_some_and(|one| one.is_up),
                round_trip_us: known.map_or(0, |one| one.round_trip.as_micros() as u64),
                window_frames: known.map_or(0, |one| one.window),
                sent_frames: known.map_or(0, |one| one.sent),
                lost_frames: known.map_or(0, |one| one.lost),
                local_bytes: known.map_or(0, |one| one.local_bytes),
                remote_bytes: known.map_or(0, |one| one.remote_bytes),
            }
        };
        let (is_spread, schedule_changes) = core.initiator.schedule();
        NetworkStat {
            device: core.name.to_string(),
            security: core
                .attached
                .map_or(String::new(), |a| a.security.to_string()),
            is_spread,
            schedule_changes,
            channels: statuses.map(channel).collect(),
            locks: std::iter::once(lock.named("protocol"))
                .chain(self.outboxes.locks())
                .collect(),
        }
    }

    /// Ends the session in order.
    pub fn detach(&self) {
        let mut core = self.lock();
        core.is_leaving = true;
        let now = core.clock.now();
        core.initiator.detach(now);
        core.perform(&mut None);
        self.leave(core);
    }

    /// Unlocks the core after its outputs were performed, and does what must not be done before.
    fn leave(&self, mut core: TimedGuard<'_, Core>) {
        self.is_silent.store(core.is_silent, Ordering::Relaxed);
        let (now, due) = (core.clock.now(), core.initiator.timer());
        alarm::set(&self.timer, &mut core.timer_at, now, due);
        let wakes = std::mem::take(&mut core.wakes);
        if !wakes.is_empty() {
            let now_ms = self.start.elapsed().as_millis() as u64;
            self.answered_ms.store(now_ms, Ordering::Relaxed);
        }
        drop(core);
        self.outboxes.send();
        for wake in wakes {
            match wake {
                Wake::Thread(thread) => thread.unpark(),
                Wake::End(end, result) => end(result),
            }
        }
    }
}

impl Core {
    /// Begins an operation of a thread on a node. `run`: the pages that have the bytes of a write already. Returns its tag.
    fn begin(
        &mut self,
        operation: Operation,
        request: Request,
        node: Option<u32>,
        run: Option<Run>,
    ) -> u64 {
        self.tags += 1;
        self.requests.insert(self.tags, request);
        let now = self.clock.now();
        self.initiator
            .submit_filled(now, self.tags, operation, node, run);
        self.tags
    }

    /// Returns pages for the bytes of the first writes of some transfers, if it is worth while to copy these without the lock.
    fn reserve(&mut self, transfers: &[(Arc<[Segment]>, Parts)], node: Option<u32>) -> Vec<Run> {
        let parts = || transfers.iter().flat_map(|(_, parts)| parts);
        let is_write = |operation: &Operation| matches!(operation.action, Action::Write { .. });
        let writes = || {
            let operations = parts().map(|(operation, ..)| *operation);
            operations.take_while(is_write)
        };
        let bytes: usize = writes().map(|one| one.length_bytes as usize).sum();
        if bytes <= COPIED_LOCKED {
            return Vec::new();
        }
        writes()
            .map_while(|operation| self.initiator.reserve(operation, node))
            .collect()
    }

    /// Takes the frames of a receiver. The caller performs the outputs that follow from the frames afterwards. Copies their payloads, or returns which are to be copied
    /// without the lock, with their number.
    fn take(&mut self, receiver: &mut Receiver) -> Option<(u64, Vec<Copy>)> {
        let (now, initiator) = (self.clock.now(), &mut self.initiator);
        let requests = &mut self.requests;
        let mut copies: Vec<Copy> = Vec::new();
        receiver.take(|frame_place, nic, frame| {
            if let Some((place, payload)) = initiator.on_frame(now, nic, frame)
                && let Some(request) = requests.get_mut(&place.tag)
            {
                let at = place.at_bytes as usize;
                match &mut request.bytes {
                    Bytes::Own(data) => data[at..at + payload.len()].copy_from_slice(payload),
                    Bytes::Shared(memory, start) => {
                        request.copying += 1;
                        copies.push(Copy {
                            tag: place.tag,
                            memory: Arc::clone(memory),
                            at: *start + at,
                            frame: frame_place,
                            length: payload.len(),
                        });
                    }
                }
            }
        });
        let bytes = |copy: &Copy| (copy.tag, copy.at..copy.at + copy.length);
        if let Some(number) = self.copies.begin(copies.iter().map(bytes).collect()) {
            return Some((number, copies));
        }
        for copy in copies {
            let payload = &receiver.frame(copy.frame)[HEADER_BYTES..][..copy.length];
            scatter(&copy.memory, copy.at, payload);
            self.copied(copy.tag);
        }
        None
    }

    /// Notes that a payload was copied.
    fn copied(&mut self, tag: u64) {
        let Some(request) = self.requests.get_mut(&tag) else {
            return;
        };
        request.copying -= 1;
        if request.copying == 0
            && let Some(result) = request.ended.take()
        {
            self.done(tag, result);
        }
    }

    /// Ends a request, or lets the last thread do so that copies its bytes.
    fn done(&mut self, tag: u64, result: Result<(), i32>) {
        let Some(request) = self.requests.get_mut(&tag) else {
            return;
        };
        if request.copying > 0 {
            request.ended = Some(result);
            return;
        }
        match &mut request.caller {
            Caller::Thread(thread, ended) => {
                *ended = Some(result);
                let thread = thread.clone();
                self.wakes.push(Wake::Thread(thread));
            }
            Caller::Callback(_) => {
                let request = self.requests.remove(&tag);
                if let Some(Caller::Callback(end)) = request.map(|r| r.caller) {
                    self.wakes.push(Wake::End(end, result));
                }
            }
        }
    }

    /// Has the protocol do what is due, and performs its outputs. `bytes`: the write that this thread submits; taken if it was copied.
    fn perform(&mut self, bytes: &mut Option<(u64, &[u8])>) {
        self.initiator.poll(self.clock.now());
        while let Some(output) = self.initiator.next_output() {
            match output {
                InitiatorOutput::Send(frame) => {
                    let has_pool = matches!(frame.body, Body::Pool { .. });
                    let pool = has_pool.then(|| Arc::clone(&self.pool));
                    self.outboxes.add(frame, pool);
                }
                InitiatorOutput::Fill { tag, run } => {
                    let to = run.bytes();
                    match bytes.take_if(|(own, _)| *own == tag) {
                        Some((_, bytes)) => self.pool.copy_in(to.start, bytes),
                        None => {
                            let request = self.requests.get_mut(&tag);
                            match request.map(|request| &mut request.bytes) {
                                Some(Bytes::Own(data)) => {
                                    self.pool.copy_in(to.start, data);
                                    *data = Vec::new();
                                }
                                Some(Bytes::Shared(memory, start)) => {
                                    gather_to(memory, *start, to.len(), &self.pool, to.start);
                                }
                                None => {}
                            }
                        }
                    }
                }
                InitiatorOutput::Done { tag, result } => self.done(tag, result),
                InitiatorOutput::Attached(attached) => {
                    self.attached = Some(attached);
                    self.wake();
                }
                InitiatorOutput::Replay { changes } => {
                    tracing::warn!(
                        changes,
                        "{} may have lost changes; they are sent again",
                        self.name
                    );
                    self.replayed += changes;
                }
                InitiatorOutput::Reachable(true) => {
                    self.is_silent = false;
                    tracing::info!("{} answers", self.name);
                }
                InitiatorOutput::Reachable(false) if self.is_leaving => {}
                InitiatorOutput::Reachable(false) => {
                    self.is_silent = true;
                    tracing::warn!("{} does not answer; requests wait for it", self.name);
                }
                InitiatorOutput::Hint(why) => {
                    tracing::warn!("{}: a message that may be forged says: {why}", self.name);
                }
                InitiatorOutput::Ended(why) => {
                    if why != Ended::Detached {
                        tracing::error!("{}: {why}", self.name);
                    }
                    self.ended = Some(why);
                    // Nothing waits for the target any more.
                    self.is_silent = false;
                    self.wake();
                }
            }
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(|thread| thread.unpark());
    }
}
