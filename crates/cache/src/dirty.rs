//! Which pages are dirty, by object, in the order in which objects became dirty.
//!
//! The table's state words are the truth; this index finds the pages again without scanning the table. It
//! may name pages that are clean or gone by now (they are skipped when looked up), and it misses no
//! page that is dirty once the announcements are drained. Pages are kept in groups of sixteen, so
//! that a sequential writer costs a tree entry per 64 KiB and a random one no more than a plain set.

use std::collections::{BTreeMap, VecDeque};
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
    /// After a failed write-back: not tried again in the background before.
    not_before: Option<Instant>,
}

#[derive(Default)]
pub(crate) struct DirtyIndex {
    objects: HashMap<u64, DirtyObject>,
    /// Ids in the order of `since`; ids that left `objects` are skipped.
    order: VecDeque<(u64, Instant)>,
}

impl DirtyIndex {
    /// Pages became dirty.
    pub fn add(&mut self, object: &Arc<dyn Object>, first: u64, count: u64, now: Instant) {
        let id = object.id();
        let order = &mut self.order;
        let entry = self.objects.entry(id).or_insert_with(|| {
            order.push_back((id, now));
            DirtyObject {
                object: object.clone(),
                pages: Pages::default(),
                since: now,
                not_before: None,
            }
        });
        // The number may have been given to a new file since: its pages must not be placed by the old one.
        if !Arc::ptr_eq(&entry.object, object) {
            entry.object = object.clone();
        }
        for page in first..first + count {
            entry.pages.insert(page);
        }
    }

    pub fn remove(&mut self, id: u64, page: u64) {
        if let Some(object) = self.objects.get_mut(&id) {
            object.pages.remove(page);
            if object.pages.0.is_empty() {
                self.objects.remove(&id);
            }
        }
    }

    /// Whether the index names a page.
    pub fn contains(&self, id: u64, page: u64) -> bool {
        self.objects.get(&id).is_some_and(|o| {
            let bits = o.pages.0.get(&(page >> GROUP_BITS));
            bits.is_some_and(|bits| bits & 1 << (page & 15) != 0)
        })
    }

    /// Whether it names none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// At most `limit` pages of an object in a range, in order.
    pub fn pages(&self, id: u64, range: Range<u64>, limit: usize) -> Vec<u64> {
        self.objects
            .get(&id)
            .map_or_else(Vec::new, |o| o.pages.iter(&range).take(limit).collect())
    }

    pub fn object(&self, id: u64) -> Option<&Arc<dyn Object>> {
        self.objects.get(&id).map(|o| &o.object)
    }

    /// Objects with dirty pages.
    pub fn ids(&self) -> Vec<u64> {
        self.objects.keys().copied().collect()
    }

    /// The object that has been dirty longest and may be tried, and since when. None of `busy`.
    pub fn oldest(&mut self, now: Instant, busy: &HashSet<u64>) -> Option<(u64, Instant)> {
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
                objects
                    .get(id)
                    .is_some_and(|o| o.since == *since && o.not_before.is_none_or(|t| t <= now))
                    && !busy.contains(id)
            })
            .copied()
    }

    /// An object whose pages were partly written goes to the end of the queue.
    pub fn requeue(&mut self, id: u64, now: Instant, not_before: Option<Instant>) {
        if let Some(object) = self.objects.get_mut(&id) {
            object.since = now;
            object.not_before = not_before;
            self.order.push_back((id, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
