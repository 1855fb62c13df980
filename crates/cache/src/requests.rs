//! What callers ask of a slice, and the records of the requests that wait.

use std::ops::Range;
use std::sync::Arc;

use jericho_shm::{Flags, Key, PageState as Word, SliceMemory};

use crate::checks::Check;
use crate::object::{Error, Object};

/// Maximum number of pages of one Get: 1 MiB.
pub const PAGES_PER_GET_MAX: u32 = 256;

/// Purpose of a Get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The caller reads the pages.
    Read,
    /// The caller changes parts of the pages, so their contents are fetched first. It has reserved space.
    Modify,
    /// The caller replaces whole pages, so nothing is fetched. It has reserved space.
    Overwrite,
}

/// Callback that runs once, at the end of the operation. The thread that takes the last step of the operation runs it: the caller,
/// a thread of the slice, or any other caller of the slice, for example one that drops a `Grant`.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// The pages and the intent of a Get.
#[derive(Clone)]
pub(crate) struct GetRequest {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub count: u32,
    pub intent: Intent,
}

/// The result of a Get: pages in the table, each with a pin that the receiver releases.
pub(crate) struct PinnedPages {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub entries: Vec<u32>,
}

pub(crate) type GetDone = Box<dyn FnOnce(Result<PinnedPages, Error>) + Send>;

/// A Get that waits.
pub(crate) struct PendingGet {
    pub request: GetRequest,
    /// `None` for read-ahead.
    pub done: Option<GetDone>,
    /// Entries pinned for this Get so far.
    pub held: Vec<u32>,
    /// Number of events that this Get waits for: its fill must start, its reads must end, and other Gets' fills must end.
    pub remaining: u32,
    pub error: Option<Error>,
    /// Another Get fills some of the pages, so check all pages again at the end.
    pub reenter: bool,
    /// The Get has already waited in the queue for frames. It queues again only if too few frames are free, not because other
    /// Gets are in the queue.
    pub has_queued: bool,
}

impl PendingGet {
    pub fn new(request: GetRequest, done: Option<GetDone>) -> PendingGet {
        PendingGet {
            request,
            done,
            held: vec![],
            remaining: 0,
            error: None,
            reenter: false,
            has_queued: false,
        }
    }
}

/// Pages that a Get has inserted and that must be filled.
pub(crate) struct Fill {
    pub get: u64,
    pub object: Arc<dyn Object>,
    /// (page, entry, frame), in page order.
    pub pages: Vec<(u64, u32, u32)>,
    pub read_ahead: bool,
}

/// A read transfer in flight.
pub(crate) struct Reading {
    pub get: u64,
    pub entries: Vec<u32>,
    /// The pages may be written inline.
    pub backed: bool,
    /// The checksums of the pages, if the object keeps some.
    pub check: Option<Arc<Check>>,
}

/// An invalidation that waits for pages that are busy.
pub(crate) struct Invalidation {
    pub object: u64,
    pub busy: Vec<u64>,
    pub done: Done,
}

/// A page that another writer has latched.
#[derive(Debug)]
#[must_use = "the bytes were not transferred"]
pub struct Latched {
    pub(crate) key: Key,
    /// The latched state that was seen; `None` when the latch is free again.
    pub(crate) word: Option<Word>,
}

impl Latched {
    pub(crate) fn new(memory: &SliceMemory, key: Key) -> Latched {
        let word = memory.lookup(key).map(|found| found.state);
        let word = word.filter(|word| word.has(Flags::LATCH));
        Latched { key, word }
    }
}

/// A request that resumes when a latch changes hands.
pub(crate) struct Parked {
    pub latched: Latched,
    pub resume: Box<dyn FnOnce() + Send>,
}

/// Work on syncs, for the evictor.
pub(crate) enum SyncJob {
    Pages {
        object: u64,
        pages: Range<u64>,
        done: Done,
    },
    All {
        done: Done,
    },
    /// The transfer of a small sync has ended, for which other syncs wait.
    TransferEnded {
        syncs: Vec<u64>,
        error: Option<Error>,
    },
}

impl SyncJob {
    /// Fails the job, because the slice closes.
    pub fn close(self) {
        if let SyncJob::Pages { done, .. } | SyncJob::All { done } = self {
            done(Err(Error::Closed));
        }
    }
}
