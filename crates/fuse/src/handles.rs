//! File handles of the kernel: a number for each open file.
//!
//! Opens of files in different groups (a group is a slice) share no lock and no cache line that one of them writes, while there are at most
//! `GROUPS` groups. The numbers are divided into lists with a lock each, and a group has lists of its own. A release takes the lock of the
//! list that owns the number, so it does not disturb other groups either.
//!
//! Every read and write of every worker looks its handle up. A lookup of a *busy* handle takes no lock and writes only to memory of its own
//! thread. The price is that `ArcSwapOption` writes to memory of every thread at each change of its value: some 100 ns for each thread of
//! the process. So a handle becomes busy only at lookup number `BUSY_LOOKUPS`. Up to then a lookup takes the lock of the handle for as long
//! as it takes to count a reference. Most files that are created are released before.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use parking_lot::Mutex;

const SEGMENT_SLOTS: usize = 1024;
const SEGMENTS: usize = 4096;
/// Groups that share no list.
const GROUPS: usize = 16;
/// Lists of a group, which the threads use in turn.
const GROUP_LISTS: usize = 2;
const LISTS: usize = GROUPS * GROUP_LISTS;
/// A handle with this many lookups is busy.
const BUSY_LOOKUPS: u32 = 256;

const _: () = assert!(SEGMENTS.is_multiple_of(LISTS) && SEGMENT_SLOTS.is_multiple_of(LINE_SLOTS));

/// Open files by number.
pub(crate) struct Handles<T> {
    /// Grows by whole segments, which never move, so a lookup needs no lock against growth. Each segment belongs to one list.
    segments: Box<[OnceLock<Segment<T>>]>,
    /// The free numbers.
    lists: Box<[List]>,
}

type Segment<T> = Box<[Line<T>]>;

const LINE_SLOTS: usize = 4;

/// Slots with cache lines of their own, so that a segment shares none with the memory beside it.
#[repr(align(128))]
struct Line<T>([Slot<T>; LINE_SLOTS]);

/// The place of a number.
struct Slot<T> {
    /// The value, if it is busy. Changes only with `open` locked.
    busy: ArcSwapOption<T>,
    open: Mutex<Open<T>>,
}

struct Open<T> {
    value: Option<Arc<T>>,
    /// Number of lookups, up to `BUSY_LOOKUPS`.
    lookups: u32,
}

/// Has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct List(Mutex<Free>);

#[derive(Default)]
struct Free {
    /// Numbers that were returned.
    reusable: Vec<u64>,
    /// How many of the list's numbers were ever used.
    used: usize,
}

impl Free {
    /// Takes a free number of a list, in a table of `segments` segments. Returns `None` when all numbers of the list are in use.
    fn take(&mut self, list: usize, segments: usize) -> Option<u64> {
        if let Some(number) = self.reusable.pop() {
            return Some(number);
        }
        let segment = self.used / SEGMENT_SLOTS * LISTS + list;
        if segment >= segments {
            return None;
        }
        let number = segment * SEGMENT_SLOTS + self.used % SEGMENT_SLOTS;
        self.used += 1;
        Some(number as u64)
    }
}

/// Returns the list to which a number belongs.
fn list_of(number: u64) -> usize {
    number as usize / SEGMENT_SLOTS % LISTS
}

/// Returns the list from which the calling thread takes the numbers of a group.
fn own_list(group: u16) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static THREAD: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    usize::from(group) % GROUPS * GROUP_LISTS + THREAD.with(|thread| thread % GROUP_LISTS)
}

impl<T> Slot<T> {
    fn empty() -> Slot<T> {
        Slot {
            busy: ArcSwapOption::empty(),
            open: Mutex::new(Open {
                value: None,
                lookups: 0,
            }),
        }
    }

    #[inline]
    fn get(&self) -> Guard<Option<Arc<T>>> {
        let busy = self.busy.load();
        match *busy {
            Some(_) => busy,
            None => Guard::from_inner(self.count_lookup()),
        }
    }

    /// Returns the value of a handle that may not be busy.
    fn count_lookup(&self) -> Option<Arc<T>> {
        let mut open = self.open.lock();
        let value = open.value.clone()?;
        if open.lookups < BUSY_LOOKUPS {
            open.lookups += 1;
            if open.lookups == BUSY_LOOKUPS {
                self.busy.store(Some(value.clone()));
            }
        }
        Some(value)
    }

