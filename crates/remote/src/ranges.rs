//! Ranges of a device that do not overlap.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of bytes.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// Start -> end. No two overlap.
    ends: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Returns whether a range overlaps one of these.
    pub fn overlap(&self, range: &Range<u64>) -> bool {
        let last = self.ends.range(..range.end).next_back();
        last.is_some_and(|(_, &end)| end > range.start)
    }

    /// Adds a range. Returns `false`, without effect, if it overlaps one of these or is empty.
    pub fn add(&mut self, range: Range<u64>) -> bool {
        let fits = !range.is_empty() && !self.overlap(&range);
        if fits {
            self.ends.insert(range.start, range.end);
        }
        fits
    }

    /// Removes a range that `add` added.
    pub fn remove(&mut self, range: &Range<u64>) {
        self.ends.remove(&range.start);
    }

    /// Removes all.
    pub fn clear(&mut self) {
        self.ends.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_do_not_overlap() {
        let mut ranges = Ranges::default();
        assert!(ranges.add(10..20) && ranges.add(30..40) && ranges.add(20..30));
        assert!(!ranges.add(15..16) && !ranges.add(0..11) && !ranges.add(39..50));
        ranges.remove(&(20..30));
        assert!(ranges.add(22..28) && !ranges.add(20..23) && !ranges.add(0..100));
    }
}
