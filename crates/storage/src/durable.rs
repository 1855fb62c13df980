//! A write that is durable when it returns, and which part of it failed.

use std::io;

use crate::Cause;

/// Durability of one attempt to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The bytes are durable when the attempt has succeeded.
    Durable,
    /// The bytes are on the device, perhaps only in its cache.
    Plain,
}

/// Why a durable write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DurableError {
    /// Only the first `done` bytes were written.
    Data { done: usize, cause: Cause },
    /// All bytes were written, and may not be durable.
    Durability(Cause),
}

/// Writes `len` bytes durably. `write` makes an attempt to write the bytes from a position on, and returns how many it wrote.
///
/// The kernel reports a failed write and a failed flush with the same errno. So after a failed attempt the bytes are written once more,
/// without durability. If this fails too, the data was not written. Otherwise the data is on the device, and it is unknown whether it is
/// durable, as after a failed flush.
pub(crate) fn write_durable(
    len: usize,
    mut write: impl FnMut(usize, Attempt) -> io::Result<usize>,
) -> Result<(), DurableError> {
    let mut done = 0;
    let mut lost = None;
    while done < len {
        let attempt = match lost {
            None => Attempt::Durable,
            Some(_) => Attempt::Plain,
        };
        let cause = match write(done, attempt) {
            Ok(count) if count > 0 => {
                done += count;
                continue;
            }
            Ok(_) => Cause::Short { done_bytes: 0 },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if attempt == Attempt::Durable => {
                lost = Some(Cause::of(&error));
                continue;
            }
            Err(error) => Cause::of(&error),
        };
        return Err(DurableError::Data { done, cause });
    }
    lost.map_or(Ok(()), |cause| Err(DurableError::Durability(cause)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sys::errno::{EINTR, EIO, ENOSPC};

    /// Writes 100 bytes through `outcomes`, in which a negative number is an errno. Returns the result and the attempts.
    fn run(outcomes: &[i32]) -> (Result<(), DurableError>, Vec<(usize, Attempt)>) {
        let mut outcomes = outcomes.iter();
        let mut attempts = vec![];
        let result = write_durable(100, |done, attempt| {
            attempts.push((done, attempt));
            match *outcomes.next().expect("an outcome") {
                count @ 0.. => Ok(count as usize),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            }
        });
        assert!(outcomes.next().is_none());
        (result, attempts)
    }

    use Attempt::{Durable, Plain};

    #[test]
    fn a_short_or_interrupted_write_goes_on() {
        let (result, attempts) = run(&[60, -EINTR, 40]);
        assert_eq!(result, Ok(()));
        assert_eq!(attempts, [(0, Durable), (60, Durable), (60, Durable)]);
        let short = Cause::Short { done_bytes: 0 };
        let (done, cause) = (60, short);
        assert_eq!(run(&[60, 0]).0, Err(DurableError::Data { done, cause }));
    }

    #[test]
    fn a_write_whose_data_cannot_be_written_lost_nothing() {
        let cause = Cause::Errno(ENOSPC);
        let (result, attempts) = run(&[60, -ENOSPC, -ENOSPC]);
        assert_eq!(result, Err(DurableError::Data { done: 60, cause }));
        assert_eq!(attempts, [(0, Durable), (60, Durable), (60, Plain)]);
    }

    #[test]
    fn a_write_whose_data_can_be_written_is_a_failed_flush() {
        let (result, attempts) = run(&[60, -EIO, 30, 10]);
        assert_eq!(result, Err(DurableError::Durability(Cause::Errno(EIO))));
        assert_eq!(attempts[1..], [(60, Durable), (60, Plain), (90, Plain)]);
    }
}
