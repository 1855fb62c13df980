//! Grants that a program gets together with a read or write that it makes anyway.
//!
//! A thread of a client leaves a wish in its block and makes an ordinary call. The thread that serves the request grants the slot
//! before it replies. Protocol: docs/formats/shm.md, *Wishes*.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;
use jericho_shm::{ClientThread, Granted, Refusal, Wish};

use super::Fast;
use super::trusted::Asker;
use super::wishers::Wisher;
use crate::handle::Handle;

/// Fewest and most pages that are reserved with a wish. A writer that continues asks for more.
const RESERVE_MIN: u64 = 16;
const RESERVE_MAX: u64 = 64;

/// The request with which a wish is answered.
#[derive(Debug, Clone, Copy)]
pub enum Served {
    /// A read that a program waits for, which is about to begin.
    Read,
    /// A write that has ended.
    Write {
        /// Where it ended. `None` when it was an append.
        end: Option<u64>,
        /// Bytes that it wrote.
        len: usize,
        /// The thread may wait for space and pages.
        may_wait: bool,
    },
}

impl Fast {
    /// Records which block the thread uses, if the thread belongs to the client that `block` names. `thread`: its id in the
    /// daemon's pid namespace, 0 when it has none there.
    pub(super) fn knows_thread(&self, block: ClientThread, thread: u32) {
        if thread == 0
            || block.instance != self.control.instance()
            || self.wishers.is_known(thread, block)
            || !self.is_client_thread(block.owner, thread)
        {
            return;
        }
        // While the clients are locked, no thread buries the client, which would remove its threads.
        let clients = self.clients.lock();
        if let Some(client) = clients.by_owner.get(&block.owner) {
            let wisher = Wisher {
                owner: block.owner,
                block: block.block,
                area: client.area.clone(),
            };
            self.wishers.add(thread, wisher);
        }
    }

    /// Returns whether the calling thread may leave wishes. Costs one load for other threads.
    #[inline]
    pub fn may_wish(&self, asker: Asker) -> bool {
        self.wishers.entry(asker.thread).is_some()
    }

    /// Grants the handle a slot if the calling thread has left a wish for its file. Call it before the reply. Never waits: if the
    /// grant would have to wait, the thread asks by an ioctl later.
    #[inline]
    pub fn answer_wish(self: &Arc<Self>, handle: &Arc<Handle>, asker: Asker, served: Served) {
        if let Some(entry) = self.wishers.entry(asker.thread)
            && let Some(wisher) = entry.lock(asker.thread)
            && let Some(wisher) = &*wisher
        {
            self.answer_wish_of(wisher, handle, asker, served);
        }
    }

    fn answer_wish_of(
        self: &Arc<Self>,
        wisher: &Wisher,
        handle: &Arc<Handle>,
        asker: Asker,
        served: Served,
    ) {
        let wishing = wisher.area.wishing(wisher.block);
        let Some(wish) = wishing.take(handle.file.ino()) else {
            return;
        };
        if self.closing.load(Ordering::SeqCst) || !self.trusted.includes(asker.uid, asker.gid) {
            return;
        }
        if let Ok(granted) = self.grant_wish(handle, wish, served) {
            wishing.grant(wish, granted);
            self.counts.slots_by_wish.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn grant_wish(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        wish: Wish,
        served: Served,
    ) -> Result<Granted, Refusal> {
        let mut grants = handle.grants.try_lock().ok_or(Refusal::Busy)?;
        let (answer, first) = self.grant_slot(handle, &mut grants, wish.write)?;
        drop(grants);
        if let Some(slot_file) = first {
            // Clients learn from the slot's word that they may write.
            self.begin_inline_writes(slot_file, || ());
        }
        Ok(Granted {
            slot: answer.slot,
            generation: answer.generation,
            reserved_to: match served {
                Served::Write { end, len, may_wait } if wish.write && wish.reserve => {
                    self.reserve_behind(handle, end, len, may_wait)
                }
                _ => 0,
            },
        })
    }

    /// Reserves pages beyond the end of the file for a program whose write ended there. Returns the page after the last one, 0
    /// for none.
    fn reserve_behind(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        end: Option<u64>,
        len: usize,
        may_wait: bool,
    ) -> u64 {
        let size = handle.file.size();
        if end.is_some_and(|end| end < size) {
            return 0;
        }
        // The first of these pages is the one in which the file ends.
        let first = size / PAGE_BYTES;
        let pages = (len as u64).div_ceil(PAGE_BYTES) + 1;
        let pages = pages.clamp(RESERVE_MIN, RESERVE_MAX) as u32;
        let reserved = match may_wait {
            true => self.reserve(handle, first, pages),
            false => self.post_reserve(handle, first..first + u64::from(pages)),
        };
        reserved.map_or(0, |pages| first + u64::from(pages))
    }
}

#[cfg(test)]
mod tests;
