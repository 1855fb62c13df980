//! Makes way for a signal handler that has interrupted an inline call of its own thread.

use std::time::Duration;

use jericho_format::PAGE_BYTES;
use jericho_shm::Call;
use jericho_sys::files::{self, Result};
use jericho_sys::signals;

use super::route::file;
use crate::access::WRITE_MAX;
use crate::descriptors::{self, Facts, FdState, OpenFd, Position, SEEK_CUR};
use crate::migration;
use crate::session::{self, InlineFile, ask, devices};
use crate::thread::{self, Thread};

/// Most pages that the daemon checks in one call: 1 GiB.
const WAY_PAGES: u32 = 1 << 18;

/// A signal handler waits for at most this number of polls, each followed by a pause, until the daemon has taken away a latch of
/// the handler's own thread. The daemon cannot take it away while the page is being written back, or while no frame is free to
/// which the page can move. After the last poll the handler continues and the daemon waits for the latch.
const WAY_POLLS: u32 = 1000;

const WAY_POLL: Duration = Duration::from_millis(1);

/// Most pages whose latches the library checks itself.
const CHECKED_PAGES_MAX: u64 = 1024;

/// Makes way for the ordinary call. Returns `None`, so that the caller makes that call.
#[inline]
pub(super) fn by_kernel<T>(fd: i32, at: Option<u64>, len: usize, write: bool) -> Option<T> {
    if thread::is_writing() {
        make_way(fd, at, len, write);
    }
    migration::tick();
    None
}

/// Makes way for a signal handler that has interrupted an inline write of its own thread. The handler is about to access `len`
/// bytes at `at` (`None`: at the kernel's offset) through the kernel, and the daemon would wait for the latch that the write may
/// hold. So this asks the daemon to take that latch away. After the handler has returned, the interrupted write finds its latch
/// lost and repeats itself.
#[cold]
fn make_way(fd: i32, at: Option<u64>, len: usize, write: bool) {
    let Ok(stat) = files::fstat(fd) else { return };
    if !stat.is_regular || !devices::is_ours(stat.device) {
        return;
    }
    let append = write && files::mode(fd).is_ok_and(|mode| mode.append);
    let here = || files::lseek(fd, 0, SEEK_CUR).ok()?.try_into().ok();
    // The kernel's size may be older than the latest inline appends.
    let file = described_file(fd);
    let size = file.as_ref().and_then(|file| file.size().ok());
    let (at, len) = match (append, size) {
        (false, _) => (at.or_else(here).unwrap_or(0), len),
        (true, Some(end)) => (end, len),
        // Only the daemon knows the end, so this names every page from the kernel's size on.
        (true, None) => (stat.size, usize::MAX),
    };
    let first = at / PAGE_BYTES;
    let end = at.saturating_add(len as u64).div_ceil(PAGE_BYTES);
    if file.is_some_and(|file| is_clear(&file, at, len, write)) {
        return;
    }
    ask_for_way(fd, first, u32::try_from(end - first).unwrap_or(u32::MAX));
}

/// Makes way before a kernel call on all pages of a file, such as fsync, ftruncate or fallocate. Otherwise a signal handler would
/// wait for the inline write that it has interrupted. See `make_way`.
#[inline]
pub fn make_way_everywhere(fd: i32) {
    if thread::is_writing() {
        ask_for_way_everywhere(fd);
    }
}

/// Does the same for all files that this process uses inline, before a call that names none of its fds, such as sync or truncate.
#[inline]
pub fn make_way_in_all_files() {
    if thread::is_writing() {
        ask_for_way_in_all_files();
    }
}

#[cold]
fn ask_for_way_in_all_files() {
    let is_inline = |fd: &i32| matches!(descriptors::state(*fd), Some(FdState::Described(_)));
    descriptors::fds()
        .filter(is_inline)
        .for_each(ask_for_way_everywhere);
}

