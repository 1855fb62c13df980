//! A file that has a slot, and the inline access that handles were granted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use jericho_fs::File;
use jericho_shm::Refusal;
use parking_lot::{Mutex, RwLock};

use super::extend::ExtendHolders;
use super::kernel_pages::KernelPages;
use super::range::RangeHolders;

/// A file that may be accessed inline.
pub(crate) struct SlotFile {
    pub slot: u32,
    pub file: Arc<File>,
    /// Number of handles that were granted inline access, and number of them that may write. Changed with the file's
    /// part of `Files` locked for writing.
    pub granted: AtomicU32,
    pub writers: AtomicU32,
    /// Number of reasons against inline access of the file: mapped handles, and changes that gave the file set-id
    /// bits or capabilities (these count until the slot is freed). Changed with the file's part of `Files` locked for writing.
    pub mapped: AtomicU32,
    pub kernel_pages: KernelPages,
    /// The daemon's hold on the slot's extend lock.
    pub extend: ExtendHolders,
    /// The daemon's hold on the words of the range lock.
    pub range: RangeHolders,
    /// The daemon has logged that a client claims a size beyond the reserved space.
    pub size_warned: AtomicBool,
    /// Held while a writable handle is released.
    pub closing: Mutex<()>,
    /// Held for reading from the moment at which a thread takes what clients have changed until it has applied that.
    pub absorbing: RwLock<()>,
    free_slots: Arc<Mutex<FreeSlots>>,
}

impl SlotFile {
    /// Takes a free slot below `count` for a file. Returns `None` when all are taken.
    pub fn take(
        file: &Arc<File>,
        free_slots: &Arc<Mutex<FreeSlots>>,
        count: u32,
    ) -> Option<SlotFile> {
        let slot = free_slots.lock().take(count)?;
        Some(SlotFile {
            slot,
            file: file.clone(),
            granted: AtomicU32::new(0),
            writers: AtomicU32::new(0),
            mapped: AtomicU32::new(0),
            kernel_pages: KernelPages::default(),
            extend: ExtendHolders::default(),
            range: RangeHolders::default(),
            size_warned: AtomicBool::new(false),
            closing: Mutex::default(),
            absorbing: RwLock::default(),
            free_slots: free_slots.clone(),
        })
    }

    pub fn is_written(&self) -> bool {
        self.writers.load(Ordering::Acquire) > 0
    }
}

impl Drop for SlotFile {
    /// Frees the slot's number with the last reference to the slot. A thread that still holds the `SlotFile` would otherwise
    /// apply its change to the slot's next file.
    fn drop(&mut self) {
        self.free_slots.lock().back.push(self.slot);
    }
}

/// The inline access that a handle was granted.
#[derive(Default)]
pub(crate) struct Grants {
    pub file: Option<Arc<SlotFile>>,
    pub write: bool,
    pub mapped: bool,
    /// The handle counts as one that uses the file through the kernel alone; see `File::count_kernel_user`.
    pub kernel_user: bool,
}

impl Grants {
    /// Returns the file if the handle writes it inline. Fails with `ReadOnly` otherwise.
    pub(super) fn written(&self) -> Result<&Arc<SlotFile>, Refusal> {
        let file = self.file.as_ref().filter(|_| self.write && !self.mapped);
        file.ok_or(Refusal::ReadOnly)
    }
}

/// Numbers of free slots.
#[derive(Default)]
pub(crate) struct FreeSlots {
    back: Vec<u32>,
    next: u32,
}

impl FreeSlots {
    /// Takes a free number below `count`. Returns `None` when all are taken.
    fn take(&mut self, count: u32) -> Option<u32> {
        if let Some(slot) = self.back.pop() {
            return Some(slot);
        }
        let slot = self.next;
        self.next += u32::from(slot < count);
        (slot < count).then_some(slot)
    }
}
