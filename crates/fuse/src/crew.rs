//! A crew: the threads that serve requests which may wait, and further ones while requests hang.
//!
//! A request that waits for a device holds its thread. If a device does not answer, requests for it would sooner or later hold all threads of
//! a fixed number, and no request for the other devices would be served. So each thread notes in its request cell which request it serves. A
//! supervisor polls the cells every `PERIOD` while some thread serves a request. A thread that serves the same request at two polls in succession
//! is *stuck*. The supervisor starts further threads until as many as the regular number are not stuck. If more than the regular number are not
//! stuck for a second, the further threads end, each after its next request. So only requests that take longer than `PERIOD` ever start a thread.
//!
//! Threads that other rules start, at each request that finds no idle thread, come and go under ordinary load, and spread the memory of
//! the daemon over the heaps of very many threads.
//!
//! A request allocates nothing here and writes no memory that another thread writes, except the first request after an idle time, which wakes
//! the supervisor.

mod roster;

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_sys::service as threads;
use parking_lot::{Condvar, Mutex};

use crate::workers::WorkerNodes;
use roster::{RequestCell, Roster};

/// The most threads of a crew. Requests for a device that does not answer can hold this many.
pub(crate) const THREADS_MAX: usize = 512;
/// Time from one poll of the supervisor to the next one. Longer than nearly all requests for a device that answers.
const PERIOD: Duration = Duration::from_millis(100);

/// The body of a thread: it serves requests by `Place::serve`, and returns when no more will come, or when `Place::is_surplus` says so.
pub(crate) type Body = Box<dyn FnOnce(&Place) -> io::Result<()> + Send>;
/// Prepares the thread with a number, and returns its body.
pub(crate) type Prepare = Box<dyn Fn(usize) -> io::Result<Body> + Send + Sync>;

/// Does what must go on while all threads of a crew are stuck, and no further one can be started.
///
/// A thread notes in its cell that it serves no request, and then looks whether this is armed. The supervisor arms, and then looks at the cells. All four
/// accesses are `SeqCst`. So if the supervisor finds no idle thread, each thread sees that this is armed before it takes its next request.
pub(crate) trait Relief: Send + Sync {
    /// Returns whether anything must go on.
    fn is_wanted(&self) -> bool;
    /// Tells the threads. Returns false if they know it already.
    fn arm(&self) -> bool;
    /// Goes on: each thread served a request when it was armed.
    fn confirm(&self);
    /// Tells the threads that nothing is needed.
    fn cancel(&self);
}

/// Threads, and their supervisor.
pub(crate) struct Crew {
    /// Threads have this name and the number of their cell.
    name: &'static str,
    nodes: Arc<WorkerNodes>,
    prepare: Prepare,
    relief: Option<Box<dyn Relief>>,
    hints: Hints,
    state: Mutex<State>,
    /// Notified when the crew ends, and to wake the supervisor.
    changed: Condvar,
}

/// What each request reads. In cache lines of its own, because it changes rarely.
#[repr(align(128))]
struct Hints {
    /// The supervisor sleeps, or is about to: a thread that begins a request wakes it.
    is_asleep: AtomicBool,
    /// A copy of `Roster::surplus`.
    surplus: AtomicUsize,
    /// The number of regular threads at the start.
    regular: usize,
}

struct State {
    roster: Roster,
    /// A thread has found that no more requests will come, or all have failed.
    has_ended: bool,
    /// The last attempt to start a thread failed, which was logged.
    start_failed: bool,
    threads: Vec<JoinHandle<()>>,
    supervisor: Option<JoinHandle<()>>,
    result: io::Result<()>,
}

/// A thread's place in its crew.
pub(crate) struct Place {
    crew: Arc<Crew>,
    number: usize,
    cell: Arc<RequestCell>,
    /// Number of requests so far.
    requests: Cell<u64>,
    is_released: Cell<bool>,
}

impl Place {
    /// Serves a request: calls `request`.
    #[inline]
    pub(crate) fn serve<T>(&self, request: impl FnOnce() -> T) -> T {
        self.requests.set(self.requests.get() + 1);
        self.cell.begin(self.requests.get());
        if self.crew.hints.is_asleep.load(Ordering::SeqCst) {
            self.crew.wake_supervisor();
        }
        let result = request();
        self.cell.end();
        result
    }

