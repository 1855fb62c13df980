//! The slots segment: what the writers of a file share, size and locks.

use std::io;
use std::os::fd::OwnedFd;

use jericho_sys::memory::Mapping;

use crate::lock::{Holding, Lock};
use crate::sync::{AtomicU32, AtomicU64, Ordering, futex};

/// Stripe locks of a slot.
pub const STRIPES: usize = 15;
const HEADER: usize = 4096;
const SIZE_BITS: u32 = 46;
/// Bytes to a stripe.
const STRIPE_SHIFT: u32 = 20;

/// A file's size with the count of its truncations: `[cuts:18][bytes:46]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeWord(u64);

impl SizeWord {
    /// Bytes.
    #[inline]
    pub fn bytes(self) -> u64 {
        self.0 & ((1 << SIZE_BITS) - 1)
    }

    /// Whether the file was not truncated between the two.
    #[inline]
    pub fn same_cuts(self, other: SizeWord) -> bool {
        // Mostly it is the very same.
        self == other || (self.0 ^ other.0) >> SIZE_BITS == 0
    }

    fn with_bytes(self, bytes: u64) -> SizeWord {
        SizeWord(self.0 >> SIZE_BITS << SIZE_BITS | bytes & ((1 << SIZE_BITS) - 1))
    }

    fn cut_to(self, bytes: u64) -> SizeWord {
        SizeWord(self.0.wrapping_add(1 << SIZE_BITS)).with_bytes(bytes)
    }
}

/// A file's part that its writers change.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Slot {
    size: AtomicU64,
    modified: AtomicU64,
    _unused: [u64; 6],
    extend: Lock,
    stripes: [Lock; STRIPES],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 128);

impl Slot {
    #[cfg(all(test, loom))]
    pub(crate) fn new(bytes: u64) -> Slot {
        Slot {
            size: AtomicU64::new(bytes),
            modified: AtomicU64::new(0),
            _unused: [0; 6],
            extend: Lock::new(),
            stripes: std::array::from_fn(|_| Lock::new()),
        }
    }

    /// The size now. Acquire: pages that it covers are there.
    #[inline]
    pub fn size(&self) -> SizeWord {
        SizeWord(self.size.load(Ordering::Acquire))
    }

    /// A writer that holds the extend lock and has written the pages makes the file longer. False when the
    /// size is not `seen` any more.
    #[inline]
    pub fn extend(&self, seen: SizeWord, bytes: u64) -> bool {
        self.replace(seen, seen.with_bytes(bytes))
    }

