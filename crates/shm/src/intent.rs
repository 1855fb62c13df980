//! What a client's thread is about to latch, where the daemon finds it when the program has died.

use std::sync::atomic::compiler_fence;

use crate::area::Area;
use crate::sync::{AtomicU64, Ordering};

/// The word is one of a thread.
const SET: u64 = 1 << 63;

/// Who writes: the owner number for the latch and, for a thread of a client, where it notes the entry that it is about to latch.
///
/// The note is one plain store before the latch is taken, and stays until the thread's next write: it names the entry while the latch is
/// held, and afterwards until the page that became dirty is reported. The daemon looks at it after the program's end, when all
/// its stores are there, so only their order in the thread matters; and when a file may not be written inline any more, for who has not noticed yet.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    owner: u16,
    intent: Option<(&'a AtomicU64, u16)>,
    area: Option<&'a Area>,
}

impl<'a> Writer<'a> {
    /// A writer that leaves no note: the daemon.
    pub const fn daemon(owner: u16) -> Writer<'static> {
        Writer {
            owner,
            intent: None,
            area: None,
        }
    }

    /// A thread of a client, whose note is `intent`, in a slice.
    #[inline(always)]
    pub(crate) fn client(owner: u16, intent: &AtomicU64, slice: u16) -> Writer<'_> {
        Writer {
            owner,
            intent: Some((intent, slice)),
            area: None,
        }
    }

    /// The writer reports pages that it makes dirty in an area.
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

    /// Whether the writer could report a clean page that it makes dirty.
    #[inline(always)]
    pub(crate) fn can_report(&self) -> bool {
        self.area.is_none_or(Area::has_room)
    }

    /// The owner number.
    #[inline(always)]
    pub fn owner(&self) -> u16 {
        self.owner
    }

    /// The writer is about to latch an entry.
    #[inline(always)]
    pub fn about_to_latch(&self, index: u32) {
        if let Some((intent, slice)) = self.intent {
            intent.store(
                SET | u64::from(slice) << 32 | u64::from(index),
                Ordering::Relaxed,
            );
            // Not for other processors: a thread that is killed after the latch was killed after the note, too.
            compiler_fence(std::sync::atomic::Ordering::SeqCst);
        }
    }
}

/// Slice and entry of a note, both unchecked; `None`: the thread has not written.
pub(crate) fn read(intent: &AtomicU64) -> Option<(u16, u32)> {
    let word = intent.load(Ordering::Relaxed);
    (word & SET != 0).then_some(((word >> 32) as u16, word as u32))
}
