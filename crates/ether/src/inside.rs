//! What the threads of an initiator share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::Thread;
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_remote::{Attached, Ended, Initiator, InitiatorOutput, Operation};
use jericho_sys::service;
use jericho_sys::timer::Timer;

use crate::links::Links;

/// A request of a caller.
struct Request {
    /// Bytes of a write that are not in the pool yet; where the bytes of a read go.
    data: Vec<u8>,
    /// The caller, who sleeps until the result is there.
    caller: Thread,
    result: Option<Result<(), i32>>,
}

/// The protocol, its sockets and its memory.
pub(crate) struct Core {
    initiator: Initiator,
    links: Links,
    pool: Vec<u8>,
    requests: HashMap<u64, Request>,
    tags: u64,
    /// When the receiver's timer ends.
    timer_at: Option<Duration>,
    pub attached: Option<Attached>,
    pub ended: Option<Ended>,
    pub replayed: u64,
    /// Threads that wait for `attached` or `ended`.
    waiting: Vec<Thread>,
}

/// The core, and what wakes the receiver.
pub(crate) struct Inside {
    core: Mutex<Core>,
    timer: Timer,
}

/// The bytes of a request.
pub(crate) enum Data<'d> {
    None,
    Write(&'d [u8]),
    Read(usize),
}

impl Inside {
    pub fn new(initiator: Initiator, links: Links, pool_pages: u32, timer: Timer) -> Arc<Inside> {
        Arc::new(Inside {
            core: Mutex::new(Core {
                initiator,
                links,
                pool: vec![0; pool_pages as usize * PAGE_BYTES as usize],
                requests: HashMap::new(),
                tags: 0,
                timer_at: None,
                attached: None,
                ended: None,
                replayed: 0,
                waiting: Vec::new(),
            }),
            timer,
        })
    }

    /// Returns the core. Ends the process if a thread has panicked with it: nothing is known about its requests then.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        let panicked = |_| service::run(|| panic!("another thread panicked in the protocol"));
        self.core.lock().unwrap_or_else(panicked)
    }

    /// Returns the timer, which the receiver watches.
    pub fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Begins an operation, and sends its frames from this thread. Returns its tag.
    pub fn submit(&self, operation: Operation, data: Data<'_>) -> u64 {
        let mut core = self.lock();
        core.tags += 1;
        let tag = core.tags;
        let own = match data {
            Data::Read(length) => vec![0; length],
            _ => Vec::new(),
        };
        core.requests.insert(
            tag,
            Request {
                data: own,
                caller: std::thread::current(),
                result: None,
            },
        );
        let now = core.links.now();
        core.initiator.submit(now, tag, operation);
        let mut bytes = match data {
            Data::Write(bytes) => Some((tag, bytes)),
            _ => None,
        };
        core.initiator.poll(now);
        core.perform(&mut bytes);
        // There was no room in the pool. Another thread copies the bytes when there is.
        if let Some((_, bytes)) = bytes
            && let Some(request) = core.requests.get_mut(&tag)
        {
            request.data = bytes.to_vec();
        }
        self.set_timer(&mut core);
        tag
    }

    /// Sleeps until an operation has ended. Returns its result, with the bytes of a read.
    pub fn wait(&self, tag: u64) -> Result<Vec<u8>, i32> {
        loop {
            let mut core = self.lock();
            let result = core.requests.get(&tag).and_then(|request| request.result);
            if let Some(result) = result {
                let request = core.requests.remove(&tag);
                let data = request.map_or_else(Vec::new, |request| request.data);
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

    /// Takes what has arrived, and does what is due. Returns whether more may have arrived.
    pub fn serve(&self) -> bool {
        let mut core = self.lock();
        let has_more = core.receive();
        let now = core.links.now();
        core.initiator.poll(now);
        core.perform(&mut None);
        self.set_timer(&mut core);
        has_more
    }

    /// Ends the session in order.
    pub fn detach(&self) {
        let mut core = self.lock();
        let now = core.links.now();
        core.initiator.detach(now);
        core.initiator.poll(now);
        core.perform(&mut None);
        self.set_timer(&mut core);
    }

    /// Sets the timer if the protocol has something to do before it ends. A timer that is too early costs one wake-up. Setting it again would cost a
    /// system call for each request.
    fn set_timer(&self, core: &mut Core) {
        let now = core.links.now();
        let is_set = core.timer_at.filter(|&at| at > now);
        if let Some(due) = core.initiator.timer()
            && is_set.is_none_or(|at| due < at)
        {
            core.timer_at = Some(due);
            if let Err(error) = self.timer.set(due.saturating_sub(now)) {
                tracing::error!(%error, "cannot set a timer");
            }
        }
    }
}

impl Core {
    /// Takes frames. Each one's payload is copied before what follows from it is performed.
    fn receive(&mut self) -> bool {
        let (now, initiator) = (self.links.now(), &mut self.initiator);
        let requests = &mut self.requests;
        self.links.receive(|link, frame| {
            if let Some((place, payload)) = initiator.on_frame(now, link, frame)
                && let Some(request) = requests.get_mut(&place.tag)
            {
                let at = place.at_bytes as usize;
                request.data[at..at + payload.len()].copy_from_slice(payload);
            }
        })
    }

    /// Performs the outputs of the protocol. `bytes`: the write that this thread submits; taken if it was copied.
    fn perform(&mut self, bytes: &mut Option<(u64, &[u8])>) {
        while let Some(output) = self.initiator.next_output() {
            match output {
                InitiatorOutput::Send(frame) => self.links.send(&frame, &self.pool),
                InitiatorOutput::Fill { tag, run } => {
                    let to = &mut self.pool[run.bytes()];
                    match bytes.take_if(|(own, _)| *own == tag) {
                        Some((_, bytes)) => to.copy_from_slice(bytes),
                        None => {
                            if let Some(request) = self.requests.get_mut(&tag) {
                                to.copy_from_slice(&request.data);
                                request.data = Vec::new();
                            }
                        }
                    }
                }
                InitiatorOutput::Done { tag, result } => {
                    if let Some(request) = self.requests.get_mut(&tag) {
                        request.result = Some(result);
                        request.caller.unpark();
                    }
                }
                InitiatorOutput::Attached(attached) => {
                    self.attached = Some(attached);
                    self.wake();
                }
                InitiatorOutput::Replay { changes } => {
                    tracing::warn!(
                        changes,
                        "the target may have lost changes; they are sent again"
                    );
                    self.replayed += changes;
                }
                InitiatorOutput::Reachable(true) => tracing::info!("the target answers"),
                InitiatorOutput::Reachable(false) => tracing::warn!("the target does not answer"),
                InitiatorOutput::Ended(why) => {
                    if why != Ended::Detached {
                        tracing::error!("the remote device has ended: {why}");
                    }
                    self.ended = Some(why);
                    self.wake();
                }
            }
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(|thread| thread.unpark());
    }
}
