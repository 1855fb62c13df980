//! Pinned pages in the hands of a caller.

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key, Miss};

use crate::effects::Effects;
use crate::faults::OWNER_DAEMON;
use crate::object::{Error, Object};
use crate::requests::{GetRequest, Latched, PinnedPages};
use crate::scheduler::{self, perform};
use crate::shared::SliceShared;
use crate::{get, waiting};

/// Pinned pages: they stay in the cache until the grant is dropped (the Put).
pub struct Grant {
    shared: Arc<SliceShared>,
    object: Arc<dyn Object>,
    first: u64,
    entries: Vec<u32>,
    /// Pages that this grant made dirty.
    dirtied: Vec<u64>,
}

impl Grant {
    pub(crate) fn new(shared: Arc<SliceShared>, pages: PinnedPages) -> Grant {
        Grant {
            shared,
            object: pages.object,
            first: pages.first,
            entries: pages.entries,
            dirtied: vec![],
        }
    }

    /// Returns the first page.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the number of pages.
    pub fn count(&self) -> u32 {
        self.entries.len() as u32
    }

    fn entry(&self, page: u64) -> u32 {
        self.entries[(page - self.first) as usize]
    }

    /// Returns whether a page of the grant has contents. A page got with `Intent::Overwrite` has none if it was not in the cache
    /// and has not been written yet.
    pub fn is_filled(&self, page: u64) -> bool {
        !self
            .shared
            .context
            .memory
            .entry(self.entry(page))
            .state()
            .has(Flags::FILL)
    }

    /// Returns the node whose CPUs are local to a page of the grant, if its frame is in a spill range.
    pub fn node_of_spilled(&self, page: u64) -> Option<u16> {
        let memory = &self.shared.context.memory;
        memory.node_of_spilled(memory.entry(self.entry(page)).state().frame())
    }

    /// Returns the slice's index.
    pub fn slice(&self) -> u16 {
        self.shared.context.id
    }

    /// Reads bytes of a page of the grant, as of one instant. Panics outside of the grant. Must not be called for a page without
    /// contents. Fails when a writer latches the page for longer than a reader spins. The caller then drops the grant, and gets
    /// the page again with `Slice::when_unlatched`.
    pub fn read(&self, page: u64, offset: usize, out: &mut [u8]) -> Result<(), Latched> {
        let memory = &self.shared.context.memory;
        let key = Key::new(self.object.id(), page);
        match memory.read(key, offset, out, self.shared.context.epoch()) {
            Ok(()) => Ok(()),
            Err(Miss::Busy) => Err(Latched::new(memory, key)),
            Err(_) => {
                // A client has corrupted the table. Zeros reveal no other file's bytes; only the client's volume is affected.
                out.fill(0);
                Ok(())
            }
        }
    }

    /// Writes bytes of a page of the grant. The caller has reserved space for the page. For a page without contents, `data` must be
    /// a whole page.
    /// Fails as `read` does, and then leaves the page unchanged.
    pub fn write(&mut self, page: u64, offset: usize, data: &[u8]) -> Result<(), Latched> {
        let memory = &self.shared.context.memory;
        let index = self.entry(page);
        let entry = memory.entry(index);
        let word = entry.state();
        // For a page without contents, `data` is a whole page and the frame number is valid, unless a client has corrupted the
        // entry. Then `write_own` below refuses the page.
        let is_new = data.len() as u64 == PAGE_BYTES;
        if word.has(Flags::FILL) && is_new && memory.copy_in(word.frame(), 0, data).is_ok() {
            entry.publish(Flags::DIRTY.with(self.backed()));
            self.dirtied.push(page);
            self.shared.dirtied(1);
            return Ok(());
        }
        let key = Key::new(self.object.id(), page);
        match memory.write_own(key, offset, data, OWNER_DAEMON, self.shared.context.epoch()) {
            Ok(was_clean) => {
                if was_clean {
                    self.dirtied.push(page);
                    self.shared.dirtied(1);
                }
                self.back(index);
                Ok(())
            }
            Err(Miss::Busy | Miss::Broken | Miss::Changed | Miss::NoRoom) => {
                Err(Latched::new(memory, key))
            }
            // The table is corrupt; as in `read`, only this volume is affected.
            Err(Miss::Absent | Miss::Unbacked) => Ok(()),
        }
    }

    /// Returns BACKED for a page that is published now, if clients may write the object inline. The page was inserted before this
    /// check. If the object refuses inline writes only after the check, `Slice::revoke_writes` therefore finds the page, waits for
    /// the end of its fill, and clears BACKED.
    fn backed(&self) -> Flags {
        match self.object.may_write_inline() {
            true => Flags::BACKED,
            false => Flags::NONE,
        }
    }

    /// Allows inline writes to a page that has space reserved, if clients may write its object inline.
    fn back(&self, index: u32) {
        let entry = self.shared.context.memory.entry(index);
        if entry.state().has(Flags::BACKED) {
            return;
        }
        // Checks under the lock: `Slice::revoke_writes` takes the lock after the object refuses inline writes, and then visits the
        // pages.
        let _state = self.shared.lock();
        if self.object.may_write_inline() {
            entry.mark(Flags::BACKED);
        }
    }

    /// Publishes pages without contents as zeros. Lets clients write all pages of the grant inline, if they may write the object
    /// inline. The caller has reserved space for the pages.
    pub fn offer(&mut self) {
        let memory = &self.shared.context.memory;
        for index in &self.entries {
            let entry = memory.entry(*index);
            let word = entry.state();
            if word.has(Flags::FILL) {
                // Fails if the frame number is invalid: a client has corrupted the entry.
                let _ = memory.copy_in(word.frame(), 0, &[0; PAGE_BYTES as usize]);
                entry.publish(self.backed());
            } else {
                self.back(*index);
            }
        }
    }

    /// Marks a page dirty without changing it. Fails as `write` does.
    pub fn redirty(&mut self, page: u64) -> Result<(), Latched> {
        self.write(page, 0, &[])
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let mut effects = Effects::default();
        let shared = self.shared.clone();
        let context = &shared.context;
        let mut state = shared.lock();
        get::put(
            &mut state,
            context,
            &self.object,
            &self.dirtied,
            &self.entries,
            &mut effects,
        );
        if effects.released || !state.stalled.is_empty() || !state.invalidations.is_empty() {
            waiting::retry(&mut state, context, &mut effects);
        }
        drop(state);
        perform(&shared, effects);
    }
}

/// Gets pages. `done` runs when they are in the cache.
pub(crate) fn get(
    shared: &Arc<SliceShared>,
    request: GetRequest,
    done: impl FnOnce(Result<Grant, Error>) + Send + 'static,
) {
    // A strong reference would keep a closed slice in memory if its last Gets do not end.
    let weak = Arc::downgrade(shared);
    let done = Box::new(move |pages: Result<PinnedPages, Error>| {
        // The thread that runs this performs effects of the slice, so the slice is there.
        if let Some(shared) = weak.upgrade() {
            done(pages.map(|pages| Grant::new(shared, pages)));
        }
    });
    scheduler::get(shared, request, Some(done));
}
