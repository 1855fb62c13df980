//! A device that loses some of the blocks that were not flushed when its process is killed, for tests of a host that loses power. Only debug builds with
//! the feature `faults` have it.
//!
//! The environment variable `JERICHO_VOLATILE` holds a number, from which the random choices begin. Each block of a write either reaches the
//! device at once, or stays in this process until the next flush.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::handle::is_in_range;
use crate::{BLOCK_BYTES, Cause, Device, Extent, IoError, Layer};
use jericho_sys::errno;

/// The environment variable with the seed.
const VARIABLE: &str = "JERICHO_VOLATILE";
const BLOCK: usize = BLOCK_BYTES as usize;

/// Returns a device that keeps some writes until the next flush, or the device itself if the environment does not ask for it.
pub(crate) fn with_volatile_writes(device: Arc<dyn Device>) -> Arc<dyn Device> {
    let Some(seed) = std::env::var_os(VARIABLE) else {
        return device;
    };
    let seed = seed.to_str().and_then(|seed| seed.parse().ok());
    let state = State {
        held: BTreeMap::new(),
        random: seed.expect("JERICHO_VOLATILE is not a number"),
    };
    Arc::new(Volatile {
        device,
        state: Mutex::new(state),
    })
}

struct Volatile {
    device: Arc<dyn Device>,
    state: Mutex<State>,
}

struct State {
    /// Blocks that are not on the device yet, by number.
    held: BTreeMap<u64, Vec<u8>>,
    random: u64,
}

impl State {
    /// Returns one bit of a sequence that is good enough to choose blocks (splitmix64).
    fn coin(&mut self) -> bool {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) & 1 == 1
    }

    fn drop_range(&mut self, offset_bytes: u64, length_bytes: u64) {
        let first = offset_bytes / BLOCK_BYTES;
        let end = first + length_bytes / BLOCK_BYTES;
        self.held.retain(|block, _| !(first..end).contains(block));
    }
}

impl Volatile {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Layer for Volatile {
    fn below(&self) -> &dyn Device {
        &*self.device
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let state = self.lock();
        self.device.read_at(offset_bytes, buf)?;
        let first = offset_bytes / BLOCK_BYTES;
        for (block, part) in (first..).zip(buf.chunks_mut(BLOCK)) {
            if let Some(held) = state.held.get(&block) {
                part.copy_from_slice(held);
            }
        }
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        if !is_in_range(offset_bytes, buf.len() as u64, self.size_bytes()) || self.is_read_only() {
            return Err(IoError {
                operation: "write",
                device: self.name(),
                offset_bytes,
                length_bytes: buf.len() as u64,
                cause: Cause::Errno(errno::EINVAL),
            });
        }
        let mut state = self.lock();
        for (block, part) in (offset_bytes / BLOCK_BYTES..).zip(buf.chunks(BLOCK)) {
            if state.coin() {
                state.held.insert(block, part.to_vec());
            } else {
                state.held.remove(&block);
                self.device.write_at(block * BLOCK_BYTES, part)?;
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), IoError> {
        let mut state = self.lock();
        for (block, part) in std::mem::take(&mut state.held) {
            self.device.write_at(block * BLOCK_BYTES, &part)?;
        }
        self.device.flush()
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let mut state = self.lock();
        state.drop_range(offset_bytes, buf.len() as u64);
        self.device.write_durable(offset_bytes, buf)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let mut state = self.lock();
        state.drop_range(offset_bytes, length_bytes);
        self.device.discard(offset_bytes, length_bytes)
    }

    fn extent_at(&self, _offset_bytes: u64, length_bytes: u64) -> Result<Extent, IoError> {
        // A block that is held may be in a hole of the device.
        Ok(Extent {
            length_bytes,
            is_hole: false,
        })
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let mut state = self.lock();
        state.drop_range(offset_bytes, length_bytes);
        self.device.write_zeros(offset_bytes, length_bytes)
    }

    fn describe(&self) -> String {
        format!(
            "{}, LOSES what is not flushed when it is killed",
            self.device.describe()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpenOptions, open_device};

    #[test]
    fn a_killed_device_has_what_was_flushed_and_some_of_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions {
            create_size: Some(64 * BLOCK_BYTES),
            ..OpenOptions::default()
        };
        let path = dir.path().join("device");
        let below = open_device(&path, options).unwrap();
        let volatile = Volatile {
            device: Arc::clone(&below),
            state: Mutex::new(State {
                held: BTreeMap::new(),
                random: 7,
            }),
        };
        let volatile: &dyn Device = &volatile;
        let read = |device: &dyn Device| {
            let mut bytes = vec![0; 64 * BLOCK];
            device.read_at(0, &mut bytes).unwrap();
            bytes
        };
        volatile.write_at(0, &vec![1; 64 * BLOCK]).unwrap();
        volatile.flush().unwrap();
        assert!(read(&*below) == vec![1; 64 * BLOCK]);
        volatile.write_at(0, &vec![2; 64 * BLOCK]).unwrap();
        volatile.write_durable(0, &vec![3; BLOCK]).unwrap();
        let expected = [vec![3; BLOCK], vec![2; 63 * BLOCK]].concat();
        assert!(read(volatile) == expected);
        // What a process that is killed now leaves.
        let left = read(&*below);
        assert!(left[..BLOCK] == vec![3; BLOCK]);
        let old = left.chunks(BLOCK).filter(|block| block[0] == 1).count();
        assert!((10..54).contains(&old), "{old} blocks were held back");
    }
}
