//! Requests that wait for space that is being freed.
//!
//! A full volume often has room again soon after a program has removed a file: only the kernel's release of the file is missing
//! (`fs/leaving.rs`). The threads that serve requests must serve that release too, and other writers of a file wait for its
//! locks. So a request that finds no space gives up everything that it holds: range words, the extend lock, `Writing`, its
//! thread. It waits in a thread of its own, which repeats it from the start when space has become free.
//!
//! The number of such requests is limited, because the kernel has limits too. It delays a release while too many requests are
//! unanswered: asynchronous requests of the device, or requests of one CPU's queue of the ring. The requests of one user take at
//! most half of the places.
//!
//! A request that finds no place does not wait for a release. But space may become free when the removals that the daemon knows
//! of are durable. One thread (`Turns`) makes them durable and tries each such request once more, one after the other. It waits
//! only for devices, so it always finishes. A thread whose request has more data than the queue may keep waits until the queue
//! has room.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jericho_fs::fs::Fs;
use jericho_fs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::handle::Handle;
use crate::mounted::Mounted;

const FULL: Error = Error::Errno(libc::ENOSPC);

/// Most requests that wait at once, unless the front end sets another limit.
const COUNT_MAX: usize = 192;
/// Most bytes of data that waiting requests keep in memory.
const BYTES_MAX: usize = 64 << 20;

/// One user's part of both limits.
const USER_PART: usize = 2;

/// The requests that wait for space.
#[derive(Default)]
pub(crate) struct SpaceWaits {
    state: Mutex<State>,
    /// Notified when a wait or a turn has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    all: Held,
    users: HashMap<u32, Held>,
    turns: Turns,
    /// The limit, if it is not `COUNT_MAX`.
    count_max: Option<usize>,
    closed: bool,
}

/// The places and the memory of requests that wait.
#[derive(Clone, Copy, Default)]
struct Held {
    count: usize,
    bytes: usize,
}

impl Held {
    /// Returns the sum after one more request with `bytes` of data. Returns `None` when that is more than a `part` of the limits.
    fn with(self, bytes: usize, count_max: usize, part: usize) -> Option<Held> {
        let (count, bytes) = (self.count + 1, self.bytes + bytes);
        let fits = count <= (count_max / part).max(1) && bytes <= BYTES_MAX / part;
        fits.then_some(Held { count, bytes })
    }

