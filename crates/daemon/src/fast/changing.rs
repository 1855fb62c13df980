//! Files that get no slot for now, because the daemon is changing state that a new slot copies.
//!
//! A new slot starts with the file's current size. The daemon looks up the slot to change when a change begins. A slot that
//! appeared in the middle of a truncation would therefore keep the old size. A slot that appeared in the middle of a chmod would
//! continue to allow inline writes.

use std::collections::HashMap;

use jericho_fs::types::Ino;
use parking_lot::{Condvar, Mutex};

/// Counts the changes in progress, by file.
#[derive(Default)]
pub(super) struct Changing {
    files: Mutex<HashMap<Ino, u32>>,
    ended: Condvar,
}

/// A change of a file in progress; ends when dropped.
pub(super) struct ChangeGuard<'a> {
    changing: &'a Changing,
    ino: Ino,
}

impl Changing {
    /// Registers that a change of the file begins.
    pub fn begin(&self, ino: Ino) -> ChangeGuard<'_> {
        *self.files.lock().entry(ino).or_default() += 1;
        ChangeGuard {
            changing: self,
            ino,
        }
    }

    /// Returns whether a change of the file is in progress.
    pub fn contains(&self, ino: Ino) -> bool {
        self.files.lock().contains_key(&ino)
    }

    /// Waits until no change of the file is in progress.
    pub fn wait(&self, ino: Ino) {
        let mut files = self.files.lock();
        self.ended
            .wait_while(&mut files, |files| files.contains_key(&ino));
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
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