    fn put(&self, value: Arc<T>) {
        *self.open.lock() = Open {
            value: Some(value),
            lookups: 0,
        };
    }

    fn take(&self) -> Option<Arc<T>> {
        let mut open = self.open.lock();
        let value = open.value.take()?;
        if open.lookups == BUSY_LOOKUPS {
            self.busy.store(None);
        }
        Some(value)
    }
}

impl<T> Handles<T> {
    pub(crate) fn new() -> Handles<T> {
        Handles::with_segments(SEGMENTS)
    }

    fn with_segments(count: usize) -> Handles<T> {
        Handles {
            segments: (0..count).map(|_| OnceLock::new()).collect(),
            lists: (0..LISTS).map(|_| List::default()).collect(),
        }
    }

    /// Assigns a number to `value`, which belongs to `group`. Returns `None` when all four million numbers are in use.
    pub(crate) fn insert(&self, group: u16, value: Arc<T>) -> Option<u64> {
        let own = own_list(group);
        let mut lists = (0..LISTS).map(|further| (own + further) % LISTS);
        let segments = self.segments.len();
        let number = lists.find_map(|list| self.lists[list].0.lock().take(list, segments))?;
        self.segments[number as usize / SEGMENT_SLOTS].get_or_init(|| {
            let line = |_| Line(std::array::from_fn(|_| Slot::empty()));
            (0..SEGMENT_SLOTS / LINE_SLOTS).map(line).collect()
        });
        self.slot(number)?.put(value);
        Some(number)
    }

    #[inline]
    fn slot(&self, number: u64) -> Option<&Slot<T>> {
        let number = usize::try_from(number).ok()?;
        let segment = self.segments.get(number / SEGMENT_SLOTS)?.get()?;
        let at = number % SEGMENT_SLOTS;
        Some(&segment.get(at / LINE_SLOTS)?.0[at % LINE_SLOTS])
    }

    /// Returns the value with this number. Returns an empty guard when there is none.
    #[inline]
    pub(crate) fn get(&self, number: u64) -> Guard<Option<Arc<T>>> {
        match self.slot(number) {
            Some(slot) => slot.get(),
            None => Guard::from_inner(None),
        }
    }

