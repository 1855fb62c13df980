//! Makes reads.

use std::io::IoSliceMut;

use jericho_format::PAGE_BYTES;
use jericho_shm::Call;
use jericho_sys::files::{self, Result};

use super::buffers::{PARTS_MAX, is_fit, total};
use super::companions;
use super::early::{self, CallKind, CallPath, ordinary};
use super::kernel_path::{errno_after, from_kernel};
use super::offset::with_offset;
use super::route::{Route, facts, route};
use super::state::{described, fast_state};
use super::way::{by_kernel, interrupted};
use crate::access::ReadProgress;
use crate::descriptors::{Facts, OpenFd, Position, READ};
use crate::session::{InlineFile, Session, ask, report};
use crate::thread::{self, Doing, Thread};

/// Largest window of read-ahead: 4 MiB.
const WINDOW_PAGES_MAX: u32 = 1024;
/// Attempts to read without the offset's lock, which fail when another thread moves the offset.
const READ_TRIES: u32 = 3;

/// Makes a read(2).
#[inline]
pub fn read(fd: i32, out: &mut [u8]) -> Option<Result<usize>> {
    let (len, mut tries) = (out.len(), 0);
    loop {
        match early::begin(fd, CallKind::Read, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, len, false),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, len, false);
                return Some(call.has_read(files::read(fd, out)));
            }
        }
        let result = read_here(fd, len, |thread, open, facts, at| {
            read_at(thread, open, facts, out, at)
        });
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Makes a pread(2).
#[inline]
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Option<Result<usize>> {
    let at = u64::try_from(offset).ok()?;
    let len = out.len();
    let mut inline = || {
        let state = fast_state(fd)?;
        if !is_fit(out) {
            return None;
        }
        if let Some(call) = ordinary(fd, CallKind::Read)? {
            let _: Option<()> = by_kernel(fd, Some(at), len, false);
            return Some(call.has_read(files::pread(fd, out, offset)));
        }
        thread::enter(Doing::Reading, |thread| {
            let open = described(fd, state)?;
            read_at(thread, &open, &facts(&open)?, out, at)
        })?
    };
    inline().or_else(|| by_kernel(fd, Some(at), len, false))
}

