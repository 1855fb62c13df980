//! The frames between an initiator and a target. `docs/formats/wire.md` specifies these bytes.

use zerocopy::byteorder::{big_endian, little_endian};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use little_endian::{U16, U32, U64};

/// Ethertype of the frames, if the user sets no other one.
pub const ETHERTYPE: u16 = 0x88B5;
/// First bytes of the payloads outside of a channel.
pub const WIRE_MAGIC: [u8; 8] = *b"JERIWIRE";
/// The version of the protocol that this code speaks.
pub const WIRE_VERSION: u8 = 1;
/// Size of the header of a frame, with the Ethernet header.
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();
/// Maximum size of a payload.
pub const PAYLOAD_BYTES_MAX: usize = 8192;
/// Largest payloads that a channel may have, in ascending order.
pub const PAYLOADS: [u16; 3] = [1408, 4096, PAYLOAD_BYTES_MAX as u16];
/// Maximum size of the data of a READ or WRITE.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Unit of `FrameHeader::place`, and of all payloads of DATA.
pub const PLACE_BYTES: u32 = 64;
/// Maximum number of slots of a session.
pub const SLOTS_MAX: u16 = 1024;
/// Maximum number of channels of a session.
pub const CHANNELS_MAX: usize = 64;
/// Maximum number of lanes of a session.
pub const LANES_MAX: u16 = 64;
/// Maximum number of pages of a pool.
pub const POOL_PAGES_MAX: u32 = 65_536;
/// Numbers of a channel that a receiver remembers, below the greatest one that it has seen.
pub const NUMBERS_KEPT: u64 = 1024;
/// Words of acknowledgements in the payload of an ACK frame.
pub const ACK_WORDS: usize = 15;
/// Size of a name of a host or an export, padded with zeros.
pub const NAME_BYTES: usize = 64;
/// Bytes that follow the payload of a frame with keys: its authentication tag.
pub const TAG_BYTES: usize = 16;
/// Size of the key that a client and a target share.
pub const KEY_BYTES: usize = 32;
/// Size of what names a key.
pub const FINGERPRINT_BYTES: usize = 16;
/// Size of the Noise message in HANDSHAKE: a public key and a tag.
pub const NOISE_BYTES: usize = 32 + TAG_BYTES;
/// Size of the Noise message that ACCEPT is with keys: a public key, the record `Accept` and a tag.
pub const NOISE_ACCEPT_BYTES: usize = 32 + size_of::<Accept>() + TAG_BYTES;
/// Frames of one direction of a channel that use one key. RFC 9001, section 6.6, allows 2^23 with AES-GCM.
pub const FRAMES_PER_KEY: u64 = 1 << 22;
/// Size of an Ethernet header, which an MTU does not count.
pub const ETHERNET_BYTES: usize = 14;
/// Smallest MTU of a link.
pub const MTU_MIN: usize = 1500;

/// A MAC address.
pub type Mac = [u8; 6];

/// Returns a MAC address as text, like 02:00:00:00:00:0a.
pub fn mac_text(mac: &Mac) -> String {
    let bytes: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}

/// Returns the MAC address that a text is, or `None` if it is none.
pub fn parse_mac(text: &str) -> Option<Mac> {
    let mut mac = Mac::default();
    let mut bytes = text.split(':');
    for byte in &mut mac {
        let digits = bytes.next().filter(|digits| digits.len() == 2)?;
        // `from_str_radix` takes a sign, too.
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        *byte = u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)?;
    }
    bytes.next().is_none().then_some(mac)
}

/// Values of `FrameHeader::kind`.
pub mod frame_kind {
    /// Looks for a target.
    pub const HELLO: u8 = 1;
    /// Answers HELLO.
    pub const OFFER: u8 = 2;
    /// Asks for a session, or a further channel of a session.
    pub const HANDSHAKE: u8 = 3;
    /// Answers HANDSHAKE.
    pub const ACCEPT: u8 = 4;
    /// Refuses a frame.
    pub const REFUSED: u8 = 5;
    /// Has requests.
    pub const REQUESTS: u8 = 6;
    /// Has completions.
    pub const COMPLETIONS: u8 = 7;
    /// Has a part of the data of a request.
    pub const DATA: u8 = 8;
    /// Has acknowledgements.
    pub const ACK: u8 = 9;
    /// Asks for an acknowledgement.
    pub const PING: u8 = 10;
    /// Ends the session.
    pub const CLOSE: u8 = 11;
}

