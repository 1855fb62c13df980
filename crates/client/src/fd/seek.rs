//! Makes lseek(2).

use jericho_sys::errno;
use jericho_sys::files::{self, Result};

use super::early::{self, CallKind, CallPath};
use super::offset::with_offset;
use super::size::{end_of, refresh_size};
use super::state::{described, fast_state};
use crate::descriptors::{self, FdState, OFFSET_MAX, OpenFd, SEEK_CUR, SEEK_END, SEEK_SET};
use crate::thread::{self, Doing};

/// Makes an lseek(2).
pub fn lseek(fd: i32, offset: i64, whence: i32) -> Option<Result<i64>> {
    let mut tries = 0;
    loop {
        match early::begin(fd, CallKind::Seek, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => break,
            CallPath::Counted(_call) => {
                refresh_end(fd, whence);
                return Some(files::lseek(fd, offset, whence));
            }
        }
        let result = lseek_here(fd, offset, whence);
        if result.is_some() {
            return result;
        }
        if !early::is_undecided(fd, &mut tries) {
            break;
        }
    }
    // The caller makes the call. Most fds on the kernel path are not on a mount, and the library does not know which ones are.
    if !matches!(descriptors::state(fd), None | Some(FdState::Kernel)) {
        refresh_end(fd, whence);
    }
    None
}

/// Makes the kernel know the size, before it seeks to the end of a file.
fn refresh_end(fd: i32, whence: i32) {
    if whence == SEEK_END {
        refresh_size(fd);
    }
}

fn lseek_here(fd: i32, offset: i64, whence: i32) -> Option<Result<i64>> {
    let state = fast_state(fd)?;
    thread::enter(Doing::Reading, |thread| {
        let open = described(fd, state)?;
        if open.description().offset.is_in_kernel(open.tag()) {
            return None;
        }
        with_offset(
            thread,
            &open,
            0,
            |at| seek(&open, at, offset, whence),
            |to, at, written| {
                // Bytes that a handler has written meanwhile count as written before the seek.
                if written > 0 {
                    *to = seek(&open, at + written, offset, whence);
                }
                to.map_or(at + written, |to| to as u64)
            },
        )
    })?
}

/// Returns the offset to which an lseek leads from `at`.
fn seek(open: &OpenFd, at: u64, offset: i64, whence: i32) -> Result<i64> {
    let to = match whence {
        SEEK_SET => offset,
        SEEK_CUR => at.checked_add_signed(offset).ok_or(errno::EINVAL)? as i64,
        SEEK_END => end_of(open)?
            .checked_add_signed(offset)
            .ok_or(errno::EINVAL)? as i64,
        // For data, holes and unknown kinds, the kernel finds the offset.
        _ => files::lseek(open.fd, offset, whence)?,
    };
    // The kernel knows the largest offset of its filesystems' files.
    match u64::try_from(to) {
        Ok(far) if far > OFFSET_MAX => files::lseek(open.fd, to, SEEK_SET),
        Ok(_) => Ok(to),
        Err(_) => Err(errno::EINVAL),
    }
}
