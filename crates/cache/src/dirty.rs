//! The dirty pages, by object, in the order in which the objects became dirty.
//!
//! The table's state words are the truth. This index finds the dirty pages without a scan of the table. It may name pages that
//! are clean or gone by now; a lookup skips them. It misses no dirty page once the reports are drained. It keeps pages in groups
//! of sixteen, so that a sequential writer costs one tree entry per 64 KiB and a random writer costs no more than a plain set.
//!
//! Pages whose write-back failed are kept apart (`failed`). Background write-back skips them. Otherwise it would retry them in a
//! busy loop while the device accepts nothing. Three functions return them to write-back: `retry` (a sync needs them now),
//! `probe` (one piece, to test whether the device accepts writes) and `retry_all` (the device accepts writes). `retried` names
//! the returned pages until write-back chooses them. It chooses them at any age, and the outage does not end while `retried`
//! names a page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use foldhash::{HashMap, HashSet};

use crate::object::Object;

const GROUP_BITS: u32 = 4;

#[derive(Default)]
struct Pages(BTreeMap<u64, u16>);

impl Pages {
    fn insert(&mut self, page: u64) {
        *self.0.entry(page >> GROUP_BITS).or_default() |= 1 << (page & 15);
    }

    fn remove(&mut self, page: u64) {
        if let Some(bits) = self.0.get_mut(&(page >> GROUP_BITS)) {
            *bits &= !(1 << (page & 15));
            if *bits == 0 {
                self.0.remove(&(page >> GROUP_BITS));
            }
        }
    }

    fn contains(&self, page: u64) -> bool {
        let bits = self.0.get(&(page >> GROUP_BITS));
        bits.is_some_and(|bits| bits & 1 << (page & 15) != 0)
    }

    fn len(&self) -> u64 {
        self.0
            .values()
            .map(|bits| u64::from(bits.count_ones()))
            .sum()
    }

    fn merge(&mut self, other: &Pages) {
        for (group, bits) in &other.0 {
            *self.0.entry(*group).or_default() |= bits;
        }
    }

    fn iter(&self, range: &Range<u64>) -> impl Iterator<Item = u64> + use<'_> {
        let range = range.clone();
        let groups = (range.start >> GROUP_BITS)..=((range.end.saturating_sub(1)) >> GROUP_BITS);
        let groups = if range.is_empty() {
            None
        } else {
            Some(self.0.range(groups))
        };
        groups.into_iter().flatten().flat_map(move |(group, bits)| {
            let (group, bits, range) = (*group, *bits, range.clone());
            (0..16u64)
                .filter(move |i| bits & 1 << i != 0)
                .map(move |i| group << GROUP_BITS | i)
                .filter(move |p| range.contains(p))
        })
    }
}

struct DirtyObject {
    object: Arc<dyn Object>,
    pages: Pages,
    since: Instant,
}

/// Pages of an object whose write-back failed.
struct FailedObject {
    object: Arc<dyn Object>,
    pages: Pages,
    since: Instant,
}

#[derive(Default)]
pub(crate) struct DirtyIndex {
    objects: HashMap<u64, DirtyObject>,
    /// Ids in the order of `since`. Ids that are no longer in `objects` are skipped.
    order: VecDeque<(u64, Instant)>,
    /// Ordered by object id, so that probes visit all objects in turn.
    failed: BTreeMap<u64, FailedObject>,
    /// Number of pages in `failed`.
    failed_pages: u64,
    /// Pages that failed and were returned to `objects`, until write-back chooses them. By object.
    retried: BTreeMap<u64, Pages>,
    /// Object and page where the next probe begins.
    probe_from: (u64, u64),
}