/// Values of `RequestRecord::op`.
pub mod op {
    /// Reads.
    pub const READ: u8 = 1;
    /// Writes.
    pub const WRITE: u8 = 2;
    /// Writes zeros.
    pub const WRITE_ZEROES: u8 = 3;
    /// Discards.
    pub const DISCARD: u8 = 4;
    /// Makes completed writes durable.
    pub const FLUSH: u8 = 5;
}

/// Values of `Refused::reason`.
pub mod reason {
    /// The receiver has no channel with the index.
    pub const UNKNOWN_INDEX: u16 = 1;
    /// Another session has the export.
    pub const FENCED: u16 = 2;
    /// Another client has the export.
    pub const IN_USE: u16 = 3;
    /// The target does not speak the version.
    pub const VERSION: u16 = 4;
    /// The client may not use the export.
    pub const NOT_ALLOWED: u16 = 5;
    /// A frame broke a rule.
    pub const PROTOCOL: u16 = 6;
    /// The sender ends the session in order.
    pub const DETACHED: u16 = 7;
    /// The target waits for operations of an earlier session.
    pub const WAITING: u16 = 8;
}

/// Values of `Offer::security` and `Handshake::security`.
pub mod security {
    /// No keys: checksums only.
    pub const NONE: u8 = 0;
    /// Each frame has a tag.
    pub const MAC: u8 = 1;
    /// Each frame has a tag, and its payload is encrypted.
    pub const ENCRYPT: u8 = 2;
}

/// Bit of `FrameHeader::flags`: the sender wants an acknowledgement at once.
pub const FLAG_ACK_WANTED: u8 = 1;
/// Bit of `FrameHeader::flags`: a target sent the frame.
pub const FLAG_FROM_TARGET: u8 = 2;
/// Bit of `RequestRecord::flags`: the request must be durable when it completes.
pub const FLAG_FUA: u8 = 1;
/// Bit of `Offer::flags` and `Accept::flags`: the export is read-only.
pub const FLAG_READ_ONLY: u16 = 1;
/// Bit of `Handshake::flags`: take the export from another client.
pub const FLAG_TAKE_OVER: u16 = 1;
/// Bit of `Handshake::flags`: the instance has had the export.
pub const FLAG_RESUMES: u16 = 2;
/// Bit of `Accept::flags`: no other instance has had the export since this one had it.
pub const FLAG_CONTINUES: u16 = 2;

/// The start of each frame.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct FrameHeader {
    /// Receiver.
    pub destination: Mac,
    /// Sender.
    pub source: Mac,
    /// `ETHERTYPE` or another one.
    pub ethertype: big_endian::U16,
    /// One of `frame_kind`.
    pub kind: u8,
    /// `FLAG_ACK_WANTED`, `FLAG_FROM_TARGET`.
    pub flags: u8,
    /// The receiver's index of the channel.
    pub index: U32,
    /// Bytes of the payload. Tells padding from payload.
    pub payload_bytes: U16,
    /// Frames that the receiver of this frame may have in flight on this channel.
    pub credit: U16,
    /// Number of the frame.
    pub number: U64,
    /// One more than the greatest number that the sender has received.
    pub ack_end: U64,
    /// Bit N: the sender has received the frame `ack_end - 1 - N`.
    pub acks: U64,
    /// DATA: the slot.
    pub slot: U16,
    /// DATA: offset of the payload in the data, in `PLACE_BYTES`.
    pub place: U16,
    /// DATA: sequence of the request.
    pub sequence: U32,
    /// DATA to a target: first page of the request in the pool.
    pub pool_page: U32,
    /// Checksum. Detects damage, and frames of other sessions. Zero in a frame with keys, which has a tag.
    pub crc: U32,
}
const _: () = assert!(size_of::<FrameHeader>() == 64);

