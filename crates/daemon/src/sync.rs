//! Makes data durable, and gives free space back to the devices.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use jericho_format::PAGE_BYTES;
use jericho_fs::Result;
use jericho_fs::types::{Ino, Trimmed};
use jericho_fs::{Done, begin_change};
use jericho_volume::{GrowError, GrowRequest, GrownDevice};

use crate::handle::Handle;
use crate::mounted::Mounted;

impl Mounted {
    /// Makes the file's data durable; see `Fs::fsync_blocking`. The calling thread may have to wait for inline writers and devices.
    /// Fails also with a write-back error of the file that happened while the handle was open, once for each handle.
    pub fn fsync(&self, handle: &Arc<Handle>, datasync: bool, done: Done) {
        self.fast.absorb(handle.file.ino());
        // Includes reports of writes that were still in progress when the last writable descriptor was closed.
        self.fast.drain_reports();
        let done = handle.reporting(done);
        self.fs().fsync_blocking(&handle.file, datasync, done);
    }

    /// Makes all data written to the volume so far durable, including inline writes.
    pub fn sync(&self) -> Result<()> {
        for slot_file in self.fast.written_files() {
            self.fast.absorb_file(&slot_file);
        }
        self.fast.drain_reports();
        self.fs().sync_all()
    }

    /// Does the same as `sync`, for syncfs(2). Fails also if a write-back has failed since the last call, even if a later attempt
    /// has written the pages.
    pub fn syncfs(&self) -> Result<()> {
        let synced = self.sync();
        // An interrupted call does not report the error: the next call does.
        begin_change()?;
        let reported = self.fs().report_errors();
        synced.and(reported)
    }

    /// Returns the paths of the files with data that is not on a device yet. If some of these files have no name, the last entry
    /// tells how many.
    pub fn unwritten(&self) -> Vec<String> {
        let objects = self
            .volume
            .slices
            .iter()
            .flat_map(|slice| slice.dirty_objects());
        // A file with unwritten data is in memory, so its object has an inode.
        let inodes = objects.filter_map(|object| self.fs().ino_of_object(object));
        let files: HashSet<Ino> = inodes.collect();
        let (count, mut names) = (files.len(), self.fs().paths_of(files));
        names.sort_unstable();
        if names.len() < count {
            names.push(format!("{} files without a name", count - names.len()));
        }
        names
    }

    /// Discards free space; see `Fs::trim`, but in bytes. Returns the number of bytes that the devices discarded, and the offset
    /// at which to continue. A trim that starts at 0 also discards blocks freed before it.
    pub fn trim(
        &self,
        range: Range<u64>,
        run_least: u64,
        until: Option<Instant>,
    ) -> Result<(u64, Option<u64>)> {
        if range.start == 0 {
            self.fs().commit()?;
        }
        let blocks = range.start.div_ceil(PAGE_BYTES)..range.end / PAGE_BYTES;
        let run_least = run_least.div_ceil(PAGE_BYTES);
        let Trimmed { blocks, next } = self.fs().trim(blocks, run_least, until)?;
        Ok((blocks * PAGE_BYTES, next.map(|block| block * PAGE_BYTES)))
    }

    /// Takes larger files and block devices into use; see `Fs::grow`.
    pub fn grow(&self, request: &GrowRequest) -> std::result::Result<Vec<GrownDevice>, GrowError> {
        let grown = self.fs().grow(request)?;
        for device in &grown {
            tracing::info!(
                device = %device.name,
                old_bytes = device.old_bytes,
                new_bytes = device.new_bytes,
                "the volume has grown"
            );
        }
        Ok(grown)
    }
}

#[cfg(test)]
mod tests;
