//! Converts between the store's rows and the filesystem's types. Fails with `Damaged`, which names the inode, if a row is invalid.

use jericho_format::record::{self, EntryValue, ExtentValue, InodeValue, kind};
use jericho_format::sums::Group;
use jericho_volume::Blocks;
use zerocopy::byteorder::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::records::{Block, Entry, Extent, Image, InodeRecord};
use super::tables::ReadError;
use crate::types::{Ino, Kind, SliceId};
use jericho_format::threads::ThreadsOfInode;

type Read<T> = std::result::Result<T, ReadError>;

fn damaged<T>(what: String) -> Read<T> {
    Err(ReadError::Damaged(what))
}

/// Returns the byte of a file type in inode records and entries.
pub fn kind_to_byte(kind: Kind) -> u8 {
    match kind {
        Kind::File => kind::FILE,
        Kind::Directory => kind::DIRECTORY,
        Kind::Symlink => kind::SYMLINK,
        Kind::Fifo => kind::FIFO,
        Kind::Socket => kind::SOCKET,
        Kind::CharDevice => kind::CHAR_DEVICE,
        Kind::BlockDevice => kind::BLOCK_DEVICE,
    }
}

fn kind_from_byte(byte: u8) -> Option<Kind> {
    Some(match byte {
        kind::FILE => Kind::File,
        kind::DIRECTORY => Kind::Directory,
        kind::SYMLINK => Kind::Symlink,
        kind::FIFO => Kind::Fifo,
        kind::SOCKET => Kind::Socket,
        kind::CHAR_DEVICE => Kind::CharDevice,
        kind::BLOCK_DEVICE => Kind::BlockDevice,
        _ => return None,
    })
}

fn slice_to_u16(slice: Option<SliceId>) -> U16 {
    U16::new(slice.unwrap_or(record::NO_SLICE))
}

fn slice_from_u16(slice: U16) -> Option<SliceId> {
    (slice.get() != record::NO_SLICE).then_some(slice.get())
}

/// Returns the value of a row of `INODES`.
pub fn inode_to_bytes(inode: &InodeRecord) -> Vec<u8> {
    let (atime_s, atime_ns) = record::split_time(inode.atime_ns);
    let (mtime_s, mtime_ns) = record::split_time(inode.mtime_ns);
    let (ctime_s, ctime_ns) = record::split_time(inode.ctime_ns);
    let (btime_s, btime_ns) = record::split_time(inode.btime_ns);
    let target = inode.target.as_deref().unwrap_or_default();
    let value = InodeValue {
        version: record::RECORD_VERSION,
        kind: kind_to_byte(inode.kind),
        perm: U16::new(inode.perm),
        nlink: U32::new(inode.nlink),
        uid: U32::new(inode.uid),
        gid: U32::new(inode.gid),
        rdev: U32::new(inode.rdev),
        generation: U32::new(inode.generation),
        size: U64::new(inode.size),
        atime_s: I64::new(atime_s),
        mtime_s: I64::new(mtime_s),
        ctime_s: I64::new(ctime_s),
        btime_s: I64::new(btime_s),
        atime_ns: U32::new(atime_ns),
        mtime_ns: U32::new(mtime_ns),
        ctime_ns: U32::new(ctime_ns),
        btime_ns: U32::new(btime_ns),
        parent: U64::new(inode.parent),
        slice: slice_to_u16(inode.slice),
        placement: slice_to_u16(inode.placement),
        // A target is at most a path, 4095 bytes.
        target_bytes: U16::new(target.len().min(usize::from(u16::MAX)) as u16),
        threads: inode.threads.byte(),
        blocks: U64::new(inode.blocks),
        ..InodeValue::new_zeroed()
    };
    let mut bytes = Vec::with_capacity(size_of::<InodeValue>() + target.len());
    bytes.extend_from_slice(value.as_bytes());
    bytes.extend_from_slice(target);
    bytes
}

