//! A device in memory, and small volumes on it, for the unit tests of this crate and of those above it.
#![expect(missing_docs, clippy::missing_panics_doc, reason = "only tests use it")]

use std::result::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_storage::{BLOCK_BYTES, Cause, Device, IoError};
use jericho_volume::{FormatOptions, OpenMode, Volume};
use parking_lot::Mutex;

use crate::alloc::Allocator;
use crate::format::{format_devices, root};
use crate::store::{Change, Extent, StoreRef};
use crate::stores::open;
use crate::types::{Kind, ROOT};

/// Opens the metadata of a volume with one shard.
pub fn open_first(volume: &Volume, cache_bytes: usize) -> (StoreRef, Arc<Allocator>) {
    let (mut stores, allocator) = open(volume, cache_bytes).unwrap();
    (stores.remove(0), allocator)
}

/// A device in memory that can lose unflushed writes, and fails from the Nth write on.
pub struct MemoryDevice {
    name: Arc<str>,
    state: Mutex<Memory>,
    /// Number of writes and flushes that still succeed.
    pub budget: AtomicU64,
}

#[derive(Clone)]
struct Memory {
    now: Vec<u8>,
    flushed: Vec<u8>,
    /// Ranges in which `now` and `flushed` differ.
    written: Vec<(usize, usize)>,
}

impl MemoryDevice {
    pub fn new(name: &str, mib: usize) -> Arc<MemoryDevice> {
        let zeros = vec![0; mib << 20];
        Arc::new(MemoryDevice {
            name: name.into(),
            state: Mutex::new(Memory {
                now: zeros.clone(),
                flushed: zeros,
                written: vec![],
            }),
            budget: AtomicU64::new(u64::MAX),
        })
    }

    /// Returns the device as it is after a power cut that lost all unflushed writes.
    pub fn after_power_cut(&self) -> Arc<MemoryDevice> {
        let flushed = self.state.lock().flushed.clone();
        Arc::new(MemoryDevice {
            name: self.name.clone(),
            state: Mutex::new(Memory {
                now: flushed.clone(),
                flushed,
                written: vec![],
            }),
            budget: AtomicU64::new(u64::MAX),
        })
    }

    /// Changes bytes in both states, like damage to the medium.
    pub fn corrupt(&self, offset: usize, bytes: &[u8]) {
        let mut state = self.state.lock();
        state.now[offset..offset + bytes.len()].copy_from_slice(bytes);
        state.flushed[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.state.lock().now.clone()
    }

    fn spend(&self, operation: &'static str, at: u64, len: usize) -> Result<(), IoError> {
        let spent = self
            .budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |budget| {
                if budget == u64::MAX {
                    Some(budget)
                } else {
                    budget.checked_sub(1)
                }
            });
        spent.map(drop).map_err(|_| IoError {
            operation,
            device: self.name.clone(),
            offset_bytes: at,
            length_bytes: len as u64,
            cause: Cause::Errno(5),
        })
    }
}

impl Device for MemoryDevice {
    fn name(&self) -> Arc<str> {
        self.name.clone()
    }
    fn size_bytes(&self) -> u64 {
        self.state.lock().now.len() as u64
    }
    fn home_node(&self) -> Option<u32> {
        None
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        assert!(offset_bytes.is_multiple_of(BLOCK_BYTES) && buf.len().is_multiple_of(4096));
        let at = offset_bytes as usize;
        buf.copy_from_slice(&self.state.lock().now[at..at + buf.len()]);
        Ok(())
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        assert!(offset_bytes.is_multiple_of(BLOCK_BYTES) && buf.len().is_multiple_of(4096));
        self.spend("write", offset_bytes, buf.len())?;
        let at = offset_bytes as usize;
        let mut state = self.state.lock();
        state.now[at..at + buf.len()].copy_from_slice(buf);
        state.written.push((at, at + buf.len()));
        Ok(())
    }
    fn flush(&self) -> Result<(), IoError> {
        self.spend("flush", 0, 0)?;
        let mut state = self.state.lock();
        let state = &mut *state;
        for (from, to) in state.written.drain(..) {
            state.flushed[from..to].copy_from_slice(&state.now[from..to]);
        }
        Ok(())
    }
    fn discard(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), IoError> {
        Ok(())
    }
    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
    fn describe(&self) -> String {
        "memory".into()
    }
}

pub fn formatted(mib: usize, slices: u16) -> Arc<MemoryDevice> {
    let options = FormatOptions {
        slices: Some(slices),
        ..FormatOptions::default()
    };
    formatted_with(mib, &options)
}

pub fn formatted_with(mib: usize, options: &FormatOptions) -> Arc<MemoryDevice> {
    let device = MemoryDevice::new("memory", mib);
    let devices: [Arc<dyn Device>; 1] = [device.clone()];
    format_devices(&devices, &[], options).unwrap();
    device
}

pub fn opened(device: &Arc<MemoryDevice>) -> Volume {
    let mode = OpenMode::WRITE;
    Volume::open_from_devices(vec![device.clone()], mode).unwrap()
}

pub fn file_batch(first: u64, count: u64, allocator: &Allocator) -> Vec<Change> {
    let mut changes = Vec::new();
    for ino in first..first + count {
        let mut inode = root((0, 0));
        (inode.kind, inode.nlink, inode.size) = (Kind::File, 1, 4096);
        let name = format!("file-{ino:08}").into_bytes().into_boxed_slice();
        let mut blocks = Vec::new();
        if allocator.reserve(1).is_ok() {
            allocator.allocate(0, None, 1, &mut blocks).unwrap();
        }
        for blocks in blocks {
            changes.push(Change::PutExtent(
                ino,
                Extent {
                    page: 0,
                    blocks,
                    unwritten: false,
                    summed: false,
                },
            ));
            changes.push(Change::Use(blocks));
        }
        let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1;
        changes.push(Change::PutInode(ino, inode));
        changes.push(Change::PutEntry {
            dir: ROOT,
            hash,
            name,
            ino,
            kind: Kind::File,
        });
    }
    changes
}

/// Takes room for files, as the namespace does.
pub fn take_room(store: &StoreRef, files: u64) -> crate::error::Result<()> {
    let check = || store.check_room(files, files as usize * 320);
    check().or_else(|error| match store.make_room(|| Ok(()))? {
        true => check(),
        false => Err(error),
    })
}
