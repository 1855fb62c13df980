//! What this process has mapped of a volume.
//!
//! Sessions stay for the life of the process: a thread may look into any of them at any time, so none is
//! ever unmapped. A session is added for each daemon that is met, when one is wanted writable, and in
//! a child of fork(2), which is another client than its parent.

use jericho_shm::{Area, Control, SliceMemory, Slots};
use jericho_sys::files;

use crate::inside;

/// The segments of a volume's daemon, as this process has them.
#[derive(Debug)]
pub struct Session {
    /// Number among this process's sessions.
    pub number: usize,
    /// What the daemon tells.
    pub control: Control,
    /// What writers share.
    pub slots: Slots,
    /// This process's own.
    pub area: Area,
    /// Pages, slice by slice.
    pub slices: Vec<SliceMemory>,
    /// The owner number under which this process latches and locks.
    pub owner: u16,
}

impl Session {
    /// Of what was handed over.
    pub fn new(
        number: usize,
        control: Control,
        slots: Slots,
        area: Area,
        slices: Vec<SliceMemory>,
    ) -> Session {
        Session {
            number,
            owner: area.owner(),
            control,
            slots,
            area,
            slices,
        }
    }

    /// Whether this process may write inline.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.slices.first().is_some_and(SliceMemory::is_writable)
    }

    /// Counts an access to pages of a slice, as local when this thread runs on the slice's node.
    #[inline]
    pub fn account(&self, slice: u16, pages: u64, bytes: u64, write: bool) {
        let home = self.control.node_of_slice(slice);
        let local = self.control.node_of_cpu(files::current_cpu()) == home;
        let (line, alone) = inside::line(self.number, || self.area.take_thread());
        self.area
            .counter(line, slice)
            .add(local, pages, bytes, write, alone);
    }
}
