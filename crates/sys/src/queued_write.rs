//! A durable write to a block device in one system call.
//!
//! pwritev2(2) with RWF_DSYNC flushes a block device twice, because the kernel syncs the device after the write. A write with that flag through
//! io_uring is not synced afterwards: the kernel asks the block layer to make the write itself durable (REQ_FUA). If the hardware cannot,
//! the block layer writes and then flushes, and merges the flushes of several threads. The calling thread sleeps once.
//!
//! Each thread that writes has an io_uring of its own, for one write at a time. Each call waits until its write has ended, so the kernel
//! uses no memory of the caller afterwards.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::{IoUring, opcode, types};

use crate::uring::{build, passing};

/// Longest write of one call; the rest is left over, as after a short write.
const BYTES_MAX: usize = 1 << 30;

/// A ring, or why there is none.
type Own = Result<IoUring, io::ErrorKind>;

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// Creates an enabled ring for one operation.
fn new_ring() -> Own {
    let (ring, _) = build(1).map_err(|error| error.kind())?;
    let enabled = ring.submitter().register_enable_rings();
    enabled.map_err(|error| error.kind())?;
    Ok(ring)
}

/// Writes as pwrite(2) does, and makes what it wrote durable before it returns. For block devices; other files may commit a tree or a log.
/// Fails without an effect with ENOSYS if this thread can have no io_uring.
pub fn write_durable(file: impl AsFd, data: &[u8], offset_bytes: u64) -> io::Result<usize> {
    OWN.with_borrow_mut(|own| match own.get_or_insert_with(new_ring) {
        Ok(ring) => write(ring, file, data, offset_bytes),
        Err(_) => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
    })
}

fn write(ring: &mut IoUring, file: impl AsFd, data: &[u8], offset_bytes: u64) -> io::Result<usize> {
    let fd = types::Fd(file.as_fd().as_raw_fd());
    let len = data.len().min(BYTES_MAX) as u32;
    let entry = opcode::Write::new(fd, data.as_ptr(), len)
        .offset(offset_bytes)
        .rw_flags(libc::RWF_DSYNC)
        .build();
    // SAFETY: `data` and `file` outlive this function, which returns only when the kernel has completed the operation, or has not
    // taken it: see below. It does not unwind in between.
    let pushed = unsafe { ring.submission().push(&entry) };
    // The ring has no other operation.
    debug_assert!(pushed.is_ok());
    loop {
        let entered = passing(ring.submit_and_wait(1));
        if let Some(completion) = ring.completion().next() {
            return match completion.result() {
                written @ 0.. => Ok(written as usize),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
        }
        if let Err(error) = entered {
            // The kernel refuses the call itself, which is a bug here. It may have the operation, so the caller must not go on.
            eprintln!("cannot wait for a durable write: {error}");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_queued_write_writes_at_its_offset_and_reports_errors() {
        let file = tempfile::tempfile().unwrap();
        let write = |data: &[u8], at| write_durable(&file, data, at);
        match write(b"hello", 3) {
            // A sandbox forbids io_uring.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return,
            written => assert_eq!(written.unwrap(), 5),
        }
        assert_eq!(write(b"abc", 0).unwrap(), 3);
        let mut out = [0; 9];
        assert_eq!(file.read_at(&mut out, 0).unwrap(), 8);
        assert_eq!(&out[..8], b"abchello");
        let directory = std::fs::File::open("/").unwrap();
        let error = write_durable(&directory, b"x", 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        // The ring works after an error, and in other threads.
        std::thread::scope(|scope| {
            for n in 0..4_u8 {
                let file = &file;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let at = u64::from(n) * 100;
                        assert_eq!(write_durable(file, &[n; 100], at).unwrap(), 100);
                    }
                });
            }
        });
        let mut out = [0; 400];
        file.read_exact_at(&mut out, 0).unwrap();
        assert!(out.chunks(100).zip(0..).all(|(chunk, n)| chunk == [n; 100]));
    }
}
