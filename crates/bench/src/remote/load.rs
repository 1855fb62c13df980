//! Generates the transfers of a row.

use std::time::{Duration, Instant};

use crate::Result;
use crate::remote::client::{Client, Transfer};
use crate::remote::usage::{Usage, Used};

/// What a row transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Writes instead of reads.
    pub is_write: bool,
    /// Random offsets instead of ascending ones.
    pub is_random: bool,
    /// Length of each transfer.
    pub block_bytes: usize,
    /// Transfers in progress.
    pub depth: usize,
}

/// What a side reached in a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// Transfers that ended in a second.
    pub rate_per_s: f64,
    /// CPU time of each transfer.
    pub used: Used,
}

impl Load {
    /// Returns a load of 4 KiB at random offsets.
    pub const fn random(is_write: bool, depth: usize) -> Load {
        Load {
            is_write,
            is_random: true,
            block_bytes: 4096,
            depth,
        }
    }

    /// Returns a load of large blocks at ascending offsets, eight at a time.
    pub const fn sequential(is_write: bool, block_bytes: usize) -> Load {
        Load {
            is_write,
            is_random: false,
            block_bytes,
            depth: 8,
        }
    }

    /// Returns the name of its row.
    pub fn name(&self) -> String {
        let order = if self.is_random {
            "random"
        } else {
            "sequential"
        };
        let (verb, kib) = (
            if self.is_write { "write" } else { "read" },
            self.block_bytes >> 10,
        );
        let size = match kib {
            0..1024 => format!("{kib} KiB"),
            _ => format!("{} MiB", kib >> 10),
        };
        format!("{size} {order} {verb}, depth {}", self.depth)
    }
}

/// Offsets of a load, without division by a variable in the loop.
struct Offsets {
    is_random: bool,
    block_bytes: u64,
    blocks: u64,
    state: u64,
}

impl Offsets {
    fn new(load: &Load, size_bytes: u64) -> Offsets {
        let block_bytes = load.block_bytes as u64;
        Offsets {
            is_random: load.is_random,
            block_bytes,
            blocks: size_bytes / block_bytes,
            // Any number but 0. Each round has the same offsets.
            state: if load.is_random {
                0x9E37_79B9_7F4A_7C15
            } else {
                0
            },
        }
    }

    fn next(&mut self) -> u64 {
        if !self.is_random {
            let block = self.state;
            self.state = if block + 1 == self.blocks {
                0
            } else {
                block + 1
            };
            return block * self.block_bytes;
        }
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let random = self.state.wrapping_mul(0x2545_F491_4F6C_DD1D);
        let block = (u128::from(random) * u128::from(self.blocks)) >> 64;
        block as u64 * self.block_bytes
    }
}

/// Keeps transfers in progress while `goes_on`, which takes the number of transfers that have ended so far and the time. Returns when all
/// have ended.
pub fn drive(
    client: &mut dyn Client,
    load: &Load,
    mut goes_on: impl FnMut(u64, Instant) -> Result<bool>,
) -> Result<()> {
    let mut offsets = Offsets::new(load, client.size_bytes());
    let mut begin = |client: &mut dyn Client, slot| {
        let transfer = Transfer {
            is_write: load.is_write,
            offset_bytes: offsets.next(),
            length_bytes: load.block_bytes,
        };
        client.begin(slot, transfer)
    };
    for slot in 0..load.depth {
        begin(client, slot)?;
    }
    let mut ended = Vec::with_capacity(load.depth);
    let (mut done, mut in_progress) = (0, load.depth);
    while in_progress > 0 {
        ended.clear();
        client.wait(&mut ended)?;
        done += ended.len() as u64;
        in_progress -= ended.len();
        if !goes_on(done, Instant::now())? {
            continue;
        }
        for slot in &ended {
            begin(client, *slot)?;
        }
        in_progress += ended.len();
    }
    Ok(())
}

/// Measures a load for a time, after a short time that does not count.
pub fn measure(
    client: &mut dyn Client,
    load: &Load,
    usage: &Usage,
    time: Duration,
) -> Result<Reached> {
    let warm = Instant::now() + time / 5;
    let mut start = None;
    let mut reached = None;
    drive(client, load, |done, now| {
        if now < warm || reached.is_some() {
            return Ok(reached.is_none());
        }
        let Some((from, done_before, before)) = &start else {
            start = Some((now, done, usage.now()?));
            return Ok(true);
        };
        let seconds = now.duration_since(*from).as_secs_f64();
        if seconds < time.as_secs_f64() {
            return Ok(true);
        }
        let transfers = (done - done_before) as f64;
        reached = Some(Reached {
            rate_per_s: transfers / seconds,
            used: usage.now()?.since(before).per(transfers),
        });
        Ok(false)
    })?;
    reached.ok_or_else(|| format!("{}: no transfer has ended", load.name()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_offsets_begin_again_at_the_end() {
        let load = Load::sequential(false, 8192);
        let mut offsets = Offsets::new(&load, 16_384);
        let first: Vec<u64> = (0..3).map(|_| offsets.next()).collect();
        assert_eq!(first, [0, 8192, 0]);
    }

    #[test]
    fn random_offsets_are_whole_blocks_of_the_device() {
        let mut offsets = Offsets::new(&Load::random(false, 1), 64 << 20);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            let offset = offsets.next();
            assert!(offset < 64 << 20 && offset.is_multiple_of(4096));
            seen.insert(offset);
        }
        assert!(seen.len() > 900);
    }

    #[test]
    fn a_row_is_named_after_its_load() {
        assert_eq!(
            Load::random(true, 16).name(),
            "4 KiB random write, depth 16"
        );
        let large = Load::sequential(false, 1 << 20);
        assert_eq!(large.name(), "1 MiB sequential read, depth 8");
    }
}
