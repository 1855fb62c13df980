//! Requests that a reader has read and no worker has begun, while all workers wait.
//!
//! Workers read the kernel's messages themselves. If all of them wait for a silent host, one further thread, the *reader*, reads for them. It serves
//! what never waits, and parks the rest here:
//!
//! ```text
//!        arm                 confirm
//!   Off ──────▶ Armed ──────────────────▶ On: the reader reads, the workers take parked requests
//!    ▲            │ cancel                 │ `rest`: enough workers wait for a request
//!    └────────────┴────────────────────────┘
//! ```
//!
//! Invariants:
//! - While it is On, no worker reads: each takes parked requests. So a parked request never waits beside a worker that sleeps in the kernel. The
//!   supervisor arms, and then looks for a worker that serves no request. A worker notes that it serves no request, and then looks whether this
//!   is armed (both accesses `SeqCst`). So one of them sees the other, and the supervisor cancels if it sees a worker.
//! - The reader reads only while it is On, and only the reader turns it Off from there. So it never sleeps in the kernel while the workers read, and
//!   never has a message that nobody takes.
//! - The parked requests take at most `bytes_max` and one message. Beyond that the reader does not read.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A request that waits for a worker.
pub(crate) trait Parked: Send {
    /// Returns the bytes of memory that it takes.
    fn bytes(&self) -> usize;
    /// Returns whether it has its answer, so that nothing is left to do.
    fn has_ended(&self) -> bool;
}

/// The parked requests of a crew of workers.
pub(crate) struct Backlog<T> {
    /// A copy of `State::mode`: Armed or On.
    is_on: AtomicBool,
    state: Mutex<State<T>>,
    /// Wakes workers.
    parked: Condvar,
    /// Wakes the reader.
    reader: Condvar,
    /// Number of waiting workers from which on the workers read for themselves.
    enough: usize,
    bytes_max: usize,
}

struct State<T> {
    mode: Mode,
    requests: VecDeque<T>,
    bytes: usize,
    /// Workers that wait for a request here.
    waiting: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Off,
    Armed,
    On,
    /// The mount has ended.
    Ended,
}

/// What a worker does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T> {
    Serve(T),
    /// It reads a message of the kernel itself.
    Read,
    /// No more requests come.
    End,
}

impl<T: Parked> Backlog<T> {
    /// `enough`: the regular number of workers.
    pub(crate) fn new(enough: usize, bytes_max: usize) -> Backlog<T> {
        Backlog {
            is_on: AtomicBool::new(false),
            state: Mutex::new(State {
                mode: Mode::Off,
                requests: VecDeque::new(),
                bytes: 0,
                waiting: 0,
            }),
            parked: Condvar::new(),
            reader: Condvar::new(),
            enough,
            bytes_max,
        }
    }

    /// Tells the workers to read no more. Returns whether they were reading until now.
    pub(crate) fn arm(&self) -> bool {
        let mut state = self.state.lock();
        let was_off = state.mode == Mode::Off;
        if was_off {
            self.set(&mut state, Mode::Armed);
        }
        was_off
    }

    /// Lets the reader read, because no worker does.
    pub(crate) fn confirm(&self) {
        self.change(Mode::Armed, Mode::On);
    }

    /// Lets the workers read again.
    pub(crate) fn cancel(&self) {
        self.change(Mode::Armed, Mode::Off);
    }

    /// Lets all threads end when no request is left.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        self.set(&mut state, Mode::Ended);
    }

    fn change(&self, from: Mode, to: Mode) {
        let mut state = self.state.lock();
        if state.mode == from {
            self.set(&mut state, to);
        }
    }

    fn set(&self, state: &mut State<T>, mode: Mode) {
        state.mode = mode;
        self.is_on.store(mode != Mode::Off, Ordering::SeqCst);
        self.parked.notify_all();
        self.reader.notify_all();
    }

    /// Returns what a worker does next, which serves no request and has noted that.
    #[inline]
    pub(crate) fn next(&self) -> Next<T> {
        match self.is_on.load(Ordering::SeqCst) {
            true => self.wait(),
            false => Next::Read,
        }
    }

    #[cold]
    fn wait(&self) -> Next<T> {
        let mut state = self.state.lock();
        loop {
            if let Some(request) = state.requests.pop_front() {
                state.bytes -= request.bytes();
                self.reader.notify_all();
                return Next::Serve(request);
            }
            match state.mode {
                Mode::Off => return Next::Read,
                Mode::Ended => return Next::End,
                Mode::Armed | Mode::On => {}
            }
            state.waiting += 1;
            self.parked.wait(&mut state);
            state.waiting -= 1;
        }
    }

    /// Parks a request. Only the reader calls this.
    pub(crate) fn park(&self, request: T) {
        let mut state = self.state.lock();
        state.bytes += request.bytes();
        state.requests.push_back(request);
        self.parked.notify_one();
    }

    /// Waits until the reader has to read. Returns false when the mount has ended. `is_full` is called now and then while the parked requests take too
    /// much memory.
    pub(crate) fn rest(&self, pause: Duration, mut is_full: impl FnMut()) -> bool {
        let mut state = self.state.lock();
        // Those that wait take what is parked. The others find that they have to read.
        let enough = |state: &State<T>| state.waiting >= self.enough.max(state.requests.len());
        if state.mode == Mode::On && enough(&state) {
            self.set(&mut state, Mode::Off);
        }
        loop {
            match state.mode {
                Mode::Off | Mode::Armed => self.reader.wait(&mut state),
                Mode::Ended => return false,
                Mode::On if state.bytes < self.bytes_max => return true,
                Mode::On => {
                    let ended = state.drop_ended();
                    if ended.is_empty() {
                        parking_lot::MutexGuard::unlocked(&mut state, &mut is_full);
                        self.reader.wait_for(&mut state, pause);
                    }
                    // Without the lock: it may free much memory.
                    parking_lot::MutexGuard::unlocked(&mut state, || drop(ended));
                }
            }
        }
    }
}

