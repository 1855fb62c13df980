//! Bytes of a fuzzer as values.

/// Takes values from the front of the bytes; returns zeros when the bytes are used up.
pub(crate) struct Input<'d>(pub &'d [u8]);

impl<'d> Input<'d> {
    /// Returns whether the bytes are used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes at most this many bytes.
    pub fn take(&mut self, count: usize) -> &'d [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Takes a number of this many bytes, at most 8.
    pub fn number(&mut self, bytes: usize) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(bytes.min(8));
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// Takes a number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.number(4) as usize).checked_rem(limit).unwrap_or(0)
    }
}