/// A request.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RequestRecord {
    /// One of `op`.
    pub op: u8,
    /// `FLAG_FUA` or 0.
    pub flags: u8,
    /// Slot.
    pub slot: U16,
    /// Sequence.
    pub sequence: U32,
    /// Offset on the device.
    pub offset_bytes: U64,
    /// Length.
    pub length_bytes: U32,
    /// First page of the data in the pool.
    pub pool_page: U32,
    /// Zero.
    pub reserved: [u8; 8],
}
const _: () = assert!(size_of::<RequestRecord>() == 32);

/// The end of a request.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CompletionRecord {
    /// Slot.
    pub slot: U16,
    /// An errno, or 0.
    pub error: U16,
    /// Sequence.
    pub sequence: U32,
    /// The export's verifier when the operation ended.
    pub verifier: U64,
    /// Zero.
    pub reserved: [u8; 8],
}
const _: () = assert!(size_of::<CompletionRecord>() == 24);

/// Payload of HELLO.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Hello {
    /// `WIRE_MAGIC`.
    pub magic: [u8; 8],
    /// Oldest version that the initiator speaks.
    pub version_min: u8,
    /// Newest version that it speaks.
    pub version_max: u8,
    /// Zero.
    pub reserved0: U16,
    /// The index for answers.
    pub index: U32,
    /// Name of the target's host, or zeros.
    pub host: [u8; NAME_BYTES],
    /// Name of the export, or zeros.
    pub export: [u8; NAME_BYTES],
}
const _: () = assert!(size_of::<Hello>() == 144);

/// Payload of OFFER.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Offer {
    /// `WIRE_MAGIC`.
    pub magic: [u8; 8],
    /// The newest version that both speak; 0: none.
    pub version: u8,
    /// One of `security`: what the target demands.
    pub security: u8,
    /// `FLAG_READ_ONLY` or 0.
    pub flags: U16,
    /// Zero.
    pub reserved1: U32,
    /// What HANDSHAKE must repeat. Proves that the initiator receives frames at its address.
    pub cookie: [u8; 16],
    /// Instance of the target. Tells which links lead to the same target.
    pub target: [u8; 16],
    /// Name of the target's host.
    pub host: [u8; NAME_BYTES],
    /// Name of the export.
    pub export: [u8; NAME_BYTES],
}
const _: () = assert!(size_of::<Offer>() == 176);

/// Start of the payload of HANDSHAKE.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Handshake {
    /// `WIRE_MAGIC`.
    pub magic: [u8; 8],
    /// Version of the offer.
    pub version: u8,
    /// One of `security`: what the initiator has learnt from the offer.
    pub security: u8,
    /// `FLAG_TAKE_OVER`, `FLAG_RESUMES`.
    pub flags: U16,
    /// The initiator's index of the new channel.
    pub index: U32,
    /// Cookie of the offer.
    pub cookie: [u8; 16],
    /// Identifies the client.
    pub client: [u8; 16],
    /// Instance of the initiator.
    pub instance: [u8; 16],
    /// Name of the export.
    pub export: [u8; NAME_BYTES],
    /// Frames that the target may have in flight.
    pub credit: U16,
    /// Largest payload of a frame.
    pub payload_max: U16,
    /// The initiator's index of a channel that ends with this one's begin, or 0.
    pub replaces: U32,
    /// The initiator's number for the node of its network interface.
    pub lane: U16,
    /// Zero.
    pub reserved1: [u8; 6],
    /// Fingerprint of the client's key; zeros without keys.
    pub key: [u8; FINGERPRINT_BYTES],
    /// First message of the Noise handshake; zeros without keys.
    pub noise: [u8; NOISE_BYTES],
}
const _: () = assert!(size_of::<Handshake>() == 208);

/// Start of the payload of ACCEPT. With keys it is the payload of a Noise message, which is the start of the payload of ACCEPT.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Accept {
    /// `WIRE_MAGIC`.
    pub magic: [u8; 8],
    /// Version of the session.
    pub version: u8,
    /// Zero.
    pub reserved0: u8,
    /// `FLAG_READ_ONLY`, `FLAG_CONTINUES`.
    pub flags: U16,
    /// The target's index of the new channel.
    pub index: U32,
    /// Instance of the initiator.
    pub instance: [u8; 16],
    /// Identifies the session.
    pub session: [u8; 16],
    /// Size of the device.
    pub size_bytes: U64,
    /// The export's verifier.
    pub verifier: U64,
    /// Salt of the checksums.
    pub salt: U32,
    /// Pages of the pool.
    pub pool_pages: U32,
    /// Number of slots.
    pub slots: U16,
    /// Frames that the initiator may have in flight.
    pub credit: U16,
    /// Largest payload of a frame.
    pub payload_max: U16,
    /// Zero.
    pub reserved1: U16,
    /// First page of the pool that is on the node of the target's network interface.
    pub near_page: U32,
    /// Pages of the pool there.
    pub near_pages: U32,
}
const _: () = assert!(size_of::<Accept>() == 88);