/// Reads the value of a row of `INODES`.
pub fn inode_from_bytes(ino: Ino, bytes: &[u8]) -> Read<InodeRecord> {
    let Ok((value, target)) = InodeValue::read_from_prefix(bytes) else {
        return damaged(format!(
            "the record of inode {ino} has only {} bytes",
            bytes.len()
        ));
    };
    if value.version != record::RECORD_VERSION {
        return damaged(format!(
            "the record of inode {ino} has version {}",
            value.version
        ));
    }
    let Some(kind) = kind_from_byte(value.kind) else {
        return damaged(format!("inode {ino} has the unknown type {}", value.kind));
    };
    let unused = &value.as_bytes()[record::INODE_UNUSED_AT..];
    if let Some(at) = unused.iter().position(|byte| *byte != 0) {
        return damaged(format!(
            "byte {} of the record of inode {ino} is {:#x}, and this version knows no use of it",
            record::INODE_UNUSED_AT + at,
            unused[at]
        ));
    }
    if target.len() != usize::from(value.target_bytes.get()) {
        return damaged(format!("the link target of inode {ino} is cut off"));
    }
    Ok(InodeRecord {
        kind,
        perm: value.perm.get(),
        nlink: value.nlink.get(),
        uid: value.uid.get(),
        gid: value.gid.get(),
        rdev: value.rdev.get(),
        generation: value.generation.get(),
        size: value.size.get(),
        atime_ns: record::join_time(value.atime_s.get(), value.atime_ns.get()),
        mtime_ns: record::join_time(value.mtime_s.get(), value.mtime_ns.get()),
        ctime_ns: record::join_time(value.ctime_s.get(), value.ctime_ns.get()),
        btime_ns: record::join_time(value.btime_s.get(), value.btime_ns.get()),
        slice: slice_from_u16(value.slice),
        placement: slice_from_u16(value.placement),
        threads: ThreadsOfInode::from_byte(value.threads),
        parent: value.parent.get(),
        blocks: value.blocks.get(),
        target: (kind == Kind::Symlink).then(|| target.into()),
    })
}

/// Returns the value of a row of `ENTRIES`.
pub fn entry_to_bytes(ino: Ino, kind: Kind) -> [u8; 16] {
    let value = EntryValue {
        ino: U64::new(ino),
        kind: kind_to_byte(kind),
        reserved: [0; 7],
    };
    zerocopy::transmute!(value)
}

/// Reads the value of a row of `ENTRIES`, of the directory `dir`.
pub fn entry_from_bytes(dir: Ino, bytes: &[u8]) -> Read<(Ino, Kind)> {
    match EntryValue::read_from_bytes(bytes) {
        Ok(value) => match kind_from_byte(value.kind) {
            Some(kind) => Ok((value.ino.get(), kind)),
            None => damaged(format!(
                "an entry of directory {dir} has type {}",
                value.kind
            )),
        },
        Err(_) => damaged(format!(
            "an entry of directory {dir} has {} bytes",
            bytes.len()
        )),
    }
}

/// Reads a row of `ENTRIES`.
pub fn entry_of_row(key: &[u8], value: &[u8]) -> Read<Entry> {
    let (Some(dir), Some(hash)) = (
        record::key_number(key),
        record::key_number(key.get(8..).unwrap_or_default()),
    ) else {
        return damaged("the key of an entry is too short".into());
    };
    let (ino, kind) = entry_from_bytes(dir, value)?;
    Ok(Entry {
        hash,
        name: key[16..].into(),
        ino,
        kind,
    })
}

/// Returns the value of a row of `EXTENTS`.
pub fn extent_to_bytes(extent: &Extent) -> [u8; 24] {
    let flag = |is_set, bit| if is_set { bit } else { 0 };
    let flags = flag(extent.unwritten, record::EXTENT_UNWRITTEN)
        | flag(extent.summed, record::EXTENT_CHECKSUMS);
    let value = ExtentValue {
        first: U64::new(extent.blocks.first),
        count: U32::new(extent.blocks.count),
        slice: U16::new(extent.blocks.slice),
        flags: U16::new(flags),
        born: U64::new(0),
    };
    zerocopy::transmute!(value)
}

