//! The note of the entry that a client's thread is about to latch. The daemon reads it after the program has died.

use std::sync::atomic::compiler_fence;

use crate::sync::{AtomicU64, Ordering};

/// Set in every note, so that a note is not 0. The word belongs to one thread.
const SET: u64 = 1 << 63;

/// Notes that a client's thread is about to latch an entry of a slice.
///
/// The note is one plain store before the latch is taken, and stays until the thread's next write. It names the entry while the
/// latch is held, and afterwards until the dirty page is reported. The daemon reads it in two cases. The first is the end of the
/// program: all stores of the program are visible then, so only their order within the thread matters. The second is the end of
/// inline writes of a file: the note names writers that have not noticed the end yet.
#[inline(always)]
pub(crate) fn note(intent: &AtomicU64, slice: u16, index: u32) {
    intent.store(
        SET | u64::from(slice) << 32 | u64::from(index),
        Ordering::Relaxed,
    );
    // Orders this thread's own stores, not other processors: if the thread dies after it has taken the latch, its note is stored.
    compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

/// Returns slice and entry of a note, both unchecked; `None` if the thread has not written yet.
pub(crate) fn read(intent: &AtomicU64) -> Option<(u16, u32)> {
    let word = intent.load(Ordering::Relaxed);
    (word & SET != 0).then_some(((word >> 32) as u16, word as u32))
}
