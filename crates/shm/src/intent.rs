//! The note of the entry that a client's thread is about to latch. The daemon reads it after the program has died.

use std::sync::atomic::compiler_fence;

use crate::area::Area;
use crate::sync::{AtomicU64, Ordering};

/// Set in every note, so that a note is not 0. The word belongs to one thread.
const SET: u64 = 1 << 63;

/// A writer: the owner number for the latch and, for a client's thread, the place of its note.
///
/// The note is one plain store before the latch is taken, and stays until the thread's next write. It names the entry while the
/// latch is held, and afterwards until the dirty page is reported. The daemon reads it in two cases. After the program has ended,
/// all its stores are visible, so only their order within the thread matters. The daemon also reads it after it has ended inline
/// writes of a file, to find writers that have not noticed yet.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    owner: u16,
    intent: Option<(&'a AtomicU64, u16)>,
    area: Option<&'a Area>,
}

impl<'a> Writer<'a> {
    /// Returns a writer without a note, for the daemon.
    pub const fn daemon(owner: u16) -> Writer<'static> {
        Writer {
            owner,
            intent: None,
            area: None,
        }
    }

    /// Returns the writer of a client's thread in a slice; `intent` holds its note.
    #[inline(always)]
    pub(crate) fn client(owner: u16, intent: &AtomicU64, slice: u16) -> Writer<'_> {
        Writer {
            owner,
            intent: Some((intent, slice)),
            area: None,
        }
    }

    /// Sets the area in which the writer reports pages that it makes dirty.
    #[inline(always)]
    pub(crate) fn reporting_to<'b>(self, area: &'b Area) -> Writer<'b>
    where
        Self: 'b,
    {
        Writer {
            area: Some(area),
            ..self
        }
    }

    /// Returns whether the writer has room to report a clean page that it makes dirty.
    #[inline(always)]
    pub(crate) fn can_report(&self) -> bool {
        self.area.is_none_or(Area::has_room)
    }

    /// Returns the owner number.
    #[inline(always)]
    pub fn owner(&self) -> u16 {
        self.owner
    }

    /// Notes that the writer is about to latch an entry.
    #[inline(always)]
    pub fn about_to_latch(&self, index: u32) {
        if let Some((intent, slice)) = self.intent {
            intent.store(
                SET | u64::from(slice) << 32 | u64::from(index),
                Ordering::Relaxed,
            );
            // Orders this thread's own stores, not other processors: a thread that dies after the latch has stored
            // the note.
            compiler_fence(std::sync::atomic::Ordering::SeqCst);
        }
    }
}

/// Returns slice and entry of a note, both unchecked; `None` if the thread has not written yet.
pub(crate) fn read(intent: &AtomicU64) -> Option<(u16, u32)> {
    let word = intent.load(Ordering::Relaxed);
    (word & SET != 0).then_some(((word >> 32) as u16, word as u32))
}
