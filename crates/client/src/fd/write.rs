//! Makes writes.

use std::io::IoSlice;
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Call, SourceParts};
use jericho_sys::files::{self, Result};

use super::companions;
use super::data::{Data, Written};
use super::early::{self, CallKind, CallPath, ordinary};
use super::kernel_write::write_by_kernel;
use super::offset::with_offset;
use super::reserve::{extended, is_missing, reserve, reserve_for_append};
use super::route::{Route, facts, file, route};
use super::size::refresh_size;
use super::size_limit;
use super::state::{described, fast_state};
use super::way::{by_kernel, interrupted};
use crate::access::{Failed, WRITE_MAX};
use crate::descriptors::{APPEND, Facts, NO_INLINE_WRITE, OpenFd, SYNC, WRITE};
use crate::session::{self, InlineFile, Session, Why, ask, report};
use crate::thread::{self, Doing, Thread};

/// Reservations that an append makes before it goes through the kernel, if other writers use up the pages each time.
const APPEND_TRIES: u32 = 4;

/// Makes a write(2).
#[inline]
pub fn write(fd: i32, data: &[u8]) -> Option<Result<usize>> {
    write_data(fd, Data::new(&[IoSlice::new(data)]), None)
}

/// Makes a pwrite(2).
#[inline]
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Option<Result<usize>> {
    write_data(fd, Data::new(&[IoSlice::new(data)]), Some(offset))
}

/// Makes a writev(2), or with `at` a pwritev(2).
pub fn writev(fd: i32, parts: &[IoSlice<'_>], at: Option<i64>) -> Option<Result<usize>> {
    write_data(fd, Data::new(parts), at)
}

#[inline]
fn write_data(fd: i32, data: Data<'_, '_>, offset: Option<i64>) -> Option<Result<usize>> {
    if let Some(offset) = offset {
        let at = u64::try_from(offset).ok()?;
        let inline = || {
            let state = fast_state(fd).filter(|_| data.is_fit)?;
            if let Some(call) = ordinary(fd, CallKind::Write(data.len))? {
                let _: Option<()> = by_kernel(fd, Some(at), data.len, true);
                let result = match data.parts {
                    [part] => files::pwrite(fd, part, offset),
                    parts => files::pwritev(fd, parts, offset),
                };
                return Some(call.has_written(result, Some(at)));
            }
            thread::enter(Doing::Writing, |thread| {
                let open = described(fd, state)?;
                Some(write_at(thread, &open, &facts(&open)?, data, at)?.result)
            })?
        };
        return inline().or_else(|| by_kernel(fd, Some(at), data.len, true));
    }
    let mut tries = 0;
    loop {
        match early::begin(fd, CallKind::Write(data.len), true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, data.len, true),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, data.len, true);
                let result = match data.parts {
                    [part] => files::write(fd, part),
                    parts => files::writev(fd, parts),
                };
                return Some(call.has_written(result, None));
            }
        }
        let result = write_here(fd, data);
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Writes at the description's offset and advances it.
#[inline]
fn write_here(fd: i32, data: Data<'_, '_>) -> Option<Result<usize>> {
    let Some(state) = fast_state(fd) else {
        return by_kernel(fd, None, data.len, true);
    };
    let result = thread::enter(Doing::Writing, |thread| {
        let open = described(fd, state)?;
        if open.description().offset.is_in_kernel(open.tag()) {
            if facts(&open).is_some_and(|facts| facts.flags & APPEND != 0) {
                refresh_size(fd);
            }
            return None;
        }
        let facts = facts(&open)?;
        let written = with_offset(
            thread,
            &open,
            data.len,
            |at| write_at(thread, &open, &facts, data, at),
            |written, at, behind| match written {
                Some(written) if behind == 0 || written.result == Ok(data.len) => {
                    written.end + behind
                }
                Some(written) => written.end.max(at + data.len as u64) + behind,
                None => at + behind,
            },
        )?;
        Some(written?.result)
    });
    match result {
        Some(result) => result,
        None => interrupted(fd, data.len, true, |_, open, facts, at| {
            Some(write_by_kernel(open, facts, data, at, false, None).result)
        }),
    }
}

/// Writes at an offset, or at the end if the description appends. Returns `None` when the caller must make the ordinary call.
fn write_at(
    thread: &Thread,
    open: &OpenFd,
    facts: &Facts,
    data: Data<'_, '_>,
    at: u64,
) -> Option<Written> {
    let inline = facts.flags & (WRITE | SYNC | NO_INLINE_WRITE) == WRITE && data.is_fit;
    let mut kept = None;
    if inline {
        let why = match route(open, facts) {
            Route::Ordinary => return None,
            Route::Kernel(why) => why,
            Route::Inline(session, file) => {
                give_back_copied(open, session);
                companions::bring_if_due(thread, open, session);
                let written = writable(open, facts, session, file)
                    .map_err(Failed::from)
                    .and_then(|file| write_inline(thread, open, facts, &file, data, at));
                match written {
                    Ok(written) => return Some(written),
                    Err(failed) => {
                        // The kernel makes the write, or the rest of it, and counts its pages.
                        thread.spilled.take();
                        kept = failed.kept;
                        failed.why
                    }
                }
            }
        };
        report::kernel(true, why);
    }
    Some(write_by_kernel(open, facts, data, at, inline, kept))
}

