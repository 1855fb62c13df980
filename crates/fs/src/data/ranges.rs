//! Sets of pages, as ranges that neither overlap nor touch.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of pages: the end of each range by its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// Returns the first page of the set at or after `page`.
    pub fn first_from(&self, page: u64) -> Option<u64> {
        let before = self.0.range(..=page).next_back();
        match before {
            Some((_, end)) if *end > page => Some(page),
            _ => self.0.range(page..).next().map(|(start, _)| *start),
        }
    }

    /// Adds pages.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        if let Some((first, last)) = self.0.range(..=start).next_back()
            && *last >= start
        {
            start = *first;
            end = end.max(*last);
        }
        while let Some((first, last)) = self.0.range(start..=end).next() {
            let (first, last) = (*first, *last);
            self.0.remove(&first);
            end = end.max(last);
        }
        self.0.insert(start, end);
    }

    /// Returns the range that has a page.
    pub fn containing(&self, page: u64) -> Option<Range<u64>> {
        let (start, end) = self.0.range(..=page).next_back()?;
        (*end > page).then_some(*start..*end)
    }

    /// Removes the pages of a range. Returns those that were in the set.
    pub fn take(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.containing(range.start);
        let first = before.map_or(range.start, |before| before.start);
        let found = self.0.range(first..range.end);
        let found: Vec<_> = found.map(|(start, end)| *start..*end).collect();
        for found in &found {
            self.0.remove(&found.start);
            self.insert(found.start..range.start);
            self.insert(range.end..found.end);
        }
        let within = |found: Range<u64>| found.start.max(range.start)..found.end.min(range.end);
        found.into_iter().map(within).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut pages = Ranges::default();
        for range in [10..12, 20..22, 14..15, 5..5, 12..14, 21..30, 40..41, 8..50] {
            pages.insert(range.clone());
            let all: Vec<_> = pages.iter().collect();
            assert!(
                all.windows(2).all(|two| two[0].end < two[1].start),
                "{all:?}"
            );
            assert!(range.is_empty() || pages.first_from(range.start) == Some(range.start));
        }
        assert!(pages.iter().eq([Range { start: 8, end: 50 }]));
    }

    #[test]
    fn the_pages_that_are_taken_are_in_the_set_no_more() {
        let mut pages = Ranges::default();
        [10..20, 30..40, 50..60]
            .into_iter()
            .for_each(|range| pages.insert(range));
        assert_eq!(pages.take(15..15), []);
        assert_eq!(pages.take(20..30), []);
        assert_eq!(pages.take(12..14), [Range { start: 12, end: 14 }]);
        assert_eq!(pages.take(18..55), [18..20, 30..40, 50..55]);
        assert!(pages.iter().eq([10..12, 14..18, 55..60]));
        assert_eq!(pages.containing(12), None);
        assert_eq!(pages.containing(17), Some(14..18));
        assert_eq!(pages.take(0..u64::MAX), [10..12, 14..18, 55..60]);
        assert!(pages.is_empty());
    }
}