#[cold]
fn ask_for_way_everywhere(fd: i32) {
    let Ok(stat) = files::fstat(fd) else { return };
    if !stat.is_regular || !devices::is_ours(stat.device) {
        return;
    }
    // The kernel's size may be older than the latest inline writes.
    let known = described_file(fd).and_then(|file| file.size().ok());
    let end = known.unwrap_or(0).max(stat.size) / PAGE_BYTES;
    let mut first = 0;
    // The last range also covers bytes beyond the end of the file.
    while first <= end {
        ask_for_way(fd, first, WAY_PAGES);
        first += u64::from(WAY_PAGES);
    }
}

/// Asks the daemon to take away this process's latches on some pages of a file, and its locks of the file.
fn ask_for_way(fd: i32, first: u64, pages: u32) {
    for session in session::all().filter(|session| session.is_own() && session.is_writable()) {
        let call = Call::Interrupted {
            first,
            pages,
            owner: session.owner,
            instance: session.instance,
        };
        for _ in 0..WAY_POLLS {
            match ask(fd, call) {
                Ok(answer) if answer.status == 0 && answer.pages > 0 => {
                    std::thread::sleep(WAY_POLL);
                }
                _ => break,
            }
        }
    }
}

/// Returns the file of an fd that is used inline.
fn described_file(fd: i32) -> Option<InlineFile<'static>> {
    let Some(FdState::Described(open)) = descriptors::state(fd) else {
        return None;
    };
    let facts = open.facts()?;
    file(session::get(facts.session)?, &facts).ok()
}

/// Returns whether this process holds no latch and no lock for which the access would wait, as far as the library can tell.
fn is_clear(file: &InlineFile<'_>, at: u64, len: usize, write: bool) -> bool {
    let pages = at / PAGE_BYTES..at.saturating_add(len as u64).div_ceil(PAGE_BYTES);
    let Ok(size) = file.size() else {
        return false;
    };
    let beyond = size.div_ceil(PAGE_BYTES);
    if file.is_locked_here(at, len, write && at.saturating_add(len as u64) > size) {
        return false;
    }
    // Before a write that may go beyond the end, the daemon zeroes the bytes that an interrupted write left there.
    let left = match write && pages.end >= beyond {
        true => beyond.saturating_sub(1)..beyond + WRITE_MAX as u64 / PAGE_BYTES,
        false => 0..0,
    };
    let pages = pages.start..pages.end.min(beyond + 1);
    pages.end.saturating_sub(pages.start) <= CHECKED_PAGES_MAX
        && !pages.chain(left).any(|page| file.is_latched_here(page))
}

/// Makes a call of a signal handler that has interrupted an inline call of its thread. Waits for nothing that the thread may
/// hold.
#[cold]
pub(super) fn interrupted(
    fd: i32,
    len: usize,
    write: bool,
    mut io: impl FnMut(&Thread, &OpenFd, &Facts, u64) -> Option<Result<usize>>,
) -> Option<Result<usize>> {
    let Some(FdState::Described(open)) = descriptors::state(fd) else {
        return by_kernel(fd, None, len, write);
    };
    let (offset, tag) = (&open.description().offset, open.tag());
    // Without flags, all I/O goes through the kernel, at the given offset.
    let facts = Facts {
        flags: 0,
        ..open.facts()?
    };
    let mut io_at = |at| {
        let _: Option<()> = by_kernel(fd, Some(at), len, write);
        thread::current(|thread| io(thread, &open, &facts, at))
    };
    // Blocks signals. Another handler could use the offset after this handler's write and before `displace` records the write, or
    // could wait for the offset that this handler has locked.
    let result = signals::blocked(|| {
        thread::current(|thread| {
            if thread.offset.has_offset(open.index, offset) {
                let at = thread.offset.behind(offset);
                let result = io_at(at)?;
                thread
                    .offset
                    .displace(offset, tag, at, result.unwrap_or(0) as u64);
                return Some(Some(result));
            }
            let Position::At(at) = offset.lock(tag) else {
                return None;
            };
            let result = io_at(at);
            let n = result.and_then(|result| result.ok()).unwrap_or(0);
            offset.unlock(tag, Some(at + n as u64));
            Some(result)
        })
    });
    match result {
        Some(result) => result,
        None => by_kernel(fd, None, len, write),
    }
}