/// Reports frames into which writers of this process copied after they had lost a page's latch. The daemon may reuse them.
#[inline]
fn give_back_copied(open: &OpenFd, session: &Session) {
    for (slice, memory) in session.slices.iter().enumerate() {
        while let Some(frame) = memory.take_copied() {
            let call = Call::Copied {
                slice: slice as u16,
                frame,
                owner: session.owner,
                instance: session.instance,
            };
            // If the call fails, the frame stays out of use until this process ends.
            let _ = ask(open.fd, call);
        }
    }
}

/// Returns the file through a writable session. Attaches one at the first write.
#[inline]
fn writable(
    open: &OpenFd,
    facts: &Facts,
    session: &'static Session,
    file_seen: InlineFile<'static>,
) -> std::result::Result<InlineFile<'static>, Why> {
    if session.is_writable() {
        return Ok(file_seen.for_writing());
    }
    attach_writable(open, facts, session)
}

#[cold]
fn attach_writable(
    open: &OpenFd,
    facts: &Facts,
    session: &Session,
) -> std::result::Result<InlineFile<'static>, Why> {
    let token = || {
        let answer = ask(open.fd, Call::Token).ok();
        answer.filter(|a| a.status == 0).map(|a| a.token)
    };
    let Ok(session) = session::attach_writable(session.instance, token) else {
        open.add_flags(NO_INLINE_WRITE);
        return Err(Why::Withheld);
    };
    // Changes only the session: another thread may have stored a new slot since `facts`.
    let facts = Facts {
        session: session.index,
        ..open.facts().unwrap_or(*facts)
    };
    open.set_slot(&facts);
    file(session, &facts).map(InlineFile::for_writing)
}

fn write_inline<'a>(
    thread: &Thread,
    open: &OpenFd,
    facts: &Facts,
    file: &InlineFile<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<Written, Failed<'a>> {
    let end = if facts.flags & APPEND != 0 {
        append_inline(open, file, data)?
    } else if data.len <= WRITE_MAX {
        write_piece(open, file, data, at)?
    } else {
        return write_pieces(thread, open, facts, file, data, at);
    };
    thread.account(file, true, end - data.len as u64..end, 1);
    Ok(Written {
        result: Ok(data.len),
        end,
    })
}

/// Splits a write that would hold the locks for too long into several inline writes, as the kernel splits long writes.
#[cold]
fn write_pieces<'a>(
    thread: &Thread,
    open: &OpenFd,
    facts: &Facts,
    file: &InlineFile<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<Written, Failed<'a>> {
    let [part] = data.parts else {
        return Err(Why::Far.into());
    };
    let (mut end, mut rest) = (at, None);
    for piece in part.chunks(WRITE_MAX) {
        let parts = [IoSlice::new(piece)];
        match write_piece(open, file, Data::new(&parts), end) {
            Ok(to) => end = to,
            Err(failed) if end == at => return Err(failed),
            Err(failed) => {
                rest = Some(failed);
                break;
            }
        }
    }
    let mut done = (end - at) as usize;
    thread.account(file, true, at..end, u64::from(rest.is_none()));
    if let Some(Failed { why, kept }) = rest {
        report::kernel(true, why);
        let rest = [IoSlice::new(&part[done..])];
        let rest = write_by_kernel(open, facts, Data::new(&rest), end, true, kept);
        // The first part counts, even if the rest failed.
        done += rest.result.unwrap_or(0);
    }
    Ok(Written {
        result: Ok(done),
        end: at + done as u64,
    })
}

/// Writes at most `WRITE_MAX` bytes. Returns the end of the write.
fn write_piece<'a>(
    open: &OpenFd,
    file: &InlineFile<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<u64, Failed<'a>> {
    let end = at.checked_add(data.len as u64).ok_or(Why::Far)?;
    if end <= file.size()? {
        file.write(at, data.len, SourceParts::new(data.parts))?;
        return Ok(end);
    }
    write_beyond(open, file, data, at, end)
}

/// Makes a write that seems to extend the file.
#[inline(never)]
fn write_beyond<'a>(
    open: &OpenFd,
    file: &InlineFile<'a>,
    data: Data<'_, '_>,
    at: u64,
    end: u64,
) -> std::result::Result<u64, Failed<'a>> {
    if size_limit::is_limited() {
        return Err(Why::Withheld.into());
    }
    let write = || file.write(at, data.len, SourceParts::new(data.parts));
    let mut result = write();
    let d = open.description();
    // A write that stopped half-way is not repeated here.
    let misses = |failed: &Failed<'_>| failed.kept.is_none() && is_missing(failed.why);
    if result.as_ref().is_err_and(misses)
        && d.extended_to.load(Relaxed) == at
        && reserve(open, file, data.len, || Ok(at))?
    {
        result = write();
    }
    if result.is_ok() {
        extended(open, file, end);
    }
    result.map(|()| end)
}

#[inline(never)]
fn append_inline(
    open: &OpenFd,
    file: &InlineFile<'_>,
    data: Data<'_, '_>,
) -> std::result::Result<u64, Why> {
    if size_limit::is_limited() {
        return Err(Why::Withheld);
    }
    if data.len > WRITE_MAX {
        return Err(Why::Far);
    }
    let append = || file.append(data.len, SourceParts::new(data.parts));
    let mut result = append();
    for _ in 0..APPEND_TRIES {
        if !result.is_err_and(is_missing) || !reserve_for_append(open, file, data.len)? {
            break;
        }
        result = append();
    }
    if let Ok(end) = result {
        extended(open, file, end);
    }
    result
}