    fn without(self, bytes: usize) -> Held {
        Held {
            count: self.count - 1,
            bytes: self.bytes - bytes,
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Requests without a place, which are retried one after the other.
#[derive(Default)]
struct Turns {
    waiting: VecDeque<(usize, Job)>,
    bytes: usize,
    /// The thread runs. It ends when no request waits.
    is_running: bool,
}

impl SpaceWaits {
    /// Ends all waits and prevents further ones.
    pub fn close(&self, fs: &Fs) {
        let mut state = self.state.lock();
        state.closed = true;
        fs.end_space_waits();
        self.ended.notify_all();
        let is_busy = |state: &mut State| state.all.count > 0 || state.turns.is_running;
        self.ended.wait_while(&mut state, is_busy);
    }

    /// Queues the job for its turn. Waits while too much data is queued. Returns false when the mount ends or no thread can be
    /// started.
    fn take_turn(mounted: &Arc<Mounted>, bytes: usize, job: Job) -> bool {
        let waits = &mounted.space_waits;
        let mut state = waits.state.lock();
        let is_much = |state: &mut State| {
            let turns = &state.turns;
            !state.closed && !turns.waiting.is_empty() && turns.bytes + bytes > BYTES_MAX
        };
        waits.ended.wait_while(&mut state, is_much);
        if state.closed {
            return false;
        }
        if !state.turns.is_running {
            let own = mounted.clone();
            let thread = std::thread::Builder::new().name("space-turns".into());
            if thread.spawn(move || own.space_waits.run_turns()).is_err() {
                return false;
            }
            state.turns.is_running = true;
        }
        state.turns.waiting.push_back((bytes, job));
        state.turns.bytes += bytes;
        true
    }

    fn run_turns(&self) {
        let mut state = self.state.lock();
        while let Some((bytes, job)) = state.turns.waiting.pop_front() {
            drop(state);
            job();
            state = self.state.lock();
            state.turns.bytes -= bytes;
            self.ended.notify_all();
        }
        state.turns.is_running = false;
        self.ended.notify_all();
    }
}

/// A request that waits. It gives its place back when dropped.
struct Waiting {
    mounted: Arc<Mounted>,
    user: u32,
    bytes: usize,
}

impl Waiting {
    /// Takes a place. Returns `None` when too many requests wait, in total or of this user.
    fn begin(mounted: &Arc<Mounted>, user: u32, bytes: usize) -> Option<Waiting> {
        let mut state = mounted.space_waits.state.lock();
        if state.closed {
            return None;
        }
        let count_max = state.count_max.unwrap_or(COUNT_MAX);
        let all = state.all.with(bytes, count_max, 1)?;
        let users = state.users.get(&user).copied().unwrap_or_default();
        let users = users.with(bytes, count_max, USER_PART)?;
        state.all = all;
        state.users.insert(user, users);
        Some(Waiting {
            mounted: mounted.clone(),
            user,
            bytes,
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let waits = &self.mounted.space_waits;
        let mut state = waits.state.lock();
        state.all = state.all.without(self.bytes);
        if let Some(held) = state.users.get_mut(&self.user) {
            *held = held.without(self.bytes);
            if held.count == 0 {
                state.users.remove(&self.user);
            }
        }
        waits.ended.notify_all();
    }
}

impl Mounted {
    /// Sets how many requests may wait for space at once. Further requests fail with ENOSPC if there is no space after a commit.
    pub fn limit_space_waits(&self, count_max: usize) {
        self.space_waits.state.lock().count_max = Some(count_max);
    }

    /// Calls `reply` with the result of `attempt`. If the volume is full, calls `attempt` again in another thread when space has
    /// become free. `range`: offset and length of the bytes that may need space.
    pub(crate) fn answer_with_space<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        range: (u64, u64),
        attempt: impl Fn(&Arc<Self>) -> Result<T> + Send + 'static,
        reply: R,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        match attempt(self) {
            Err(error) if error.is_full_volume() => {}
            result => return reply(result),
        }
        let own = handle.clone();
        self.in_own_thread(handle.user(), 0, reply, move |mounted, has_place, reply| {
            reply(mounted.with_space(&own, range, has_place, || attempt(mounted)));
        });
    }

    /// Calls `attempt` with `reply` in another thread when space has become free. `attempt` returns the unused reply when the
    /// volume is full. `range`: offset and length of the data that may need space; the request keeps that many bytes in memory.
    pub(crate) fn retry_with_space<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        range: (u64, usize),
        reply: R,
        mut attempt: impl FnMut(&Arc<Self>, R) -> std::result::Result<(), R> + Send + 'static,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        let own = handle.clone();
        let (at, bytes) = range;
        self.in_own_thread(
            handle.user(),
            bytes,
            reply,
            move |mounted, has_place, reply| {
                let mut unused = Some(reply);
                let range = (at, bytes as u64);
                let result = mounted.with_space(&own, range, has_place, || {
                    let Some(reply) = unused.take() else {
                        return Ok(());
                    };
                    attempt(mounted, reply).map_err(|reply| {
                        unused = Some(reply);
                        FULL
                    })
                });
                if let (Err(error), Some(reply)) = (result, unused) {
                    reply(Err(error));
                }
            },
        );
    }

    /// Calls `attempt` until it finds space. Waits for removed files only if the request has a place, and if they have enough
    /// space for what the range lacks.
    fn with_space<T>(
        &self,
        handle: &Handle,
        (at, len): (u64, u64),
        has_place: bool,
        attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let (fs, file) = (self.fs(), &handle.file);
        let may_wait = || has_place && fs.may_have_room(file, at, len);
        fs.with_space_if(file, may_wait, attempt)
    }

    /// Runs `job` in a thread of its own and lets it wait for space, or in the thread of requests without a place. Calls `reply`
    /// with ENOSPC when the mount ends.
    fn in_own_thread<T, R>(
        self: &Arc<Self>,
        user: u32,
        bytes: usize,
        reply: R,
        job: impl FnOnce(&Arc<Self>, bool, R) + Send + 'static,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        let waiting = Waiting::begin(self, user, bytes);
        let has_place = waiting.is_some();
        // Kept here in case no thread can be started.
        let kept = Arc::new(Mutex::new(Some(reply)));
        let (mounted, taken) = (self.clone(), kept.clone());
        let body: Job = Box::new(move || {
            let _waiting = waiting;
            let reply = taken.lock().take();
            let run = AssertUnwindSafe(|| {
                if let Some(reply) = reply {
                    job(&mounted, has_place, reply);
                }
            });
            // A reply that is dropped answers EIO.
            if catch_unwind(run).is_err() {
                tracing::error!(
                    "a request that waited for space panicked; it was answered with an I/O error"
                );
            }
        });
        let is_running = match has_place {
            true => {
                let thread = std::thread::Builder::new().name("space-wait".into());
                thread.spawn(body).is_ok()
            }
            false => SpaceWaits::take_turn(self, bytes, body),
        };
        if !is_running {
            let reply = kept.lock().take();
            if let Some(reply) = reply {
                reply(Err(FULL));
            }
        }
    }
}

#[cfg(test)]
mod tests;
