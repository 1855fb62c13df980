//! An open file with the state of its reader.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use jericho_client::ReadAhead;
use jericho_fs::{Done, File, Interruption, Result, SeenErrors};
use parking_lot::Mutex;

use crate::fast::Grants;
use crate::write_mode::WriteSync;

/// An open file with the state of its reader (read-ahead) and the inline access that its program was granted.
pub struct Handle {
    pub(crate) file: Arc<File>,
    pub(crate) read_ahead: ReadAhead,
    /// Opened for writing.
    pub(crate) writable: bool,
    /// Durability of writes through this handle (O_SYNC, O_DSYNC) that do not set their own.
    sync: AtomicU8,
    /// The write-back errors of the file that syncs through this handle have reported.
    errors: SeenErrors,
    /// Reads change no access time (O_NOATIME).
    no_access_time: AtomicBool,
    /// User of the last request that may need space. That user's limit of waits for space applies.
    user: AtomicU32,
    /// Inline access. Lock order: a thread takes this lock before the locks of the fast path.
    pub(crate) grants: Mutex<Grants>,
    /// Pages that a posted job will reserve. Empty when no job is posted.
    pub(crate) soon: Mutex<Range<u64>>,
}

impl Handle {
    pub(crate) fn new(file: Arc<File>, writable: bool) -> Arc<Handle> {
        Arc::new(Handle {
            errors: file.errors_seen(),
            file,
            read_ahead: ReadAhead::default(),
            writable,
            sync: AtomicU8::new(0),
            no_access_time: AtomicBool::new(false),
            user: AtomicU32::new(u32::MAX),
            grants: Mutex::default(),
            soon: Mutex::default(),
        })
    }

    /// Returns the callback for a sync through this handle: it calls `done`, and fails also with a write-back error of the file
    /// that this handle has not reported. If the caller of the sync was interrupted, the error waits for the next sync.
    pub(crate) fn reporting(self: &Arc<Self>, done: Done) -> Done {
        let (handle, interruption) = (self.clone(), Interruption::of_thread());
        Box::new(move |result: Result<()>| {
            if interruption.is_some_and(|interruption| interruption.begin().is_err()) {
                return done(result);
            }
            let reported = handle.file.report_errors(&handle.errors);
            done(result.and(reported));
        })
    }

    /// Returns whether its program was granted inline writes. Returns true when a lock is busy, so that it never
    /// waits.
    pub fn may_write_inline(&self) -> bool {
        let grants = self.grants.try_lock();
        grants.is_none_or(|grants| grants.write)
    }

    /// Sets the user of the next requests through this handle. Their waits for space count towards this user's limit.
    #[inline]
    pub fn set_user(&self, user: u32) {
        if self.user() != user {
            self.user.store(user, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn user(&self) -> u32 {
        self.user.load(Ordering::Relaxed)
    }

    /// Sets whether reads leave the access time unchanged (O_NOATIME).
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

    /// Sets the durability of writes that do not set their own.
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
