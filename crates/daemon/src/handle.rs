//! An open file with its reader's position.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use jericho_client::ReadAhead;
use jericho_fs::fs::File;
use parking_lot::Mutex;

use crate::fast::Grants;
use crate::write::WriteSync;

/// An open file with the state of its reader (read-ahead) and what its program was granted.
pub struct Handle {
    pub(crate) file: Arc<File>,
    pub(crate) read_ahead: ReadAhead,
    /// Opened for writing.
    pub(crate) writable: bool,
    /// Durability of what is written through it (O_SYNC, O_DSYNC), where a request does not say.
    sync: AtomicU8,
    /// Reads change no access time (O_NOATIME).
    no_access_time: AtomicBool,
    /// Inline access. Its lock comes before those of the fast path.
    pub(crate) grants: Mutex<Grants>,
    /// Pages that a posted job will reserve; empty: no job is posted.
    pub(crate) soon: Mutex<Range<u64>>,
}

impl Handle {
    pub(crate) fn new(file: Arc<File>, writable: bool) -> Arc<Handle> {
        Arc::new(Handle {
            file,
            read_ahead: ReadAhead::default(),
            writable,
            sync: AtomicU8::new(0),
            no_access_time: AtomicBool::new(false),
            grants: Mutex::default(),
            soon: Mutex::default(),
        })
    }

    /// Whether its program was granted inline writes; true when that cannot be known without waiting.
    pub fn may_write_inline(&self) -> bool {
        let grants = self.grants.try_lock();
        grants.is_none_or(|grants| grants.write)
    }

    /// Sets whether reads leave the access time as it is (O_NOATIME).
    #[inline]
    pub fn set_no_access_time(&self, no: bool) {
        if self.no_access_time() != no {
            self.no_access_time.store(no, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn no_access_time(&self) -> bool {
        self.no_access_time.load(Ordering::Relaxed)
    }

    /// Sets how durable writes are that do not say so themselves.
    pub fn set_sync(&self, sync: WriteSync) {
        self.sync.store(sync as u8, Ordering::Relaxed);
    }

    pub(crate) fn sync(&self) -> WriteSync {
        match self.sync.load(Ordering::Relaxed) {
            0 => WriteSync::No,
            1 => WriteSync::Data,
            _ => WriteSync::Full,
        }
    }
}
