//! Numbers and bytes from a seed: the same in each run.

use std::sync::atomic::{AtomicBool, Ordering};

use jericho_storage::AlignedBuffer;

use crate::error::{Error, Result};

/// A generator of 64-bit numbers: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins with a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is at least 1. The bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// Returns another seed for each name.
pub fn seed_for(seed: u64, name: &[u8]) -> u64 {
    let mixed = name.iter().fold(Random::new(seed), |mut random, byte| {
        Random::new(random.next() ^ u64::from(*byte))
    });
    mixed.0
}

/// Fills a buffer with bytes that no device can compress.
pub fn fill(seed: u64, buffer: &mut [u8]) {
    let mut random = Random::new(seed);
    for chunk in buffer.chunks_mut(8) {
        let bytes = random.next().to_le_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

/// Calls `write` with all of `bytes` bytes of a file, a piece of at most 1 MiB at a time, and the offset of the piece. Pieces begin at a page. Fails
/// before the next piece if `stopping` is set.
pub fn pieces(
    seed: u64,
    bytes: u64,
    stopping: &AtomicBool,
    mut write: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    const PIECE_BYTES: u64 = 1 << 20;
    const PAGE_BYTES: usize = 4096;
    let mut piece = AlignedBuffer::new(PIECE_BYTES as usize);
    fill(seed, piece.as_mut_slice());
    let mut random = Random::new(seed);
    for at in (0..bytes).step_by(PIECE_BYTES as usize) {
        if stopping.load(Ordering::Relaxed) {
            return Err(Error::interrupted());
        }
        // Each page differs from all others, so that no device stores equal ones once.
        for page in piece.as_mut_slice().chunks_mut(PAGE_BYTES) {
            page[..8].copy_from_slice(&random.next().to_le_bytes());
        }
        let length = (bytes - at).min(PIECE_BYTES) as usize;
        write(at, &piece.as_slice()[..length])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_and_bounds_hold() {
        let (mut one, mut two) = (Random::new(7), Random::new(7));
        assert!((0..100).all(|_| one.next() == two.next()));
        assert!((1..1000).all(|bound| one.below(bound) < bound));
        let going = AtomicBool::new(false);
        let mut pages = std::collections::BTreeSet::new();
        for name in ["file.0", "file.1"] {
            let seed = seed_for(7, name.as_bytes());
            assert_eq!(seed, seed_for(7, name.as_bytes()));
            pieces(seed, 2 << 20, &going, |_, piece| {
                pages.extend(piece.chunks(4096).map(<[u8]>::to_vec));
                Ok(())
            })
            .unwrap();
        }
        assert_eq!(pages.len(), 1024, "all pages differ");
        let mut buffer = [0; 13];
        fill(3, &mut buffer);
        assert!(buffer.iter().filter(|byte| **byte != 0).count() > 8);
    }

    #[test]
    fn a_run_that_ends_is_not_kept_waiting_for_its_files() {
        let stopping = AtomicBool::new(false);
        let mut written = 0;
        let stopped = pieces(1, 1 << 30, &stopping, |_, piece| {
            written += piece.len();
            stopping.store(true, Ordering::Relaxed);
            Ok(())
        });
        assert!(stopped.unwrap_err().is_interruption());
        assert_eq!(written, 1 << 20);
    }
}
