//! One page's entry in the table: a key word and a state word.
//!
//! ```text
//!            insert(FILL)             publish                 latch
//!   EMPTY ────────────────▶ FILLING ───────────▶ VALID ◀──────────────▶ VALID+LATCH
//!     ▲                        │                   │        unlatch
//!     └────────────────────────┴───────────────────┘
//!              remove (failed)        remove (evicted, invalidated)
//! ```
//!
//! Every arrow but `latch` adds one to the version, and `latch` sets a bit that readers compare. A reader compares the state
//! before and after its copy. If both are equal, the copied bytes were the page's at one instant. DIRTY, WRITE_BACK and BACKED
//! say nothing about the bytes, so the comparison leaves them out.

use crate::sync::{AtomicU64, Ordering, fence};

use jericho_format::{OBJECT_MAX, PAGE_MAX};

const PAGE_BITS: u32 = PAGE_MAX.trailing_ones();
const _: () = assert!(PAGE_BITS + OBJECT_MAX.trailing_ones() == 64);

/// Object number and page number in one word: 30 and 34 bits. Zero is no key, because objects count from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub(crate) u64);

impl Key {
    /// Packs a key. `object` is 1..=`OBJECT_MAX`, `page` 0..=`PAGE_MAX`. Panics otherwise: a key that wraps would serve another
    /// file's bytes.
    #[inline]
    pub fn new(object: u64, page: u64) -> Key {
        assert!(
            object != 0 && object <= OBJECT_MAX && page <= PAGE_MAX,
            "page key out of range"
        );
        Key(object << PAGE_BITS | page)
    }

    pub(crate) fn from_word(word: u64) -> Option<Key> {
        (word >> PAGE_BITS != 0).then_some(Key(word))
    }

    /// Returns the key of another page of the same object. Panics when the page is beyond `PAGE_MAX`.
    #[inline]
    pub fn with_page(self, page: u64) -> Key {
        assert!(page <= PAGE_MAX, "page key out of range");
        Key(self.0 & !PAGE_MAX | page)
    }

    /// Returns a number that only the four neighbouring pages of a line share.
    #[inline]
    pub fn group(self) -> u64 {
        self.0 >> 2
    }

    /// Returns the object.
    #[inline]
    pub fn object(self) -> u64 {
        self.0 >> PAGE_BITS
    }

    /// Returns the page of the object.
    #[inline]
    pub fn page(self) -> u64 {
        self.0 & PAGE_MAX
    }

