//! The cached result of the check of an inode's privileges.

use std::sync::atomic::{AtomicU8, Ordering};

/// The set-id bits.
pub const SET_ID: u16 = 0o6000;

const UNKNOWN: u8 = 0;
const NONE: u8 = 1;
const SOME: u8 = 2;

/// The cached result of the check of an inode's privileges.
#[derive(Default)]
pub struct KnownPrivileges(AtomicU8);

impl KnownPrivileges {
    /// Returns the state of an inode that is being created with this mode and without capabilities.
    pub fn without_capability(perm: u16) -> KnownPrivileges {
        let known = KnownPrivileges::default();
        known.set(perm & SET_ID != 0);
        known
    }

    /// Clears the cached result before the mode or the attribute changes. The caller holds the inode's lock exclusively.
    pub fn forget(&self) {
        self.0.store(UNKNOWN, Ordering::Release);
    }

    /// Stores the result of a check.
    pub fn set(&self, some: bool) {
        self.0
            .store(if some { SOME } else { NONE }, Ordering::Release);
    }

    /// Returns the cached result: whether there are privileges. `None` if there is no result.
    #[inline]
    pub fn get(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            UNKNOWN => None,
            known => Some(known == SOME),
        }
    }
}
