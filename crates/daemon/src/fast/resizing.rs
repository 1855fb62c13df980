//! Files whose size the daemon is changing.
//!
//! A file gets a slot with the size that it has then. If that happened in the middle of a truncation, the truncation would tell
//! another slot, or none, of the new size. So a file that is being resized gets no slot until that is over.

use std::collections::HashMap;

use jericho_fs::types::Ino;
use parking_lot::{Condvar, Mutex};

/// Counts the changes of size under way, by file.
#[derive(Default)]
pub(super) struct Resizing {
    files: Mutex<HashMap<Ino, u32>>,
    ended: Condvar,
}

/// A change of a file's size, until it is dropped.
pub(super) struct Resize<'a> {
    resizing: &'a Resizing,
    ino: Ino,
}

impl Resizing {
    /// Notes that a file's size is about to change.
    pub fn begin(&self, ino: Ino) -> Resize<'_> {
        *self.files.lock().entry(ino).or_default() += 1;
        Resize {
            resizing: self,
            ino,
        }
    }

    /// Returns whether a file's size is being changed.
    pub fn contains(&self, ino: Ino) -> bool {
        self.files.lock().contains_key(&ino)
    }

    /// Waits until a file's size is not being changed.
    pub fn wait(&self, ino: Ino) {
        let mut files = self.files.lock();
        self.ended
            .wait_while(&mut files, |files| files.contains_key(&ino));
    }
}

impl Drop for Resize<'_> {
    fn drop(&mut self) {
        let mut files = self.resizing.files.lock();
        if let Some(count) = files.get_mut(&self.ino) {
            *count -= 1;
            if *count == 0 {
                files.remove(&self.ino);
                self.resizing.ended.notify_all();
            }
        }
    }
}