/// Payload of REFUSED and CLOSE.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Refused {
    /// `WIRE_MAGIC`.
    pub magic: [u8; 8],
    /// One of `reason`.
    pub reason: U16,
    /// Zero.
    pub reserved0: U16,
    /// The index in the frame that is refused.
    pub index: U32,
}
const _: () = assert!(size_of::<Refused>() == 16);

impl Refused {
    /// Returns a refusal of a frame with an index.
    pub fn new(reason: u16, index: u32) -> Refused {
        Refused {
            magic: WIRE_MAGIC,
            reason: U16::new(reason),
            reserved0: U16::new(0),
            index: U32::new(index),
        }
    }
}

impl FrameHeader {
    /// Returns a header of a kind, with the length of its payload, and the rest zero.
    ///
    /// # Panics
    /// Panics if the payload is longer than `PAYLOAD_BYTES_MAX`.
    pub fn new(kind: u8, payload_bytes: usize) -> FrameHeader {
        assert!(payload_bytes <= PAYLOAD_BYTES_MAX, "{payload_bytes}");
        let mut header = FrameHeader::new_zeroed();
        header.kind = kind;
        header.payload_bytes = U16::new(payload_bytes as u16);
        header
    }

    /// Splits a frame into its header and its payload, without the padding. Returns `None` if the frame is shorter than these.
    pub fn split(frame: &[u8]) -> Option<(FrameHeader, &[u8])> {
        let (header, rest) = FrameHeader::read_from_prefix(frame).ok()?;
        let payload = rest.get(..header.payload_bytes.get().into())?;
        (payload.len() <= PAYLOAD_BYTES_MAX).then_some((header, payload))
    }

    /// Returns the checksum of a frame.
    pub fn checksum(&self, salt: u32, payload: &[u8]) -> u32 {
        let mut header = *self;
        header.crc = U32::new(0);
        let crc = crc32c::crc32c(&salt.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &header.as_bytes()[ETHERNET_BYTES..]);
        crc32c::crc32c_append(crc, payload)
    }

    /// Sets the checksum.
    pub fn seal(&mut self, salt: u32, payload: &[u8]) {
        self.crc = U32::new(self.checksum(salt, payload));
    }

    /// Returns whether the checksum is right.
    pub fn is_sealed(&self, salt: u32, payload: &[u8]) -> bool {
        self.crc.get() == self.checksum(salt, payload)
    }
}

/// Returns the largest payload of a frame on a link with an MTU. Returns `None` if the MTU is below `MTU_MIN`.
pub fn payload_max_of(mtu: usize) -> Option<u16> {
    let around = HEADER_BYTES - ETHERNET_BYTES + TAG_BYTES;
    let fits = |payload: &u16| mtu >= MTU_MIN.max(usize::from(*payload) + around);
    PAYLOADS.into_iter().rfind(fits)
}

/// Returns the next smaller payload after one of `payload_max_of`.
pub fn smaller_payload(payload_max: u16) -> Option<u16> {
    PAYLOADS.into_iter().rfind(|payload| *payload < payload_max)
}

/// Returns a name as a field. Returns `None` if the name is longer than `NAME_BYTES`, or has a zero.
pub fn name_field(name: &str) -> Option<[u8; NAME_BYTES]> {
    let mut field = [0; NAME_BYTES];
    field
        .get_mut(..name.len())?
        .copy_from_slice(name.as_bytes());
    (!name.contains('\0')).then_some(field)
}

/// Returns the name in a field. Returns `None` if it is not UTF-8.
pub fn name_in(field: &[u8; NAME_BYTES]) -> Option<&str> {
    let end = field.iter().position(|&byte| byte == 0);
    std::str::from_utf8(&field[..end.unwrap_or(NAME_BYTES)]).ok()
}
