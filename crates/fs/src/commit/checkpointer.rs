//! The thread that makes checkpoints of the metadata store.
//!
//! A commit leaves its rows in the journal and in memory. The committer says after each commit how soon a checkpoint is wanted. The
//! checkpointer sleeps without a timeout while redb has everything.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::core::Core;
use crate::store::CheckpointNeed;

/// Longest time for which rows are only in the journal, so that a mount after a crash has little to apply.
const AGE_MAX: Duration = Duration::from_secs(30);
/// Pause after a checkpoint for which there was no room.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Control {
    due: Option<Instant>,
    stop: bool,
}

/// The controls of the checkpointer.
#[derive(Default)]
pub struct Checkpoints {
    control: Mutex<Control>,
    work: Condvar,
}

impl Checkpoints {
    /// Notes how soon the store wants a checkpoint.
    pub fn note(&self, need: CheckpointNeed) {
        let now = Instant::now();
        let at = match need {
            CheckpointNeed::None => return,
            CheckpointNeed::AtLast => now + AGE_MAX,
            CheckpointNeed::Now => now,
        };
        let mut control = self.control.lock();
        if control.due.is_none_or(|due| at < due) {
            control.due = Some(at);
            self.work.notify_one();
        }
    }

    /// Ends the thread after the checkpoint that it is making.
    pub fn stop(&self) {
        self.control.lock().stop = true;
        self.work.notify_one();
    }

    /// Sleeps until a checkpoint is due. Returns false when the thread must end.
    fn wait(&self) -> bool {
        let mut control = self.control.lock();
        loop {
            if control.stop {
                return false;
            }
            match control.due {
                Some(due) if due <= Instant::now() => {
                    control.due = None;
                    return true;
                }
                Some(due) => drop(self.work.wait_until(&mut control, due)),
                None => self.work.wait(&mut control),
            }
        }
    }

    fn try_later(&self) {
        let mut control = self.control.lock();
        control.due.get_or_insert(Instant::now() + RETRY);
    }
}

/// Runs the checkpointer's thread.
pub fn run(core: &Core) {
    while core.checkpoints.wait() {
        if let Err(error) = core.store.checkpoint() {
            // The next commit gets an error that ended all changes.
            tracing::debug!(%error, "no checkpoint of the metadata store");
            core.checkpoints.try_later();
        }
    }
}
