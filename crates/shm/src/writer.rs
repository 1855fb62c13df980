//! The threads that latch entries: those of clients, and the daemon's.

use crate::area::Area;
use crate::intent;
use crate::sync::AtomicU64;

/// A writer: the owner number for the latch and, for a client's thread, the place of its note.
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
            intent::note(intent, slice, index);
        }
    }
}

impl Area {
    /// Returns the writer of a thread that has the block for itself, for a slice.
    #[inline]
    pub fn writer(&self, owner: u16, block: u32, slice: u16) -> Writer<'_> {
        Writer::client(owner, self.intent(block), slice).reporting_to(self)
    }
}
