//! Slices: the page cache of one home node, its pipeline, evictor and write-back.
//!
//! Knows pages of numbered objects, not files. See docs/internals/cache.md for the protocol.
#![forbid(unsafe_code)]

mod object;
pub use object::{Error, Object, Place, Run};

use std::ops::Range;
use std::sync::Arc;

/// What a Get is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The pages will be read.
    Read,
    /// Parts of the pages will be changed: contents are fetched first. The caller has reserved space.
    Modify,
    /// The pages will be replaced as a whole: nothing is fetched. The caller has reserved space.
    Overwrite,
}

/// Counters of a slice since it was started, and its state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Frames of the slice.
    pub frames: u64,
    /// Frames that hold a page.
    pub resident: u64,
    /// Pages that are newer than the device.
    pub dirty: u64,
    /// Pages that were found.
    pub hits: u64,
    /// Pages that were not.
    pub misses: u64,
    /// Pages dropped to make room.
    pub evictions: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes read ahead of a request.
    pub read_ahead_bytes: u64,
    /// Bytes written to devices.
    pub written_back_bytes: u64,
    /// Write transfers (coalescing: written_back_bytes / write_backs).
    pub write_backs: u64,
    /// Gets that waited for a frame.
    pub stalled: u64,
    /// Gets that waited for I/O of another.
    pub clashed: u64,
    /// Writers that waited at the dirty limit.
    pub throttled: u64,
    /// Write-backs that failed.
    pub write_errors: u64,
}

/// Called once, when the operation is over; in the caller's thread or in a thread of the slice.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// A resident page of an object.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// Page number in the object.
    pub page: u64,
    /// Newer than the device.
    pub dirty: bool,
    /// The kernel's node that holds the frame, as the kernel reports it.
    pub kernel_node: Option<u32>,
}

/// One slice. (Skeleton: signatures that other crates use.)
pub struct Slice {
    _todo: (),
}

impl Slice {
    /// Index of the slice.
    pub fn id(&self) -> u16 {
        todo!()
    }
    /// Writes back the dirty pages of `object` in the range; `done` when they are on the device (written, not
    /// flushed). Pages dirtied after the call are not waited for.
    pub fn sync(&self, _object: &Arc<dyn Object>, _pages: Range<u64>, _done: Done) {
        todo!()
    }
    /// Writes back everything.
    pub fn sync_all(&self, _done: Done) {
        todo!()
    }
    /// Drops the object's pages in the range, dirty or not, after any I/O on them has ended. A page
    /// that is fetched after `done` sees what `Object::resolve` says then.
    pub fn invalidate(&self, _object: u64, _pages: Range<u64>, _done: Done) {
        todo!()
    }
    /// Zeroes bytes `range` (within the page) of a page and makes it dirty, fetching it first;
    /// the caller has reserved space (or the page is on the device).
    pub fn zero_part(&self, _object: &Arc<dyn Object>, _page: u64, _range: Range<usize>, _done: Done) {
        todo!()
    }
    /// The first page >= `from` of the object that is dirty or being written back.
    pub fn first_dirty(&self, _object: u64, _from: u64) -> Option<u64> {
        todo!()
    }
    /// Number of dirty pages of an object.
    pub fn dirty_of(&self, _object: u64) -> u64 {
        todo!()
    }
    /// The object's resident pages and the kernel's node of each.
    pub fn resident_of(&self, _object: u64, _pages: Range<u64>) -> Vec<Resident> {
        todo!()
    }
    /// Makes all of the object's cached pages in the range dirty after fetching them (for moving them
    /// to new blocks). Space is reserved by the caller.
    pub fn touch(&self, _object: &Arc<dyn Object>, _pages: Range<u64>, _done: Done) {
        todo!()
    }
    /// Counters and state.
    pub fn counters(&self) -> Counters {
        todo!()
    }
}