impl DirtyIndex {
    /// Adds pages that became dirty.
    pub fn add(&mut self, object: &Arc<dyn Object>, first: u64, count: u64, now: Instant) {
        let id = object.id();
        let order = &mut self.order;
        let entry = self.objects.entry(id).or_insert_with(|| {
            order.push_back((id, now));
            DirtyObject {
                object: object.clone(),
                pages: Pages::default(),
                since: now,
            }
        });
        // A new file may have the same id by now. Write-back must ask the new object for the places of its pages, not the old one.
        if !Arc::ptr_eq(&entry.object, object) {
            entry.object = object.clone();
        }
        for page in first..first + count {
            entry.pages.insert(page);
        }
    }

    /// Removes a page that is clean, gone, or about to be written.
    pub fn remove(&mut self, id: u64, page: u64) {
        if let Some(object) = self.objects.get_mut(&id) {
            object.pages.remove(page);
            if object.pages.0.is_empty() {
                self.objects.remove(&id);
            }
        }
        if let Some(pages) = self.retried.get_mut(&id) {
            pages.remove(page);
            if pages.0.is_empty() {
                self.retried.remove(&id);
            }
        }
        self.remove_failed(id, page);
    }

    fn remove_failed(&mut self, id: u64, page: u64) {
        if let Some(failed) = self.failed.get_mut(&id)
            && failed.pages.contains(page)
        {
            failed.pages.remove(page);
            self.failed_pages -= 1;
            if failed.pages.0.is_empty() {
                self.failed.remove(&id);
            }
        }
    }

    /// Marks pages whose write-back failed, so that background write-back skips them.
    pub fn fail(&mut self, object: &Arc<dyn Object>, first: u64, count: u64, now: Instant) {
        let failed = self
            .failed
            .entry(object.id())
            .or_insert_with(|| FailedObject {
                object: object.clone(),
                pages: Pages::default(),
                since: now,
            });
        if !Arc::ptr_eq(&failed.object, object) {
            failed.object = object.clone();
        }
        for page in first..first + count {
            if !failed.pages.contains(page) {
                failed.pages.insert(page);
                self.failed_pages += 1;
            }
        }
    }

    /// Returns the number of pages whose write-back failed and was not retried. Some may be clean or gone by now.
    pub fn failed_pages(&self) -> u64 {
        self.failed_pages
    }

    /// Returns an object's failed pages to ordinary write-back, as the oldest. Returns whether there were any.
    pub fn retry(&mut self, id: u64) -> bool {
        let Some(failed) = self.failed.remove(&id) else {
            return false;
        };
        self.failed_pages -= failed.pages.len();
        self.return_to_write_back(failed);
        true
    }

    /// Does the same as `retry` for all objects.
    pub fn retry_all(&mut self) {
        self.failed_pages = 0;
        for (_, failed) in std::mem::take(&mut self.failed) {
            self.return_to_write_back(failed);
        }
    }

    fn return_to_write_back(&mut self, failed: FailedObject) {
        let (id, since) = (failed.object.id(), failed.since);
        let retried = self.retried.entry(id).or_default();
        retried.merge(&failed.pages);
        let entry = self.objects.entry(id).or_insert_with(|| DirtyObject {
            object: failed.object,
            pages: Pages::default(),
            since,
        });
        entry.pages.merge(&failed.pages);
        entry.since = since;
        self.order.push_front((id, since));
    }

    /// Takes at most `limit` adjacent failed pages of one object for a trial write. Successive calls take different
    /// pages, all in turn. The pages become ordinary dirty pages. Returns `None` when nothing has failed.
    pub fn probe(&mut self, limit: usize) -> Option<(u64, Range<u64>)> {
        let (id, from) = self.probe_from;
        let later = |(id, from): (u64, u64)| {
            let mut objects = self.failed.range(id..);
            objects.find_map(|(at, failed)| {
                let from = if *at == id { from } else { 0 };
                let mut pages = failed.pages.iter(&(from..u64::MAX)).take(limit);
                let first = pages.next()?;
                let mut end = first + 1;
                while pages.next() == Some(end) {
                    end += 1;
                }
                Some((*at, first..end))
            })
        };
        let (id, pages) = later((id, from)).or_else(|| later((0, 0)))?;
        self.probe_from = (id, pages.end);
        let failed = self.failed.get(&id)?;
        let (object, since) = (failed.object.clone(), failed.since);
        let mut taken = Pages::default();
        for page in pages.clone() {
            taken.insert(page);
            self.remove_failed(id, page);
        }
        self.return_to_write_back(FailedObject {
            object,
            pages: taken,
            since,
        });
        Some((id, pages))
    }

