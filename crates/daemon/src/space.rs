//! Requests that wait for space that is being freed.
//!
//! A full volume often has room again soon after a program has removed a file: only the kernel's release of the file is missing
//! (`crates/fs/src/data/leaving.rs`). The threads that serve requests must serve that release too, and other writers of a file
//! wait for its locks. So a request that finds no space gives up everything that it holds: range words, the extend lock,
//! `Writing`, its thread. It waits in a thread of its own, which repeats it from the start when space has become free.
//!
//! The number of such requests is limited, because the kernel has limits too. It delays a release while too many requests are
//! unanswered: asynchronous requests of the device, or requests of one CPU's queue of the ring. The requests of one user take at
//! most half of the places.
//!
//! A request that finds no place does not wait for a release. But space may become free when the removals that the daemon knows
//! of are durable. So the request goes to a queue (`RetryQueue`). One thread makes the removals durable and tries each request of
//! the queue once more, one after the other. It waits only for devices, so it always finishes. If the data of queued requests
//! would exceed a limit, a thread with a further request waits until the queue has room.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jericho_fs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::handle::Handle;
use crate::volume::OpenVolume;

const FULL: Error = Error::Errno(libc::ENOSPC);

/// Most requests that wait at once, unless the front end sets another limit.
const COUNT_MAX: usize = 192;
/// Most bytes of data that waiting requests keep in memory.
const BYTES_MAX: usize = 64 << 20;

/// One user's part of both limits: each limit divided by this number.
const USER_PART: usize = 2;

/// The requests that wait for space.
pub(crate) struct SpaceWaits {
    waits: Mutex<Waits>,
    /// Notified when a wait or a queued retry has ended.
    ended: Condvar,
    /// The last field: see `OpenVolume`.
    volume: Arc<OpenVolume>,
}

#[derive(Default)]
struct Waits {
    all: Held,
    users: HashMap<u32, Held>,
    retries: RetryQueue,
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
    /// Returns the sum after one more request with `bytes` of data. Returns `None` when that is more than the limits divided by
    /// `part`.
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

type Retry = Box<dyn FnOnce() + Send>;

/// Requests without a place, which are retried one after the other.
#[derive(Default)]
struct RetryQueue {
    waiting: VecDeque<(usize, Retry)>,
    bytes: usize,
    /// The thread runs. It ends when no request waits.
    is_running: bool,
}

impl SpaceWaits {
    /// Creates a table without requests.
    pub fn new(volume: Arc<OpenVolume>) -> Arc<SpaceWaits> {
        Arc::new(SpaceWaits {
            waits: Mutex::default(),
            ended: Condvar::default(),
            volume,
        })
    }

    /// Sets how many requests may wait for space at once. Further requests fail with ENOSPC if there is no space after a commit.
    pub fn limit(&self, count_max: usize) {
        self.waits.lock().count_max = Some(count_max);
    }

    /// Ends all waits and prevents further ones.
    pub fn close(&self) {
        let mut waits = self.waits.lock();
        waits.closed = true;
        self.volume.fs.end_space_waits();
        self.ended.notify_all();
        let is_busy = |waits: &mut Waits| waits.all.count > 0 || waits.retries.is_running;
        self.ended.wait_while(&mut waits, is_busy);
    }

    /// Queues the job for the thread `space-turns`. Waits while too much data is queued. Returns false when the mount ends or no
    /// thread can be started.
    fn queue_retry(self: &Arc<Self>, bytes: usize, job: Retry) -> bool {
        let mut waits = self.waits.lock();
        let is_much = |waits: &mut Waits| {
            let retries = &waits.retries;
            !waits.closed && !retries.waiting.is_empty() && retries.bytes + bytes > BYTES_MAX
        };
        self.ended.wait_while(&mut waits, is_much);
        if waits.closed {
            return false;
        }
        if !waits.retries.is_running {
            let own = self.clone();
            let thread = std::thread::Builder::new().name("space-turns".into());
            if thread.spawn(move || own.run_retries()).is_err() {
                return false;
            }
            waits.retries.is_running = true;
        }
        waits.retries.waiting.push_back((bytes, job));
        waits.retries.bytes += bytes;
        true
    }

