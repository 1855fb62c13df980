//! Bytes that outlive or leave a process: volume, shared memory, wire. No I/O.
//!
//! What is durable is specified in `docs/formats/volume.md`; a test compares the offsets that the
//! page gives with those of the structs here.
#![forbid(unsafe_code)]

pub mod label;
pub mod record;
pub mod superblock;
pub mod threads;

/// Size of a block on a volume and of a page in a cache.
pub const PAGE_BYTES: u64 = 4096;
/// Inode numbers are 1..=INO_MAX: 30 bits, so that a page key packs into one word.
pub const INO_MAX: u64 = (1 << 30) - 1;
/// Page numbers within a file are 0..=PAGE_MAX: 34 bits, 64 TiB.
pub const PAGE_MAX: u64 = (1 << 34) - 1;
/// Largest file.
pub const FILE_BYTES_MAX: u64 = (PAGE_MAX + 1) * PAGE_BYTES;
