//! Copies from file to file, in the cache and across slices (copy_file_range).
//!
//! Source pages are read like any other read: the daemon first absorbs what clients changed inline. Destination pages are
//! written under the locks of an ordinary write. Holes of the source stay holes.

use std::sync::{Arc, mpsc};

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_fs::{Error, Result};

use crate::handle::Handle;
use crate::mounted::Mounted;
use crate::write_mode::WriteSync;

/// Limits of one request: the bytes that it covers, holes included, and the bytes of data after which it ends. After a short
/// reply, the program continues with its next call, and a signal can interrupt the copy.
const REQUEST_MAX: u64 = 1 << 30;
const DATA_MAX: u64 = 64 << 20;
/// Bytes that one step reads and writes.
const STEP: u64 = 1 << 20;
/// Shortest run of zeros that becomes a hole. A shorter run is written.
const HOLE_MIN: usize = 64 << 10;
const PAGE: usize = PAGE_BYTES as usize;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// State of a copy.
struct Copy<'a> {
    mounted: &'a Arc<Mounted>,
    from: (&'a Arc<Handle>, u64),
    to: (&'a Arc<Handle>, u64),
    done: u64,
}

impl Mounted {
    /// Copies up to `len` bytes from one open file's offset to another's. Calls `reply` once with the number of bytes copied. It
    /// is less than `len` at the end of the source, after an error, and beyond the limit of one request. Waits for devices. If
    /// the volume is full, another thread waits for space.
    pub fn copy_range<R>(
        self: &Arc<Self>,
        from: (&Arc<Handle>, u64),
        to: (&Arc<Handle>, u64),
        len: u64,
        reply: R,
    ) where
        R: FnOnce(Result<u64>) + Send + 'static,
    {
        let (source, target) = ((from.0.clone(), from.1), (to.0.clone(), to.1));
        // Each attempt repeats all checks, because a program may map the file during the wait.
        let mounted = self.clone();
        let attempt = move || mounted.copy_once((&source.0, source.1), (&target.0, target.1), len);
        // Holes of the source take no space, so a single page may be enough.
        self.space_waits.answer(to.0, (to.1, 1), attempt, reply);
    }

    fn copy_once(
        self: &Arc<Self>,
        from: (&Arc<Handle>, u64),
        to: (&Arc<Handle>, u64),
        len: u64,
    ) -> Result<u64> {
        if self.read_only() {
            return Err(Error::Errno(libc::EROFS));
        }
        self.fast.absorb(from.0.file.ino());
        let left = from.0.file.size().saturating_sub(from.1);
        let len = len.min(left).min(REQUEST_MAX);
        let end = to.1.checked_add(len);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Error::Errno(libc::EFBIG));
        }
        let is_same = from.0.file.ino() == to.0.file.ino();
        if is_same && from.1.abs_diff(to.1) < len {
            return Err(Error::Errno(libc::EINVAL));
        }
        let len = self.beside_mappings(to, len)?;
        let mut copy = Copy {
            mounted: self,
            from,
            to,
            done: 0,
        };
        let result = copy.run(len);
        let result = copy.reach().and(result);
        if copy.done == 0 {
            result?;
        }
        if copy.done > 0 && to.0.sync() != WriteSync::No {
            let datasync = to.0.sync() == WriteSync::Data;
            let (tx, rx) = mpsc::channel();
            let synced = Box::new(move |result| drop(tx.send(result)));
            self.fsync(to.0, datasync, synced);
            answer(&rx)?;
        }
        Ok(copy.done)
    }

    /// Returns how many bytes a copy may write. After the call, the kernel drops its copies of all pages that the copy touches,
    /// including a program's stores to the rest of the first and last page. So if the kernel may have pages of the file, only
    /// whole pages are copied. Fails with EOPNOTSUPP for less than a page; the kernel then copies with ordinary reads and writes.
    fn beside_mappings(&self, (to, at): (&Arc<Handle>, u64), len: u64) -> Result<u64> {
        if len == 0 || self.mapped.file(to.file.ino()).is_none() {
            return Ok(len);
        }
        let end = at + len;
        let whole_end = match end < to.file.size() {
            true => end - end % PAGE_BYTES,
            // The copy reaches the end of the file, so its last page has no bytes after the copy.
            false => end,
        };
        match whole_end.checked_sub(at) {
            Some(whole) if whole > 0 && at.is_multiple_of(PAGE_BYTES) => Ok(whole),
            _ => Err(Error::Errno(libc::EOPNOTSUPP)),
        }
    }
}

