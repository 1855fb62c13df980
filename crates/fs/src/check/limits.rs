//! How much memory a check takes.
//!
//! A check takes at most 256 MiB for any volume, and less for small ones: 64 MiB for the metadata stores (cached pages of redb, and
//! rows of the journal), the limits below, and what `findings` keeps. The index and the directories are in memory together, the
//! bitmaps later, and the data last. A volume that needs more is compared in several windows. Each window reads all entries, or all
//! extents, once more.

/// Limits of a check.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes for the inodes of a window: 17 for an inode, and 24 more for a directory.
    pub index_bytes: usize,
    /// Bytes for the directories and their parents: 20 for each.
    pub directories_bytes: usize,
    /// Bytes for the bitmaps of a window. 32 MiB are 1 TiB of a volume.
    pub bitmaps_bytes: usize,
    /// Bytes for the extents of a batch whose data is read: 48 for each. Used alone.
    pub data_bytes: usize,
}

impl Limits {
    pub const USUAL: Limits = Limits {
        index_bytes: 80 << 20,
        directories_bytes: 32 << 20,
        bitmaps_bytes: 96 << 20,
        data_bytes: 16 << 20,
    };

    /// Returns the maximum number of directories that are kept with their parents.
    pub fn directories_max(&self) -> usize {
        self.directories_bytes / 20
    }
}
