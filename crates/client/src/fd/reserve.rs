//! Has the daemon reserve pages beyond the end of a file for a writer that goes on.

use std::sync::atomic::Ordering::Relaxed;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Ahead, Call, Refusal};

use super::route::file;
use crate::descriptors::{NEVER, OpenFd, Position};
use crate::session::{self, InlineFile, Why, ask};

/// Fewest and most pages reserved beyond the end at a time for a writer that keeps extending the file. Each reservation has twice
/// as many pages as the one before.
const RESERVE_MIN: u32 = 16;
const RESERVE_MAX: u32 = 1024;
/// Number of extending writes that ask for no pages after the daemon has refused a reservation.
const RESERVE_PAUSE: u32 = 64;
/// The same after the daemon has answered `Busy` to `ASK_TRIES` requests.
const BUSY_PAUSE: u32 = 4;
/// Attempts of a writer to reserve pages, which fail with `Busy` while the daemon reserves the same pages for another request.
const ASK_TRIES: u32 = 4;

/// The end of what a call has written.
#[derive(Clone, Copy)]
pub(super) enum WrittenTo {
    /// The call has written nothing.
    Nothing,
    /// The call wrote at the fd's offset.
    Here,
    /// The call wrote up to this offset.
    Offset(u64),
}

/// Prepares a description for its next write, after a write that carried the wish for the description. Notes where that write
/// ended, and `reserved_to`, the page up to which the daemon has reserved pages (0: none).
pub(super) fn described_with_write(open: &OpenFd, written: WrittenTo, reserved_to: u64) {
    let end = match written {
        WrittenTo::Nothing => return,
        WrittenTo::Offset(end) => end,
        WrittenTo::Here => match open.description().offset.get(open.tag()) {
            Position::At(at) => at,
            _ => return,
        },
    };
    open.description().extended_to.store(end, Relaxed);
    let Some(facts) = open.facts() else { return };
    let session = session::get(facts.session).filter(|session| session.is_writable());
    let Some(Ok(file)) = session.map(|session| file(session, &facts)) else {
        return;
    };
    let (ahead, pages) = (file.ahead(), reserved_to.saturating_sub(end / PAGE_BYTES));
    // The file's other writers may have more pages reserved.
    if pages > 0 && ahead.to() < reserved_to {
        let pages = u32::try_from(pages).unwrap_or(RESERVE_MAX);
        ahead.tell(reserved_to, pages.min(RESERVE_MAX));
    }
}

/// Returns whether a write lacks a cached page with space reserved.
#[inline]
pub(super) fn is_missing(why: Why) -> bool {
    matches!(why, Why::Absent | Why::Unbacked)
}

/// Has pages reserved after an append that found no page at the end. The first append of a file reserves none, because it may be
/// the only one. Returns true if the append is worth another try.
#[cold]
pub(super) fn reserve_for_append(
    open: &OpenFd,
    file: &InlineFile<'_>,
    len: usize,
) -> std::result::Result<bool, Why> {
    let extends = open.description().extended_to.load(Relaxed) != NEVER;
    if !extends && file.ahead().to() == 0 {
        return Ok(false);
    }
    // Other writers may have moved the end meanwhile.
    reserve(open, file, len, || file.size())
}

pub(super) fn extended(open: &OpenFd, file: &InlineFile<'_>, end: u64) {
    let d = open.description();
    d.extended_to.store(end, Relaxed);
    let ahead = file.ahead();
    let (to, pages) = (ahead.to(), ahead.pages());
    // Half of the pages are used, so more are requested in time.
    if end / PAGE_BYTES + u64::from(pages / 2) >= to && to > 0 {
        reserve_soon(open, ahead, end, to, pages);
    }
}

/// Does the same as `extended` after a write through the kernel.
pub(super) fn extended_by_kernel(open: &OpenFd, end: u64) {
    open.description().extended_to.store(end, Relaxed);
    // The session may have been replaced by a writable one since the write began.
    let Some(facts) = open.facts() else { return };
    let session = session::get(facts.session).filter(|session| session.is_writable());
    if let Some(file) = session.and_then(|session| file(session, &facts).ok()) {
        extended(open, &file, end);
    }
}

/// Has more pages reserved behind the present ones before they are needed.
#[cold]
fn reserve_soon(open: &OpenFd, ahead: &Ahead, end: u64, first: u64, pages: u32) {
    // The end has moved past the reserved pages by other means, so their state is unknown.
    if first < end.div_ceil(PAGE_BYTES) {
        ahead.claim(first, 0);
        return;
    }
    let pages = pages.saturating_mul(2).clamp(RESERVE_MIN, RESERVE_MAX);
    let claimed = first.saturating_add(u64::from(pages));
    if !ahead.claim(first, claimed) {
        return;
    }
    let call = Call::Reserve {
        first,
        pages,
        soon: true,
    };
    match ask(open.fd, call) {
        Ok(answer) if answer.status == 0 && answer.pages >= pages => ahead.tell_pages(pages),
        Ok(answer) if answer.status == 0 && answer.pages > 0 => {
            ahead.tell_pages(answer.pages);
            ahead.claim(claimed, first + u64::from(answer.pages));
        }
        // The next write that lacks a page asks again.
        _ => {
            ahead.claim(claimed, 0);
        }
    }
}

/// Has pages reserved after a write beyond the end found none there. Of several writers that need pages, one asks at a time.
/// Returns true if the write is worth another try.
#[cold]
pub(super) fn reserve(
    open: &OpenFd,
    file: &InlineFile<'_>,
    len: usize,
    at: impl Fn() -> std::result::Result<u64, Why>,
) -> std::result::Result<bool, Why> {
    let d = open.description();
    let _asking = file.begin_asking();
    let begin = at()?;
    // Another writer has had the pages reserved meanwhile.
    if file.is_writable(begin, len) {
        return Ok(true);
    }
    let pause = d.reserve_pause.load(Relaxed);
    if pause > 0 {
        d.reserve_pause.store(pause - 1, Relaxed);
        return Ok(false);
    }
    let first = begin / PAGE_BYTES;
    let needed = (begin + len as u64).div_ceil(PAGE_BYTES) - first;
    if needed > u64::from(RESERVE_MAX) {
        return Ok(false);
    }
    let ahead = file.ahead();
    let pages = (ahead.pages().saturating_mul(2))
        .clamp(RESERVE_MIN, RESERVE_MAX)
        .max(needed as u32);
    let call = Call::Reserve {
        first,
        pages,
        soon: false,
    };
    for _ in 0..ASK_TRIES {
        let answer = ask(open.fd, call);
        if let Ok(answer) = answer
            && answer.status == 0
            && u64::from(answer.pages) >= needed
        {
            ahead.tell(first + u64::from(answer.pages), pages);
            return Ok(true);
        }
        // Another writer has had the pages reserved, or the end has moved.
        if file.is_writable(begin, len) || at()? != begin {
            return Ok(true);
        }
        if !answer.is_ok_and(|answer| answer.status == Refusal::Busy as u32) {
            ahead.forget();
            d.reserve_pause.store(RESERVE_PAUSE, Relaxed);
            return Ok(false);
        }
        // The daemon's thread that reserves pages in advance is reserving these pages now.
        std::thread::yield_now();
    }
    d.reserve_pause.store(BUSY_PAUSE, Relaxed);
    Ok(false)
}
