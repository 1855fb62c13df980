//! Decides when the next checkpoint of the metadata store is due, or the next settlement of images (`settle`).
//!
//! A commit leaves its rows in the journal and in memory. After each commit the committer notes how soon the store wants a checkpoint. The
//! checkpointer sleeps without a timeout while redb has all rows.

use std::time::{Duration, Instant};

use jericho_metadata::store::CheckpointNeed;
use parking_lot::{Condvar, Mutex};

/// Longest time for which rows are only in the journal, so that a mount after a crash has little to apply.
const AGE_MAX: Duration = Duration::from_secs(30);
/// Pause after a checkpoint for which there was no room.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Control {
    due: Option<Instant>,
    /// The end of the pause after a checkpoint without room.
    not_before: Option<Instant>,
    /// Whether images should be settled soon.
    settle: bool,
    /// The end of the pause after a settlement that a device refused.
    settle_not_before: Option<Instant>,
    stop: bool,
}

/// What the checkpointer has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Settle images.
    Settle,
    /// Settle images, then make a checkpoint.
    Checkpoint,
}

/// The controls of the checkpointer.
#[derive(Default)]
pub struct Checkpoints {
    control: Mutex<Control>,
    work: Condvar,
}

impl Checkpoints {
    /// Holds the lock until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self) -> impl Sized {
        self.control.lock()
    }

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

    /// Notes the need after a checkpoint. The checkpoint has served the needs noted before.
    pub fn note_after_checkpoint(&self, need: CheckpointNeed) {
        self.control.lock().due = None;
        self.note(need);
    }

    /// Notes that images should be settled. Has no effect for a while after a device has refused one.
    pub fn note_settlement(&self) {
        let mut control = self.control.lock();
        let is_pause = |until: Instant| Instant::now() < until;
        if !control.settle && !control.settle_not_before.is_some_and(is_pause) {
            control.settle = true;
            self.work.notify_one();
        }
    }

    /// Ignores `note_settlement` for a while, because a device has refused an image: every batch would ask for the next attempt.
    /// Checkpoints go on.
    pub fn settlement_failed(&self) {
        self.control.lock().settle_not_before = Some(Instant::now() + AGE_MAX);
    }

    /// Ends the thread after the checkpoint that it is making.
    pub fn stop(&self) {
        self.control.lock().stop = true;
        self.work.notify_one();
    }

    /// Sleeps until there is work. Returns `None` when the thread must end.
    pub fn wait(&self) -> Option<Work> {
        let mut control = self.control.lock();
        loop {
            if control.stop {
                return None;
            }
            let due = control.due.max(control.due.and(control.not_before));
            match due {
                Some(due) if due <= Instant::now() => {
                    control.due = None;
                    control.not_before = None;
                    control.settle = false;
                    return Some(Work::Checkpoint);
                }
                _ if std::mem::take(&mut control.settle) => return Some(Work::Settle),
                Some(due) => drop(self.work.wait_until(&mut control, due)),
                None => self.work.wait(&mut control),
            }
        }
    }

    /// Makes a checkpoint due after a pause, because there was no room for the last one.
    pub fn try_later(&self) {
        let at = Instant::now() + RETRY;
        let mut control = self.control.lock();
        control.not_before = Some(at);
        control.due = Some(at);
    }
}
