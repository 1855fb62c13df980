//! Checks one segment of the ring, without its neighbours.

use jericho_format::journal::{JOURNAL_VERSION, SEGMENT_HEADER_BYTES, SegmentHeader, segment_kind};
use jericho_storage::IoError;

use crate::area::AreaDevice;
use crate::error::Found;
use crate::window::Window;

/// Returns the header of the segment at the window's begin, if the segment is whole: of this journal, within the ring, with a right
/// checksum. Does not check the segment's number, incarnation and `prev_crc`.
pub(crate) fn inspect(
    window: &mut Window,
    place: &AreaDevice,
) -> Result<Result<SegmentHeader, Found>, IoError> {
    let header = window.peek(1)?.and_then(SegmentHeader::read);
    let Some(header) = header else {
        return Ok(Err(Found::Nothing));
    };
    let version = header.version.get();
    if u32::from(version) != JOURNAL_VERSION {
        return Ok(Err(Found::Version(version)));
    }
    if header.secret != place.volume.secret || header.slice.get() != place.slice {
        return Ok(Err(Found::Foreign));
    }
    let blocks = header.blocks.get();
    let is_pad = header.kind == segment_kind::PAD;
    let fits = !is_pad || blocks == window.lap_rest() && blocks <= window.left();
    if !header.sizes_agree() || !fits {
        return Ok(Err(Found::Sizes));
    }
    // Only the first block of a pad is written.
    let Some(bytes) = window.peek(if is_pad { 1 } else { blocks })? else {
        return Ok(Err(Found::Sizes));
    };
    let following = &bytes[SEGMENT_HEADER_BYTES..header.checked_bytes() as usize];
    match header.checksum(following) == header.crc.get() {
        true => Ok(Ok(header)),
        false => Ok(Err(Found::Checksum)),
    }
}