    /// Returns a well-mixed hash of the group of four neighbouring pages that share a line.
    #[inline]
    pub(crate) fn group_hash(self) -> u64 {
        let mut h = self.0 >> 2;
        h = (h ^ (h >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        h = (h ^ (h >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h ^ (h >> 32)
    }
}

/// Bits of the state word that tell which accesses the page allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub(crate) u64);

const FRAME_BITS: u32 = 26;
const FLAG_BITS: u32 = 6;
const OWNER_BITS: u32 = 10;
const VERSION_SHIFT: u32 = FRAME_BITS + FLAG_BITS + OWNER_BITS;
const FRAME_MASK: u64 = (1 << FRAME_BITS) - 1;
const OWNER_MASK: u64 = ((1 << OWNER_BITS) - 1) << (FRAME_BITS + FLAG_BITS);
const VERSION_ONE: u64 = 1 << VERSION_SHIFT;

impl Flags {
    /// No flags.
    pub const NONE: Flags = Flags(0);
    /// The frame holds the page's bytes.
    pub const VALID: Flags = Flags(1 << FRAME_BITS);
    /// The bytes are newer than the device's.
    pub const DIRTY: Flags = Flags(2 << FRAME_BITS);
    /// A writer is changing the bytes; its number is in the owner field.
    pub const LATCH: Flags = Flags(4 << FRAME_BITS);
    /// The bytes are being written to the device.
    pub const WRITE_BACK: Flags = Flags(8 << FRAME_BITS);
    /// The frame is being filled; its bytes mean nothing yet.
    pub const FILL: Flags = Flags(16 << FRAME_BITS);
    /// The page has space on the volume, or space is reserved for it: a client may write it without asking.
    pub const BACKED: Flags = Flags(32 << FRAME_BITS);

    /// Returns both sets of flags.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// A value of the state word: `[version:22][owner:10][flags:6][frame:26]`, high to low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageState(pub(crate) u64);

impl PageState {
    /// Most frames of one slice: 2^26 of 4 KiB, 256 GiB.
    pub const FRAMES_MAX: u32 = 1 << FRAME_BITS;
    /// Owners are 1..=`OWNER_MAX`.
    pub const OWNER_MAX: u16 = (1 << OWNER_BITS) - 1;

    /// Returns whether all of `flags` are set.
    #[inline]
    pub fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns whether any of `flags` is set.
    #[inline]
    pub fn any(self, flags: Flags) -> bool {
        self.0 & flags.0 != 0
    }

    /// Returns whether a client may write the page, no writer has latched it, and it is dirty already.
    #[inline(always)]
    pub(crate) fn is_ready_to_write(self) -> bool {
        let ready = Flags::VALID.0 | Flags::BACKED.0 | Flags::DIRTY.0;
        self.0 & (ready | Flags::LATCH.0) == ready
    }

    /// Returns whether the frame holds the page's bytes and no writer is changing them.
    #[inline]
    pub(crate) fn is_readable(self) -> bool {
        self.0 & (Flags::VALID.0 | Flags::LATCH.0) == Flags::VALID.0
    }

    /// Returns the frame's index.
    #[inline]
    pub fn frame(self) -> u32 {
        (self.0 & FRAME_MASK) as u32
    }

    /// Returns the owner that holds the latch.
    #[inline]
    pub fn owner(self) -> u16 {
        ((self.0 & OWNER_MASK) >> (FRAME_BITS + FLAG_BITS)) as u16
    }

    /// Returns whether a copy made between the two states is whole.
    #[inline]
    pub(crate) fn is_same_page(self, other: PageState) -> bool {
        const OF_NO_BYTES: u64 =
            OWNER_MASK | Flags::DIRTY.0 | Flags::WRITE_BACK.0 | Flags::BACKED.0;
        (self.0 ^ other.0) & !OF_NO_BYTES == 0
    }

    /// Returns the bits that identify the holder of the latch.
    #[inline]
    fn holder(self) -> u64 {
        self.0 & !(Flags::DIRTY.0 | Flags::WRITE_BACK.0 | Flags::BACKED.0)
    }

    /// Returns whether both states belong to the same holding of the latch.
    pub fn is_same_holding(self, other: PageState) -> bool {
        self.holder() == other.holder()
    }

    fn flags(self) -> u64 {
        self.0 & (((1 << FLAG_BITS) - 1) << FRAME_BITS)
    }

    /// Returns the next version with other flags and frame, and without owner.
    #[inline]
    pub(crate) fn next(self, flags: u64, frame: u32) -> PageState {
        let version = (self.0 >> VERSION_SHIFT << VERSION_SHIFT).wrapping_add(VERSION_ONE);
        PageState(version | flags | u64::from(frame))
    }

    #[inline]
    pub(crate) fn latched_by(self, owner: u16) -> PageState {
        PageState(
            self.0 & !OWNER_MASK | Flags::LATCH.0 | u64::from(owner) << (FRAME_BITS + FLAG_BITS),
        )
    }

    /// Returns the next version with `set` added, without latch and owner.
    #[inline]
    pub(crate) fn unlatched(self, set: Flags) -> PageState {
        PageState((self.0 & !(OWNER_MASK | Flags::LATCH.0) | set.0).wrapping_add(VERSION_ONE))
    }
}

/// An entry of the table: 16 bytes, four to a cache line.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct Entry {
    key: AtomicU64,
    state: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Entry>() == 16);

impl Entry {
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Entry {
        Entry {
            key: AtomicU64::new(0),
            state: AtomicU64::new(0),
        }
    }

    /// Returns the key; `None` for an empty entry.
    #[inline]
    pub fn key(&self) -> Option<Key> {
        Key::from_word(self.key.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn is(&self, key: Key) -> bool {
        self.key.load(Ordering::Relaxed) == key.0
    }

    /// Returns the state, if the entry is the key's.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<PageState> {
        // Loads the state before the key: the entry keeps the key while the version does not change.
        let state = self.state();
        self.is(key).then_some(state)
    }

    /// Returns the state. Pairs with the releases of `publish`, `unlatch` and `remove`: a thread that reads the frame afterwards
    /// sees the bytes written before them.
    #[inline]
    pub fn state(&self) -> PageState {
        PageState(self.state.load(Ordering::Acquire))
    }

    /// Returns the state after a copy. The fence keeps the copy's loads before this load.
    #[inline]
    pub(crate) fn state_after_copy(&self) -> PageState {
        fence(Ordering::Acquire);
        PageState(self.state.load(Ordering::Relaxed))
    }

    /// Takes the page's latch if the state is still `seen`. Returns the state with the latch. Acquire: the copy that follows does
    /// not move before it.
    #[inline]
    pub fn try_latch(&self, seen: PageState, owner: u16) -> Option<PageState> {
        debug_assert!(seen.has(Flags::VALID) && !seen.has(Flags::LATCH));
        let latched = seen.latched_by(owner);
        self.state
            .compare_exchange(seen.0, latched.0, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        // The latch must be visible before any byte of the copy: a reader that saw new bytes must also see the latch or a later
        // version. Pairs with the fence in `state_after_copy`.
        fence(Ordering::Release);
        Some(latched)
    }

    /// Releases the latch that left the state `latched`, and adds flags. Returns the state before; its DIRTY tells whether the
    /// page was dirty already. Returns `None` and changes nothing when the latch was broken meanwhile: the page may be another
    /// holder's.
    #[inline]
    pub fn unlatch(&self, latched: PageState, set: Flags) -> Option<PageState> {
        // Repeats, because a completed write-back may clear WRITE_BACK meanwhile.
        let mut seen = self.state.load(Ordering::Relaxed);
        loop {
            if PageState(seen).holder() != latched.holder() {
                return None;
            }
            let next = PageState(seen).unlatched(set).0;
            match self
                .state
                .compare_exchange_weak(seen, next, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return Some(PageState(seen)),
                Err(now) => seen = now,
            }
        }
    }

    /// Opens a latch that its holder cannot or will not release, if the state is still `seen`. The page becomes dirty with the
    /// present bytes of its frame. `frame`: the frame of the page from now on. BACKED stays unchanged: the right to write may
    /// have been revoked meanwhile, and must not come back.
    pub fn break_latch(&self, seen: PageState, frame: u32) -> bool {
        debug_assert!(seen.has(Flags::LATCH));
        let flags = seen.flags() & !Flags::LATCH.0 | Flags::DIRTY.0;
        self.state
            .compare_exchange(
                seen.0,
                seen.next(flags, frame).0,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// Releases the latch that left the state `latched`, and makes `frame` the page's frame. The caller is the slice, which has copied the page's
    /// bytes there. Whether the page is dirty stays unchanged. Returns false and changes nothing when another thread has broken the latch.
    ///
    /// Release: a reader that sees the new frame sees the copied bytes. The old frame is free then: a reader that still copies from it finds
    /// another version afterwards.
    pub fn move_latched(&self, latched: PageState, frame: u32) -> bool {
        let mut seen = self.state.load(Ordering::Relaxed);
        // Repeats, because BACKED may be cleared meanwhile.
        loop {
            let now = PageState(seen);
            if now.holder() != latched.holder() {
                return false;
            }
            let next = now.next(now.flags() & !Flags::LATCH.0, frame).0;
            match self
                .state
                .compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
    }

    /// Sets and clears flags that say nothing about the bytes, if the state is still `seen`.
    pub fn try_mark(&self, seen: PageState, set: Flags, clear: Flags) -> bool {
        self.state
            .compare_exchange(
                seen.0,
                seen.0 & !clear.0 | set.0,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// Sets flags that say nothing about the bytes. Returns the state before.
    pub fn mark(&self, set: Flags) -> PageState {
        PageState(self.state.fetch_or(set.0, Ordering::AcqRel))
    }

    /// Clears flags that say nothing about the bytes. Returns the state before.
    pub fn unmark(&self, clear: Flags) -> PageState {
        PageState(self.state.fetch_and(!clear.0, Ordering::AcqRel))
    }

    /// Revokes the right to write a page inline. `clear` is BACKED, or no flag when writers check another word under the latch.
    /// Returns `None` when no writer holds the page from here on. Otherwise returns the new state: a writer holds the latch, or
    /// the page is being filled and may be published with the right. The caller then calls again later.
    pub fn revoke(&self, clear: Flags) -> Option<PageState> {
        let before = self.unmark(clear);
        let after = PageState(before.0 & !clear.0);
        after.any(Flags::LATCH.with(Flags::FILL)).then_some(after)
    }

    /// Puts a page into an empty entry, in state FILL: its frame is being filled. Only the slice calls this.
    pub(crate) fn insert(&self, key: Key, frame: u32) {
        let seen = PageState(self.state.load(Ordering::Relaxed));
        // The version changes before the key appears (release), so that a reader that matched the new key cannot validate against
        // the old version.
        self.state
            .store(seen.next(Flags::FILL.0, frame).0, Ordering::Release);
        self.key.store(key.0, Ordering::Release);
        // As in `try_latch`, for the frame's previous page: a reader that saw bytes filled in from here on must also see that the
        // previous page is gone.
        fence(Ordering::Release);
    }

    /// Restores an entry that a client has corrupted, for a page that was filled earlier. Readers of the page get the present
    /// bytes of its frame.
    pub fn restore(&self) {
        self.mark(Flags::VALID);
        self.unmark(Flags::FILL);
    }

    /// Makes a filled page visible. Only the slice calls this. Release: pairs with `state`. Does not assert FILL: a malicious
    /// client may have cleared it.
    pub fn publish(&self, flags: Flags) {
        let seen = PageState(self.state.load(Ordering::Relaxed));
        // A swap instead of a store, because `revoke` may change the word at the same moment and must come before or after.
        self.state.swap(
            seen.next(Flags::VALID.0 | flags.0, seen.frame()).0,
            Ordering::Release,
        );
    }

    /// Empties the entry if its state is still `seen`. The frame then is the slice's. Only the slice calls this.
    pub(crate) fn try_clear(&self, seen: PageState) -> bool {
        if self
            .state
            .compare_exchange(
                seen.0,
                seen.next(0, 0).0,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_err()
        {
            return false;
        }
        self.key.store(0, Ordering::Release);
        true
    }
}
