//! Signals that end requests which wait for a silent host.
//!
//! The kernel reports a signal for the program of a request (FUSE_INTERRUPT), and lets the program go only when the request has an answer. A request that
//! waits for a host may wait for minutes. So its reply is *held* here, and the operation has only a [`HeldReply`]. The operation
//! takes the reply from there to answer, or this file takes it to answer EINTR, but only while a host is silent and
//! [`Interruption`] permits it. The operation then goes on in the background: it changes nothing more, and its answer is dropped.
//!
//! Invariants:
//! - One of the two answers, under the lock of the reply.
//! - While `most` operations go on in the background, a signal ends no request that began while `most` went on. Each operation may keep a thread
//!   (`crew`). So a program that repeats its call after each signal gets no further threads. Requests that waited at one time may all be ended:
//!   they have their threads already.
//! - Volumes without a device on another host hold no replies. A read that hits holds none either.
//! - A request is ended only after `AGE_MIN`: a request that does not wait for the silent host has its own answer by then.
//!
//! The report of a signal may be read before the request is held, in another thread. So `early` keeps the numbers of the last reports that
//! found no request. A number is never used again, so a stale one does no harm.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_daemon::Interruption;
use jericho_sys::{affinity, service};
use parking_lot::{Condvar, Mutex};

/// A request that has waited for less is not ended.
const AGE_MIN: Duration = Duration::from_millis(200);
/// The same, if the program goes on after the signal. The request may wait for another device than the silent one, and then the program does not expect EINTR.
const AGE_MIN_ALIVE: Duration = Duration::from_secs(1);
/// Time between two attempts to end the requests for which a signal has come.
const PERIOD: Duration = Duration::from_millis(50);
/// The thread waits for this long for a further request before it ends.
const LINGER: Duration = Duration::from_secs(1);
/// Parts of the table, so that threads rarely meet.
const SHARDS: usize = 64;
/// Reports without a request that a part keeps.
const EARLY_MAX: usize = 64;
/// The bit of SIGKILL in the masks of /proc/PID/status. The kernel sets it for each fatal signal without a core dump.
const KILL_BIT: u64 = 1 << (libc::SIGKILL - 1);

/// The obligation to answer a request.
pub(crate) trait Answer: Send + 'static {
    /// Answers with EINTR.
    fn interrupted(self);
    /// Answers with the number of bytes that a write has written.
    fn wrote(self, bytes: u32);
}

type Shared<R> = Arc<Interrupts<R>>;
/// Returns whether a host of the volume is silent.
type IsSilent = Box<dyn Fn() -> bool + Send + Sync>;

/// The requests of a mount whose replies are held.
pub(crate) struct Interrupts<R> {
    is_silent: IsSilent,
    shards: [Mutex<Shard<R>>; SHARDS],
    /// Requests for which a signal has come, and those that end with their programs.
    pending: Mutex<Pending<R>>,
    changed: Condvar,
    /// Operations that go on in the background.
    background: AtomicUsize,
    most: usize,
}

struct Shard<R> {
    held: HashMap<u64, Arc<Held<R>>>,
    early: VecDeque<u64>,
}

struct Pending<R> {
    requests: Vec<Arc<Held<R>>>,
    /// The thread `interrupts` runs. It ends when no request is left.
    is_running: bool,
}

/// How a request is answered when a signal ends it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With EINTR; a write that has written bytes, with their number.
    Answer,
    /// The rest of a write of which this number of bytes was written before.
    RestOfWrite(usize),
    /// With EINTR, but only if the program ends: otherwise a page fault would give it SIGBUS. A program that is ended does not wait for the
    /// answer, but another one that opens the file does.
    IfDying,
}

struct Held<R> {
    unique: u64,
    thread: u32,
    ending: Ending,
    since: Instant,
    /// Operations that went on in the background when the request came.
    background_before: usize,
    /// The kernel has reported a signal.
    has_signal: AtomicBool,
    /// Is among `Pending::requests`.
    is_pending: AtomicBool,
    interruption: Arc<Interruption>,
    reply: Mutex<Owner<R>>,
}

