//! Maps whose keys are inode numbers or object numbers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::types::Ino;

/// Hashes inode numbers. They are dense and assigned by this filesystem, so one multiplication spreads them well enough.
#[derive(Default)]
pub struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        // All numbers of a shard end in the same bits, so the mixed high bits are moved down.
        self.0 ^ (self.0 >> 32)
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A map with numbers of inodes or objects as keys.
pub type InoMap<V> = HashMap<Ino, V, BuildHasherDefault<InoHasher>>;
