//! The files that have a slot.
//!
//! Each request of the kernel looks its file up here while any file is written inline. One lock for all files would be a cache
//! line that the CPUs of all nodes write to, so the table is split by inode number.

use std::collections::HashMap;
use std::sync::Arc;

use jericho_fs::types::Ino;
use parking_lot::RwLock;

use super::slot_file::SlotFile;

/// Number of parts, a power of two.
const PARTS: usize = 64;

/// The slots of some files, by inode number.
pub(super) type Part = HashMap<Ino, Arc<SlotFile>>;

/// Fills two cache lines, because the CPU also fetches the adjacent line.
#[derive(Default)]
#[repr(align(128))]
struct Locked(RwLock<Part>);

/// The files that have a slot, by inode number.
pub(super) struct Files([Locked; PARTS]);

impl Default for Files {
    fn default() -> Files {
        Files(std::array::from_fn(|_| Locked::default()))
    }
}

impl Files {
    /// Returns the part to which the file belongs.
    pub fn part(&self, ino: Ino) -> &RwLock<Part> {
        // Consecutive inode numbers must not share a part.
        &self.0[ino as usize % PARTS].0
    }

    /// Returns the file's slot, if it has one.
    pub fn get(&self, ino: Ino) -> Option<Arc<SlotFile>> {
        self.part(ino).read().get(&ino).cloned()
    }

    /// Returns the files for which `is_wanted` returns true. Each part is read at a different moment.
    pub fn all(&self, is_wanted: impl Fn(&SlotFile) -> bool) -> Vec<Arc<SlotFile>> {
        let mut found = Vec::new();
        for Locked(part) in &self.0 {
            let part = part.read();
            let wanted = part.values().filter(|file| is_wanted(file));
            found.extend(wanted.cloned());
        }
        found
    }
}