enum Owner<R> {
    /// The request has no answer yet.
    Held {
        reply: R,
        /// No thread serves the request yet.
        is_parked: bool,
    },
    /// The operation has taken the reply.
    Operation,
    /// A signal has ended the request.
    Signal {
        /// The operation goes on in the background.
        goes_on: bool,
    },
}

/// A thread's own reference to the table. Each held reply counts a reference, and so writes to memory. Threads that share one reference would
/// write to one cache line at every read.
pub(crate) struct OwnInterrupts<R>(Arc<Shared<R>>);

/// What holds the reply to one request.
pub(crate) struct Ticket<R> {
    interrupts: Arc<Shared<R>>,
    unique: u64,
    thread: u32,
}

/// The obligation to answer a request whose reply is held. When it is dropped, so is the reply.
pub(crate) struct HeldReply<R> {
    held: Arc<Held<R>>,
    interrupts: Arc<Shared<R>>,
}

impl<R> Clone for OwnInterrupts<R> {
    fn clone(&self) -> OwnInterrupts<R> {
        OwnInterrupts(Arc::new((*self.0).clone()))
    }
}

impl<R: Answer> OwnInterrupts<R> {
    /// Makes a table. `most`: how many operations may go on in the background.
    pub(crate) fn new(is_silent: IsSilent, most: usize) -> OwnInterrupts<R> {
        OwnInterrupts(Arc::new(Arc::new(Interrupts {
            is_silent,
            shards: std::array::from_fn(|_| {
                Mutex::new(Shard {
                    held: HashMap::new(),
                    early: VecDeque::new(),
                })
            }),
            pending: Mutex::new(Pending {
                requests: Vec::new(),
                is_running: false,
            }),
            changed: Condvar::new(),
            background: AtomicUsize::new(0),
            most,
        })))
    }

    pub(crate) fn ticket(&self, unique: u64, thread: u32) -> Ticket<R> {
        Ticket {
            interrupts: self.0.clone(),
            unique,
            thread,
        }
    }

    /// Takes the kernel's report that a signal has come for the program of a request.
    pub(crate) fn came(&self, unique: u64) {
        let held = {
            let mut shard = self.0.shard(unique).lock();
            let held = shard.held.get(&unique).cloned();
            if held.is_none() {
                if shard.early.len() == EARLY_MAX {
                    shard.early.pop_front();
                }
                shard.early.push_back(unique);
            }
            held
        };
        if let Some(held) = held {
            held.has_signal.store(true, Ordering::Relaxed);
            self.0.pend(held);
        }
    }

    /// Ends requests of programs that end, although no report of their signals was read.
    pub(crate) fn look_for_dying(&self) {
        for shard in &self.0.shards {
            let all: Vec<_> = shard.lock().held.values().cloned().collect();
            all.into_iter().for_each(|held| self.0.pend(held));
        }
    }
}

impl<R: Answer> Ticket<R> {
    /// Holds the reply of a request that a thread serves.
    pub(crate) fn hold(self, reply: R, ending: Ending) -> HeldReply<R> {
        self.hold_for(reply, ending, false)
    }

    /// Holds the reply of a request that no thread serves yet.
    pub(crate) fn park(self, reply: R, ending: Ending) -> HeldReply<R> {
        self.hold_for(reply, ending, true)
    }

    fn hold_for(self, reply: R, ending: Ending, is_parked: bool) -> HeldReply<R> {
        let held = Arc::new(Held {
            unique: self.unique,
            thread: self.thread,
            ending,
            since: Instant::now(),
            background_before: self.interrupts.background.load(Ordering::Relaxed),
            has_signal: AtomicBool::new(false),
            is_pending: AtomicBool::new(false),
            interruption: Arc::default(),
            reply: Mutex::new(Owner::Held { reply, is_parked }),
        });
        let is_early = {
            let mut shard = self.interrupts.shard(self.unique).lock();
            shard.held.insert(self.unique, held.clone());
            let at = shard.early.iter().position(|early| *early == self.unique);
            at.and_then(|at| shard.early.remove(at)).is_some()
        };
        // The kernel reports no signal for a read that it makes ahead of a page fault.
        held.has_signal.fetch_or(is_early, Ordering::Relaxed);
        if is_early || ending == Ending::IfDying {
            self.interrupts.pend(held.clone());
        }
        HeldReply {
            held,
            interrupts: self.interrupts,
        }
    }
}

