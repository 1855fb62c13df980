//! Compares one page with its rows: its checksum, and whether a block still is the page's.

use jericho_format::PAGE_BYTES;
use jericho_format::sums::{GROUP_PAGES, Group, Sum, checksum, place_of};
use jericho_metadata::store::Extent;

use crate::core::Core;
use crate::data::extents::At;
use crate::data::summed::place_name;
use crate::error::{Error, Result};
use crate::scrub::findings::Fault;
use crate::types::Ino;

/// The rows of a file's checksums.
pub(super) struct Rows<'c> {
    core: &'c Core,
    ino: Ino,
    /// The last group that was read.
    last: Option<(u64, Group)>,
    /// A line for the log, if a row makes no sense.
    pub(super) damaged: Option<String>,
}

impl Rows<'_> {
    pub(super) fn of(core: &Core, ino: Ino) -> Rows<'_> {
        Rows {
            core,
            ino,
            last: None,
            damaged: None,
        }
    }

    /// Returns the checksum of a page in the store. A damaged row has none: its pages can be read from the device, but not compared.
    fn get(&mut self, page: u64) -> Result<Sum> {
        let (group, at) = place_of(page);
        if self.last.as_ref().is_none_or(|(last, _)| *last != group) {
            let sums = match self.core.store_of(self.ino).sums(self.ino, group) {
                Err(Error::Damaged(why)) => {
                    let first = group * GROUP_PAGES;
                    self.damaged = Some(format!(
                        "inode {}, offset {}: the background check cannot compare {GROUP_PAGES} pages: {why}",
                        self.ino,
                        first * PAGE_BYTES
                    ));
                    Group::default()
                }
                sums => sums?,
            };
            self.last = Some((group, sums));
        }
        Ok(self
            .last
            .as_ref()
            .map_or(Sum::None, |(_, sums)| sums.get(at)))
    }

    /// Returns whether bytes have the checksum of a page, or nothing is known of it.
    pub(super) fn fits(&mut self, page: u64, bytes: &[u8]) -> Result<bool> {
        Ok(match self.get(page)? {
            Sum::Of(sum) => checksum(bytes) == sum,
            Sum::Bare | Sum::None => true,
        })
    }
}

/// Examines a block that could not be read, or differed from a checksum. Counts it if it is damaged, and returns what is wrong. It is not
/// damaged if the file has changed meanwhile, or the block's contents are in the journal. The extent of the page began at `start`.
pub(super) fn examine(
    core: &Core,
    ino: Ino,
    (start, page): (u64, u64),
    at: At,
    block: &mut [u8],
) -> Result<Option<(Fault, String)>> {
    let blocks = at.blocks(1);
    let rows = || -> Result<(bool, Sum)> {
        // Only the extent that has the page now: a file may have very many.
        let extents = core.store_of(ino).extents_after(ino, (start, page), 1)?;
        let has_block = |extent: &Extent| {
            let skip = page.wrapping_sub(extent.page);
            skip < u64::from(extent.blocks.count)
                && !extent.unwritten
                && (extent.blocks.slice, extent.blocks.first + skip) == (at.slice, at.block)
        };
        let is_there = extents.iter().any(has_block);
        let sum = Rows::of(core, ino).get(page)?;
        // After the checksum: without an image now, the block has the contents of this checksum, or of a newer one.
        let is_logged = core.allocator.logged(blocks).has_rows(blocks);
        Ok((is_there && !is_logged, sum))
    };
    let before = rows()?;
    let Some(run) = core.volume.runs(blocks).next() else {
        return Ok(None);
    };
    let read = core.volume.devices()[usize::from(run.device)].read_at(run.offset_bytes, block);
    let found = checksum(block);
    let differs = matches!(before.1, Sum::Of(sum) if sum != found);
    if !before.0 || (read.is_ok() && !differs) || rows()? != before {
        return Ok(None);
    }
    if let Some(slice) = core.slices.get(usize::from(at.slice)) {
        slice.count_checksum_error();
    }
    let place = place_name(&core.volume, at);
    Ok(Some(match read {
        Ok(()) => (
            Fault::Damaged,
            format!("the data on the device is damaged: it has the checksum {found:#010x}{place}"),
        ),
        Err(error) => (
            Fault::Unreadable,
            format!("the data cannot be read: {error}{place}"),
        ),
    }))
}
