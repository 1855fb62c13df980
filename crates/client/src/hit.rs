//! The short path: reads and writes of one page that is cached.
//!
//! Straight code, because each instruction counts here. Every uncommon case returns `None`. The caller then takes the long path
//! (`fd`), which handles all cases; repeating the access there is always safe. Keeps errno: its rare system calls, such as ringing
//! the doorbell, do not set it.

use jericho_format::PAGE_BYTES;
use jericho_sys::files;

use crate::descriptors::{
    self, APPEND, Description, NO_INLINE_WRITE, OpenFd, Position, READ, SYNC, TO_KERNEL, WRITE,
};
use crate::fd::{errno_after, with_offset};
use crate::session::{self, InlineFile};
use crate::thread::{self, Doing, Thread};

/// Flags that a write checks.
const WRITE_FLAGS: u32 = WRITE | SYNC | APPEND | NO_INLINE_WRITE;

/// Returns the description and the file of an fd's word. Returns `None` unless, of the flags in `among` and `TO_KERNEL`, the
/// description has exactly `flags`.
#[inline(always)]
fn file(
    thread: &Thread,
    fd: i32,
    word: u64,
    among: u32,
    flags: u32,
) -> Option<(&'static Description, InlineFile<'static>)> {
    let write = flags & WRITE != 0;
    let (description, file) = match thread.recent_hits.file(word, write) {
        Some(found) => found,
        None => find(thread, OpenFd::of_word(fd, word), word, write)?,
    };
    // Another thread may close the fd at the same time. The call then counts as made before the close.
    let is_so = description.flags() & (among | TO_KERNEL) == flags;
    (is_so && file.is_reachable()).then_some((description, file))
}

/// Finds the file of a description that is not the thread's last one.
#[inline(never)]
fn find(
    thread: &Thread,
    open: OpenFd,
    word: u64,
    write: bool,
) -> Option<(&'static Description, InlineFile<'static>)> {
    // The long path does due migrations.
    if thread.migration.needs_long_path() {
        return None;
    }
    let facts = open.facts()?;
    let session = session::get(facts.session)?;
    let file = InlineFile::of(session, facts.slot, facts.slot_generation, facts.object).ok()?;
    let file = match write {
        true => file.for_writing(),
        false => file.for_reading(),
    };
    thread
        .recent_hits
        .set(&thread.migration, word, open.description(), file);
    thread.recent_hits.file(word, write)
}

/// Reads at `at`. Counts the read if `moved` accepts its end.
#[inline(always)]
fn read_page(
    thread: &Thread,
    (description, file): (&Description, InlineFile<'static>),
    out: &mut [u8],
    at: u64,
    moved: impl FnOnce(u64) -> bool,
) -> Option<usize> {
    let page = at / PAGE_BYTES;
    if !description.read_ahead.is_quiet(page, page + 1) {
        return None;
    }
    let len = file.read_page(thread, at, out)?;
    if !moved(at + len as u64) {
        return None;
    }
    thread.count_hit(false, len);
    Some(len)
}

/// Makes a pread(2). `out` begins at or above `LOWEST_ADDRESS`.
#[inline]
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Option<usize> {
    let word = descriptors::described(fd)?;
    // A negative offset becomes one beyond the end of any file.
    let at = offset as u64;
    thread::enter_briefly(Doing::Reading, |thread| {
        let found = file(thread, fd, word, READ, READ)?;
        read_page(thread, found, out, at, |_| true)
    })
}

/// Makes a read(2), as `pread`.
#[inline]
pub fn read(fd: i32, out: &mut [u8]) -> Option<usize> {
    let word = descriptors::described(fd)?;
    thread::enter_briefly(Doing::Reading, |thread| {
        let found = file(thread, fd, word, READ, READ)?;
        let (offset, tag) = (&found.0.offset, OpenFd::of_word(fd, word).tag());
        let Position::At(at) = offset.get_free(tag)? else {
            return None;
        };
        // If another thread advanced the offset, these bytes are its.
        read_page(thread, found, out, at, |end| offset.advance(tag, at, end))
    })
}

/// Makes a pwrite(2). `data` begins at or above `LOWEST_ADDRESS`.
#[inline]
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Option<usize> {
    let word = descriptors::described(fd)?;
    let at = offset as u64;
    if data.is_empty() {
        return None;
    }
    thread::enter_briefly(Doing::Writing, |thread| {
        let (_, file) = file(thread, fd, word, WRITE_FLAGS, WRITE)?;
        file.write_page(thread, at, data)?;
        thread.count_hit(true, data.len());
        Some(data.len())
    })
}

/// Makes a write(2), as `pwrite`. Fails with an errno only if it made the write through the kernel.
#[inline]
pub fn write(fd: i32, data: &[u8]) -> Option<Result<usize, i32>> {
    let word = descriptors::described(fd)?;
    if data.is_empty() {
        return None;
    }
    thread::enter_briefly(Doing::Writing, |thread| {
        let (description, file) = file(thread, fd, word, WRITE_FLAGS, WRITE)?;
        let open = OpenFd::of_word(fd, word);
        // Checks before it locks the offset: a write that extends the file would lock it in vain.
        let Position::At(at) = description.offset.get_free(open.tag())? else {
            return None;
        };
        if !file.has_in_page(at, data.len()) {
            return None;
        }
        with_offset(
            thread,
            &open,
            data.len(),
            |at| {
                file.write_page(thread, at, data)?;
                thread.count_hit(true, data.len());
                Some(Ok(data.len()))
            },
            |result, at, behind| {
                if result.is_none() && behind == 0 {
                    return at;
                }
                // A signal handler has written behind these bytes already, so they must go here.
                result.get_or_insert_with(|| {
                    let result = files::pwrite(fd, data, at as i64);
                    result.map_err(|errno| errno_after(fd, errno))
                });
                at + data.len() as u64 + behind
            },
        )?
    })
}
