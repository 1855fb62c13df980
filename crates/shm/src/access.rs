//! One attempt to read or write a page through its entry: the order of checking, copying and checking again.
//!
//! Does not know where the bytes are, so that the model checker goes through the same steps.

use crate::entry::{Entry, Flags, PageState};
use crate::sync::{Ordering, fence};

/// Why a page was not read or written inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The page is not in the cache, or not filled yet.
    Absent,
    /// No space is reserved for the page: a write has to go through the daemon.
    Unbacked,
    /// A writer held the latch for too long.
    Busy,
    /// The writer lost its latch: it held the latch for too long, or its signal handler gave it up. The page is not written.
    Broken,
    /// The file has changed since the writer checked it. The page is not written.
    Changed,
    /// The page is clean, and the writer's ring has no room to report it as dirty. The page is not written.
    NoRoom,
}

/// Fences before the calling thread fills a frame of the slice. The frame held another page before. A reader of that page that
/// sees bytes of the new one must also see that the old one is gone. The fence of `Entry::insert` orders only the thread that
/// inserts, and another thread may fill the frame. Pairs with the fence of `state_after_copy`.
#[inline]
pub(crate) fn before_fill() {
    fence(Ordering::Release);
}

/// Returns whether the page can be read. Fails with the reason why not.
#[inline]
pub(crate) fn check_readable(seen: PageState) -> Result<(), Miss> {
    if seen.has(Flags::VALID) {
        Ok(())
    } else {
        Err(Miss::Absent)
    }
}

/// Returns whether a client can write the page without asking the slice. Fails with the reason why not.
#[inline]
pub(crate) fn check_writable(seen: PageState) -> Result<(), Miss> {
    check_readable(seen)?;
    if seen.has(Flags::BACKED) {
        Ok(())
    } else {
        Err(Miss::Unbacked)
    }
}

/// Calls `copy`, which copies out of the frame of `seen`, the state that a lookup found. Returns `Some` when the copied bytes
/// were the page's at one instant, and `None` when another thread changed them meanwhile.
#[inline(always)]
pub(crate) fn try_read(
    entry: &Entry,
    seen: PageState,
    copy: impl FnOnce(u32) -> Result<(), Miss>,
) -> Result<Option<()>, Miss> {
    // Most pages are readable, and one comparison finds that.
    if !seen.is_readable() {
        check_readable(seen)?;
        return Ok(None);
    }
    copy(seen.frame())?;
    let same = entry.state_after_copy().is_same_page(seen);
    Ok(same.then_some(()))
}

/// Writes a page under its latch. `seen` is the state that a lookup found. All checks of it come before the latch, which is taken
/// only if the state still is `seen`. `copy` runs under the latch and copies into the frame; if it fails, the page stays as it was.
/// Returns whether the page was clean before, or `None` if another writer holds the latch. Fails with
/// `NoRoom` if the page is clean and `has_room` returns false: the writer could not report that the page becomes dirty.
#[inline(always)]
pub(crate) fn try_write(
    entry: &Entry,
    seen: PageState,
    owner: u16,
    has_room: impl FnOnce() -> bool,
    copy: impl FnOnce(u32) -> Result<(), Miss>,
) -> Result<Option<bool>, Miss> {
    // Most written pages are dirty already, and one comparison finds that.
    if !seen.is_ready_to_write() {
        check_writable(seen)?;
        if seen.has(Flags::LATCH) {
            return Ok(None);
        }
        // Checks before it takes the latch. The answer stays right, because the latch is taken only if the state still is `seen`.
        if !seen.has(Flags::DIRTY) && !has_room() {
            return Err(Miss::NoRoom);
        }
    }
    write_free(entry, seen, owner, copy)
}

/// Does the same as `try_write` for the daemon, which has reserved space for the page and needs no BACKED.
#[inline(always)]
pub(crate) fn try_write_own(
    entry: &Entry,
    seen: PageState,
    owner: u16,
    copy: impl FnOnce(u32) -> Result<(), Miss>,
) -> Result<Option<bool>, Miss> {
    check_readable(seen)?;
    if seen.has(Flags::LATCH) {
        return Ok(None);
    }
    write_free(entry, seen, owner, copy)
}

/// Writes a page that no writer had latched.
#[inline(always)]
fn write_free(
    entry: &Entry,
    seen: PageState,
    owner: u16,
    copy: impl FnOnce(u32) -> Result<(), Miss>,
) -> Result<Option<bool>, Miss> {
    let Some(latched) = entry.try_latch(seen, owner) else {
        return Ok(None);
    };
    let copied = copy(seen.frame());
    let set = if copied.is_ok() {
        Flags::DIRTY
    } else {
        Flags(0)
    };
    let before = entry.unlatch(latched, set).ok_or(Miss::Broken)?;
    copied?;
    Ok(Some(!before.has(Flags::DIRTY)))
}
