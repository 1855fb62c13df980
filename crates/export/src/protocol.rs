//! The numbers of the NBD protocol, from <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>. Each group names
//! its section there. All integers are big-endian on the wire.

/// The port that IANA has assigned to NBD.
pub const TCP_PORT: u16 = 10809;

// "Newstyle negotiation"
pub(crate) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
pub(crate) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Zeros after the reply to `OPT_EXPORT_NAME`, unless both sides have set `FLAG_NO_ZEROES`.
pub(crate) const EXPORT_NAME_ZEROS: usize = 124;

// "Handshake flags", "Client flags"
pub(crate) const FLAG_FIXED_NEWSTYLE: u32 = 1 << 0;
pub(crate) const FLAG_NO_ZEROES: u32 = 1 << 1;

// "Transmission flags"
pub(crate) const FLAG_HAS_FLAGS: u16 = 1 << 0;
pub(crate) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(crate) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(crate) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(crate) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(crate) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const FLAG_SEND_DF: u16 = 1 << 7;
pub(crate) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(crate) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

// "Option types"
pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;

// "Option reply types"
pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub(crate) const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub(crate) const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub(crate) const REP_ERR_SHUTDOWN: u32 = (1 << 31) + 7;

// "Option types": information for `OPT_INFO` and `OPT_GO`
pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_NAME: u16 = 1;
pub(crate) const INFO_DESCRIPTION: u16 = 2;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

// "Metadata contexts"
pub(crate) const CONTEXT_NAMESPACE: &[u8] = b"base:";
pub(crate) const CONTEXT_ALLOCATION: &[u8] = b"base:allocation";
/// The number that this server gives to `CONTEXT_ALLOCATION`.
pub(crate) const CONTEXT_ALLOCATION_ID: u32 = 1;
pub(crate) const STATE_HOLE: u32 = 1 << 0;
pub(crate) const STATE_ZERO: u32 = 1 << 1;

// "Request message", "Simple reply message", "Structured reply chunk message"
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

// "Request types"
pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_DISC: u16 = 2;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_BLOCK_STATUS: u16 = 7;

// "Command flags"
pub(crate) const CMD_FLAG_FUA: u16 = 1 << 0;
pub(crate) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(crate) const CMD_FLAG_DF: u16 = 1 << 2;
pub(crate) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(crate) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

// "Structured reply flags", "Structured reply types"
pub(crate) const REPLY_FLAG_DONE: u16 = 1 << 0;
pub(crate) const REPLY_TYPE_NONE: u16 = 0;
pub(crate) const REPLY_TYPE_OFFSET_DATA: u16 = 1;
pub(crate) const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
pub(crate) const REPLY_TYPE_ERROR: u16 = (1 << 15) + 1;

// "Error values"
pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const ENOMEM: u32 = 12;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const EOVERFLOW: u32 = 75;
pub(crate) const ENOTSUP: u32 = 95;
pub(crate) const ESHUTDOWN: u32 = 108;

// "Size constraints": what this server offers.
/// Requests may have any offset and length.
pub(crate) const BLOCK_BYTES_MIN: u32 = 1;
/// Maximum length of a read or write. Clients that do not ask assume the same (section "Size constraints").
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Maximum length of a string (section "Values").
pub(crate) const STRING_BYTES_MAX: usize = 4096;
