//! Inode numbers, and the number of inodes of a shard.
//!
//! A number is a slice and the value of that slice's counter. A counter only grows, also over mounts: a mount begins at the
//! *mark* that the store has for the slice, and every number that is in the store is below its slice's mark. So no number is used
//! twice, and a mount reads no inodes. Each mark is in the batch of the first inode that needs it, or in an earlier one.

use std::sync::atomic::{AtomicU64, Ordering};

use jericho_format::record::{
    INO_COUNTER_BITS, INO_MARK_STEP, INODES_NAME, ino_mark_name, ino_of, parts_of_ino,
};

use jericho_storage::Appended;

use crate::errno::ENOSPC;
use crate::error::{Error, Result};
use crate::store::{Change, Store};
use crate::types::{Ino, SliceId};

/// The first value of a counter that is given out. Slice 0 has the root directory before it.
const FIRST: u64 = 2;
/// No counter gives this value or a larger one.
const END: u64 = 1 << INO_COUNTER_BITS;

/// Gives out inode numbers.
pub struct Numbers {
    /// By slice.
    counters: Appended<Counter>,
}

/// The inode numbers of a slice. Has cache lines of its own, so that threads that create inodes in different slices do not slow each other down.
#[repr(align(128))]
pub struct Counter {
    /// The first value of this mount. Changes only when the missing device of the slice comes back.
    start: AtomicU64,
    next: AtomicU64,
}

impl Counter {
    /// Reads the mark of a slice from its store.
    pub fn load(store: &Store, slice: SliceId) -> Result<Counter> {
        if store.is_absent() {
            // Gives no numbers: nothing can be created there.
            return Ok(Counter::from(END));
        }
        let start = store.value(&ino_mark_name(slice))?.unwrap_or(FIRST);
        if !(FIRST..=END).contains(&start) {
            let error = Error::Damaged(format!(
                "the mark of the inode numbers of slice {slice} is {start}; run jericho check --repair"
            ));
            store.note_damage(&error);
            return Err(error);
        }
        Ok(Counter::from(start))
    }

    fn from(start: u64) -> Counter {
        Counter {
            start: AtomicU64::new(start),
            next: AtomicU64::new(start),
        }
    }
}

impl Numbers {
    /// Reads the marks of a volume's slices. `store_of` returns the store of a slice.
    pub fn load<'a>(slices: SliceId, store_of: impl Fn(SliceId) -> &'a Store) -> Result<Numbers> {
        let counter = |slice| Counter::load(store_of(slice), slice);
        let counters: Vec<Counter> = (0..slices).map(counter).collect::<Result<_>>()?;
        Ok(Numbers {
            counters: counters.into_iter().collect(),
        })
    }

    /// Appends the counter of the next slice.
    pub fn append(&self, counter: Counter) {
        self.counters.append([counter]);
    }

    /// Gives out the numbers of a slice whose store has come back, once the slice takes changes.
    pub fn put_back(&self, store: &Store, slice: SliceId) -> Result<()> {
        let loaded = Counter::load(store, slice)?;
        let counter = self.counters.get(usize::from(slice)).ok_or(ENOSPC)?;
        let start = loaded.next.into_inner();
        counter.start.store(start, Ordering::Relaxed);
        counter.next.store(start, Ordering::Release);
        Ok(())
    }

    /// Returns a new number of a slice, and the mark that must be in the current batch, if there is a new one. The caller holds the gate
    /// from before this call until it has pushed the mark. So the current batch is not sealed without the mark, and no later number
    /// of the slice is in an earlier batch.
    pub fn take(&self, slice: SliceId) -> Result<(Ino, Option<Change>)> {
        let counter = self.counters.get(usize::from(slice)).ok_or(ENOSPC)?;
        let value = counter.next.fetch_add(1, Ordering::Relaxed);
        if value >= END {
            // Undoes the increment, so that the counter cannot wrap.
            counter.next.fetch_sub(1, Ordering::Relaxed);
            return Err(ENOSPC);
        }
        let needs_mark =
            value == counter.start.load(Ordering::Relaxed) || value.is_multiple_of(INO_MARK_STEP);
        let mark = needs_mark.then(|| Change::PutInoMark(slice, mark_after(value)));
        Ok((ino_of(slice, value), mark))
    }
}

