//! fallocate: reserves space and makes holes, also in a file whose pages the kernel may have.
//!
//! The kernel zeroes its own copies of pages only after the call that zeroes a range (fallocate). A copy that it writes back
//! before that still has the old bytes. If only a part of a page is zeroed, the daemon must tell these old bytes from stores of a
//! program. It does so as for writes: it first writes zeros to that part, which creates records (`mapped`).

use std::ops::Range;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_fs::Result;

use crate::fast::WriteGuard;
use crate::handle::Handle;
use crate::mounted::Mounted;

const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

impl Mounted {
    /// Reserves space or makes holes; see `Fs::fallocate`. Calls `reply` once: at once, or from another thread after a wait for
    /// space that is being freed.
    pub fn fallocate<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        mode: i32,
        offset: u64,
        len: u64,
        reply: R,
    ) where
        R: FnOnce(Result<()>) + Send + 'static,
    {
        let (mounted, own) = (self.clone(), handle.clone());
        let attempt = move || mounted.try_fallocate(&own, mode, offset, len);
        let takes_space = mode & libc::FALLOC_FL_PUNCH_HOLE == 0;
        let range = (offset, if takes_space { len } else { 0 });
        self.space_waits.answer(handle, range, attempt, reply);
    }

    /// Reserves space or makes holes; see `Fs::fallocate`. Fails with ENOSPC at once when there is no space now. Waits for
    /// devices.
    pub(crate) fn try_fallocate(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let file = &handle.file;
        let zeroes = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        if zeroes {
            // Before inline writers are locked out.
            self.fs().commit_replacement(file.ino(), None);
        }
        if zeroes && self.mapped.file(file.ino()).is_some() {
            // Checks the call and takes its space first: a call that fails, or that is repeated later for lack of space, must
            // zero nothing.
            self.fs().check_fallocate(mode, offset, len)?;
            if mode & libc::FALLOC_FL_ZERO_RANGE != 0 {
                let keep_size = libc::FALLOC_FL_KEEP_SIZE;
                let take_space = || self.fs().fallocate(file, keep_size, offset, len);
                self.fast.resize(file.ino(), None, take_space)?;
            }
            self.fast.absorb(file.ino());
            let end = offset.saturating_add(len).min(file.size());
            for part in parts(offset..end).into_iter().flatten() {
                self.write_zeros(handle, part)?;
            }
        }
        let change = || {
            let bytes = offset..offset.saturating_add(len);
            let _words = zeroes.then(|| WriteGuard::for_zeroing(&self.fast, file, bytes));
            self.fs().fallocate(file, mode, offset, len)
        };
        self.fast.resize(file.ino(), None, change)
    }

    /// Writes zeros to a part of a page, if the page has data.
    fn write_zeros(self: &Arc<Self>, handle: &Arc<Handle>, bytes: Range<u64>) -> Result<()> {
        let page = bytes.start - bytes.start % PAGE_BYTES;
        let data = self.fs().seek(&handle.file, page, true);
        if !data.is_ok_and(|data| data < page + PAGE_BYTES) {
            return Ok(());
        }
        let zeros = &ZEROS[..(bytes.end - bytes.start) as usize];
        self.write_now(handle, bytes.start, zeros).map(drop)
    }
}

/// Returns the ranges at both ends that cover only a part of a page.
fn parts(bytes: Range<u64>) -> [Option<Range<u64>>; 2] {
    let first_end = bytes.start.next_multiple_of(PAGE_BYTES).min(bytes.end);
    let last_start = (bytes.end - bytes.end % PAGE_BYTES).max(first_end);
    [bytes.start..first_end, last_start..bytes.end].map(|part| Some(part).filter(|p| !p.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_covers_a_part_of_a_page_at_each_end() {
        assert_eq!(parts(4096..12288), [None, None]);
        assert_eq!(parts(4090..12290), [Some(4090..4096), Some(12288..12290)]);
        assert_eq!(parts(5..10), [Some(5..10), None]);
        assert_eq!(parts(8192..8200), [None, Some(8192..8200)]);
        let beyond_the_end = Range {
            start: 8200,
            end: 8192,
        };
        assert_eq!(parts(beyond_the_end), [None, None]);
    }
}
