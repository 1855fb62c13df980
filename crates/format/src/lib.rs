//! Bytes that outlive or leave a process: volume, shared memory, wire. No I/O.
//!
//! `docs/formats/volume.md` and `docs/formats/journal.md` specify the durable bytes, and `docs/formats/wire.md` the frames. Tests compare the offsets on these pages with those
//! of the structs here.
#![forbid(unsafe_code)]

pub mod journal;
pub mod label;
pub mod record;
pub mod sums;
pub mod superblock;
pub mod threads;
pub mod wire;

/// Size of a block on a volume and of a page in a cache.
pub const PAGE_BYTES: u64 = 4096;
/// Maximum object number; the minimum is 1. Has 30 bits, so that a page key packs into one word. An object number names a file in
/// the caches, during one mount.
pub const OBJECT_MAX: u64 = (1 << 30) - 1;
/// Maximum page number within a file; the minimum is 0. Has 34 bits: 64 TiB.
pub const PAGE_MAX: u64 = (1 << 34) - 1;
/// Maximum size of a file.
pub const FILE_BYTES_MAX: u64 = (PAGE_MAX + 1) * PAGE_BYTES;
