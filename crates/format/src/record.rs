//! Values of the metadata store's tables, and inode numbers. All integers are little-endian, except in keys: these are big-endian, so that their
//! byte order is their numeric order.

use zerocopy::byteorder::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of all records below, in each inode and in the superblock. A reader refuses others. What a volume has in addition is in the
/// feature bits of its superblock.
pub const RECORD_VERSION: u8 = 5;
/// Bits of an inode number for the counter. The slice is above them.
pub const INO_COUNTER_BITS: u32 = 40;
/// Bits of an inode number for the slice.
pub const INO_SLICE_BITS: u32 = 8;
/// Inode number of the root directory.
pub const INO_ROOT: u64 = 1;
/// Counters up to a mark may be in use. A writer makes a mark durable before, or together with, the first number below it.
pub const INO_MARK_STEP: u64 = 65_536;
/// Value of `slice` and `placement`: no slice.
pub const NO_SLICE: u16 = u16::MAX;
/// Bit of `ExtentValue::flags`: allocated but never written, reads as zeros.
pub const EXTENT_UNWRITTEN: u16 = 1;
/// Bit of `ExtentValue::flags`, reserved: other extents have the same blocks.
pub const EXTENT_SHARED: u16 = 2;
/// Bit of `ExtentValue::flags`: the blocks have checksums, in table `sums`.
pub const EXTENT_CHECKSUMS: u16 = 4;

/// File types as stored (values of `d_type`).
pub mod kind {
    /// FIFO.
    pub const FIFO: u8 = 1;
    /// Character device.
    pub const CHAR_DEVICE: u8 = 2;
    /// Directory.
    pub const DIRECTORY: u8 = 4;
    /// Block device.
    pub const BLOCK_DEVICE: u8 = 6;
    /// Regular file.
    pub const FILE: u8 = 8;
    /// Symbolic link.
    pub const SYMLINK: u8 = 10;
    /// Socket.
    pub const SOCKET: u8 = 12;
}

/// Value of table `inodes`. A symbolic link's target follows it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct InodeValue {
    /// `RECORD_VERSION`.
    pub version: u8,
    /// One of `kind`.
    pub kind: u8,
    /// Permission bits, 07777.
    pub perm: U16,
    /// Hard links.
    pub nlink: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Device number of special files.
    pub rdev: U32,
    /// Differs between the mounts in which inodes are created.
    pub generation: U32,
    /// Size in bytes; for directories, number of entries.
    pub size: U64,
    /// Time of the last access: seconds since the epoch, rounded down.
    pub atime_s: I64,
    /// Time of the last modification: seconds.
    pub mtime_s: I64,
    /// Time of the last change of attributes: seconds.
    pub ctime_s: I64,
    /// Time of creation: seconds.
    pub btime_s: I64,
    /// Nanoseconds after `atime_s`, below 10^9.
    pub atime_ns: U32,
    /// Nanoseconds after `mtime_s`.
    pub mtime_ns: U32,
    /// Nanoseconds after `ctime_s`.
    pub ctime_ns: U32,
    /// Nanoseconds after `btime_s`.
    pub btime_ns: U32,
    /// Parent directory.
    pub parent: U64,
    /// Home slice or `NO_SLICE`.
    pub slice: U16,
    /// Placement set by the user, or `NO_SLICE`.
    pub placement: U16,
    /// Bytes of the symbolic link's target that follows.
    pub target_bytes: U16,
    /// When threads migrate to the data: a `threads::ThreadsOfInode`.
    pub threads: u8,
    /// Zero.
    pub reserved0: u8,
    /// Blocks of the file's extents.
    pub blocks: U64,
    /// Zero. This field and all that follow have no use yet. A reader refuses an inode in which one of them is not zero.
    pub flags: U32,
    /// Zero: the file's data is in its home slice, except for data that is being moved.
    pub layout: u8,
    /// Zero. Room for striping: logarithm of the pages of a stripe.
    pub stripe_log2: u8,
    /// Zero. Room for striping: number of columns.
    pub columns: U16,
    /// Zero. Room for striping: bit N is set if a slice whose index is N modulo 64 may have extents of the file.
    pub column_filter: U64,
    /// Zero. Room for snapshots.
    pub born: U64,
    /// Zero. Room for quotas: the project.
    pub project: U32,
    /// Zero.
    pub reserved: [u8; 28],
}
const _: () = assert!(size_of::<InodeValue>() == 160);
/// Offset of the fields of `InodeValue` that have no use yet. They reach to its end.
pub const INODE_UNUSED_AT: usize = std::mem::offset_of!(InodeValue, flags);

