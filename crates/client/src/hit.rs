//! The short way: reads and writes of one page that is there.
//!
//! One straight line, as instructions are counted here. Whatever is not as it mostly is ends in `None`: then nothing
//! is done, or nothing that doing it anew would not make good, and the caller goes the long way (`fd`), which alone
//! has to deal with everything. No system call is made, so errno stays what it is.

use jericho_format::PAGE_BYTES;
use jericho_sys::files;

use crate::description::{
    self, APPEND, NO_INLINE_WRITE, Number, Open, READ, SYNC, TO_KERNEL, WRITE,
};
use crate::fast::File;
use crate::fd::with_offset;
use crate::inside::{self, Thread};
use crate::offset::Position;
use crate::session;

/// Lowest address that a buffer of a program can have; what is below, the kernel calls EFAULT.
pub const LOWEST_ADDRESS: usize = 4096;

/// What a write looks at.
const WRITE_FLAGS: u32 = WRITE | SYNC | APPEND | NO_INLINE_WRITE;

#[inline]
fn described(fd: i32) -> Option<Open> {
    match description::number(fd)? {
        Number::Described(open) => Some(open),
        _ => None,
    }
}

/// The file, when the description's flags among `among` are exactly `flags`.
#[inline(always)]
fn file(thread: &Thread, open: &Open, among: u32, flags: u32) -> Option<File<'static>> {
    if open.flags()? & (among | TO_KERNEL) != flags {
        return None;
    }
    if !thread.lately.is(open.index, open.generation) {
        find(thread, *open)?;
    }
    let file = thread.lately.file()?;
    file.is_reachable().then_some(file)
}

/// Finds the file of a description that the thread did not use last.
#[inline(never)]
fn find(thread: &Thread, open: Open) -> Option<()> {
    // What is due is done by the long way.
    if thread.placement.is_due() {
        return None;
    }
    let facts = open.facts()?;
    let session = session::get(facts.session)?;
    let file = File::of(session, facts.slot, facts.slot_generation, facts.object).ok()?;
    thread
        .lately
        .set(&thread.placement, open.index, open.generation, file);
    Some(())
}

/// Reads at `at`, and counts it if `moved` agrees with where that ends.
#[inline(always)]
fn read_page(
    thread: &Thread,
    open: &Open,
    out: &mut [u8],
    at: u64,
    moved: impl FnOnce(u64) -> bool,
) -> Option<usize> {
    let file = file(thread, open, READ, READ)?;
    let page = at / PAGE_BYTES;
    if !open.description().read_ahead.is_quiet(page, page + 1) {
        return None;
    }
    let len = file.read_page(thread, at, out)?;
    if !moved(at + len as u64) {
        return None;
    }
    file.account_hit(thread, false, len);
    Some(len)
}

/// pread(2). `out` lies at an address of the program's.
#[inline]
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Option<usize> {
    let open = described(fd)?;
    // A negative one is beyond the end of any file.
    let at = offset as u64;
    inside::enter_briefly(|thread| read_page(thread, &open, out, at, |_| true))
}

/// read(2), as `pread`.
#[inline]
pub fn read(fd: i32, out: &mut [u8]) -> Option<usize> {
    let open = described(fd)?;
    inside::enter_briefly(|thread| {
        let (offset, tag) = (&open.description().offset, open.tag());
        let Position::At(at) = offset.get_free(tag)? else {
            return None;
        };
        // When another thread has moved it meanwhile, that one has read this.
        read_page(thread, &open, out, at, |end| offset.advance(tag, at, end))
    })
}

/// pwrite(2). `data` lies at an address of the program's.
#[inline]
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Option<usize> {
    let open = described(fd)?;
    let at = offset as u64;
    if data.is_empty() {
        return None;
    }
    inside::enter_briefly(|thread| {
        let file = file(thread, &open, WRITE_FLAGS, WRITE)?;
        file.write_page(thread, at, data)?;
        file.account_hit(thread, true, data.len());
        Some(data.len())
    })
}

/// write(2), as `pwrite`. An errno is the kernel's answer.
#[inline]
pub fn write(fd: i32, data: &[u8]) -> Option<Result<usize, i32>> {
    let open = described(fd)?;
    if data.is_empty() {
        return None;
    }
    inside::enter_briefly(|thread| {
        let file = file(thread, &open, WRITE_FLAGS, WRITE)?;
        // Looked at before the offset is locked for nothing, as by whoever makes a file longer.
        let Position::At(at) = open.description().offset.get_free(open.tag())? else {
            return None;
        };
        if !file.has_in_page(at, data.len()) {
            return None;
        }
        with_offset(thread, &open, |at| {
            thread.ends_at(at + data.len() as u64);
            if file.write_page(thread, at, data).is_some() {
                file.account_hit(thread, true, data.len());
                return (Some(Ok(data.len())), at + data.len() as u64);
            }
            if !thread.is_displaced() {
                return (None, at);
            }
            // A handler has written behind these bytes already, so this is where they have to go.
            let result = files::pwrite(open.fd, data, at as i64);
            (Some(result), at + result.unwrap_or(0) as u64)
        })?
    })
}
