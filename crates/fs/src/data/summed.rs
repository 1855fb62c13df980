//! The side of a file that is different on volumes with checksums: where dirty pages go, and what a read compares.

use std::fmt;
use std::ops::Range;

use jericho_cache::Error as CacheError;
use jericho_format::PAGE_BYTES;
use jericho_format::sums::{Group, Sum, checksum, place_of};
use jericho_metadata::errno::{EIO, ENOSPC};

use crate::data::extents::{At, Map, Placing};
use crate::data::file::{CacheResult, object_error};
use crate::data::runs::Step;
use crate::error::{Error, Result};
use crate::inode::File;

/// Commits for which the write-back of pages waits that overwrites blocks in place. One is enough if the batch of the file's shard needs no
/// other shard, and else two: the first one leaves the file out, and the second one is linked. Further blocks of the file in other slices
/// may need one more. None is enough while no batch includes the file, because it is being truncated.
const COMMITS_MAX: usize = 4;

impl File {
    /// Returns the checksums of the contents of pages, or none on a volume without checksums.
    pub(crate) fn checksums_of(&self, bytes: &[u8]) -> Vec<u32> {
        match self.host.volume().has_checksums() {
            true => bytes
                .chunks_exact(PAGE_BYTES as usize)
                .map(checksum)
                .collect(),
            false => Vec::new(),
        }
    }

    /// Gives pages blocks for write-back that no durable batch names with a checksum, and appends these in order, as (first block,
    /// number). If the home slice has no room, waits until the pages are durably without a checksum, and leaves them in their blocks.
    pub(crate) fn place_anew(
        &self,
        first: u64,
        count: u32,
        out: &mut Vec<(At, u32)>,
    ) -> CacheResult {
        let pages = first..first + u64::from(count);
        for commits in 0..=COMMITS_MAX {
            let durable = self.host.durable(self.ino());
            out.clear();
            self.place(first, count, Placing::Anew(durable), out)?;
            if self.map.write().overwrites_safely(pages.clone(), durable) {
                return Ok(());
            }
            self.host.mark_dirty(&self.inode);
            if commits < COMMITS_MAX {
                // No commit waits for the cache.
                let committed = self.host.commit(self.ino());
                committed.map_err(|error| object_error(&error))?;
            }
        }
        Err(object_error(&ENOSPC))
    }

    /// Appends the checksum of each page, or `None` for a page that has nothing to compare.
    pub(crate) fn sums_in(
        &self,
        map: &Map,
        pages: Range<u64>,
        out: &mut Vec<Option<u32>>,
    ) -> CacheResult {
        let from = out.len();
        out.resize(from + (pages.end - pages.start) as usize, None);
        if !self.host.volume().has_checksums() {
            return Ok(());
        }
        // The last group that was read from the store.
        let mut stored: Option<(u64, Group)> = None;
        for run in map.extents.within(pages.clone()) {
            if run.state.readable().is_none() {
                continue;
            }
            for page in run.page..run.end() {
                let sum = match map.new_sum(page) {
                    Some(sum) => Ok(sum),
                    None => self.stored_sum(page, &mut stored),
                };
                out[from + (page - pages.start) as usize] = match sum {
                    Ok(Sum::Of(sum)) => Some(sum),
                    Ok(Sum::Bare) => None,
                    Ok(Sum::None) => return Err(self.report_unverifiable(page, "it is missing")),
                    // The damage is of this file's rows only, so the volume stays as it is for all others.
                    Err(error @ Error::Damaged(_)) => {
                        return Err(self.report_unverifiable(page, &error.to_string()));
                    }
                    Err(error) => return Err(object_error(&error)),
                };
            }
        }
        Ok(())
    }

    fn stored_sum(&self, page: u64, last: &mut Option<(u64, Group)>) -> Result<Sum> {
        let (group, at) = place_of(page);
        if last.as_ref().is_none_or(|(number, _)| *number != group) {
            *last = Some((group, self.host.stored_sums(self.ino(), group)?));
        }
        Ok(last.as_ref().map_or(Sum::None, |(_, sums)| sums.get(at)))
    }

    /// Logs why the checksum of a page cannot be used. Returns the error for those that read the page.
    fn report_unverifiable(&self, page: u64, why: &str) -> CacheError {
        self.report(page, format_args!(
            "the data cannot be compared with its checksum: {why}; write the whole page again, and run jericho check"
        ))
    }

    /// Logs that a page does not have its checksum. Returns the error for those that read the page.
    pub(crate) fn report_difference(&self, page: u64, expected: u32, found: u32) -> CacheError {
        let at = {
            let map = self.map.read();
            let run = map.extents.containing(page);
            run.and_then(|run| run.state.advance(page - run.page).readable())
        };
        let place = at.map_or_else(String::new, |at| place_name(self.host.volume(), at));
        self.report(page, format_args!(
            "the data on the device is damaged: checksum {found:#010x} instead of {expected:#010x}{place}"
        ))
    }

    /// Logs what is wrong with a page. Returns the error for those that read it.
    fn report(&self, page: u64, what: fmt::Arguments<'_>) -> CacheError {
        let message = format!("inode {}, offset {}: {what}", self.ino(), page * PAGE_BYTES);
        tracing::error!("{message}");
        CacheError::Object {
            errno: EIO.errno(),
            message: message.into(),
        }
    }
}

/// Returns the text that names the place of a block.
pub(crate) fn place_name(volume: &jericho_volume::Volume, at: At) -> String {
    let run = volume.translate(at.slice, at.block, 1);
    let device = run.and_then(|run| {
        let device = volume.devices().get(usize::from(run.device))?;
        Some(format!(", {} at byte {}", device.name(), run.offset_bytes))
    });
    let device = device.unwrap_or_default();
    format!(" (slice {}, block {}{device})", at.slice, at.block)
}
