//! Files that get no slot for now, because the daemon is changing state that a new slot copies.
//!
//! A new slot starts with the file's current size. The daemon looks up the slot to change when a change begins. A slot that
//! appeared in the middle of a truncation would therefore keep the old size. A slot that appeared in the middle of a chmod would
//! continue to allow inline writes.
//!
//! The same count knows the files whose attributes the kernel may not keep, because the space that was reserved for their last inline
//! writer is still to be freed (`Fast::settling`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jericho_fs::types::Ino;
use parking_lot::{Condvar, Mutex};

/// Counts the changes in progress, by file.
#[derive(Default)]
pub(super) struct Changing {
    files: Mutex<HashMap<Ino, u32>>,
    /// Number of changes, for threads that find none. They store to no common word.
    count: AtomicUsize,
    ended: Condvar,
}

/// A change of a file in progress; ends when dropped.
pub(super) struct ChangeGuard {
    changing: Arc<Changing>,
    ino: Ino,
}

impl Changing {
    /// Registers that a change of the file begins.
    pub fn begin(self: &Arc<Changing>, ino: Ino) -> ChangeGuard {
        *self.files.lock().entry(ino).or_default() += 1;
        self.count.fetch_add(1, Ordering::AcqRel);
        ChangeGuard {
            changing: self.clone(),
            ino,
        }
    }

    /// Returns whether a change of the file is in progress.
    pub fn contains(&self, ino: Ino) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.files.lock().contains_key(&ino)
    }

    /// Waits until no change of the file is in progress.
    pub fn wait(&self, ino: Ino) {
        let mut files = self.files.lock();
        self.ended
            .wait_while(&mut files, |files| files.contains_key(&ino));
    }
}

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        self.changing.count.fetch_sub(1, Ordering::AcqRel);
        let mut files = self.changing.files.lock();
        if let Some(count) = files.get_mut(&self.ino) {
            *count -= 1;
            if *count == 0 {
                files.remove(&self.ino);
                self.changing.ended.notify_all();
            }
        }
    }
}
