//! Requests that wait for space that is being freed.
//!
//! A full volume has room again soon if a program has just removed a file: the kernel has yet to release the file
//! (`fs/leaving.rs`). The threads that serve requests serve that release too, and other writers of a file wait for its locks.
//! So a request that finds no space gives up everything that it holds: range words, the extend lock, `Writing`, its thread. It
//! waits in a thread of its own, which begins it again from the start when space has become free.
//!
//! The number of such requests is limited, because the kernel has limits too. It keeps a release back while too many requests are
//! unanswered: asynchronous ones of the device, or those of one CPU's queue over the ring.

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
/// Most bytes to write that they keep in memory.
const BYTES_MAX: usize = 64 << 20;

/// The requests that wait for space.
#[derive(Default)]
pub(crate) struct SpaceWaits {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    count: usize,
    bytes: usize,
    /// Limit, if not `COUNT_MAX`.
    count_max: Option<usize>,
    closed: bool,
}

impl SpaceWaits {
    /// Ends all waits and prevents further ones.
    pub fn close(&self, fs: &Fs) {
        let mut state = self.state.lock();
        state.closed = true;
        fs.end_space_waits();
        self.ended.wait_while(&mut state, |state| state.count > 0);
    }
}

/// A request that waits, until dropped.
struct Waiting {
    mounted: Arc<Mounted>,
    bytes: usize,
}

impl Waiting {
    /// Returns `None` when too many requests wait.
    fn begin(mounted: &Arc<Mounted>, bytes: usize) -> Option<Waiting> {
        let mut state = mounted.space_waits.state.lock();
        let count_max = state.count_max.unwrap_or(COUNT_MAX);
        if state.closed || state.count >= count_max || state.bytes + bytes > BYTES_MAX {
            return None;
        }
        state.count += 1;
        state.bytes += bytes;
        Some(Waiting {
            mounted: mounted.clone(),
            bytes,
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let waits = &self.mounted.space_waits;
        let mut state = waits.state.lock();
        state.count -= 1;
        state.bytes -= self.bytes;
        waits.ended.notify_all();
    }
}

impl Mounted {
    /// Sets how many requests may wait for space at once. Others then fail with ENOSPC at once.
    pub fn limit_space_waits(&self, count_max: usize) {
        self.space_waits.state.lock().count_max = Some(count_max);
    }

    /// Calls `reply` with the result of `attempt`. If the volume is full, calls `attempt` again in another thread when space has
    /// become free.
    pub(crate) fn answer_with_space<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
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
        let file = handle.file.clone();
        self.in_own_thread(0, reply, move |mounted, reply| {
            reply(mounted.fs().with_space(&file, || attempt(mounted)));
        });
    }

    /// Calls `attempt` with `reply` in another thread when space has become free. `attempt` returns the reply, unused, when the
    /// volume is full. `bytes`: what the request keeps in memory.
    pub(crate) fn retry_with_space<T, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        bytes: usize,
        reply: R,
        mut attempt: impl FnMut(&Arc<Self>, R) -> std::result::Result<(), R> + Send + 'static,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        let file = handle.file.clone();
        self.in_own_thread(bytes, reply, move |mounted, reply| {
            let mut unused = Some(reply);
            let result = mounted.fs().with_space(&file, || {
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
        });
    }

    /// Runs `job`, which may wait for space, in a thread of its own. If too many requests wait, calls `reply` with ENOSPC.
    pub(crate) fn in_own_thread<T, R>(
        self: &Arc<Self>,
        bytes: usize,
        reply: R,
        job: impl FnOnce(&Arc<Self>, R) + Send + 'static,
    ) where
        T: 'static,
        R: FnOnce(Result<T>) + Send + 'static,
    {
        let Some(waiting) = Waiting::begin(self, bytes) else {
            return reply(Err(FULL));
        };
        // Kept here, for the case that no thread can be started.
        let kept = Arc::new(Mutex::new(Some(reply)));
        let taken = kept.clone();
        let body = move || {
            let reply = taken.lock().take();
            let run = AssertUnwindSafe(|| {
                if let Some(reply) = reply {
                    job(&waiting.mounted, reply);
                }
            });
            // A reply that is dropped answers EIO.
            if catch_unwind(run).is_err() {
                tracing::error!(
                    "a request that waited for space panicked; it was answered with an I/O error"
                );
            }
        };
        let thread = std::thread::Builder::new().name("space-wait".into());
        if thread.spawn(body).is_err() {
            let reply = kept.lock().take();
            if let Some(reply) = reply {
                reply(Err(FULL));
            }
        }
    }
}

#[cfg(test)]
mod tests;
