//! Parses requests and checks them (proto.md, "Request message", "Request types"). No I/O.

use std::ops::Range;

use crate::disk::Zeroes;
use crate::export::Export;
use crate::negotiation::Agreed;
use crate::protocol::{
    CMD_BLOCK_STATUS, CMD_DISC, CMD_FLAG_DF, CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE,
    CMD_FLAG_REQ_ONE, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, ENOSPC,
    EOVERFLOW, EPERM, ESHUTDOWN, PAYLOAD_BYTES_MAX, REQUEST_MAGIC,
};

/// Length of a request without its payload.
pub(crate) const REQUEST_BYTES: usize = 28;

/// A request as the client sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub flags: u16,
    pub kind: u16,
    /// The client's mark, which comes back in the reply.
    pub cookie: u64,
    pub offset_bytes: u64,
    pub length_bytes: u32,
}

/// A request that can be executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read(Range<u64>),
    Write { bytes: Range<u64>, is_durable: bool },
    Flush,
    Trim { bytes: Range<u64>, is_durable: bool },
    WriteZeroes { bytes: Range<u64>, how: Zeroes },
    BlockStatus { bytes: Range<u64>, wants_one: bool },
}

/// Why a request is not executed. The client gets it as a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// An error of the protocol.
    pub error: u32,
    /// A text for the client's user.
    pub why: &'static str,
}

fn refuse<T>(error: u32, why: &'static str) -> Result<T, Refusal> {
    Err(Refusal { error, why })
}

impl Request {
    /// Parses a request. Fails with the number that should have been `REQUEST_MAGIC`.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, u32> {
        let part = |at: usize, length: usize| {
            let part = &bytes[at..at + length];
            part.iter()
                .fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        let magic = part(0, 4) as u32;
        if magic != REQUEST_MAGIC {
            return Err(magic);
        }
        Ok(Request {
            flags: part(4, 2) as u16,
            kind: part(6, 2) as u16,
            cookie: part(8, 8),
            offset_bytes: part(16, 8),
            length_bytes: part(24, 4) as u32,
        })
    }

    /// Returns whether the client disconnects.
    pub fn is_disconnect(&self) -> bool {
        self.kind == CMD_DISC
    }

    /// Returns the number of bytes that follow the request.
    pub fn payload_bytes(&self) -> u32 {
        match self.kind {
            CMD_WRITE => self.length_bytes,
            _ => 0,
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns the flags that the request may have.
    fn allowed_flags(&self, agreed: Agreed) -> u16 {
        // Clients may set it on all commands.
        CMD_FLAG_FUA
            | match self.kind {
                CMD_READ if agreed.has_structured_replies => CMD_FLAG_DF,
                CMD_WRITE_ZEROES => CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
                CMD_BLOCK_STATUS => CMD_FLAG_REQ_ONE,
                _ => 0,
            }
    }

    /// Checks a request and returns what it asks for.
    pub fn check(&self, export: &Export, agreed: Agreed) -> Result<Command, Refusal> {
        if export.is_ending() {
            return refuse(ESHUTDOWN, "the server is ending");
        }
        if self.flags & !self.allowed_flags(agreed) != 0 {
            return refuse(EINVAL, "the request does not have all of these flags");
        }
        let is_change = matches!(self.kind, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES);
        if is_change && export.disk.is_read_only() {
            return refuse(EPERM, "the export is read-only");
        }
        let end = self.offset_bytes.checked_add(self.length_bytes.into());
        let bytes = match end {
            Some(end) if end <= export.disk.size_bytes() => self.offset_bytes..end,
            _ if matches!(self.kind, CMD_WRITE | CMD_WRITE_ZEROES) => {
                return refuse(ENOSPC, "the range ends beyond the export");
            }
            _ => return refuse(EINVAL, "the range ends beyond the export"),
        };
        let is_durable = self.has(CMD_FLAG_FUA);
        match self.kind {
            CMD_READ if self.length_bytes > PAYLOAD_BYTES_MAX => match self.has(CMD_FLAG_DF) {
                true => refuse(EOVERFLOW, "the range is too long for one reply"),
                false => refuse(EINVAL, "the range is too long"),
            },
            CMD_READ => Ok(Command::Read(bytes)),
            CMD_WRITE => Ok(Command::Write { bytes, is_durable }),
            CMD_FLUSH if !bytes.is_empty() || self.offset_bytes != 0 => {
                refuse(EINVAL, "a flush has no range")
            }
            CMD_FLUSH => Ok(Command::Flush),
            CMD_TRIM if export.disk.can_trim() => Ok(Command::Trim { bytes, is_durable }),
            CMD_WRITE_ZEROES => Ok(Command::WriteZeroes {
                bytes,
                how: Zeroes {
                    is_durable,
                    keeps_space: self.has(CMD_FLAG_NO_HOLE),
                    must_be_fast: self.has(CMD_FLAG_FAST_ZERO),
                },
            }),
            CMD_BLOCK_STATUS if !agreed.has_allocation => {
                refuse(EINVAL, "no metadata context was negotiated")
            }
            CMD_BLOCK_STATUS if bytes.is_empty() => refuse(EINVAL, "the range is empty"),
            CMD_BLOCK_STATUS => Ok(Command::BlockStatus {
                bytes,
                wants_one: self.has(CMD_FLAG_REQ_ONE),
            }),
            _ => refuse(EINVAL, "the server does not have this request"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::ExportOptions;
    use jericho_sim::SimDevice;
    use std::sync::Arc;

    #[test]
    fn requests_are_refused_once_the_server_is_ending() {
        let device = Arc::new(SimDevice::new("sim", 1 << 20));
        let export = Export::new(device, ExportOptions::default());
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[27] = 9;
        let request = Request::parse(&bytes).unwrap();
        let command = request.check(&export, Agreed::default());
        assert_eq!(command, Ok(Command::Read(0..9)));
        export.end();
        let refused = request.check(&export, Agreed::default());
        assert_eq!(refused.unwrap_err().error, ESHUTDOWN);
        bytes[0] = 0;
        assert_eq!(Request::parse(&bytes), Err(REQUEST_MAGIC & 0xff_ffff));
    }
}
