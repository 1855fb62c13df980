//! Writes, and the rests of writes, through the kernel at the library's offset.

use std::io::IoSlice;

use jericho_sys::errno;
use jericho_sys::files::{self, Result};

use super::data::{Data, Written};
use super::kernel_path::from_kernel;
use super::reserve::extended_by_kernel;
use super::size::{end_of, refresh_size};
use super::size_limit;
use crate::access::KeptLocks;
use crate::descriptors::{APPEND, Facts, OpenFd};

/// Most parts of a rest that is written alone. With more parts, the whole write is made again.
const REST_PARTS_MAX: usize = 64;

/// Writes the bytes through the kernel. `tried`: an inline write was attempted first, so later writes may need pages reserved
/// beyond the end. `kept`: the locks of the inline write, if it wrote a part.
#[cold]
pub(super) fn write_by_kernel(
    open: &OpenFd,
    facts: &Facts,
    data: Data<'_, '_>,
    at: u64,
    tried: bool,
    kept: Option<KeptLocks<'_>>,
) -> Written {
    let append = facts.flags & APPEND != 0;
    if append && size_limit::is_limited() {
        // The kernel compares the limit with its own size of the file.
        refresh_size(open.fd);
    }
    let result = match kept {
        Some(kept) => end_by_kernel(open, data, at, &kept),
        None => write_parts(open, data.parts, at),
    };
    let mut end = at + result.unwrap_or(0) as u64;
    if append && result.is_ok_and(|n| n > 0) {
        // The kernel has written at the end, wherever that was. The size now covers the write.
        end = end_of(open).unwrap_or(end);
    }
    if tried && result.is_ok() {
        extended_by_kernel(open, end);
    }
    Written { result, end }
}

/// Ends a write whose first part is written. Writes the rest only, so that newer bytes of other writers in the first part stay.
/// Writes all bytes again if others may have written over both parts or removed the first part.
#[cold]
fn end_by_kernel(
    open: &OpenFd,
    data: Data<'_, '_>,
    at: u64,
    kept: &KeptLocks<'_>,
) -> Result<usize> {
    let whole = || write_parts(open, data.parts, at);
    let done = kept.done();
    let mut room = [IoSlice::new(&[]); REST_PARTS_MAX];
    // At a file size limit, a write of the rest alone would end differently than the whole write: with a signal.
    let Some((rest, own)) = rest_of(data.parts, done, &mut room)
        .zip(kept.own_borrows(data.len - done))
        .filter(|_| !size_limit::is_limited() && kept.is_one_write(0))
    else {
        return whole();
    };
    match write_parts(open, rest, at + done as u64) {
        // The daemon's memory, which has the first part, is gone, too.
        Err(errno::ENOTCONN) => Err(errno::ENOTCONN),
        Err(_) => Ok(done),
        Ok(n) if done + n < data.len || kept.is_one_write(own) => Ok(done + n),
        Ok(_) => whole(),
    }
}

fn write_parts(open: &OpenFd, parts: &[IoSlice<'_>], at: u64) -> Result<usize> {
    let result = match parts {
        [part] => files::pwrite(open.fd, part, at as i64),
        parts => files::pwritev(open.fd, parts, at as i64),
    };
    from_kernel(open, result)
}

/// Returns the parts without their first `done` bytes; `None` if `room` has too few entries.
fn rest_of<'r, 'b>(
    parts: &[IoSlice<'b>],
    done: usize,
    room: &'r mut [IoSlice<'b>; REST_PARTS_MAX],
) -> Option<&'r [IoSlice<'b>]> {
    let (mut skip, mut first) = (done, 0);
    while skip >= parts.get(first)?.len() {
        skip -= parts[first].len();
        first += 1;
    }
    let rest = room.get_mut(..parts.len() - first)?;
    rest.copy_from_slice(&parts[first..]);
    rest[0].advance(skip);
    Some(rest)
}