impl<T: Parked> State<T> {
    /// Removes the requests that have ended.
    fn drop_ended(&mut self) -> Vec<T> {
        let all = std::mem::take(&mut self.requests);
        let (ended, left): (Vec<T>, Vec<T>) = all.into_iter().partition(Parked::has_ended);
        self.bytes -= ended.iter().map(Parked::bytes).sum::<usize>();
        self.requests = left.into();
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[derive(Debug, PartialEq, Eq)]
    struct Request {
        number: usize,
        has_ended: bool,
    }

    impl Parked for Request {
        fn bytes(&self) -> usize {
            10
        }
        fn has_ended(&self) -> bool {
            self.has_ended
        }
    }

    fn request(number: usize) -> Request {
        let has_ended = false;
        Request { number, has_ended }
    }

    /// Takes what is next in a thread of its own.
    fn worker(backlog: &Arc<Backlog<Request>>) -> Receiver<Next<Request>> {
        let (backlog, (send, next)) = (backlog.clone(), channel());
        std::thread::spawn(move || send.send(backlog.next()));
        next
    }

    fn wait_for(backlog: &Backlog<Request>, workers: usize) {
        while backlog.state.lock().waiting < workers {
            std::thread::yield_now();
        }
    }

    /// Says when the reader reads, and when it finds no room.
    fn reader(backlog: &Arc<Backlog<Request>>) -> (Receiver<bool>, Sender<()>, Receiver<()>) {
        let (backlog, (said, reads)) = (backlog.clone(), channel());
        let (again, next) = channel();
        let (full, is_full) = channel();
        std::thread::spawn(move || {
            loop {
                let read = backlog.rest(Duration::from_millis(1), || {
                    let _ = full.send(());
                });
                said.send(read).unwrap();
                if !read || next.recv().is_err() {
                    return;
                }
            }
        });
        (reads, again, is_full)
    }

    #[test]
    fn the_reader_reads_only_while_no_worker_does() {
        let backlog = Arc::new(Backlog::new(2, 100));
        assert_eq!(backlog.next(), Next::Read);
        let (reads, again, _full) = reader(&backlog);
        // A worker that ended its request in time makes the supervisor cancel.
        assert!(backlog.arm() && !backlog.arm());
        let late = worker(&backlog);
        wait_for(&backlog, 1);
        backlog.cancel();
        assert_eq!(late.recv_timeout(LONG), Ok(Next::Read));
        assert!(reads.try_recv().is_err());
        assert!(backlog.arm());
        backlog.confirm();
        assert_eq!(reads.recv_timeout(LONG), Ok(true));
        assert!(!backlog.arm());
        // One more than enough: the reader may look before or after one has taken the request.
        let workers = [(); 3].map(|()| worker(&backlog));
        wait_for(&backlog, 3);
        // The message that the reader has at the end is served, too.
        backlog.park(request(1));
        again.send(()).unwrap();
        let nexts = workers.map(|worker| worker.recv_timeout(LONG).unwrap());
        let served = nexts
            .iter()
            .filter(|next| **next == Next::Serve(request(1)));
        assert_eq!(served.count(), 1);
        let read = nexts.iter().filter(|next| **next == Next::Read);
        assert_eq!(read.count(), 2);
        assert!(reads.try_recv().is_err());
        assert_eq!(backlog.next(), Next::Read);
        backlog.end();
    }

    #[test]
    fn parked_requests_are_served_in_their_order_also_at_the_end() {
        let backlog = Arc::new(Backlog::new(2, 100));
        backlog.arm();
        backlog.confirm();
        (0..3).for_each(|number| backlog.park(request(number)));
        backlog.end();
        for number in 0..3 {
            assert_eq!(backlog.next(), Next::Serve(request(number)));
        }
        assert_eq!(backlog.next(), Next::End);
        assert!(!backlog.rest(Duration::ZERO, || {}));
    }

    #[test]
    fn the_reader_does_not_read_while_parked_requests_take_too_much_memory() {
        let backlog = Arc::new(Backlog::new(2, 25));
        backlog.arm();
        backlog.confirm();
        (0..3).for_each(|number| backlog.park(request(number)));
        let (reads, again, full) = reader(&backlog);
        full.recv_timeout(LONG).unwrap();
        full.recv_timeout(LONG).unwrap();
        assert!(reads.try_recv().is_err());
        assert_eq!(backlog.next(), Next::Serve(request(0)));
        assert_eq!(reads.recv_timeout(LONG), Ok(true));
        // A request that has ended makes room, and nobody serves it.
        backlog.park(request(3));
        backlog.state.lock().requests[1].has_ended = true;
        again.send(()).unwrap();
        assert_eq!(reads.recv_timeout(LONG), Ok(true));
        assert_eq!(backlog.next(), Next::Serve(request(1)));
        assert_eq!(backlog.next(), Next::Serve(request(3)));
        assert_eq!(backlog.state.lock().bytes, 0);
        backlog.end();
    }
}