    /// Releases the number. Returns its value.
    pub(crate) fn remove(&self, number: u64) -> Option<Arc<T>> {
        let value = self.slot(number)?.take()?;
        self.lists[list_of(number)].0.lock().reusable.push(number);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_number_finds_its_value_until_it_is_removed() {
        let handles = Handles::new();
        let numbers: Vec<u64> = (0..3000u32)
            .map(|i| handles.insert(3, Arc::new(i)).unwrap())
            .collect();
        for (i, number) in numbers.iter().enumerate() {
            assert_eq!(handles.get(*number).as_deref(), Some(&(i as u32)));
        }
        assert_eq!(handles.remove(numbers[7]).as_deref(), Some(&7));
        assert!(handles.get(numbers[7]).is_none());
        assert!(
            handles.remove(numbers[7]).is_none(),
            "the second removal finds nothing"
        );
        assert_eq!(
            handles.insert(3, Arc::new(9)),
            Some(numbers[7]),
            "numbers are used again"
        );
    }

    #[test]
    fn a_number_that_was_never_used_finds_nothing() {
        let handles: Handles<u32> = Handles::new();
        assert!(handles.get(0).is_none());
        assert!(handles.get(u64::MAX).is_none());
        assert!(handles.remove(12_345_678_901).is_none());
    }

    #[test]
    fn a_busy_handle_is_found_without_its_lock_until_it_is_removed() {
        let handles = Handles::new();
        let number = handles.insert(0, Arc::new(5)).unwrap();
        for _ in 0..BUSY_LOOKUPS {
            assert_eq!(handles.get(number).as_deref(), Some(&5));
        }
        let locked = handles.slot(number).unwrap().open.lock();
        assert_eq!(handles.get(number).as_deref(), Some(&5));
        drop(locked);
        let value = handles.remove(number).unwrap();
        assert_eq!(Arc::strong_count(&value), 1, "the table keeps nothing");
        assert!(handles.get(number).is_none());
        // The next file with the number is another one, and is not busy.
        assert_eq!(handles.insert(0, Arc::new(6)), Some(number));
        assert_eq!(handles.get(number).as_deref(), Some(&6));
        assert!(handles.slot(number).unwrap().busy.load().is_none());
    }

    #[test]
    fn a_file_is_opened_and_released_while_all_locks_of_other_groups_are_held() {
        let handles = Arc::new(Handles::new());
        let numbers: Vec<u64> = (1..GROUPS as u16)
            .map(|group| handles.insert(group, Arc::new(group)).unwrap())
            .collect();
        let lists = &handles.lists[GROUP_LISTS..];
        let lists: Vec<_> = lists.iter().map(|list| list.0.lock()).collect();
        let slots = numbers.iter().map(|number| handles.slot(*number).unwrap());
        let slots: Vec<_> = slots.map(|slot| slot.open.lock()).collect();
        let (sender, receiver) = std::sync::mpsc::channel();
        let opener = std::thread::spawn({
            let handles = handles.clone();
            move || {
                for i in 0..3000 {
                    let number = handles.insert(0, Arc::new(i)).unwrap();
                    assert_eq!(handles.get(number).as_deref(), Some(&i));
                    if i % 3 > 0 {
                        handles.remove(number).unwrap();
                    }
                }
                sender.send(()).unwrap();
            }
        });
        let done = receiver.recv_timeout(std::time::Duration::from_secs(60));
        drop((lists, slots));
        done.expect("it waits for a lock of another group");
        opener.join().unwrap();
    }

    #[test]
    fn files_of_different_groups_have_their_slots_in_different_lines() {
        let handles = Handles::new();
        let mut groups_of = std::collections::HashMap::new();
        for i in 0..3000 {
            let group = i % GROUPS as u16;
            let number = handles.insert(group, Arc::new(0)).unwrap();
            let slot = std::ptr::from_ref(handles.slot(number).unwrap()).addr();
            for address in [slot, slot + size_of::<Slot<u32>>() - 1] {
                let before = groups_of.insert(address / 64, group);
                assert!(before.is_none_or(|before| before == group));
            }
        }
    }

    #[test]
    fn threads_that_open_and_release_never_have_the_same_number() {
        const THREADS: u32 = 8;
        let handles = &Handles::new();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || {
                    let mut own = Vec::new();
                    for i in 0..20_000 {
                        let value = (thread, i);
                        // Half of the threads use the lists of one group.
                        let group = if thread % 2 == 0 { 0 } else { thread as u16 };
                        own.push((handles.insert(group, Arc::new(value)).unwrap(), value));
                        if i % 4 > 0 {
                            let (number, value) = own.swap_remove(i as usize % own.len());
                            assert_eq!(handles.get(number).as_deref(), Some(&value));
                            assert_eq!(handles.remove(number).as_deref(), Some(&value));
                        }
                    }
                    for (number, value) in own {
                        assert_eq!(handles.remove(number).as_deref(), Some(&value));
                    }
                });
            }
        });
    }

    #[test]
    fn the_lists_have_four_million_numbers_each_once() {
        const ALL: usize = 4 << 20;
        let mut found = vec![false; ALL];
        for list in 0..LISTS {
            let mut free = Free::default();
            while let Some(number) = free.take(list, SEGMENTS) {
                assert_eq!(list_of(number), list);
                let before = std::mem::replace(&mut found[number as usize], true);
                assert!(!before, "{number}");
            }
        }
        assert!(found.iter().all(|found| *found));
        assert_eq!(Handles::<()>::new().segments.len(), SEGMENTS);
    }

    #[test]
    fn one_group_can_use_all_numbers_and_returns_each_to_its_list() {
        let handles = Handles::with_segments(2 * LISTS);
        let value = Arc::new(());
        let all = 2 * LISTS * SEGMENT_SLOTS;
        let numbers: HashSet<u64> = (0..all)
            .map(|_| handles.insert(5, value.clone()).unwrap())
            .collect();
        assert_eq!(numbers.len(), all);
        assert!(numbers.iter().all(|number| *number < all as u64));
        assert_eq!(handles.insert(5, value.clone()), None);
        assert_eq!(handles.insert(0, value.clone()), None);
        for number in [17, SEGMENT_SLOTS as u64 * 7, all as u64 - 1] {
            handles.remove(number).unwrap();
            let free = handles.lists[list_of(number)].0.lock();
            assert_eq!(free.reusable, [number]);
            drop(free);
            assert_eq!(handles.insert(5, value.clone()), Some(number));
        }
        assert_eq!(handles.insert(5, value), None);
    }
}
