//! The tables of the store. All keys and values are bytes; `docs/formats/volume.md` lists them.

use redb::{ReadOnlyTable, StorageError, TableDefinition};

use crate::error::Error;
use crate::types::SliceId;

/// A table of the store as redb defines it.
pub type Definition = TableDefinition<'static, &'static [u8], &'static [u8]>;
/// A table that is opened for reading.
pub type BytesTable = ReadOnlyTable<&'static [u8], &'static [u8]>;

/// inode -> `InodeValue`, target
pub const INODES: Definition = TableDefinition::new("inodes");
/// directory, hash, name -> `EntryValue`
pub const ENTRIES: Definition = TableDefinition::new("entries");
/// inode, page -> `ExtentValue`
pub const EXTENTS: Definition = TableDefinition::new("extents");
/// inode, name -> value
pub const XATTRS: Definition = TableDefinition::new("xattrs");
/// slice, container -> bitmap
pub const BITMAPS: Definition = TableDefinition::new("bitmaps");
/// slice, container -> blocks in use
pub const USED: Definition = TableDefinition::new("used");
/// inode -> nothing
pub const ORPHANS: Definition = TableDefinition::new("orphans");
/// name -> number
pub const VALUES: Definition = TableDefinition::new("values");

/// slice, block -> contents of the block
pub const LOGGED: Definition = TableDefinition::new("logged");

/// inode, group of pages -> checksums
pub const SUMS: Definition = TableDefinition::new("sums");

/// All tables.
pub const ALL: [Definition; 10] = [
    INODES, ENTRIES, EXTENTS, XATTRS, BITMAPS, USED, ORPHANS, VALUES, LOGGED, SUMS,
];

/// Name of the value that holds the position of the last checkpoint in the journal.
pub(super) const CHECKPOINT: &str = "checkpoint";

/// Name of the value that counts the linked batches that went to redb without the journal.
pub(super) const LINKED: &str = "linked";

/// Names a table; the value is its index in `ALL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// `INODES`
    Inodes,
    /// `ENTRIES`
    Entries,
    /// `EXTENTS`
    Extents,
    /// `XATTRS`
    Xattrs,
    /// `BITMAPS`
    Bitmaps,
    /// `USED`
    Used,
    /// `ORPHANS`
    Orphans,
    /// `VALUES`
    Values,
    /// `LOGGED`
    Logged,
    /// `SUMS`
    Sums,
}

impl Table {
    /// Returns the table with an index, or `None` if there is none.
    pub(super) fn of_index(index: u8) -> Option<Table> {
        use Table::{
            Bitmaps, Entries, Extents, Inodes, Logged, Orphans, Sums, Used, Values, Xattrs,
        };
        let all = [
            Inodes, Entries, Extents, Xattrs, Bitmaps, Used, Orphans, Values, Logged, Sums,
        ];
        all.get(usize::from(index)).copied()
    }
}

/// A row to put, or to remove if it has no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The table.
    pub table: Table,
    /// The key, as the table encodes it.
    pub key: Vec<u8>,
    /// The value. `None` removes the row.
    pub value: Option<Vec<u8>>,
}

/// What a read of a table can meet.
pub enum ReadError {
    /// redb or the device under it failed.
    Redb(StorageError),
    /// The row is invalid. Holds what is wrong.
    Damaged(String),
}

impl From<StorageError> for ReadError {
    fn from(error: StorageError) -> Self {
        ReadError::Redb(error)
    }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Redb(error) => Error::Store(error.to_string()),
            ReadError::Damaged(what) => Error::Damaged(what),
        }
    }
}

/// Returns a key of `LOGGED`: slice (2 bytes, big-endian), block (8, big-endian).
pub fn block_key((slice, block): (SliceId, u64)) -> [u8; 10] {
    let mut key = [0; 10];
    key[..2].copy_from_slice(&slice.to_be_bytes());
    key[2..].copy_from_slice(&block.to_be_bytes());
    key
}

/// Returns a key of `BITMAPS` and `USED`: slice (2 bytes, big-endian), container (4, big-endian).
pub fn container_key(slice: SliceId, container: u32) -> [u8; 6] {
    let mut key = [0; 6];
    key[..2].copy_from_slice(&slice.to_be_bytes());
    key[2..].copy_from_slice(&container.to_be_bytes());
    key
}
