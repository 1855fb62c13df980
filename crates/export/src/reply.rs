//! Makes replies (proto.md, "Simple reply message", "Structured reply chunk message"). No I/O.

use jericho_storage::IoError;
use jericho_sys::errno;

use crate::export::Status;
use crate::protocol::{
    CONTEXT_ALLOCATION_ID, EIO, ENOMEM, ENOSPC, ENOTSUP, EPERM, REPLY_FLAG_DONE,
    REPLY_TYPE_BLOCK_STATUS, REPLY_TYPE_ERROR, REPLY_TYPE_NONE, REPLY_TYPE_OFFSET_DATA,
    SIMPLE_REPLY_MAGIC, STRING_BYTES_MAX, STRUCTURED_REPLY_MAGIC,
};

/// Maximum length of what precedes the data of a read: a chunk's header and the offset.
pub(crate) const READ_HEADER_BYTES_MAX: usize = 20 + 8;

/// Returns the error of the protocol for a failed operation of a device.
pub(crate) fn error_of(error: &IoError) -> u32 {
    match error.errno() {
        errno::EPERM | errno::EACCES | errno::EROFS => EPERM,
        errno::ENOMEM => ENOMEM,
        errno::ENOSPC | errno::EDQUOT | errno::EFBIG => ENOSPC,
        errno::EOPNOTSUPP => ENOTSUP,
        _ => EIO,
    }
}

/// Returns a reply without data.
pub(crate) fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let mut reply = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend(error.to_be_bytes());
    reply.extend(cookie.to_be_bytes());
    reply
}

/// Returns the header of a reply's only chunk.
fn chunk(cookie: u64, kind: u16, length: usize) -> Vec<u8> {
    let mut chunk = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    chunk.extend(REPLY_FLAG_DONE.to_be_bytes());
    chunk.extend(kind.to_be_bytes());
    chunk.extend(cookie.to_be_bytes());
    chunk.extend((length as u32).to_be_bytes());
    chunk
}

/// Returns the reply of a failed request. A simple one has no text.
pub(crate) fn error(is_structured: bool, cookie: u64, error: u32, why: &str) -> Vec<u8> {
    if !is_structured {
        return simple(cookie, error);
    }
    let why = &why.as_bytes()[..why.len().min(STRING_BYTES_MAX)];
    let mut reply = chunk(cookie, REPLY_TYPE_ERROR, 6 + why.len());
    reply.extend(error.to_be_bytes());
    reply.extend((why.len() as u16).to_be_bytes());
    reply.extend(why);
    reply
}

/// Returns what precedes the data of a successful read. The data is sent in one chunk, so the reply suits clients that ask for
/// an unfragmented one, too.
pub(crate) fn read_header(
    is_structured: bool,
    cookie: u64,
    offset_bytes: u64,
    length_bytes: usize,
) -> Vec<u8> {
    match is_structured {
        false => simple(cookie, 0),
        // A chunk of data must not be empty.
        true if length_bytes == 0 => chunk(cookie, REPLY_TYPE_NONE, 0),
        true => {
            let mut header = chunk(cookie, REPLY_TYPE_OFFSET_DATA, 8 + length_bytes);
            header.extend(offset_bytes.to_be_bytes());
            header
        }
    }
}

/// Returns the reply to a request for the block status.
pub(crate) fn block_status(cookie: u64, runs: &[Status]) -> Vec<u8> {
    let mut reply = chunk(cookie, REPLY_TYPE_BLOCK_STATUS, 4 + 8 * runs.len());
    reply.extend(CONTEXT_ALLOCATION_ID.to_be_bytes());
    for run in runs {
        reply.extend(run.length_bytes.to_be_bytes());
        reply.extend(run.flags.to_be_bytes());
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_storage::Cause;

    #[test]
    fn errors_of_devices_become_errors_of_the_protocol() {
        let of = |cause| {
            error_of(&IoError {
                operation: "write",
                device: "d".into(),
                offset_bytes: 0,
                length_bytes: 0,
                cause,
            })
        };
        for (errno, error) in [
            (errno::EROFS, EPERM),
            (errno::EDQUOT, ENOSPC),
            (errno::ENOSPC, ENOSPC),
            (errno::EOPNOTSUPP, ENOTSUP),
            (errno::ENODEV, EIO),
            (errno::EINVAL, EIO),
        ] {
            assert_eq!(of(Cause::Errno(errno)), error, "{errno}");
        }
        assert_eq!(of(Cause::Short { done_bytes: 1 }), EIO);
    }

    #[test]
    fn headers_of_reads_fit_before_the_data() {
        for is_structured in [false, true] {
            for length in [0, 1, 32 << 20] {
                let header = read_header(is_structured, 7, 8, length);
                assert!(header.len() <= READ_HEADER_BYTES_MAX);
            }
        }
        let long = error(true, 7, EIO, &"x".repeat(10_000));
        assert_eq!(long.len(), 20 + 6 + STRING_BYTES_MAX);
    }
}