impl<R> HeldReply<R> {
    pub(crate) fn interruption(&self) -> Arc<Interruption> {
        self.held.interruption.clone()
    }

    /// Returns the reply, or `None` if a signal has ended the request.
    pub(crate) fn take(&self) -> Option<R> {
        let mut owner = self.held.reply.lock();
        match std::mem::replace(&mut *owner, Owner::Operation) {
            Owner::Held { reply, .. } => Some(reply),
            // `drop` still has to know.
            Owner::Signal { goes_on } => {
                *owner = Owner::Signal { goes_on };
                None
            }
            Owner::Operation => None,
        }
    }

    /// Notes that a thread serves the request, which was parked. Returns false if a signal has ended it.
    pub(crate) fn begin(&self) -> bool {
        match &mut *self.held.reply.lock() {
            Owner::Held { is_parked, .. } => {
                *is_parked = false;
                true
            }
            Owner::Operation | Owner::Signal { .. } => false,
        }
    }

    /// Returns whether the request has its answer.
    pub(crate) fn has_ended(&self) -> bool {
        !self.held.is_waiting()
    }
}

impl<R> Drop for HeldReply<R> {
    fn drop(&mut self) {
        let (interrupts, unique) = (&self.interrupts, self.held.unique);
        interrupts.shard(unique).lock().held.remove(&unique);
        let owner = std::mem::replace(&mut *self.held.reply.lock(), Owner::Operation);
        if matches!(owner, Owner::Signal { goes_on: true }) {
            interrupts.background.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<R> Interrupts<R> {
    fn shard(&self, unique: u64) -> &Mutex<Shard<R>> {
        // The kernel counts in steps of two, and in steps of its CPUs.
        let hash = unique.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        &self.shards[hash as usize % SHARDS]
    }
}

impl<R: Answer> Interrupts<R> {
    /// Lets the thread `interrupts` end a request when that is permitted.
    fn pend(self: &Arc<Interrupts<R>>, held: Arc<Held<R>>) {
        if held.is_pending.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut pending = self.pending.lock();
        pending.requests.push(held);
        if pending.is_running {
            // Ends a wait without requests only: others see the request after `PERIOD`.
            if pending.requests.len() == 1 {
                self.changed.notify_one();
            }
        } else {
            let own = self.clone();
            match service::spawn("interrupts", move || own.end_requests()) {
                Ok(_) => pending.is_running = true,
                // The requests end with the next report, or without one.
                Err(error) => {
                    tracing::warn!(%error, "cannot start a thread: signals do not end requests that wait for a host")
                }
            }
        }
    }

    /// Ends the requests for which signals have come, until none is left.
    fn end_requests(&self) {
        let mut pending = self.pending.lock();
        loop {
            pending.requests.retain(|held| held.is_waiting());
            if pending.requests.is_empty() {
                let waited = self.changed.wait_for(&mut pending, LINGER);
                if waited.timed_out() && pending.requests.is_empty() {
                    pending.is_running = false;
                    return;
                }
                continue;
            }
            let requests = pending.requests.clone();
            drop(pending);
            let begun = Instant::now();
            self.end_those_that_may_end(&requests);
            // With very many requests, most of the time belongs to other threads.
            let period = PERIOD.max(4 * begun.elapsed());
            pending = self.pending.lock();
            // A notification only shortens the period.
            self.changed.wait_for(&mut pending, period);
        }
    }

    fn end_those_that_may_end(&self, requests: &[Arc<Held<R>>]) {
        let old = || {
            requests
                .iter()
                .filter(|held| held.since.elapsed() >= AGE_MIN)
        };
        if old().next().is_none() {
            return;
        }
        if (self.is_silent)() {
            old().for_each(|held| self.end(held));
        }
    }

    /// Ends a request, if that is permitted.
    fn end(&self, held: &Held<R>) {
        let is_for_the_living =
            held.has_signal.load(Ordering::Relaxed) && held.ending != Ending::IfDying;
        let may_go_on = is_for_the_living && held.since.elapsed() >= AGE_MIN_ALIVE;
        if !may_go_on && !is_dying(held.thread) {
            return;
        }
        let in_background = self.background.load(Ordering::Relaxed);
        if held.background_before.min(in_background) >= self.most {
            return;
        }
        let mut owner = held.reply.lock();
        let Owner::Held { is_parked, .. } = *owner else {
            return;
        };
        // Under the lock: an operation that has taken its reply is not interrupted.
        let Some(bytes) = held.interruption.interrupt() else {
            return;
        };
        let goes_on = !is_parked;
        self.background
            .fetch_add(usize::from(goes_on), Ordering::Relaxed);
        let Owner::Held { reply, .. } = std::mem::replace(&mut *owner, Owner::Signal { goes_on })
        else {
            return;
        };
        drop(owner);
        let before = match held.ending {
            Ending::RestOfWrite(before) => before,
            Ending::Answer | Ending::IfDying => 0,
        };
        match before + bytes {
            0 => reply.interrupted(),
            written => reply.wrote(written as u32),
        }
    }
}

impl<R> Held<R> {
    fn is_waiting(&self) -> bool {
        matches!(*self.reply.lock(), Owner::Held { .. })
    }
}

/// Returns whether a thread has ended or has a fatal signal. Returns false for a thread that this process cannot see.
fn is_dying(thread: u32) -> bool {
    if thread == 0 {
        return false;
    }
    match std::fs::read_to_string(format!("/proc/{thread}/status")) {
        Ok(status) => has_fatal_signal(&status),
        // /proc may hide the threads of other users.
        Err(error) => {
            matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
                && affinity::has_ended(thread)
        }
    }
}

fn has_fatal_signal(status: &str) -> bool {
    let masks = ["SigPnd:", "ShdPnd:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
    });
    masks.into_iter().flatten().any(|mask| mask & KILL_BIT != 0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// How a request was answered: with the bytes of a write, or with EINTR.
    struct Recorded(Sender<Option<u32>>);

    impl Answer for Recorded {
        fn interrupted(self) {
            self.0.send(None).unwrap();
        }
        fn wrote(self, bytes: u32) {
            self.0.send(Some(bytes)).unwrap();
        }
    }

    /// A table whose host is silent or not, with at most two operations in the background.
    fn table(is_silent: &Arc<AtomicBool>) -> OwnInterrupts<Recorded> {
        let is_silent = is_silent.clone();
        OwnInterrupts::new(Box::new(move || is_silent.load(Ordering::Relaxed)), 2)
    }

    fn hold(
        table: &OwnInterrupts<Recorded>,
        unique: u64,
        ending: Ending,
    ) -> (HeldReply<Recorded>, Receiver<Option<u32>>) {
        let (answer, answered) = channel();
        let held = table.ticket(unique, 0).hold(Recorded(answer), ending);
        (held, answered)
    }

    const LONG: Duration = Duration::from_secs(60);
    /// Longer than a request waits for its end.
    const MORE: Duration = Duration::from_millis(1500);

    #[test]
    fn a_signal_ends_a_request_while_a_host_is_silent_also_if_it_came_before() {
        let is_silent = Arc::new(AtomicBool::new(false));
        let table = table(&is_silent);
        table.came(4);
        let (early, early_answered) = hold(&table, 4, Ending::Answer);
        let (late, late_answered) = hold(&table, 6, Ending::RestOfWrite(3));
        late.interruption().begin().unwrap();
        late.interruption().wait_again(7);
        table.came(6);
        assert!(
            early_answered.recv_timeout(MORE).is_err(),
            "the host is not silent"
        );
        is_silent.store(true, Ordering::Relaxed);
        assert_eq!(early_answered.recv_timeout(LONG), Ok(None));
        assert_eq!(late_answered.recv_timeout(LONG), Ok(Some(10)));
        assert!(early.take().is_none() && late.take().is_none());
        assert!(late.interruption().begin().is_err());
    }

    #[test]
    fn a_request_that_has_its_answer_or_changes_something_is_not_ended() {
        let table = table(&Arc::new(AtomicBool::new(true)));
        let (answered, none) = hold(&table, 2, Ending::Answer);
        let (changing, nothing) = hold(&table, 4, Ending::Answer);
        changing.interruption().begin().unwrap();
        drop(answered.take());
        table.came(2);
        table.came(4);
        assert!(none.recv_timeout(MORE).is_err() && nothing.recv_timeout(MORE).is_err());
        assert!(changing.take().is_some());
    }

    #[test]
    fn calls_that_are_repeated_after_signals_get_few_threads() {
        let table = table(&Arc::new(AtomicBool::new(true)));
        let end = |(held, answered): &(HeldReply<Recorded>, Receiver<_>)| {
            table.came(held.held.unique);
            assert_eq!(answered.recv_timeout(LONG), Ok(None));
        };
        // These wait at one time.
        let mut requests: Vec<_> = (0..5)
            .map(|n| hold(&table, 2 * n, Ending::Answer))
            .collect();
        requests.iter().for_each(end);
        let (late, answered) = hold(&table, 20, Ending::Answer);
        table.came(20);
        assert!(answered.recv_timeout(MORE).is_err(), "five go on");
        requests.truncate(1);
        assert_eq!(answered.recv_timeout(LONG), Ok(None));
        drop(late);
    }

    #[test]
    fn a_request_that_no_thread_serves_goes_on_nowhere() {
        let table = table(&Arc::new(AtomicBool::new(true)));
        let parked: Vec<_> = (0..5)
            .map(|n| {
                let (sender, answered) = channel();
                let ticket = table.ticket(2 * n, std::process::id());
                (ticket.park(Recorded(sender), Ending::Answer), answered)
            })
            .collect();
        let (begun, not_yet) = &parked[0];
        assert!(begun.begin());
        for (n, (held, answered)) in parked.iter().enumerate() {
            table.came(2 * n as u64);
            assert_eq!(answered.recv_timeout(LONG), Ok(None));
            assert!(held.has_ended() && !held.begin());
        }
        assert!(not_yet.recv_timeout(Duration::ZERO).is_err());
        let background = || table.0.background.load(Ordering::Relaxed);
        assert_eq!(background(), 1);
        drop(parked);
        assert_eq!(background(), 0);
    }

    #[test]
    fn a_program_that_ends_needs_no_report_of_its_signal() {
        let table = table(&Arc::new(AtomicBool::new(true)));
        let hold = |unique, thread| {
            let (sender, answered) = channel();
            let ticket = table.ticket(unique, thread);
            (ticket.hold(Recorded(sender), Ending::Answer), answered)
        };
        let (_living, living_answered) = hold(2, std::process::id());
        let (_dead, dead_answered) = hold(4, u32::MAX / 2);
        table.look_for_dying();
        assert_eq!(dead_answered.recv_timeout(LONG), Ok(None));
        assert!(living_answered.recv_timeout(MORE).is_err());
        // The report that comes later counts.
        table.came(2);
        assert_eq!(living_answered.recv_timeout(LONG), Ok(None));
    }

    #[test]
    fn a_thread_with_a_pending_kill_is_dying() {
        let status = |own, shared| format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t{shared}\n");
        assert!(has_fatal_signal(&status(
            "0000000000000100",
            "0000000000000000"
        )));
        assert!(has_fatal_signal(&status(
            "0000000000000000",
            "0000000000000102"
        )));
        assert!(!has_fatal_signal(&status(
            "0000000000000002",
            "0000000000004000"
        )));
        assert!(!has_fatal_signal("SigPnd:\tx"));
        assert!(!is_dying(std::process::id()) && !is_dying(0));
        assert!(is_dying(u32::MAX / 2));
    }
}