    fn run_retries(&self) {
        let mut waits = self.waits.lock();
        while let Some((bytes, job)) = waits.retries.waiting.pop_front() {
            drop(waits);
            job();
            waits = self.waits.lock();
            waits.retries.bytes -= bytes;
            self.ended.notify_all();
        }
        waits.retries.is_running = false;
        self.ended.notify_all();
    }
}

/// The place of a request that waits; given back on drop.
struct SpaceWait {
    waits: Arc<SpaceWaits>,
    user: u32,
    bytes: usize,
}

impl SpaceWait {
    /// Takes a place. Returns `None` when too many requests wait, in total or of this user.
    fn begin(all_waits: &Arc<SpaceWaits>, user: u32, bytes: usize) -> Option<SpaceWait> {
        let mut waits = all_waits.waits.lock();
        if waits.closed {
            return None;
        }
        let count_max = waits.count_max.unwrap_or(COUNT_MAX);
        let all = waits.all.with(bytes, count_max, 1)?;
        let users = waits.users.get(&user).copied().unwrap_or_default();
        let users = users.with(bytes, count_max, USER_PART)?;
        waits.all = all;
        waits.users.insert(user, users);
        Some(SpaceWait {
            waits: all_waits.clone(),
            user,
            bytes,
        })
    }
}

impl Drop for SpaceWait {
    fn drop(&mut self) {
        let mut waits = self.waits.waits.lock();
        waits.all = waits.all.without(self.bytes);
        if let Some(held) = waits.users.get_mut(&self.user) {
            *held = held.without(self.bytes);
            if held.count == 0 {
                waits.users.remove(&self.user);
            }
        }
        self.waits.ended.notify_all();
    }
}

impl SpaceWaits {
    /// Calls `reply` with the result of `attempt`. If the volume is full, calls `attempt` again in another thread when space has
    /// become free. `range`: offset and length of the bytes that may need space.
    pub fn answer<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        range: (u64, u64),
        attempt: impl Fn() -> Result<T> + Send + 'static,
        reply: R,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        match attempt() {
            Err(error) if error.is_full_volume() => {}
            result => return reply(result),
        }
        let own = handle.clone();
        self.in_own_thread(handle.user(), 0, reply, move |waits, has_place, reply| {
            reply(waits.with_space(&own, range, has_place, attempt));
        });
    }

    /// Calls `attempt` with `reply` in another thread when space has become free. `attempt` returns the unused reply when the
    /// volume is full. `range`: offset and length of the data that may need space; the request keeps that many bytes in memory.
    pub fn retry<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        range: (u64, usize),
        reply: R,
        mut attempt: impl FnMut(R) -> std::result::Result<(), R> + Send + 'static,
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
            move |waits, has_place, reply| {
                let mut unused = Some(reply);
                let range = (at, bytes as u64);
                let result = waits.with_space(&own, range, has_place, || {
                    let Some(reply) = unused.take() else {
                        return Ok(());
                    };
                    attempt(reply).map_err(|reply| {
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
        let (fs, file) = (&self.volume.fs, &handle.file);
        let may_wait = || has_place && fs.may_have_room(file, at, len);
        fs.with_space_if(file, may_wait, attempt)
    }

    /// Takes a place for the request, and runs `job` in a thread of its own, where it may wait for space. If there is no place,
    /// queues `job` for the thread `space-turns`. Calls `reply` with ENOSPC when the mount ends or no thread can be started.
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
        let waiting = SpaceWait::begin(self, user, bytes);
        let has_place = waiting.is_some();
        // Kept here in case no thread can be started.
        let kept = Arc::new(Mutex::new(Some(reply)));
        let (waits, taken) = (self.clone(), kept.clone());
        let body: Retry = Box::new(move || {
            let _waiting = waiting;
            let reply = taken.lock().take();
            let run = AssertUnwindSafe(|| {
                if let Some(reply) = reply {
                    job(&waits, has_place, reply);
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
            false => self.queue_retry(bytes, body),
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
