//! The numbers that have arrived on a channel: rules 1 and 2 of a channel in `docs/formats/wire.md`.

use std::time::Duration;

use jericho_format::wire::{ACK_WORDS, NUMBERS_KEPT};

use crate::Time;

const WORDS: usize = ACK_WORDS + 1;
const _: () = assert!(WORDS as u64 * 64 == NUMBERS_KEPT);
/// Frames without an acknowledgement that cause one.
const OWED_MAX: u32 = 16;
/// Numbers that the acknowledgements in a header reach.
const IN_HEADER: u64 = 64;
/// Greatest number of a frame. A channel would have to send for centuries to reach it.
const NUMBER_MAX: u64 = u64::MAX >> 1;
/// Maximum age of a frame without an acknowledgement.
pub(crate) const ACK_DELAY: Duration = Duration::from_micros(250);

/// Remembers which numbers have arrived, and what must be acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Received {
    /// One more than the greatest number.
    end: u64,
    /// Bit N of these words, the first one first: `end - 1 - N` has arrived.
    bits: [u64; WORDS],
    owed: u32,
    /// Least number that has arrived since the last acknowledgement.
    least: Option<u64>,
    /// An acknowledgement must be sent now.
    is_due: bool,
    deadline: Option<Time>,
}

impl Received {
    /// Takes a number. Returns whether the frame is new: `false` if the number has arrived before, is too old to know, or is
    /// impossible.
    pub fn take(&mut self, number: u64) -> bool {
        if number > NUMBER_MAX {
            return false;
        }
        self.least = Some(self.least.map_or(number, |least| least.min(number)));
        if number >= self.end {
            let ahead = number - self.end;
            // A missing number is reported at once: the sender learns of a loss in a round trip.
            self.is_due |= ahead > 0;
            self.shift(ahead.saturating_add(1));
            self.end = number + 1;
            self.bits[0] |= 1;
            return true;
        }
        let below = self.end - 1 - number;
        if below >= NUMBERS_KEPT {
            return false;
        }
        let (word, bit) = (below as usize / 64, 1 << (below % 64));
        let is_new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        self.is_due |= is_new;
        is_new
    }

    /// Returns whether a number has arrived.
    pub fn has_any(&self) -> bool {
        self.end > 0
    }

    /// Notes that a frame must be acknowledged. `is_wanted`: at once.
    pub fn owe(&mut self, now: Time, is_wanted: bool) {
        self.owed += 1;
        self.is_due |= is_wanted || self.owed >= OWED_MAX;
        self.deadline.get_or_insert(now + ACK_DELAY);
    }

    /// Returns whether an acknowledgement must be sent although no other frame is.
    pub fn is_due(&self, now: Time) -> bool {
        self.is_due && self.owed > 0 || self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Returns whether the header of a frame has room for all acknowledgements that are owed.
    pub fn fits_header(&self) -> bool {
        self.owed == 0 || self.least.is_none_or(|least| least + IN_HEADER >= self.end)
    }

    /// Returns when the next acknowledgement is due.
    pub fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Returns `ack_end` and all words of acknowledgements, to be sent now.
    pub fn acknowledge(&mut self) -> (u64, [u64; WORDS]) {
        (self.owed, self.least) = (0, None);
        (self.is_due, self.deadline) = (false, None);
        (self.end, self.bits)
    }

    /// Moves all bits up by `count` places.
    fn shift(&mut self, count: u64) {
        if count >= NUMBERS_KEPT {
            self.bits = [0; WORDS];
            return;
        }
        let (words, bits) = (count as usize / 64, count % 64);
        for to in (0..WORDS).rev() {
            let word = |from: usize| match from >= words {
                true => self.bits[from - words],
                false => 0,
            };
            let low = match (to, bits) {
                (0, _) | (_, 0) => 0,
                (to, bits) => word(to - 1) >> (64 - bits),
            };
            self.bits[to] = word(to) << bits | low;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_new_once_and_old_ones_are_not_new() {
        let mut received = Received::default();
        let mut seen = vec![false; 5000];
        let mut number = 7_u64;
        for round in 0..20_000_u64 {
            number = (number * 31 + round) % 97;
            let at = (round / 5 + number) as usize % 5000;
            let is_kept = at as u64 + NUMBERS_KEPT >= received.end;
            let expected = !seen[at] && is_kept;
            assert_eq!(received.take(at as u64), expected, "{at}");
            seen[at] = seen[at] || expected;
            let (end, words) = received.acknowledge();
            for below in 0..NUMBERS_KEPT.min(end) {
                let is_set = words[below as usize / 64] >> (below % 64) & 1 == 1;
                assert_eq!(is_set, seen[(end - 1 - below) as usize]);
            }
        }
    }

    #[test]
    fn a_gap_is_acknowledged_at_once_and_a_single_frame_after_the_delay() {
        let mut received = Received::default();
        let start = Duration::from_secs(1);
        received.take(0);
        received.owe(start, false);
        assert!(!received.is_due(start));
        assert!(received.is_due(start + ACK_DELAY));
        received.acknowledge();
        received.take(2);
        received.owe(start, false);
        assert!(received.is_due(start));
    }
}
