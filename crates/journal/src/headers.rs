//! The two copies of the journal header.

use jericho_format::PAGE_BYTES;
use jericho_format::journal::{
    BeginValue, EARLIER_BEGINS, HEADER_COPIES, JournalHeader, JournalHeaderError,
};
use jericho_storage::{AlignedBuffer, IoError};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::area::AreaDevice;
use crate::error::RecoverError;
use crate::position::Position;

/// The header that counts, and which copy it is.
#[derive(Clone, Debug)]
pub(crate) struct CurrentHeader {
    pub header: Box<JournalHeader>,
    copy: u32,
}

/// Reads both copies and returns the one that counts.
pub(crate) fn read(place: &AreaDevice) -> Result<CurrentHeader, RecoverError> {
    let mut blocks = AlignedBuffer::new((u64::from(HEADER_COPIES) * PAGE_BYTES) as usize);
    place.read(0, blocks.as_mut_slice())?;
    let (first, second) = blocks.as_slice().split_at(PAGE_BYTES as usize);
    let copies = [JournalHeader::decode(first), JournalHeader::decode(second)];
    let device = place.device.name();
    for copy in &copies {
        if let Err(JournalHeaderError::Newer(version)) = copy {
            return Err(RecoverError::Newer {
                device,
                version: *version,
            });
        }
    }
    let (header, copy) = match copies {
        [Ok(first), Ok(second)] if second.incarnation.get() > first.incarnation.get() => {
            (second, 1)
        }
        [Ok(first), _] => (first, 0),
        [_, Ok(second)] => (second, 1),
        [Err(first), Err(second)] => {
            return Err(RecoverError::NoHeader {
                device,
                block: place.on_device(0),
                first,
                second,
            });
        }
    };
    let what = if header.volume_uuid != place.volume.uuid {
        "volume"
    } else if header.slice.get() != place.slice {
        "slice"
    } else if header.blocks.get() != place.area.blocks {
        "area"
    } else {
        return Ok(CurrentHeader { header, copy });
    };
    Err(RecoverError::Foreign {
        device,
        block: place.on_device(copy),
        what,
    })
}

/// Writes a header that begins an incarnation, and makes both copies durable. `current` is the header that counts until then.
/// Overwrites its copy last, so a torn write leaves a valid copy. Writes both copies, because the loss of a single new copy
/// would revive the older header, and the segments of this incarnation do not belong to that header.
pub(crate) fn write(
    place: &AreaDevice,
    current: Option<&CurrentHeader>,
    begin: Position,
    flags: u32,
) -> Result<CurrentHeader, IoError> {
    let mut header = JournalHeader::new();
    header.volume_uuid = place.volume.uuid;
    header.slice = U16::new(place.slice);
    header.flags = U32::new(flags);
    header.blocks = U64::new(place.area.blocks);
    header.incarnation = U64::new(begin.incarnation);
    header.first_seq = U64::new(begin.seq);
    header.first_block = U32::new(begin.block);
    header.first_crc = U32::new(begin.crc);
    if let Some(current) = current {
        let before = &current.header;
        header.earlier[0] = BeginValue {
            incarnation: before.incarnation,
            first_seq: before.first_seq,
        };
        header.earlier[1..].copy_from_slice(&before.earlier[..EARLIER_BEGINS - 1]);
    }
    let mut block = AlignedBuffer::new(PAGE_BYTES as usize);
    block.as_mut_slice().copy_from_slice(&header.encode());
    let copy = current.map_or(0, |current| HEADER_COPIES - 1 - current.copy);
    for copy in [copy, HEADER_COPIES - 1 - copy] {
        place.write_durable(copy, block.as_slice())?;
    }
    Ok(CurrentHeader { header, copy })
}
