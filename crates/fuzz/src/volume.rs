//! Damages durable bytes: label, superblock, a whole small volume, and the rows of its metadata.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use jericho_format::label::Label;
use jericho_format::superblock::{COPY_BYTES, COPY_FIRST_BLOCK, Superblock};
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_metadata::store::tables::Table;
use jericho_storage::{BLOCK_BYTES, Device, DiscardEffect, IoError};
use jericho_volume::{FormatOptions, OpenMode, Volume};
use parking_lot::RwLock;

use crate::input::Input;

const BLOCK: usize = BLOCK_BYTES as usize;
/// Size of the smallest volume.
const VOLUME_BYTES: usize = 16 << 20;
const ROOT_USER: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0,
};
/// Most entries that a walk reads.
const WALK_MAX: usize = 1000;

/// A device in memory: shared blocks, and the blocks that were written to this copy.
#[derive(Default)]
pub(crate) struct Memory {
    base: Arc<HashMap<u64, Box<[u8]>>>,
    written: RwLock<HashMap<u64, Box<[u8]>>>,
}

impl Memory {
    /// Returns a copy that shares the present contents.
    fn copy(&self) -> Memory {
        let mut base = HashMap::clone(&self.base);
        base.extend(self.written.read().clone());
        Memory {
            base: Arc::new(base),
            written: RwLock::default(),
        }
    }

    fn change(&self, at: usize, byte: u8) {
        let mut block = vec![0; BLOCK];
        let start = (at / BLOCK * BLOCK) as u64;
        if self.read_at(start, &mut block).is_ok() {
            block[at % BLOCK] = byte;
            let _ = self.write_at(start, &block);
        }
    }

    /// Returns the blocks that hold data, in order.
    fn blocks(&self) -> Vec<u64> {
        let mut blocks: Vec<u64> = self.base.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }
}

impl Device for Memory {
    fn name(&self) -> Arc<str> {
        "memory".into()
    }
    fn size_bytes(&self) -> u64 {
        VOLUME_BYTES as u64
    }
    fn home_node(&self) -> Option<u32> {
        None
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        assert!(
            offset_bytes + buf.len() as u64 <= self.size_bytes(),
            "a read beyond the device"
        );
        let written = self.written.read();
        for (index, out) in buf.chunks_mut(BLOCK).enumerate() {
            let block = offset_bytes / BLOCK_BYTES + index as u64;
            match written.get(&block).or(self.base.get(&block)) {
                Some(bytes) => out.copy_from_slice(&bytes[..out.len()]),
                None => out.fill(0),
            }
        }
        Ok(())
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        assert!(
            offset_bytes + buf.len() as u64 <= self.size_bytes(),
            "a write beyond the device"
        );
        let mut written = self.written.write();
        for (index, bytes) in buf.chunks(BLOCK).enumerate() {
            written.insert(offset_bytes / BLOCK_BYTES + index as u64, bytes.into());
        }
        Ok(())
    }
    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), IoError> {
        Ok(())
    }
    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::FreesBlocks
    }
    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
    fn describe(&self) -> String {
        "memory".into()
    }
}

fn options(read_only: bool) -> FsOptions {
    FsOptions {
        read_only,
        inode_cache: 100,
        store_cache_bytes: 1 << 20,
        commit_interval_ms: 3_600_000,
    }
}

/// Returns a volume with a few directories, files, links and attributes.
pub(crate) fn sample() -> Arc<Memory> {
    static SAMPLE: OnceLock<Memory> = OnceLock::new();
    let made = SAMPLE.get_or_init(|| {
        let device = Arc::new(Memory::default());
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        let format = FormatOptions {
            slices: Some(2),
            ..FormatOptions::default()
        };
        format_devices(&devices, &[PathBuf::from("memory")], &format).expect("a new volume");
        let volume = Volume::open_from_devices(devices, OpenMode::WRITE).expect("the volume");
        let fs = Fs::open(Arc::new(volume), vec![], options(false)).expect("its filesystem");
        fill(&fs).expect("files");
        fs.close().expect("a clean end");
        device.copy()
    });
    Arc::new(made.copy())
}

fn fill(fs: &Fs) -> jericho_fs::Result<()> {
    let mut dir = ROOT;
    for name in ["a", "b", "c"] {
        let made = fs.mkdir(dir, name.as_bytes(), 0o755, ROOT_USER)?;
        fs.symlink(dir, b"link", b"a/b/c", ROOT_USER)?;
        let file = fs.mknod(dir, b"file", Kind::File, 0o644, 0, ROOT_USER)?;
        fs.setxattr(file.ino, b"user.name", b"value", 0)?;
        fs.link(file.ino, dir, b"second")?;
        dir = made.ino;
    }
    Ok(())
}

/// Decodes block 0 of a device.
pub fn label(data: &[u8]) {
    let _ = Label::decode(data);
    // Decodes a damaged block with a valid checksum too.
    let mut block = Label::new().encode();
    patch(&mut block, data);
    block[12..16].fill(0);
    let crc = crc32c::crc32c(&block);
    block[12..16].copy_from_slice(&crc.to_le_bytes());
    let _ = Label::decode(&block);
}

/// Decodes a copy of the superblock.
pub fn superblock(data: &[u8]) {
    let _ = Superblock::decode(data);
    let mut copy = vec![0; COPY_BYTES];
    let at = COPY_FIRST_BLOCK[0] * BLOCK_BYTES;
    sample().read_at(at, &mut copy).expect("memory");
    patch(&mut copy, data);
    if let Ok(decoded) = Superblock::decode(&with_crc(copy)) {
        let _ = decoded.encode();
    }
}

