//! Random numbers that are the same for the same seed on every machine.

/// A small generator (SplitMix64). Good enough to choose faults, but not secure.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Returns the generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// Returns the generator of a seed and a purpose, so that independent decisions do not depend on
    /// the order in which they are made.
    pub fn of(seed: u64, purpose: &[u64]) -> Random {
        purpose.iter().fold(Random::new(seed), |mut random, word| {
            Random::new(random.next_u64() ^ word.wrapping_mul(0xD6E8_FEB8_6659_FD93))
        })
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The bias of a remainder does not matter to a test.
        self.next_u64().checked_rem(limit).unwrap_or(0)
    }

    /// Returns true or false with equal probability.
    pub fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }
}
