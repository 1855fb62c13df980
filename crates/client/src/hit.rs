//! The short way: reads and writes of one page that is there.
//!
//! One straight line, as instructions are counted here. Whatever is not as it mostly is ends in `None`: then nothing
//! is done, or nothing that doing it anew would not make good, and the caller goes the long way (`fd`), which alone
//! has to deal with everything. No system call is made, so errno stays what it is.

use jericho_format::PAGE_BYTES;
use jericho_sys::files;

use crate::description::{
    self, APPEND, Description, NO_INLINE_WRITE, Open, READ, SYNC, TO_KERNEL, WRITE,
};
use crate::fast::File;
use crate::fd::with_offset;
use crate::offset::Position;
use crate::reentrancy::{self, Doing, Thread};
use crate::session;

/// Lowest address that a buffer of a program can have; what is below, the kernel calls EFAULT.
pub const LOWEST_ADDRESS: usize = 4096;

/// What a write looks at.
const WRITE_FLAGS: u32 = WRITE | SYNC | APPEND | NO_INLINE_WRITE;

/// The description and the file behind a number's word, when of the description's flags among `among` exactly `flags` are set.
#[inline(always)]
fn file(
    thread: &Thread,
    fd: i32,
    word: u64,
    among: u32,
    flags: u32,
) -> Option<(&'static Description, File<'static>)> {
    let write = flags & WRITE != 0;
    let (description, file) = match thread.recent_hits.file(word, write) {
        Some(found) => found,
        None => find(thread, Open::of_word(fd, word), word, write)?,
    };
    // The number still has it, or had it a moment ago: a program that closes it at the same time gets either answer.
    let is_so = description.flags() & (among | TO_KERNEL) == flags;
    (is_so && file.is_reachable()).then_some((description, file))
}

/// Finds the file of a description that the thread did not use last.
#[inline(never)]
fn find(
    thread: &Thread,
    open: Open,
    word: u64,
    write: bool,
) -> Option<(&'static Description, File<'static>)> {
    // What is due is done by the long way.
    if thread.migration.is_due() {
        return None;
    }
    let facts = open.facts()?;
    let session = session::get(facts.session)?;
    let file = File::of(session, facts.slot, facts.slot_generation, facts.object).ok()?;
    let file = match write {
        true => file.for_writing(),
        false => file.for_reading(),
    };
    thread
        .recent_hits
        .set(&thread.migration, word, open.description(), file);
    thread.recent_hits.file(word, write)
}

/// Reads at `at`, and counts it if `moved` agrees with where that ends.
#[inline(always)]
fn read_page(
    thread: &Thread,
    (description, file): (&Description, File<'static>),
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
    thread.recent_hits.count(thread, false, len);
    Some(len)
}

/// pread(2). `out` lies at an address of the program's.
#[inline]
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Option<usize> {
    let word = description::described(fd)?;
    // A negative one is beyond the end of any file.
    let at = offset as u64;
    reentrancy::enter_briefly(Doing::Reading, |thread| {
        let found = file(thread, fd, word, READ, READ)?;
        read_page(thread, found, out, at, |_| true)
    })
}

/// read(2), as `pread`.
#[inline]
pub fn read(fd: i32, out: &mut [u8]) -> Option<usize> {
    let word = description::described(fd)?;
    reentrancy::enter_briefly(Doing::Reading, |thread| {
        let found = file(thread, fd, word, READ, READ)?;
        let (offset, tag) = (&found.0.offset, Open::of_word(fd, word).tag());
        let Position::At(at) = offset.get_free(tag)? else {
            return None;
        };
        // When another thread has moved it meanwhile, that one has read this.
        read_page(thread, found, out, at, |end| offset.advance(tag, at, end))
    })
}

/// pwrite(2). `data` lies at an address of the program's.
#[inline]
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Option<usize> {
    let word = description::described(fd)?;
    let at = offset as u64;
    if data.is_empty() {
        return None;
    }
    reentrancy::enter_briefly(Doing::Writing, |thread| {
        let (_, file) = file(thread, fd, word, WRITE_FLAGS, WRITE)?;
        file.write_page(thread, at, data)?;
        thread.recent_hits.count(thread, true, data.len());
        Some(data.len())
    })
}

/// write(2), as `pwrite`. An errno is the kernel's answer.
#[inline]
pub fn write(fd: i32, data: &[u8]) -> Option<Result<usize, i32>> {
    let word = description::described(fd)?;
    if data.is_empty() {
        return None;
    }
    reentrancy::enter_briefly(Doing::Writing, |thread| {
        let (description, file) = file(thread, fd, word, WRITE_FLAGS, WRITE)?;
        let open = Open::of_word(fd, word);
        // Looked at before the offset is locked for nothing, as by whoever makes a file longer.
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
                thread.recent_hits.count(thread, true, data.len());
                Some(Ok(data.len()))
            },
            |result, at, behind| {
                if result.is_none() && behind == 0 {
                    return at;
                }
                // A handler has written behind these bytes already, so this is where they have to go.
                result.get_or_insert_with(|| {
                    let result = files::pwrite(fd, data, at as i64);
                    result.map_err(|errno| crate::fd::errno_after(fd, errno))
                });
                at + data.len() as u64 + behind
            },
        )?
    })
}