/// Returns the mark for a value of a counter: the next multiple of the step.
pub fn mark_after(value: u64) -> u64 {
    (value / INO_MARK_STEP + 1) * INO_MARK_STEP
}

/// Returns the slice of an inode number.
pub fn slice_of_ino(ino: Ino) -> Option<SliceId> {
    parts_of_ino(ino).map(|(slice, _)| slice)
}

/// The number of inodes of a shard, now and in its store.
pub struct InodeCount {
    now: AtomicU64,
    /// The number in the last sealed batch. Only the thread that seals changes it.
    sealed: AtomicU64,
}

impl InodeCount {
    /// Reads the number from the store.
    pub fn load(store: &Store) -> Result<InodeCount> {
        let count = match store.is_absent() {
            true => 0,
            false => store.value(INODES_NAME)?.unwrap_or(0),
        };
        Ok(InodeCount {
            now: AtomicU64::new(count),
            sealed: AtomicU64::new(count),
        })
    }

    /// Takes the number from a store that has come back.
    pub fn put_back(&self, store: &Store) -> Result<()> {
        let loaded = InodeCount::load(store)?;
        self.now.store(loaded.now(), Ordering::Relaxed);
        self.sealed.store(loaded.sealed(), Ordering::Relaxed);
        Ok(())
    }

    /// Returns the number of inodes, including those that no batch has yet.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Counts an inode that was made.
    pub fn made(&self) {
        self.now.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts inodes whose removal is durable.
    pub fn removed(&self, count: u64) {
        subtract(&self.now, count);
    }

    /// Returns the number of inodes in the batch that was sealed last.
    pub fn sealed(&self) -> u64 {
        self.sealed.load(Ordering::Relaxed)
    }

    /// Counts an inode that enters the store with the batch that is being sealed.
    pub fn enters(&self) {
        self.sealed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an inode that leaves the store with the batch that is being sealed.
    pub fn leaves(&self) {
        subtract(&self.sealed, 1);
    }
}

/// Subtracts from a count that may be too small on a damaged volume.
fn subtract(count: &AtomicU64, less: u64) {
    let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        Some(count.saturating_sub(less))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads the numbers of `slices` slices from a store that has one mark.
    fn load(slice: SliceId, mark: u64, slices: SliceId) -> Result<Numbers> {
        let store = Store::in_memory(64).unwrap();
        store.commit(&[Change::PutInoMark(slice, mark)]).unwrap();
        Numbers::load(slices, |_| &store)
    }

    fn mark_of(taken: &(Ino, Option<Change>)) -> Option<(SliceId, u64)> {
        match taken.1 {
            Some(Change::PutInoMark(slice, mark)) => Some((slice, mark)),
            _ => None,
        }
    }

    #[test]
    fn a_mount_begins_at_the_mark_and_each_mark_comes_with_the_first_number_that_needs_it() {
        let numbers = load(1, 3 * INO_MARK_STEP, 2).unwrap();
        let first = numbers.take(0).unwrap();
        assert_eq!((first.0, mark_of(&first)), (2, Some((0, INO_MARK_STEP))));
        for counter in 3 * INO_MARK_STEP..5 * INO_MARK_STEP {
            let taken = numbers.take(1).unwrap();
            assert_eq!(taken.0, 1 << 40 | counter);
            let mark = counter
                .is_multiple_of(INO_MARK_STEP)
                .then_some((1, counter + INO_MARK_STEP));
            assert_eq!(mark_of(&taken), mark, "counter {counter}");
        }
        assert_eq!(numbers.take(2).unwrap_err().errno(), ENOSPC.errno());
    }

    #[test]
    fn a_slice_whose_counter_has_ended_has_no_more_numbers() {
        let numbers = load(0, END, 1).unwrap();
        for _ in 0..2 {
            assert_eq!(numbers.take(0).unwrap_err().errno(), ENOSPC.errno());
        }
    }

    #[test]
    fn an_impossible_mark_is_damage() {
        for mark in [0, 1, END + 1, u64::MAX] {
            let error = load(0, mark, 1).err().unwrap();
            assert!(matches!(error, Error::Damaged(_)), "mark {mark}: {error}");
        }
    }
}
