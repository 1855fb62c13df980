//! Devices and journals for tests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_format::PAGE_BYTES;
use jericho_format::journal::SegmentHeader;
use jericho_journal::{Journal, JournalArea, JournalVolume, Position, RecoverError};
use jericho_sim::{Random, SimDevice};
use jericho_storage::{Cause, Device, IoError, Layer};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

pub const VOLUME: JournalVolume = JournalVolume {
    uuid: *b"0123456789abcdef",
    secret: *b"a secret",
};
pub const SLICE: u16 = 3;
pub const PAGE: usize = PAGE_BYTES as usize;
/// Errno of an operation after the process has died.
const EIO: i32 = 5;

/// Returns an area that does not begin with its device.
pub fn area(blocks: u64) -> JournalArea {
    JournalArea {
        first_block: 5,
        blocks,
    }
}

/// Returns a device with room for the area.
pub fn device(blocks: u64) -> Arc<SimDevice> {
    Arc::new(SimDevice::new("disk", (blocks + 9) * PAGE_BYTES))
}

pub fn create(device: &Arc<SimDevice>, blocks: u64) -> Journal {
    Journal::create(device.clone(), area(blocks), VOLUME, SLICE).expect("a journal")
}

/// Returns bytes that begin with a number and depend on it.
pub fn payload(number: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::of(number, &[bytes as u64]);
    let mut payload = vec![0; bytes];
    for chunk in payload.chunks_mut(8) {
        chunk.copy_from_slice(&random.next_u64().to_le_bytes()[..chunk.len()]);
    }
    let number = number.to_le_bytes();
    let len = bytes.min(8);
    payload[..len].copy_from_slice(&number[..len]);
    payload
}

/// What a recovery has returned.
#[derive(Debug)]
pub struct Recovered {
    pub batches: Vec<Vec<u8>>,
    pub end: Position,
    pub bytes_read: u64,
    /// The failure at its end.
    pub error: Option<RecoverError>,
}

/// Recovers a journal up to its end or a failure. Fails when the recovery cannot begin.
pub fn recover(
    device: Arc<dyn Device>,
    blocks: u64,
    checkpoint: Position,
) -> Result<Recovered, RecoverError> {
    let mut recovery = Journal::recover(device, area(blocks), VOLUME, SLICE, checkpoint)?;
    let mut batches = vec![];
    let error = loop {
        match recovery.next_batch() {
            Ok(Some(batch)) => batches.push(batch.payload.to_vec()),
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
        assert!(batches.len() as u64 <= blocks, "recovery does not end");
    };
    assert!(recovery.bytes_read() <= (blocks - 2) * PAGE_BYTES);
    Ok(Recovered {
        batches,
        end: recovery.end(),
        bytes_read: recovery.bytes_read(),
        error,
    })
}

/// Recovers a journal that is not damaged, and begins a new incarnation.
pub fn reopen(device: &Arc<SimDevice>, blocks: u64, checkpoint: Position) -> Journal {
    let mut recovery = Journal::recover(device.clone(), area(blocks), VOLUME, SLICE, checkpoint)
        .expect("a recovery");
    while recovery.next_batch().expect("no damage").is_some() {}
    let end = recovery.end();
    recovery.begin_incarnation(end).expect("an incarnation")
}

/// Changes a block of the area, durably.
pub fn change(device: &SimDevice, block: u32, change: impl FnOnce(&mut [u8])) {
    let at = (5 + u64::from(block)) * PAGE_BYTES;
    let mut bytes = vec![0; PAGE];
    device.read_at(at, &mut bytes).expect("a read");
    change(&mut bytes);
    device.write_at(at, &bytes).expect("a write");
    device.flush().expect("a flush");
}

/// Flips a bit of a block of the area.
pub fn flip(device: &SimDevice, block: u32, byte: usize) {
    change(device, block, |bytes| bytes[byte] ^= 0x10);
}

/// Changes the header of a segment of one block, and makes its checksum right.
pub fn forge(device: &SimDevice, block: u32, forge: impl FnOnce(&mut SegmentHeader)) {
    change(device, block, |bytes| {
        let mut header = SegmentHeader::read(bytes).expect("a segment");
        forge(&mut header);
        let end = (header.checked_bytes() as usize).min(PAGE);
        header.crc = U32::new(header.checksum(&bytes[96..end]));
        bytes[..96].copy_from_slice(header.as_bytes());
    });
}

/// Calls of a journal to its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    pub reads: u64,
    pub writes: u64,
    pub durable_writes: u64,
    pub flushes: u64,
}

/// The device as one process uses it: counts its calls, and after some operations fails all of them, without a power cut.
pub struct ProcessDevice {
    device: Arc<SimDevice>,
    operations_left: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    durable_writes: AtomicU64,
    flushes: AtomicU64,
}

impl ProcessDevice {
    /// Returns the device for a process that dies after this many operations.
    pub fn new(device: Arc<SimDevice>, operations: u64) -> ProcessDevice {
        ProcessDevice {
            device,
            operations_left: AtomicU64::new(operations),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            durable_writes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        }
    }

    pub fn calls(&self) -> Calls {
        Calls {
            reads: self.reads.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            durable_writes: self.durable_writes.load(Ordering::Relaxed),
            flushes: self.flushes.load(Ordering::Relaxed),
        }
    }

    /// Counts an operation, or fails because the process is dead.
    fn operate(&self, operation: &'static str) -> Result<(), IoError> {
        let left = self.operations_left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(IoError {
                operation,
                device: self.device.name(),
                offset_bytes: 0,
                length_bytes: 0,
                cause: Cause::Errno(EIO),
            });
        }
        self.operations_left.store(left - 1, Ordering::Relaxed);
        Ok(())
    }
}

impl Layer for ProcessDevice {
    fn below(&self) -> &dyn Device {
        &*self.device
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.operate("read")?;
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.device.read_at(offset_bytes, buf)
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.operate("write")?;
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.device.write_at(offset_bytes, buf)
    }
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.operate("write")?;
        self.durable_writes.fetch_add(1, Ordering::Relaxed);
        if let Err(dead) = self.operate("flush") {
            // It dies when the bytes are written and not durable.
            self.device.write_at(offset_bytes, buf)?;
            return Err(dead);
        }
        self.device.write_durable(offset_bytes, buf)
    }
    fn flush(&self) -> Result<(), IoError> {
        self.operate("flush")?;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.device.flush()
    }
}