/// Changes single bytes. Each change takes four bytes: three for the position and one for the value.
fn patch(bytes: &mut [u8], data: &[u8]) {
    for change in data.as_chunks::<4>().0 {
        let at = u32::from_le_bytes([change[0], change[1], change[2], 0]) as usize;
        let at = at % bytes.len();
        bytes[at] = change[3];
    }
}

fn with_crc(mut copy: Vec<u8>) -> Vec<u8> {
    copy[12..16].fill(0);
    let crc = crc32c::crc32c(&copy);
    copy[12..16].copy_from_slice(&crc.to_le_bytes());
    copy
}

/// Changes bytes anywhere in a whole small volume. If the first byte is odd, the superblock's checksum is repaired.
pub fn image(data: &[u8]) {
    let mut input = Input(data);
    let repair_checksum = input.number(1) % 2 == 1;
    let device = sample();
    let blocks = device.blocks();
    while !input.is_empty() {
        let block = blocks[input.below(blocks.len())] as usize;
        let at = block * BLOCK + input.number(2) as usize % BLOCK;
        device.change(at, input.number(1) as u8);
    }
    if repair_checksum {
        for first in COPY_FIRST_BLOCK {
            let mut copy = vec![0; COPY_BYTES];
            let _ = device.read_at(first * BLOCK_BYTES, &mut copy);
            let _ = device.write_at(first * BLOCK_BYTES, &with_crc(copy));
        }
    }
    use_volume(device);
}

/// Changes, adds and removes rows of the metadata store.
pub fn rows(data: &[u8]) {
    const TABLES: [Table; 9] = [
        Table::Inodes,
        Table::Entries,
        Table::Extents,
        Table::Xattrs,
        Table::Bitmaps,
        Table::Used,
        Table::Orphans,
        Table::Values,
        Table::Logged,
    ];
    let mut input = Input(data);
    let device = sample();
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).expect("the sample");
    let (stores, _allocator) = jericho_metadata::stores::open(&volume, 1 << 20).expect("its store");
    let store = &stores[0];
    let mut changed = vec![];
    while !input.is_empty() && changed.len() < 20 {
        let table = TABLES[input.below(TABLES.len())];
        let rows = store.raw_rows(table).expect("its rows");
        let (mut key, mut value) = match rows.get(input.below(rows.len() + 1)) {
            Some((key, value)) => (key.clone(), value.clone()),
            None => (
                input.take(24).to_vec(),
                input
                    .take(if table == Table::Inodes { 160 } else { 24 })
                    .to_vec(),
            ),
        };
        let how = input.number(1);
        for _ in 0..how % 8 {
            let bytes = if input.number(1) % 4 == 0 {
                &mut key
            } else {
                &mut value
            };
            let at = input.below(bytes.len());
            if let Some(byte) = bytes.get_mut(at) {
                *byte = input.number(1) as u8;
            }
        }
        changed.push((table, key, (how < 240).then_some(value)));
    }
    store
        .put_raw_rows(changed)
        .expect("rows are written as they are");
    drop((stores, _allocator, volume));
    use_volume(device);
}

/// Opens a volume, walks through it, changes names, and checks and repairs it.
fn use_volume(device: Arc<Memory>) {
    expect_panics_of_redb();
    let copy = || -> Vec<Arc<dyn Device>> { vec![Arc::new(device.copy())] };
    for (mode, read_only) in [(OpenMode::READ, true), (OpenMode::WRITE, false)] {
        if let Ok(volume) = Volume::open_from_devices(copy(), mode)
            && let Ok(fs) = Fs::open(Arc::new(volume), vec![], options(read_only))
        {
            walk(&fs);
            if !read_only {
                let _ = fs.rename(ROOT, b"second", ROOT, b"third", 0);
                if let Ok(a) = fs.lookup(ROOT, b"a") {
                    let _ = fs.rename(ROOT, b"file", a.ino, b"moved", 0);
                    let _ = fs.rename(a.ino, b"b", ROOT, b"moved", 0);
                    let _ = fs.unlink(a.ino, b"link");
                    let _ = fs.mkdir(a.ino, b"new", 0o755, ROOT_USER);
                }
                let _ = fs.close();
            }
        }
    }
    for repair in [false, true] {
        let options = CheckOptions {
            repair,
            force: false,
        };
        let _ = check_devices(copy(), options);
    }
}

fn walk(fs: &Fs) {
    let mut dirs = vec![ROOT];
    let mut seen = 0;
    while let Some(dir) = dirs.pop() {
        let mut entries = vec![];
        let _ = fs.readdir(dir, 0, &mut |entry| {
            entries.push(entry);
            entries.len() < WALK_MAX
        });
        for entry in entries {
            seen += 1;
            if seen > WALK_MAX {
                return;
            }
            let _ = fs.getattr(entry.ino);
            let _ = fs.listxattr(entry.ino);
            let _ = fs.getxattr(entry.ino, b"user.name");
            match entry.kind {
                Kind::Symlink => drop(fs.readlink(entry.ino)),
                Kind::File => drop(fs.file(entry.ino)),
                Kind::Directory if &entry.name[..] != b"." && &entry.name[..] != b".." => {
                    dirs.push(entry.ino);
                }
                _ => {}
            }
            let _ = fs.lookup(dir, &entry.name);
        }
    }
}

/// Silences panics within redb, which the store expects on damaged pages and turns into errors. A fuzzer's hook would end the
/// process at each one.
fn expect_panics_of_redb() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic
                .location()
                .is_some_and(|at| at.file().contains("/redb-"))
            {
                others(panic);
            }
        }));
    });
}