    /// Returns whether the index names a page.
    pub fn contains(&self, id: u64, page: u64) -> bool {
        let waits = self
            .objects
            .get(&id)
            .is_some_and(|o| o.pages.contains(page));
        waits || self.failed.get(&id).is_some_and(|o| o.pages.contains(page))
    }

    /// Returns whether the index is empty.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.failed.is_empty()
    }

    /// Returns at most `limit` pages of an object in a range that wait for write-back, in order, without failed ones.
    pub fn waiting(&self, id: u64, range: Range<u64>, limit: usize) -> Vec<u64> {
        self.objects
            .get(&id)
            .map_or_else(Vec::new, |o| o.pages.iter(&range).take(limit).collect())
    }

    /// Returns all dirty pages of an object in a range, in order, with failed ones.
    pub fn pages(&self, id: u64, range: Range<u64>) -> Vec<u64> {
        let waiting = self.waiting(id, range.clone(), usize::MAX);
        let Some(failed) = self.failed.get(&id) else {
            return waiting;
        };
        let all: BTreeSet<u64> = waiting
            .into_iter()
            .chain(failed.pages.iter(&range))
            .collect();
        all.into_iter().collect()
    }

    /// Returns the first page >= `from` of an object for which `is` returns true, also among failed pages. Reads no further.
    pub fn find_first(&self, id: u64, from: u64, is: impl Fn(u64) -> bool) -> Option<u64> {
        let first = |pages: &Pages| pages.iter(&(from..u64::MAX)).find(|page| is(*page));
        let waiting = self.objects.get(&id).and_then(|o| first(&o.pages));
        let failed = self.failed.get(&id).and_then(|o| first(&o.pages));
        waiting.into_iter().chain(failed).min()
    }

    /// Returns an object with pages that wait for write-back.
    pub fn object(&self, id: u64) -> Option<&Arc<dyn Object>> {
        self.objects.get(&id).map(|o| &o.object)
    }

    /// Returns the objects with dirty pages, including failed ones.
    pub fn ids(&self) -> Vec<u64> {
        let ids = self.objects.keys().chain(self.failed.keys());
        ids.copied().collect()
    }

    /// Returns whether pages that have failed wait for the next attempt.
    pub fn has_failed(&self) -> bool {
        self.failed_pages > 0 || !self.retried.is_empty()
    }

    /// Returns an object with pages that were returned to write-back. Skips the objects in `busy`.
    pub fn retried(&self, busy: &HashSet<u64>) -> Option<u64> {
        self.retried.keys().find(|id| !busy.contains(id)).copied()
    }

    /// Returns whether a page was returned to write-back after it had failed, and was not chosen since.
    pub fn is_retried(&self, id: u64, page: u64) -> bool {
        let retried = self.retried.get(&id);
        retried.is_some_and(|pages| pages.contains(page))
    }

    /// Returns the object that has been dirty longest, and since when. Skips the objects in `busy`.
    pub fn oldest(&mut self, busy: &HashSet<u64>) -> Option<(u64, Instant)> {
        let objects = &self.objects;
        while let Some((id, since)) = self.order.front() {
            if objects.get(id).is_some_and(|o| o.since == *since) {
                break;
            }
            self.order.pop_front();
        }
        self.order
            .iter()
            .find(|(id, since)| {
                objects.get(id).is_some_and(|o| o.since == *since) && !busy.contains(id)
            })
            .copied()
    }

    /// Moves an object to the end of the queue: write-back took only some of its pages, or none.
    pub fn requeue(&mut self, id: u64, now: Instant) {
        if let Some(object) = self.objects.get_mut(&id) {
            object.since = now;
            self.order.push_back((id, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    struct Number(u64);

    impl Object for Number {
        fn id(&self) -> u64 {
            self.0
        }
        fn slice_of(&self, _page: u64) -> u16 {
            0
        }
        fn resolve(&self, _: u64, _: u32, _: &mut Vec<crate::PageRun>) -> Result<(), crate::Error> {
            Ok(())
        }
        fn allocate(
            &self,
            _: u64,
            _: u32,
            _: &mut Vec<crate::PageRun>,
        ) -> Result<(), crate::Error> {
            Ok(())
        }
        fn written(&self, _: u64, _: u32) {}
        fn write_failed(&self, _: u64, _: u32, _: &crate::Error) {}
    }

    #[test]
    fn failed_pages_wait_apart_and_are_probed_in_turn() {
        let (mut index, now) = (DirtyIndex::default(), Instant::now());
        let objects: Vec<Arc<dyn Object>> = vec![Arc::new(Number(1)), Arc::new(Number(2))];
        index.fail(&objects[0], 5, 3, now);
        index.fail(&objects[0], 100, 1, now);
        index.fail(&objects[1], 7, 1, now);
        index.fail(&objects[1], 7, 1, now);
        index.add(&objects[1], 8, 1, now);
        assert_eq!(index.failed_pages(), 5);
        let none = HashSet::default();
        assert_eq!(index.oldest(&none), Some((2, now)));
        assert_eq!(index.waiting(2, 0..1000, 10), [8]);
        assert_eq!(index.pages(2, 0..1000), [7, 8]);
        let first = |id, from| index.find_first(id, from, |page| page != 6);
        assert_eq!(
            [first(2, 0), first(2, 8), first(2, 9)],
            [Some(7), Some(8), None]
        );
        assert_eq!([first(1, 0), first(1, 6)], [Some(5), Some(7)]);
        let mut probes = vec![];
        for _ in 0..5 {
            let Some((id, pages)) = index.probe(2) else {
                break;
            };
            // The page failed once more.
            let count = pages.end - pages.start;
            pages.clone().for_each(|page| index.remove(id, page));
            index.fail(&objects[id as usize - 1], pages.start, count, now);
            probes.push((id, pages));
        }
        assert_eq!(
            probes,
            [(1, 5..7), (1, 7..8), (1, 100..101), (2, 7..8), (1, 5..7)]
        );
        index.remove(1, 100);
        index.retry_all();
        assert_eq!(index.failed_pages(), 0);
        assert_eq!(index.waiting(1, 0..1000, 10), [5, 6, 7]);
        assert_eq!(index.waiting(2, 0..1000, 10), [7, 8]);
        assert_eq!(index.retried(&none), Some(1));
        let retried = |id, page| index.is_retried(id, page);
        assert!(retried(1, 5) && retried(2, 7) && !retried(2, 8));
        (5..8).for_each(|page| index.remove(1, page));
        assert_eq!(index.retried(&none), Some(2));
        index.remove(2, 8);
        assert!(index.has_failed());
        index.remove(2, 7);
        assert!(!index.has_failed() && index.retried(&none).is_none());
    }

    proptest! {
        #[test]
        fn pages_are_a_set_in_order(ops in proptest::collection::vec((0u64..100, any::<bool>()), 0..200),
                                    a in 0u64..110, b in 0u64..110) {
            let (mut pages, mut model) = (Pages::default(), BTreeSet::new());
            for (page, add) in ops {
                if add { pages.insert(page); model.insert(page); } else { pages.remove(page); model.remove(&page); }
            }
            let got: Vec<u64> = pages.iter(&(a..b)).collect();
            let want: Vec<u64> = model.iter().copied().filter(|p| (a..b).contains(p)).collect();
            prop_assert_eq!(got, want);
        }
    }
}
