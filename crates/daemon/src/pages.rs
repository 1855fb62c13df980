//! Bytes of pages.

use jericho_cache::{Grant, Latched};
use jericho_format::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;

/// Returns whether a range of bytes touches more than one page.
pub(crate) fn is_over_several_pages(offset: u64, len: u64) -> bool {
    let last = offset.saturating_add(len.saturating_sub(1));
    offset / PAGE_BYTES != last / PAGE_BYTES
}

/// Writes bytes to a page. If the page is not filled, zeroes the rest of it.
pub(crate) fn put_new(
    grant: &mut Grant,
    page: u64,
    within: usize,
    bytes: &[u8],
) -> Result<(), Latched> {
    if bytes.len() == PAGE || grant.is_filled(page) {
        return grant.write(page, within, bytes);
    }
    let mut whole = [0; PAGE];
    whole[within..within + bytes.len()].copy_from_slice(bytes);
    grant.write(page, 0, &whole)
}