/// Value of table `extents`. The key is the inode (8 bytes, big-endian) and the first page (8 bytes, big-endian).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ExtentValue {
    /// First block within the slice.
    pub first: U64,
    /// Number of blocks.
    pub count: U32,
    /// Slice.
    pub slice: U16,
    /// `EXTENT_UNWRITTEN`, `EXTENT_CHECKSUMS` or 0. A reader refuses other bits.
    pub flags: U16,
    /// Zero. Room for snapshots.
    pub born: U64,
}
const _: () = assert!(size_of::<ExtentValue>() == 24);

/// Value of table `entries`. The key is the directory (8 bytes, big-endian), the hash (8 bytes, big-endian) and the name.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct EntryValue {
    /// Inode.
    pub ino: U64,
    /// One of `kind`.
    pub kind: u8,
    /// Zero.
    pub reserved: [u8; 7],
}
const _: () = assert!(size_of::<EntryValue>() == 16);

/// Returns the inode number of a slice with this value of the slice's counter.
pub fn ino_of(slice: u16, counter: u64) -> u64 {
    u64::from(slice) << INO_COUNTER_BITS | counter
}

/// Returns the slice whose counter gave an inode number, and the counter's value then. Returns `None` for numbers that no counter
/// gives.
pub fn parts_of_ino(ino: u64) -> Option<(u16, u64)> {
    let (slice, counter) = (ino >> INO_COUNTER_BITS, ino & ((1 << INO_COUNTER_BITS) - 1));
    (counter != 0 && slice < 1 << INO_SLICE_BITS).then_some((slice as u16, counter))
}

/// Returns the name of the row of table `values` with the mark of a slice's inode numbers.
pub fn ino_mark_name(slice: u16) -> String {
    format!("next_ino_{slice}")
}

/// Name of the row of table `values` with the number of inodes.
pub const INODES_NAME: &str = "inodes";

/// Returns the key of tables `inodes` and `orphans`: the number in 8 bytes, big-endian.
pub fn ino_key(ino: u64) -> [u8; 8] {
    ino.to_be_bytes()
}

/// Returns the key of table `extents`.
pub fn extent_key(ino: u64, page: u64) -> [u8; 16] {
    pair_key(ino, page)
}

/// Returns the key of table `sums`.
pub fn sums_key(ino: u64, group: u64) -> [u8; 16] {
    pair_key(ino, group)
}

/// Returns two numbers in 16 bytes, big-endian.
pub fn pair_key(a: u64, b: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&a.to_be_bytes());
    key[8..].copy_from_slice(&b.to_be_bytes());
    key
}

/// Returns the key of table `entries`.
pub fn entry_key(dir: u64, hash: u64, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(16 + name.len());
    key.extend_from_slice(&pair_key(dir, hash));
    key.extend_from_slice(name);
    key
}

/// Returns the key of table `xattrs`.
pub fn xattr_key(ino: u64, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(8 + name.len());
    key.extend_from_slice(&ino.to_be_bytes());
    key.extend_from_slice(name);
    key
}

/// Reads a big-endian number at the start of a key; `None` when the key is shorter.
pub fn key_number(key: &[u8]) -> Option<u64> {
    key.first_chunk::<8>().map(|b| u64::from_be_bytes(*b))
}

/// Splits nanoseconds since the epoch into seconds and nanoseconds. Saturates outside of i64 seconds.
pub fn split_time(ns: i128) -> (i64, u32) {
    let s = ns.div_euclid(1_000_000_000);
    match i64::try_from(s) {
        Ok(s) => (s, ns.rem_euclid(1_000_000_000) as u32),
        Err(_) if s < 0 => (i64::MIN, 0),
        Err(_) => (i64::MAX, 999_999_999),
    }
}

/// Joins seconds and nanoseconds. The inverse of `split_time`.
pub fn join_time(s: i64, ns: u32) -> i128 {
    i128::from(s) * 1_000_000_000 + i128::from(ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_the_epoch_are_kept() {
        for ns in [
            0,
            1,
            -1,
            -1_000_000_000,
            999_999_999,
            -2_177_452_800_000_000_001,
        ] {
            let (s, n) = split_time(ns);
            assert!(n < 1_000_000_000);
            assert_eq!(join_time(s, n), ns);
        }
    }

    #[test]
    fn an_inode_number_has_the_slice_and_the_counter() {
        assert_eq!(parts_of_ino(INO_ROOT), Some((0, 1)));
        assert_eq!(parts_of_ino(ino_of(255, 7)), Some((255, 7)));
        assert_eq!(parts_of_ino(ino_of(3, 0)), None);
        assert_eq!(parts_of_ino(1 << 48 | 1), None, "there are 256 slices");
    }

    #[test]
    fn keys_sort_as_their_numbers() {
        assert!(extent_key(1, 300) < extent_key(2, 0));
        assert!(extent_key(1, 255) < extent_key(1, 256));
        assert!(entry_key(1, 5, b"zz") < entry_key(1, 6, b"a"));
    }
}
