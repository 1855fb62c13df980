//! Flushes requested by many threads. A failure is never forgotten.
//!
//! The kernel reports a failed write-back once per open file and then considers the pages clean: a second fdatasync succeeds
//! although the data is gone. So the `Flusher` keeps the first failure and returns it to every later flush. Only opening the
//! device again clears it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use jericho_sys::errno;

use crate::Cause;

/// The flush state of one device.
#[derive(Debug, Default)]
pub(crate) struct Flusher {
    next_ticket: AtomicU64,
    state: Mutex<FlushState>,
}

#[derive(Debug, Default)]
struct FlushState {
    /// All flushes with a smaller ticket are done: a sync began after they drew their tickets.
    covered: u64,
    failed: Option<Cause>,
}

impl Flusher {
    /// Makes durable what was written before the call, with `sync` or with another thread's sync that begins after the call.
    /// Syncs run one at a time: if two ran at once and data was lost, the kernel would report the failure to only one of them.
    pub(crate) fn flush(&self, sync: impl Fn() -> io::Result<()>) -> Result<(), Cause> {
        let ticket = self.next_ticket.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cause) = state.failed {
            return Err(cause);
        }
        if state.covered > ticket {
            return Ok(());
        }
        let covered = self.next_ticket.load(Ordering::SeqCst);
        loop {
            match sync() {
                Ok(()) => {
                    state.covered = covered;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let cause = Cause::Errno(error.raw_os_error().unwrap_or(errno::EIO));
                    state.failed = Some(cause);
                    return Err(cause);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_failed_flush_fails_every_later_one() {
        let flusher = Flusher::default();
        flusher.flush(|| Ok(())).unwrap();
        let failed = flusher.flush(|| Err(io::Error::from_raw_os_error(errno::ENOSPC)));
        assert_eq!(failed, Err(Cause::Errno(errno::ENOSPC)));
        assert_eq!(flusher.flush(|| Ok(())), Err(Cause::Errno(errno::ENOSPC)));
    }

    #[test]
    fn an_interrupted_flush_is_repeated() {
        let flusher = Flusher::default();
        let calls = AtomicU64::new(0);
        flusher
            .flush(|| match calls.fetch_add(1, Ordering::Relaxed) {
                0 => Err(io::Error::from_raw_os_error(errno::EINTR)),
                _ => Ok(()),
            })
            .unwrap();
        assert_eq!(calls.into_inner(), 2);
    }

    #[test]
    fn flushes_that_wait_for_a_running_one_share_a_new_one() {
        let flusher = Flusher::default();
        let syncs = AtomicU64::new(0);
        let (began, has_began) = mpsc::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let may_finish = Mutex::new(may_finish);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                flusher.flush(|| {
                    syncs.fetch_add(1, Ordering::Relaxed);
                    began.send(()).unwrap();
                    may_finish.lock().unwrap().recv().unwrap();
                    Ok(())
                })
            });
            has_began.recv().unwrap();
            for _ in 0..8 {
                scope.spawn(|| {
                    flusher.flush(|| {
                        syncs.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    })
                });
            }
            while flusher.next_ticket.load(Ordering::SeqCst) < 9 {
                std::thread::yield_now();
            }
            finish.send(()).unwrap();
        });
        // The first sync began before the others asked, so it does not cover them. The second covers them all.
        assert_eq!(syncs.into_inner(), 2);
    }
}
