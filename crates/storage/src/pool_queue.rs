//! The fallback queue: a few threads that make blocking calls.
//!
//! Used for devices without a descriptor, and where io_uring is missing or forbidden (`kernel.io_uring_disabled`, seccomp). Each
//! transfer is copied once more than with io_uring.
//!
//! `Pool::jobs` holds the transfers that no thread has begun. A thread that has finished a transfer puts its completion into
//! `Pool::done` and rings the owner's doorbell.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_sys::doorbell::Doorbell;
use jericho_sys::{errno, service};

use crate::QueueError;
use crate::aligned::AlignedBuffer;
use crate::transfer::{check, gather, length_bytes, operation, scatter};
use crate::{Cause, Completion, Device, Devices, Direction, IoError, Queue, Transfer, Wake};

/// Maximum number of threads. More threads would only wait for the same devices.
const THREADS_MAX: u32 = 8;

/// Maximum size of one blocking call.
const PIECE_BYTES: usize = 1 << 20;

pub(crate) struct PoolQueue {
    shared: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
    why: String,
    in_flight: usize,
}

struct Pool {
    devices: Devices,
    jobs: Mutex<Jobs>,
    jobs_changed: Condvar,
    done: Mutex<Vec<Completion>>,
    waker: Arc<Waker>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Transfer>,
    is_closed: bool,
}

/// Wakes the owner. Completions ring the same doorbell, so a separate flag records calls of `wake`.
struct Waker {
    was_called: AtomicBool,
    doorbell: Doorbell,
}

impl Wake for Waker {
    fn wake(&self) {
        // Sets the flag before it rings the doorbell, because the owner checks the flag after the doorbell has woken it.
        self.was_called.store(true, Ordering::Release);
        self.doorbell.ring();
    }
}

/// Ignores poisoning: no user of these locks can leave them in a bad state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PoolQueue {
    pub(crate) fn open(
        devices: &Devices,
        depth: u32,
        why: String,
    ) -> Result<PoolQueue, QueueError> {
        let doorbell = Doorbell::new().map_err(|source| QueueError {
            action: "make an eventfd",
            source,
        })?;
        let shared = Arc::new(Pool {
            devices: devices.clone(),
            jobs: Mutex::default(),
            jobs_changed: Condvar::new(),
            done: Mutex::default(),
            waker: Arc::new(Waker {
                was_called: AtomicBool::new(false),
                doorbell,
            }),
        });
        let mut queue = PoolQueue {
            shared,
            threads: Vec::new(),
            why,
            in_flight: 0,
        };
        for index in 0..depth.clamp(1, THREADS_MAX) {
            let shared = Arc::clone(&queue.shared);
            let thread = service::spawn(format!("io-{index}"), move || shared.work());
            queue.threads.push(thread.map_err(|source| QueueError {
                action: "start threads",
                source,
            })?);
        }
        Ok(queue)
    }
}

impl Drop for PoolQueue {
    fn drop(&mut self) {
        {
            let mut jobs = lock(&self.shared.jobs);
            jobs.is_closed = true;
            jobs.waiting.clear();
        }
        self.shared.jobs_changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of the thread ends the process (`service::spawn`), so the join cannot fail.
            let _ = thread.join();
        }
    }
}

impl Pool {
    /// Runs a thread of the pool.
    fn work(&self) {
        let mut buffer = None;
        loop {
            let transfer = {
                let mut jobs = lock(&self.jobs);
                loop {
                    if let Some(transfer) = jobs.waiting.pop_front() {
                        break transfer;
                    }
                    if jobs.is_closed {
                        return;
                    }
                    jobs = self
                        .jobs_changed
                        .wait(jobs)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            };
            let device = self.devices.get(usize::from(transfer.device));
            let device = device.expect("a device that `check` has found");
            let buffer = buffer.get_or_insert_with(|| AlignedBuffer::new(PIECE_BYTES));
            // A device that panics must not leave its transfer in flight for ever.
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
                run(device.as_ref(), &transfer, buffer.as_mut_slice())
            }));
            let result = result.unwrap_or_else(|_| {
                Err(IoError {
                    operation: operation(transfer.direction),
                    device: device.name(),
                    offset_bytes: transfer.offset_bytes,
                    length_bytes: length_bytes(&transfer),
                    cause: Cause::Errno(errno::EIO),
                })
            });
            lock(&self.done).push(Completion {
                tag: transfer.tag,
                result,
            });
            self.waker.doorbell.ring();
        }
    }
}

/// Performs a checked transfer with blocking calls, in pieces of the size of `buffer`.
fn run(device: &dyn Device, transfer: &Transfer, buffer: &mut [u8]) -> Result<(), IoError> {
    let total = length_bytes(transfer);
    let mut done = 0u64;
    while done < total {
        let length = (total - done).min(buffer.len() as u64) as usize;
        let piece = &mut buffer[..length];
        let offset_bytes = transfer.offset_bytes + done;
        match transfer.direction {
            Direction::Read => {
                device.read_at(offset_bytes, piece)?;
                scatter(&transfer.segments, done as usize, piece);
            }
            Direction::Write => {
                gather(&transfer.segments, done as usize, piece);
                device.write_at(offset_bytes, piece)?;
            }
        }
        done += length as u64;
    }
    Ok(())
}

impl Queue for PoolQueue {
    fn submit(&mut self, transfer: Transfer) {
        self.in_flight += 1;
        if let Err(error) = check(&transfer, &self.shared.devices) {
            lock(&self.shared.done).push(Completion {
                tag: transfer.tag,
                result: Err(error),
            });
            return;
        }
        lock(&self.shared.jobs).waiting.push_back(transfer);
        self.shared.jobs_changed.notify_one();
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waker = &self.shared.waker;
        loop {
            let mut done = std::mem::take(&mut *lock(&self.shared.done));
            if !done.is_empty() {
                self.in_flight -= done.len();
                completions.append(&mut done);
                return;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if waker.was_called.swap(false, Ordering::AcqRel) || left == Some(Duration::ZERO) {
                return;
            }
            // If the doorbell rings after the checks above, `sleep` returns at once.
            if let Err(error) = waker.doorbell.sleep(left) {
                // The kernel lacks memory to put the thread to sleep.
                tracing::warn!(%error, "cannot wait for I/O; trying again");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.shared.waker) as Arc<dyn Wake>
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn describe(&self) -> String {
        format!(
            "{} threads with blocking calls ({})",
            self.threads.len(),
            self.why
        )
    }
}
