//! Files that get no slot for now, because the daemon is changing what a slot begins with.
//!
//! A file gets a slot with the size that the file has then. In the middle of a truncation the daemon would tell another slot, or
//! none, of the new size. Likewise, in the middle of a chmod the daemon would end inline writes of another slot, or of none.

use std::collections::HashMap;

use jericho_fs::types::Ino;
use parking_lot::{Condvar, Mutex};

/// Counts the changes under way, by file.
#[derive(Default)]
pub(super) struct Changing {
    files: Mutex<HashMap<Ino, u32>>,
    ended: Condvar,
}

/// A change of a file, until it is dropped.
pub(super) struct Change<'a> {
    changing: &'a Changing,
    ino: Ino,
}

impl Changing {
    /// Notes that a file is about to change.
    pub fn begin(&self, ino: Ino) -> Change<'_> {
        *self.files.lock().entry(ino).or_default() += 1;
        Change {
            changing: self,
            ino,
        }
    }

    /// Returns whether a change of the file is under way.
    pub fn contains(&self, ino: Ino) -> bool {
        self.files.lock().contains_key(&ino)
    }

    /// Waits until no change of the file is under way.
    pub fn wait(&self, ino: Ino) {
        let mut files = self.files.lock();
        self.ended
            .wait_while(&mut files, |files| files.contains_key(&ino));
    }
}

impl Drop for Change<'_> {
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