/// Reads a row of `EXTENTS`. Returns the file's inode number and the extent.
pub fn extent_of_row(key: &[u8], value: &[u8]) -> Read<(Ino, Extent)> {
    let (Some(ino), Some(page)) = (
        record::key_number(key),
        record::key_number(key.get(8..).unwrap_or_default()),
    ) else {
        return damaged("the key of an extent is too short".into());
    };
    let Ok(value) = ExtentValue::read_from_bytes(value) else {
        return damaged(format!(
            "an extent of inode {ino} has {} bytes",
            value.len()
        ));
    };
    let blocks = Blocks {
        slice: value.slice.get(),
        first: value.first.get(),
        count: value.count.get(),
    };
    let flags = value.flags.get();
    if flags & !(record::EXTENT_UNWRITTEN | record::EXTENT_CHECKSUMS) != 0 {
        return damaged(format!(
            "an extent of inode {ino} has flags {flags:#x}, which this version does not know"
        ));
    }
    Ok((
        ino,
        Extent {
            page,
            blocks,
            unwritten: flags & record::EXTENT_UNWRITTEN != 0,
            summed: flags & record::EXTENT_CHECKSUMS != 0,
        },
    ))
}

/// Reads a key that is a number.
pub fn number_of_key(key: &[u8]) -> Read<u64> {
    match record::key_number(key) {
        Some(number) => Ok(number),
        None => damaged(format!(
            "a key that should be a number has {} bytes",
            key.len()
        )),
    }
}

/// Reads the value of a row of `VALUES` that is a number. `name` is for the error.
pub fn number_of_value(name: &str, value: &[u8]) -> Read<u64> {
    match value.try_into() {
        Ok(bytes) => Ok(u64::from_le_bytes(bytes)),
        Err(_) => damaged(format!("value {name} has {} bytes", value.len())),
    }
}

/// Reads the value of a row of `USED`.
pub fn count_of_value(value: &[u8]) -> Read<u32> {
    match value.try_into() {
        Ok(bytes) => Ok(u32::from_le_bytes(bytes)),
        Err(_) => damaged(format!("a count of used blocks has {} bytes", value.len())),
    }
}

/// Reads the key of a row of `BITMAPS` or `USED`: a slice and the index of a container in it.
pub fn container_of_key(key: &[u8]) -> Read<(SliceId, u32)> {
    match key {
        [a, b, c, d, e, f] => Ok((
            u16::from_be_bytes([*a, *b]),
            u32::from_be_bytes([*c, *d, *e, *f]),
        )),
        _ => damaged(format!("the key of a bitmap has {} bytes", key.len())),
    }
}

/// Reads the value of a row of `BITMAPS`, which has `words` words.
pub fn bitmap_from_bytes(bytes: &[u8], words: usize) -> Read<Box<[u64]>> {
    if bytes.len() != words * 8 {
        return damaged(format!(
            "a bitmap has {} bytes instead of {}",
            bytes.len(),
            words * 8
        ));
    }
    Ok(bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect())
}

/// Returns the value of a row of `BITMAPS`.
pub fn bitmap_to_bytes(bitmap: &[u64]) -> Vec<u8> {
    bitmap.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the block and the image of a row of `LOGGED`.
pub fn image_of_row(key: &[u8], value: &[u8]) -> Read<(Block, Image)> {
    let (Some((slice, block)), true) = (
        key.split_at_checked(2),
        value.len() == jericho_format::PAGE_BYTES as usize,
    ) else {
        return damaged("a logged page has a wrong form".into());
    };
    let (Ok(slice), Ok(block)) = (slice.try_into(), block.try_into()) else {
        return damaged("the key of a logged page has a wrong length".into());
    };
    let block = (SliceId::from_be_bytes(slice), u64::from_be_bytes(block));
    Ok((block, value.into()))
}

/// Returns the inode and the group of a row of `SUMS`.
pub fn group_of_key(key: &[u8]) -> Read<(Ino, u64)> {
    match (key.first_chunk::<8>(), key.last_chunk::<8>()) {
        (Some(ino), Some(group)) if key.len() == 16 => {
            Ok((u64::from_be_bytes(*ino), u64::from_be_bytes(*group)))
        }
        _ => damaged(format!("the key of checksums has {} bytes", key.len())),
    }
}

/// Returns the checksums of a row of `SUMS`.
pub fn sums_of_value(value: &[u8]) -> Read<Group> {
    match Group::decode(value) {
        Some(group) => Ok(group),
        None => damaged("a row of checksums makes no sense".into()),
    }
}
