//! One owner at a time for a file or device, and who that is: flock(2).
//!
//! The lock belongs to the open file, not to the process: descriptors duplicated from it, in this
//! process or inherited by another, hold it too, and it goes when the last is closed, also by a
//! death. Other machines that share the file over a network may not see it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::FlockOperation;

/// A lock that is held until drop.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

/// Why a lock was not had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody has it.
    #[error("locked by {}", holder_text(*.holder))]
    Held {
        /// The process that took it, where /proc/locks tells.
        holder: Option<u32>,
    },
    /// The filesystem cannot lock.
    #[error("cannot lock: {0}")]
    Io(#[from] io::Error),
}

fn holder_text(holder: Option<u32>) -> String {
    match holder {
        Some(pid) => format!("process {pid}"),
        None => "another process".to_string(),
    }
}

impl Lock {
    /// Locks an open file or device exclusively, without waiting.
    pub fn acquire(file: File) -> Result<Lock, LockError> {
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock { file }),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(LockError::Held {
                        holder: holder(&file)?,
                    });
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(LockError::Io(error.into())),
            }
        }
    }

    /// The file that is locked.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The process that holds an exclusive flock on a file. `None`: nobody, or the kernel does not tell
/// (a process outside this pid namespace, a filesystem whose device number stat(2) does not show).
pub fn holder(file: impl AsFd) -> io::Result<Option<u32>> {
    let stat = rustix::fs::fstat(file)?;
    let (major, minor) = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    Ok(holder_in(&std::fs::read_to_string("/proc/locks")?, &place))
}

/// Lines look like `1: FLOCK  ADVISORY  WRITE 4711 fe:00:393221 0 EOF`.
fn holder_in(locks: &str, place: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            // A waiter has `->` in place of its kind, so it does not match.
            [_, "FLOCK", _, "WRITE", pid, at, ..] if at == place => {
                pid.parse().ok().filter(|pid| *pid > 0)
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_to_lock_is_told_who_was_first() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = Lock::acquire(file.reopen().unwrap()).unwrap();
        match Lock::acquire(file.reopen().unwrap()) {
            Err(LockError::Held { holder }) => assert_eq!(holder, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        assert_eq!(holder(&first).unwrap(), Some(std::process::id()));
        drop(first);
        assert_eq!(holder(file.as_file()).unwrap(), None);
        Lock::acquire(file.reopen().unwrap()).unwrap();
    }

    #[test]
    fn only_exclusive_holders_of_the_very_file_count() {
        let locks = "1: POSIX  ADVISORY  WRITE 10 fe:00:7 0 EOF\n\
                     2: FLOCK  ADVISORY  READ  11 fe:00:7 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 12 fe:00:77 0 EOF\n\
                     4: -> FLOCK  ADVISORY  WRITE 13 fe:00:7 0 EOF\n\
                     5: FLOCK  ADVISORY  WRITE 14 fe:00:7 0 EOF\n\
                     6: FLOCK  ADVISORY  WRITE -1 fe:00:8 0 EOF\n";
        assert_eq!(holder_in(locks, "fe:00:7"), Some(14));
        assert_eq!(holder_in(locks, "fe:00:8"), None);
        assert_eq!(holder_in(locks, "fe:00:9"), None);
    }
}