    /// Returns whether the calling thread, which has served a request, has to return because there are too many threads.
    #[inline]
    pub(crate) fn is_surplus(&self) -> bool {
        let hints = &self.crew.hints;
        self.number >= hints.regular && hints.surplus.load(Ordering::Relaxed) > 0 && self.release()
    }

    #[cold]
    fn release(&self) -> bool {
        let mut state = self.crew.state.lock();
        let is_released = state.roster.release(self.number);
        self.is_released.set(is_released);
        self.crew.publish_surplus(&state);
        is_released
    }
}

impl Crew {
    /// Starts `regular` threads and their supervisor. `most`: the limit of all threads. `relief`: used when all of these are stuck. Fails when `prepare` fails or a thread cannot be started;
    /// the threads that have started must then be ended as at any other time.
    pub(crate) fn start(
        name: &'static str,
        regular: usize,
        most: usize,
        nodes: &Arc<WorkerNodes>,
        prepare: Prepare,
        relief: Option<Box<dyn Relief>>,
    ) -> io::Result<Arc<Crew>> {
        let crew = Crew::without_supervisor(name, regular, most, nodes, prepare, relief)?;
        let own = crew.clone();
        let supervisor = threads::spawn("supervisor", move || own.supervise())?;
        crew.state.lock().supervisor = Some(supervisor);
        Ok(crew)
    }

    fn without_supervisor(
        name: &'static str,
        regular: usize,
        most: usize,
        nodes: &Arc<WorkerNodes>,
        prepare: Prepare,
        relief: Option<Box<dyn Relief>>,
    ) -> io::Result<Arc<Crew>> {
        let crew = Arc::new(Crew {
            name,
            nodes: nodes.clone(),
            prepare,
            relief,
            hints: Hints {
                is_asleep: AtomicBool::new(false),
                surplus: AtomicUsize::new(0),
                regular,
            },
            state: Mutex::new(State {
                roster: Roster::new(regular, most),
                has_ended: false,
                start_failed: false,
                threads: Vec::new(),
                supervisor: None,
                result: Ok(()),
            }),
            changed: Condvar::new(),
        });
        for _ in 0..regular {
            crew.start_thread()?;
        }
        Ok(crew)
    }

