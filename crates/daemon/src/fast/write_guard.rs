//! The daemon's writes take the same locks as inline writers of the file.

use std::sync::Arc;

use jericho_cache::OWNER_DAEMON;
use jericho_format::PAGE_BYTES;
use jericho_shm::{Holding, Slot};

use super::SlotFile;
use crate::mounted::Mounted;

/// Locks held for a write; given back on drop, in any thread.
pub(crate) struct WriteGuard {
    mounted: Arc<Mounted>,
    file: Arc<SlotFile>,
    extend: bool,
    stripes: Vec<(usize, Holding)>,
}

impl WriteGuard {
    /// For a write of `len` bytes at `offset` (`None`: at the end), if clients write the file inline. A
    /// stripe that can't be had within some time is gone without, and the extend lock is then taken away: a client
    /// that stopped must not stop others.
    pub fn take(
        mounted: &Arc<Mounted>,
        file: Arc<SlotFile>,
        offset: Option<u64>,
        len: u64,
    ) -> WriteGuard {
        let slot = mounted.fast.slot(&file);
        let beyond = offset.is_none_or(|offset| offset + len > slot.size().bytes());
        let seized = beyond && file.extend.hold(slot);
        let mut stripes = vec![];
        if let Some(offset) = offset
            && len > 0
            && offset / PAGE_BYTES != (offset + len - 1) / PAGE_BYTES
        {
            for stripe in Slot::stripes_of(offset, len) {
                if let Some(held) = slot.stripe(stripe).lock(OWNER_DAEMON) {
                    stripes.push((stripe, held));
                }
            }
        }
        match seized {
            true => mounted.clear_seized(&file),
            false => mounted.settle_file(&file),
        }
        WriteGuard {
            mounted: mounted.clone(),
            file,
            extend: beyond,
            stripes,
        }
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        let slot = self.mounted.fast.slot(&self.file);
        for (stripe, held) in self.stripes.iter().rev() {
            slot.stripe(*stripe).unlock(*held);
        }
        if self.extend {
            self.file.extend.give_back(slot);
        }
    }
}
