//! Which parts of a request's data have arrived.

use jericho_format::wire::{PLACE_BYTES, TRANSFER_BYTES_MAX};

/// A bit for each 64 bytes of a request's data.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    words: Vec<u64>,
    /// Number of bits that are set.
    count: u32,
    /// One more than the greatest bit that is set.
    end: u32,
}

impl Pieces {
    /// Notes a part. Returns whether it is well-formed: whole units, within the largest transfer.
    pub fn take(&mut self, place: u16, length: usize) -> bool {
        let units = length as u32 / PLACE_BYTES;
        let (first, end) = (u32::from(place), u32::from(place) + units);
        let is_whole = units > 0 && length.is_multiple_of(PLACE_BYTES as usize);
        if !is_whole || end > TRANSFER_BYTES_MAX / PLACE_BYTES {
            return false;
        }
        let words = (end as usize).div_ceil(64);
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        let mut at = first;
        while at < end {
            let (word, bit) = (at as usize / 64, at % 64);
            let bits = (64 - bit).min(end - at);
            let mask = match bits {
                64 => u64::MAX,
                bits => ((1 << bits) - 1) << bit,
            };
            self.count += (mask & !self.words[word]).count_ones();
            self.words[word] |= mask;
            at += bits;
        }
        self.end = self.end.max(end);
        true
    }

    /// Returns whether all parts are within the first `length_bytes`.
    pub fn are_within(&self, length_bytes: u32) -> bool {
        self.end <= length_bytes / PLACE_BYTES
    }

    /// Returns whether the first `length_bytes` have arrived.
    pub fn are_all(&self, length_bytes: u32) -> bool {
        self.are_within(length_bytes) && self.count == length_bytes / PLACE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_size_in_any_order_add_up() {
        let mut pieces = Pieces::default();
        assert!(pieces.take(64, 8192));
        assert!(!pieces.are_all(12_288));
        assert!(pieces.take(0, 1408) && pieces.take(22, 1408) && pieces.take(22, 1408));
        assert!(!pieces.are_all(12_288));
        assert!(pieces.take(44, 1280));
        assert!(pieces.are_all(12_288) && !pieces.are_within(8192));
    }

    #[test]
    fn parts_that_are_not_whole_or_too_far_are_refused() {
        let mut pieces = Pieces::default();
        assert!(!pieces.take(0, 0) && !pieces.take(0, 65) && !pieces.take(u16::MAX, 64));
        assert!(pieces.take(16_383, 64) && !pieces.take(16_383, 128));
    }
}