    /// Starts a thread, unless the crew has ended or has as many threads as it may have.
    fn start_thread(self: &Arc<Crew>) -> io::Result<()> {
        let (number, cell) = {
            let mut state = self.state.lock();
            let joined = (!state.has_ended).then(|| state.roster.join());
            let Some(joined) = joined.flatten() else {
                return Ok(());
            };
            joined
        };
        let place = Place {
            crew: self.clone(),
            number,
            cell,
            requests: Cell::new(0),
            is_released: Cell::new(false),
        };
        let started = (self.prepare)(number).and_then(|body| {
            let name = format!("{}-{number}", self.name);
            let thread = std::thread::Builder::new().name(name);
            thread.spawn(move || {
                place.crew.nodes.bind_this_thread(number);
                // Drops what the body holds before it leaves.
                let result = threads::run(|| body(&place));
                place.crew.leave(&place, result);
            })
        });
        let mut state = self.state.lock();
        match started {
            Ok(thread) => state.threads.push(thread),
            Err(error) => {
                state.roster.leave(number);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Records that a thread ends.
    fn leave(&self, place: &Place, result: io::Result<()>) {
        if place.is_released.get() {
            return;
        }
        let mut state = self.state.lock();
        match result {
            Ok(()) => {
                state.roster.leave(place.number);
                state.has_ended = true;
            }
            Err(error) => {
                state.roster.fail(place.number);
                state.has_ended |= state.roster.regular() == 0;
                if state.result.is_ok() {
                    state.result = Err(error);
                }
            }
        }
        self.changed.notify_all();
    }

    /// Waits until all threads have ended, which they do when no more requests will come. Returns the first error of any of them.
    pub(crate) fn wait(&self) -> io::Result<()> {
        // The supervisor ends when the crew has ended, and no thread is started after that.
        let supervisor = self.state.lock().supervisor.take();
        let threads = supervisor
            .into_iter()
            .chain(std::iter::from_fn(|| self.state.lock().threads.pop()));
        for thread in threads {
            // A panic ends the process.
            let _ = thread.join();
        }
        std::mem::replace(&mut self.state.lock().result, Ok(()))
    }

    fn publish_surplus(&self, state: &State) {
        self.hints
            .surplus
            .store(state.roster.surplus(), Ordering::Relaxed);
    }
}

/// The supervisor.
impl Crew {
    fn supervise(self: &Arc<Crew>) {
        while self.sleep_while_idle() {
            // This poll only notes what the threads serve. The poll before the sleep has found no request, so none is taken for stuck.
            self.poll();
            while self.pause() && !self.poll() {}
        }
    }

    /// Sleeps until a thread begins a request. Returns false when the crew has ended.
    ///
    /// A thread writes its cell and then reads `is_asleep`. The supervisor writes `is_asleep` and then reads the cells. Without an order both could read
    /// the old values: the supervisor would sleep while the request hangs. All four accesses are `SeqCst`, so they have one order. In
    /// this order, a thread that reads false comes before the supervisor's write (or after the end of the sleep), and its cell before the supervisor's
    /// read, which then finds the request, or finds that it has ended. On x86-64, that costs a request one locked instruction on a cache line
    /// that its thread owns.
    ///
    /// The supervisor holds the lock from its last check of `is_asleep` to the sleep, and a thread takes the lock to wake it. So no wake-up comes between.
    fn sleep_while_idle(&self) -> bool {
        let hints = &self.hints;
        let mut state = self.state.lock();
        hints.is_asleep.store(true, Ordering::SeqCst);
        while !state.has_ended && hints.is_asleep.load(Ordering::SeqCst) && state.roster.is_idle() {
            self.changed.wait(&mut state);
        }
        hints.is_asleep.store(false, Ordering::SeqCst);
        !state.has_ended
    }

    #[cold]
    fn wake_supervisor(&self) {
        // One of the threads that come at once is enough.
        if self.hints.is_asleep.swap(false, Ordering::SeqCst) {
            let _state = self.state.lock();
            self.changed.notify_all();
        }
    }

    /// Waits for a period. Returns false when the crew has ended.
    fn pause(&self) -> bool {
        let until = Instant::now() + PERIOD;
        let mut state = self.state.lock();
        while !state.has_ended && !self.changed.wait_until(&mut state, until).timed_out() {}
        !state.has_ended
    }

    /// Polls the threads, and starts those that are missing. Returns whether no thread serves a request, and nothing is left to do.
    fn poll(self: &Arc<Crew>) -> bool {
        let poll = {
            let mut state = self.state.lock();
            state.threads.retain(|thread| !thread.is_finished());
            let poll = state.roster.poll();
            self.publish_surplus(&state);
            poll
        };
        let mut has_started = false;
        for _ in 0..poll.missing {
            let started = self.start_thread();
            has_started |= started.is_ok();
            let failed_before = {
                let mut state = self.state.lock();
                std::mem::replace(&mut state.start_failed, started.is_err())
            };
            if let Err(error) = started {
                // The next poll tries again.
                if !failed_before {
                    tracing::warn!(%error, "requests wait for more than {PERIOD:?}, and no further {} can be started: other requests wait too \
                         (is the limit of processes or open files reached?)", self.name);
                }
                break;
            }
        }
        if poll.all_are_stuck && !has_started {
            self.relieve();
        }
        poll.is_over
    }

    /// Begins the relief, unless a thread serves no request by now.
    fn relieve(&self) {
        let wanted = self.relief.as_ref().filter(|relief| relief.is_wanted());
        let Some(relief) = wanted.filter(|relief| relief.arm()) else {
            return;
        };
        match self.state.lock().roster.all_serve() {
            true => relief.confirm(),
            false => relief.cancel(),
        }
    }
}

#[cfg(test)]
mod tests;