impl Copy<'_> {
    fn run(&mut self, len: u64) -> Result<()> {
        let (mut buffer, mut data) = (vec![], 0);
        while self.done < len && data < DATA_MAX {
            let hole = self.hole(len - self.done);
            if hole > 0 {
                self.make_hole(hole)?;
                self.done += hole;
                continue;
            }
            let step = STEP.min(len - self.done);
            let (read, bytes) = self.read(step, buffer)?;
            buffer = bytes;
            if read == 0 {
                break;
            }
            data += read as u64;
            self.put(&buffer[..read])?;
        }
        Ok(())
    }

    /// Returns how many bytes of hole the source has at its offset, at most `len`.
    fn hole(&self, len: u64) -> u64 {
        let at = self.from.1 + self.done;
        match self.mounted.fs().seek(&self.from.0.file, at, true) {
            Ok(data) => (data - at).min(len),
            // No data up to the end of the file. Another thread may have truncated the file since its size was read.
            Err(Error::Errno(libc::ENXIO)) => {
                let size = self.from.0.file.size();
                size.saturating_sub(at).min(len)
            }
            Err(_) => 0,
        }
    }

    fn read(&self, len: u64, buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        let (tx, rx) = mpsc::channel();
        let reply = move |read: Result<usize>, buffer: Vec<u8>| {
            let _ = tx.send(read.map(|len| (len, buffer)));
        };
        let at = self.from.1 + self.done;
        self.mounted
            .read(self.from.0, at, len as u32, false, buffer, reply);
        answer(&rx)
    }

    /// Writes bytes, but leaves long runs of zero pages as holes.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            let zeros = zeros(&bytes[at..]);
            if zeros >= HOLE_MIN {
                self.make_hole(zeros as u64)?;
                self.done += zeros as u64;
                at += zeros;
                continue;
            }
            // Ends the piece at the next run of zeros that is long enough to become a hole.
            let mut end = (at + zeros + PAGE).min(bytes.len());
            while end < bytes.len() && self::zeros(&bytes[end..]) < HOLE_MIN {
                end = (end + HOLE_MIN).min(bytes.len());
            }
            let written = self.write(&bytes[at..end])?;
            self.done += u64::from(written);
            at += written as usize;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<u32> {
        let at = self.to.1 + self.done;
        self.mounted.write_now(self.to.0, at, bytes)
    }

    /// Zeroes the next `len` bytes of the destination, up to its end of file.
    fn make_hole(&self, len: u64) -> Result<()> {
        let (handle, begin) = (self.to.0, self.to.1 + self.done);
        self.mounted.fast.absorb(handle.file.ino());
        let size = handle.file.size();
        if begin < size {
            let within = len.min(size - begin);
            self.mounted.try_fallocate(handle, PUNCH, begin, within)?;
        }
        Ok(())
    }

    /// Extends the destination to the end of the copied range, which may be a hole.
    fn reach(&mut self) -> Result<()> {
        let end = self.to.1 + self.done;
        let size = self.to.0.file.size();
        if self.done == 0 || size >= end {
            return Ok(());
        }
        let reached = self.mounted.write_now(self.to.0, end - 1, &[0]).map(drop);
        if reached.is_err() {
            self.done = size.saturating_sub(self.to.1);
        }
        reached
    }
}

/// Returns the length of the zeros at the front of `bytes`: whole pages, or all of `bytes`.
fn zeros(bytes: &[u8]) -> usize {
    let is_zero = |page: &&[u8]| page.iter().all(|byte| *byte == 0);
    bytes
        .chunks(PAGE)
        .take_while(is_zero)
        .map(<[u8]>::len)
        .sum()
}

fn answer<T>(rx: &mpsc::Receiver<Result<T>>) -> Result<T> {
    // The channel closes without a reply when the volume is being closed.
    rx.recv().unwrap_or(Err(Error::Errno(libc::EIO)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_counted_in_whole_pages() {
        let mut bytes = vec![0; 3 * PAGE + 10];
        assert_eq!(zeros(&bytes), bytes.len());
        bytes[2 * PAGE + 1] = 1;
        assert_eq!(zeros(&bytes), 2 * PAGE);
        bytes[0] = 1;
        assert_eq!(zeros(&bytes), 0);
        assert_eq!(zeros(&[]), 0);
    }
}
