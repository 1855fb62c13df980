//! A file, as a session reaches it through its slot.

use jericho_format::PAGE_BYTES;
use jericho_shm::{
    Ahead, Flags, Key, Segments, SizeWord, SliceMemory, Slot, SlotInfo, SlotWord, is_in_page,
    pieces,
};

use super::guards::AskingGuard;
use super::segments::Session;
use super::why::Why;

const PAGE: usize = PAGE_BYTES as usize;

/// A file, reached through a slot.
#[derive(Clone, Copy)]
pub struct InlineFile<'a> {
    pub session: &'a Session,
    pub info: &'a SlotInfo,
    pub index: u32,
    pub slot: &'a Slot,
    pub memory: &'a SliceMemory,
    /// Key of the file's first page.
    pub key: Key,
    /// The slot's word at the lookup. A different word ends the use of this value.
    pub word: SlotWord,
    /// The slot names this process among the file's writers, and its word allows writes.
    pub may_write: bool,
}

impl<'a> InlineFile<'a> {
    /// Returns the file of a slot, if the slot still is the one that the daemon gave out for the object.
    #[inline(always)]
    pub fn of(
        session: &'a Session,
        index: u32,
        generation: u32,
        object: u64,
    ) -> Result<InlineFile<'a>, Why> {
        if session.area.is_revoked() {
            return Err(Why::Withheld);
        }
        let info = session.control.slot(index).ok_or(Why::Stale)?;
        let slot = session.slots.slot(index).ok_or(Why::Stale)?;
        let word = info.word();
        if word.generation() != generation || info.object() != object {
            return Err(Why::Stale);
        }
        if word.flags() & SlotInfo::KERNEL != 0 {
            return Err(Why::Withheld);
        }
        let memory = session.slices.get(usize::from(word.home()));
        let memory = memory.ok_or(Why::Withheld)?;
        Ok(InlineFile {
            session,
            info,
            index,
            slot,
            memory,
            key: Key::new(object, 0),
            word,
            may_write: false,
        })
    }

    /// Names this process among the file's writers, if its session may write. Otherwise the result cannot be used to write the
    /// file.
    #[inline]
    pub fn for_writing(self) -> InlineFile<'a> {
        let (named, owner) = (self.memory.is_writable(), self.session.owner);
        if named && !self.slot.writers().contains(owner) {
            self.slot.writers().add(owner);
        }
        self.if_named(named)
    }

    /// Returns the file, writable if this process already is among its writers. Stores nothing, because the caller only reads.
    #[inline]
    pub fn for_reading(self) -> InlineFile<'a> {
        self.if_named(self.memory.is_writable() && self.slot.writers().contains(self.session.owner))
    }

    /// Returns whether the file may be written inline, except while too many pages are dirty.
    pub fn is_for_writing(&self) -> bool {
        self.may_write
    }

    /// Decides whether the file may be written. The decision holds as long as this value is used: a different word of the slot
    /// ends the use.
    #[inline]
    fn if_named(self, named: bool) -> InlineFile<'a> {
        let may_write = named && self.word.flags() & SlotInfo::NO_WRITE == 0;
        InlineFile { may_write, ..self }
    }

    /// Returns whether this process may still use its session. Does not check that the slot is unchanged: the caller does that
    /// when it reads the size.
    #[inline(always)]
    pub fn is_reachable(&self) -> bool {
        self.session.is_own() && !self.session.area.is_revoked()
    }

    /// Returns the size, after checking that the slot is still this file's.
    #[inline(always)]
    pub fn size_word(&self) -> Result<SizeWord, Why> {
        let size = self.slot.size();
        // Loads the word after the size: the daemon changes the generation before it stores another file's size.
        let word = self.info.word();
        if word != self.word {
            return Err(self.why_not(word));
        }
        Ok(size)
    }

    /// Returns why a slot with this word is not usable as this file.
    #[cold]
    fn why_not(&self, word: SlotWord) -> Why {
        if word.generation() != self.word.generation() {
            return Why::Stale;
        }
        match word.flags() & SlotInfo::KERNEL {
            0 => Why::Changed,
            _ => Why::Withheld,
        }
    }

    /// Returns the file's size in bytes.
    #[inline]
    pub fn size(&self) -> Result<u64, Why> {
        Ok(self.size_word()?.bytes())
    }

    /// Returns whether bytes `[at, at + len)` are within the file and one page.
    #[inline]
    pub fn has_in_page(&self, at: u64, len: usize) -> bool {
        let left = self.slot.size().bytes().checked_sub(at);
        left.is_some_and(|left| len as u64 <= left) && len <= PAGE - (at % PAGE_BYTES) as usize
    }

    /// Returns the slice that caches the file.
    pub fn home(&self) -> u16 {
        self.word.home()
    }

    /// Returns whether a page is in the cache.
    pub fn has_page(&self, page: u64) -> bool {
        self.memory.lookup(self.key.with_page(page)).is_some()
    }

    /// Returns whether the bytes' pages are all cached and have space reserved.
    pub fn is_writable(&self, at: u64, len: usize) -> bool {
        pieces(at, len).all(|(page, _, _)| {
            let key = self.key.with_page(page);
            self.memory.is_writable_page(key).is_ok()
        })
    }

    /// Returns the state of pages that the daemon has reserved beyond the end of the file.
    #[inline]
    pub fn ahead(&self) -> &'a Ahead {
        self.slot.ahead()
    }

    /// Keeps other writers from asking for pages beyond the end until the result is dropped.
    pub fn begin_asking(&self) -> AskingGuard<'a> {
        let ahead = self.ahead();
        let held = ahead.begin_asking(self.session.owner);
        AskingGuard { ahead, held }
    }

    /// Returns whether a writer of this process holds a lock that an access to these bytes waits for.
    pub fn is_locked_here(&self, at: u64, len: usize, extends: bool) -> bool {
        let owner = self.session.owner;
        let len = len.min(isize::MAX as usize) as u64;
        let several = len > 0 && !is_in_page(at, len as usize);
        extends && self.slot.is_extended_by(owner)
            || several && self.slot.has_range_of(Segments::of(at, len), owner)
    }

    /// Returns whether a writer of this process holds a page's latch.
    pub fn is_latched_here(&self, page: u64) -> bool {
        let found = self.memory.lookup(self.key.with_page(page));
        found.is_some_and(|found| {
            found.state.has(Flags::LATCH) && found.state.owner() == self.session.owner
        })
    }

    /// Returns whether the slot is unchanged since the beginning of the call. A writer asks while it holds the page's latch:
    /// the daemon revokes the right to write by changing this word first and then waiting for latches.
    #[inline(always)]
    pub fn is_still(&self) -> bool {
        self.info.word() == self.word
    }
}