    #[inline]
    fn replace(&self, seen: SizeWord, new: SizeWord) -> bool {
        self.size
            .compare_exchange(seen.0, new.0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// The daemon sets the size; writers that saw the old one are refused when `cut`.
    pub fn set_size(&self, bytes: u64, cut: bool) {
        let mut seen = self.size();
        loop {
            let next = if cut {
                seen.cut_to(bytes)
            } else {
                seen.with_bytes(bytes)
            };
            if self.replace(seen, next) {
                return;
            }
            seen = self.size();
        }
    }

    /// The daemon changes bytes of the file: writers and readers that saw the size begin anew.
    pub fn cut(&self) {
        self.size.fetch_add(1 << SIZE_BITS, Ordering::AcqRel);
    }

    /// The daemon takes the extend lock for `owner`; from who holds it for long it is taken away. Who lost it fails
    /// when it looks whether the size is what it was, or, if it saw the size only afterwards, whether the lock is
    /// still its own. The second part: it was taken away, and bytes of a write that did not happen may be behind the end.
    pub fn seize(&self, owner: u16) -> (Holding, bool) {
        if let Some(held) = self.extend.lock(owner) {
            return (held, false);
        }
        // In this order: who sees the new count, sees that the lock is not its own.
        let held = self.extend.take_over(owner);
        self.cut();
        (held, true)
    }

    /// The daemon has made the file longer, or equally long: the size grows to `bytes` unless it is more. `bytes` is asked
    /// after the word is read, so that a truncation in between counts.
    pub fn grow(&self, bytes: impl Fn() -> u64) {
        loop {
            let seen = self.size();
            let bytes = bytes();
            if seen.bytes() >= bytes || self.extend(seen, bytes) {
                return;
            }
        }
    }

    /// When the first inline write was since the mark was taken, in nanoseconds of the realtime clock; 0: none.
    #[inline]
    pub fn modified(&self) -> u64 {
        self.modified.load(Ordering::Relaxed)
    }

    /// An inline write happens now.
    #[inline]
    pub fn set_modified(&self, now_ns: u64) {
        if self.modified.load(Ordering::Relaxed) != now_ns {
            self.modified.store(now_ns, Ordering::Relaxed);
        }
    }

    /// The daemon takes the mark of inline writes.
    pub fn take_modified(&self) -> u64 {
        if self.modified() == 0 {
            return 0;
        }
        self.modified.swap(0, Ordering::AcqRel)
    }

    /// Held by who makes the file longer, or appends.
    #[inline]
    pub fn extend_lock(&self) -> &Lock {
        &self.extend
    }

    /// Whether `owner` is in a write that makes the file longer.
    pub fn is_extended_by(&self, owner: u16) -> bool {
        self.extend.is_held_by(owner)
    }

    /// Whether anybody but `daemon` is in such a write.
    pub fn is_extended_by_client(&self, daemon: u16) -> bool {
        !self.extend.is_held_by(0) && !self.extend.is_held_by(daemon)
    }

    /// Stripes that bytes `[offset, offset + len)` fall into, in the order in which they are locked. `len` > 0.
    #[inline]
    pub fn stripes_of(offset: u64, len: u64) -> impl Iterator<Item = usize> {
        let first = offset >> STRIPE_SHIFT;
        let last = (offset + len - 1) >> STRIPE_SHIFT;
        let mut wanted = 0u32;
        for mib in first..=last.min(first + STRIPES as u64 - 1) {
            wanted |= 1 << (mib % STRIPES as u64);
        }
        (0..STRIPES).filter(move |stripe| wanted >> stripe & 1 != 0)
    }

    /// A stripe's lock.
    #[inline]
    pub fn stripe(&self, stripe: usize) -> &Lock {
        &self.stripes[stripe]
    }

    /// The daemon gives the slot to another file: opens all locks. Their holders wrote the file before, and are dead or have
    /// closed it in the middle of a write.
    pub fn open_all(&self, daemon: u16) {
        for lock in std::iter::once(&self.extend).chain(&self.stripes) {
            if !lock.is_held_by(0) {
                let held = lock.take_over(daemon);
                lock.unlock(held);
            }
        }
    }

    /// Opens all locks that `owner`, who is dead, holds.
    pub fn open_dead(&self, owner: u16) {
        self.extend.open_dead(owner);
        self.stripes.iter().for_each(|lock| lock.open_dead(owner));
    }
}

/// The segment.
#[derive(Debug)]
pub struct Slots {
    mapping: Mapping,
    count: u32,
}

impl Slots {
    /// For `count` slots. Memory is taken as slots are used.
    pub fn create(name: &str, count: u32) -> io::Result<Slots> {
        let len = HEADER + count as usize * size_of::<Slot>();
        let mapping = Mapping::create(&format!("jericho-{name}-slots"), len, false)?;
        Ok(Slots { mapping, count })
    }

    /// Another process's. Errors as `Mapping::from_fd`.
    pub fn attach(fd: OwnedFd, count: u32, writable: bool) -> io::Result<Slots> {
        let len = HEADER + count as usize * size_of::<Slot>();
        let mapping = Mapping::from_fd(fd, len, writable)?;
        Ok(Slots { mapping, count })
    }

    /// The segment, to be handed over.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Number of slots.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// A slot. `None` beyond the last. A process that mapped the segment read-only may only call what
    /// reads: a write would end it with SIGSEGV.
    #[inline]
    pub fn slot(&self, index: u32) -> Option<&Slot> {
        (index < self.count).then(|| {
            // SAFETY: the mapping has room for `count` slots after the header and stays mapped while `self`
            // lives; its start is page-aligned, so slots are aligned. All fields are atomics, valid for every
            // bit pattern, but for unused bytes that nobody reads.
            unsafe {
                &*self
                    .mapping
                    .as_ptr()
                    .add(HEADER)
                    .cast::<Slot>()
                    .add(index as usize)
            }
        })
    }

    fn bell(&self) -> &AtomicU32 {
        // SAFETY: the header's first word; as in `slot`.
        unsafe { &*self.mapping.as_ptr().cast::<AtomicU32>() }
    }

    /// A writing client wakes the daemon.
    pub fn ring(&self) {
        self.bell().fetch_add(1, Ordering::SeqCst);
        futex::wake_all(self.bell());
    }

    /// The daemon: what the bell says now, for `sleep`.
    pub fn rung(&self) -> u32 {
        self.bell().load(Ordering::SeqCst)
    }

    /// The daemon: sleeps until the bell rings, unless it has since `seen`, or for `timeout`.
    pub fn sleep(&self, seen: u32, timeout: Option<std::time::Duration>) {
        match timeout {
            Some(timeout) => futex::wait(self.bell(), seen, timeout),
            None => futex::wait_forever(self.bell(), seen),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_saw_the_size_before_a_truncation_cannot_extend() {
        let slots = Slots::create("test", 4).unwrap();
        let slot = slots.slot(3).unwrap();
        assert!(slots.slot(4).is_none());
        slot.set_size(10_000, false);
        let seen = slot.size();
        slot.set_size(10_000, true);
        assert_eq!(slot.size().bytes(), 10_000);
        assert!(!slot.extend(seen, 20_000));
        assert!(slot.extend(slot.size(), 20_000));
        slot.grow(|| 15_000);
        assert_eq!(slot.size().bytes(), 20_000);
        slot.grow(|| 25_000);
        assert_eq!(slot.size().bytes(), 25_000);
    }

    #[test]
    fn stripes_come_in_order_and_cover_the_range() {
        let of = |offset, len| Slot::stripes_of(offset, len).collect::<Vec<_>>();
        assert_eq!(of(0, 1), [0]);
        assert_eq!(of((1 << 20) - 1, 2), [0, 1]);
        assert_eq!(of(14 << 20, 2 << 20), [0, 14]);
        assert_eq!(of(3 << 20, 1 << 30).len(), STRIPES);
    }
}