/// Makes a readv(2), or with `at` a preadv(2).
pub fn readv(fd: i32, parts: &mut [IoSliceMut<'_>], at: Option<i64>) -> Option<Result<usize>> {
    let len = total(parts.iter().map(|part| part.len())).unwrap_or(0);
    let fits = parts.len() <= PARTS_MAX && len > 0;
    match at {
        Some(offset) => {
            let at = u64::try_from(offset).ok()?;
            let mut inline = || {
                let state = fast_state(fd).filter(|_| fits)?;
                if let Some(call) = ordinary(fd, CallKind::Read)? {
                    let _: Option<()> = by_kernel(fd, Some(at), len, false);
                    return Some(call.has_read(files::preadv(fd, parts, offset)));
                }
                thread::enter(Doing::Reading, |thread| {
                    let open = described(fd, state)?;
                    read_parts_at(thread, &open, &facts(&open)?, parts, len, at)
                })?
            };
            inline().or_else(|| by_kernel(fd, Some(at), len, false))
        }
        None => readv_here(fd, parts, len, fits),
    }
}

fn readv_here(
    fd: i32,
    parts: &mut [IoSliceMut<'_>],
    len: usize,
    fits: bool,
) -> Option<Result<usize>> {
    let mut tries = 0;
    loop {
        match early::begin(fd, CallKind::Read, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, len, false),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, len, false);
                return Some(call.has_read(files::readv(fd, parts)));
            }
        }
        let result = read_here(fd, len, |thread, open, facts, at| match fits {
            true => read_parts_at(thread, open, facts, parts, len, at),
            // The kernel reports the error of the buffers; it moves no bytes.
            false => Some(from_kernel(open, files::preadv(open.fd, parts, at as i64))),
        });
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Reads at the description's offset with `read`, and advances it.
#[inline]
fn read_here(
    fd: i32,
    len: usize,
    mut read: impl FnMut(&Thread, &OpenFd, &Facts, u64) -> Option<Result<usize>>,
) -> Option<Result<usize>> {
    let Some(state) = fast_state(fd) else {
        return by_kernel(fd, None, len, false);
    };
    let result = thread::enter(Doing::Reading, |thread| {
        let open = described(fd, state)?;
        let (offset, tag) = (&open.description().offset, open.tag());
        if offset.is_in_kernel(tag) {
            return None;
        }
        let facts = facts(&open)?;
        for _ in 0..READ_TRIES {
            let Position::At(at) = offset.get(tag) else {
                return None;
            };
            match read(thread, &open, &facts, at)? {
                Ok(0) => return Some(Ok(0)),
                Ok(n) if offset.advance(tag, at, at + n as u64) => return Some(Ok(n)),
                // Another thread advanced the offset, so these bytes are its. Reads again.
                Ok(_) => {}
                Err(errno) => return Some(Err(errno)),
            }
        }
        with_offset(
            thread,
            &open,
            0,
            |at| read(thread, &open, &facts, at),
            |n, at, written| at + n.and_then(|n| n.ok()).unwrap_or(0) as u64 + written,
        )?
    });
    match result {
        Some(result) => result,
        None => interrupted(fd, len, false, read),
    }
}

/// Reads at an offset: inline as far as pages hit, and the rest through the kernel.
fn read_at(
    thread: &Thread,
    open: &OpenFd,
    facts: &Facts,
    out: &mut [u8],
    at: u64,
) -> Option<Result<usize>> {
    if facts.flags & READ == 0 || !is_fit(out) {
        return read_by_kernel(open, out, at, 0);
    }
    let (done, why) = match route(open, facts) {
        Route::Ordinary => return None,
        Route::Kernel(why) => (0, why),
        Route::Inline(session, file) => {
            let read = file.read(at, out);
            let calls = u64::from(read.rest.is_none());
            thread.account(&file, false, at..at + read.done as u64, calls);
            read_ahead(open, session, &file, at, out.len(), &read);
            companions::bring_if_due(thread, open, session);
            match read.rest {
                None => return Some(Ok(read.done)),
                Some(why) => {
                    report::kernel(false, why);
                    let result = read_by_kernel(open, out, at, read.done);
                    if read.done == 0 || file.is_of_one_instant(&read) {
                        return result;
                    }
                    // A write over several pages interfered between the two parts.
                    return read_by_kernel(open, out, at, 0);
                }
            }
        }
    };
    report::kernel(false, why);
    read_by_kernel(open, out, at, done)
}

/// Reads into parts of `len` bytes in all at an offset, as if into one: all inline, or all through the kernel.
fn read_parts_at(
    thread: &Thread,
    open: &OpenFd,
    facts: &Facts,
    parts: &mut [IoSliceMut<'_>],
    len: usize,
    at: u64,
) -> Option<Result<usize>> {
    let fits = |part: &IoSliceMut<'_>| part.is_empty() || is_fit(part);
    if facts.flags & READ != 0 && parts.iter().all(fits) {
        let why = match route(open, facts) {
            Route::Ordinary => return None,
            Route::Kernel(why) => why,
            Route::Inline(session, file) => {
                let read = file.read_parts(at, len, parts);
                thread.account(
                    &file,
                    false,
                    at..at + read.done as u64,
                    u64::from(read.rest.is_none()),
                );
                read_ahead(open, session, &file, at, len, &read);
                companions::bring_if_due(thread, open, session);
                match read.rest {
                    None => return Some(Ok(read.done)),
                    Some(why) => why,
                }
            }
        };
        report::kernel(false, why);
    }
    let result = files::preadv(open.fd, parts, at as i64);
    Some(from_kernel(open, result))
}

/// Reads the rest through the kernel after `done` bytes.
#[cold]
fn read_by_kernel(open: &OpenFd, out: &mut [u8], at: u64, done: usize) -> Option<Result<usize>> {
    Some(
        match files::pread(open.fd, &mut out[done..], (at + done as u64) as i64) {
            Ok(n) => Ok(done + n),
            Err(_) if done > 0 => Ok(done),
            Err(errno) => Err(errno_after(open.fd, errno)),
        },
    )
}

/// Asks for the pages that a sequential reader will read next.
fn read_ahead(
    open: &OpenFd,
    session: &Session,
    file: &InlineFile<'_>,
    at: u64,
    len: usize,
    read: &ReadProgress,
) {
    if at >= read.size {
        return;
    }
    let reader = &open.description().read_ahead;
    let first = at / PAGE_BYTES;
    let end = (at + len as u64).min(read.size).div_ceil(PAGE_BYTES);
    if read.rest.is_none() && reader.is_quiet(first, end) {
        return;
    }
    let window = WINDOW_PAGES_MAX.min(session.control.home_frames_of(file.home()) / 16);
    let pages = reader.advance(first, end, read.size.div_ceil(PAGE_BYTES), window);
    let Some(pages) = pages else { return };
    // A cached file needs no request. This checks the first, the middle and the last page.
    let middle = (pages.start + pages.end) / 2;
    if [pages.start, middle, pages.end - 1]
        .into_iter()
        .all(|page| file.has_page(page))
    {
        return;
    }
    let call = Call::ReadAhead {
        first: pages.start,
        pages: (pages.end - pages.start) as u32,
    };
    // If the request fails, the reader only waits longer.
    let _ = ask(open.fd, call);
}
