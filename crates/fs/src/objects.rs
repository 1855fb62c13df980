//! Object numbers: the names that the caches have for files.
//!
//! A page key has room for 30 bits, and an inode number has more. So a file gets an object number when its data side is first used,
//! and keeps the number while it is in memory or a cache has a page of it. Numbers are given out in a circle. A *sweep* takes back
//! the numbers of files that are not in memory and have no page in any cache. docs/internals/fs.md tells why a number that was
//! taken back may be given out again.

use std::sync::Arc;

use jericho_cache::Slice;
use jericho_format::OBJECT_MAX;
use jericho_metadata::errno::ENFILE;
use jericho_metadata::shard::ShardId;
use jericho_storage::Appended;
use parking_lot::RwLock;

use crate::error::Result;
use crate::ino_map::InoMap;
use crate::types::Ino;

/// Fewest files that get a number between two sweeps.
const SWEEP_FILES: usize = 65_536;
/// A sweep looks at every entry of the caches. At least one file for this many entries gets a number between two sweeps.
const ENTRIES_PER_FILE: usize = 4;

/// Number of parts of `AllObjects`.
const PARTS: usize = 16;

/// The object numbers of a mount, in parts with a lock each. The files of a shard are in one part, so that threads that use the files of
/// different shards do not wait for each other, while there are few shards. The number of parts does not depend on that of the shards, which
/// grows.
pub struct AllObjects([Arc<Objects>; PARTS]);

impl AllObjects {
    /// Creates empty tables.
    pub fn new() -> AllObjects {
        let each = OBJECT_MAX as u32 / PARTS as u32;
        let part = |part| Objects::with_range(part as u32 * each, each);
        AllObjects(std::array::from_fn(part))
    }

    /// Holds all locks of the part of a shard until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self, shard: ShardId) -> impl Sized {
        self.0[shard.index() % PARTS].given.write()
    }

    /// Does what `Objects::of` does. `shard` is the file's.
    pub fn of(
        &self,
        ino: Ino,
        shard: ShardId,
        slices: &Appended<Arc<Slice>>,
    ) -> Result<ObjectNumber> {
        self.0[shard.index() % PARTS].of(ino, slices)
    }

    /// Returns the inode with an object number.
    pub fn ino_of(&self, object: u64) -> Option<Ino> {
        let each = OBJECT_MAX / PARTS as u64;
        let part = object.checked_sub(1)? / each;
        let part = self.0.get(usize::try_from(part).ok()?)?;
        part.ino_of(object)
    }
}

/// A part of the object numbers. Has cache lines of its own, with the count of its users.
#[repr(align(128))]
struct Objects {
    given: RwLock<Given>,
    /// The numbers are greater than this one.
    before: u32,
    /// Number of numbers.
    count: u32,
}

#[derive(Default)]
struct Given {
    by_ino: InoMap<u32>,
    by_number: InoMap<Entry>,
    /// The number that was given out last, less `Objects::before`.
    last: u32,
    /// Number of sweeps that have begun.
    sweeps: u32,
    is_sweeping: bool,
    /// With this many numbers in use, a sweep begins.
    sweep_at: usize,
}

struct Entry {
    ino: Ino,
    /// Number of `ObjectNumber`s.
    users: u32,
    /// `Given::sweeps` when the file last came into memory or left it.
    used_in: u32,
}

/// The object number of a file in memory. No other file gets the number while this exists.
pub struct ObjectNumber {
    objects: Arc<Objects>,
    number: u32,
}

impl ObjectNumber {
    /// Returns the number.
    pub fn get(&self) -> u64 {
        self.number.into()
    }
}

impl Drop for ObjectNumber {
    fn drop(&mut self) {
        let mut given = self.objects.given.write();
        let sweeps = given.sweeps;
        if let Some(entry) = given.by_number.get_mut(&self.get()) {
            entry.users -= 1;
            entry.used_in = sweeps;
        }
    }
}

impl Objects {
    /// Creates an empty table of the `count` numbers after `before`.
    fn with_range(before: u32, count: u32) -> Arc<Objects> {
        let given = Given {
            sweep_at: SWEEP_FILES.min(count as usize),
            ..Given::default()
        };
        Arc::new(Objects {
            given: RwLock::new(given),
            before,
            count,
        })
    }

    /// Returns the number of a file that comes into memory: the one that it has, or a new one. Now and then looks at every entry of
    /// the caches `slices`. Fails with ENFILE if all numbers are in use. One thread at a time calls it for a file. The caller may
    /// hold locks of `fs` that are taken before a slice is called.
    fn of(self: &Arc<Self>, ino: Ino, slices: &Appended<Arc<Slice>>) -> Result<ObjectNumber> {
        let mut given = self.given.write();
        if !given.by_ino.contains_key(&ino)
            && given.by_number.len() >= given.sweep_at
            && !given.is_sweeping
        {
            given.is_sweeping = true;
            given.sweeps = given.sweeps.wrapping_add(1);
            drop(given);
            self.sweep(slices);
            given = self.given.write();
        }
        let sweeps = given.sweeps;
        let number = match given.by_ino.get(&ino) {
            Some(number) => *number,
            None => given.give(ino, self.before, self.count)?,
        };
        if let Some(entry) = given.by_number.get_mut(&u64::from(number)) {
            entry.users += 1;
            entry.used_in = sweeps;
        }
        drop(given);
        Ok(ObjectNumber {
            objects: self.clone(),
            number,
        })
    }

    fn ino_of(&self, object: u64) -> Option<Ino> {
        let given = self.given.read();
        given.by_number.get(&object).map(|entry| entry.ino)
    }

    /// Takes back the numbers of files that are not in memory and of which no cache has a page.
    fn sweep(&self, slices: &Appended<Arc<Slice>>) {
        // Without the lock, because other threads need it. A file that comes into memory meanwhile, or leaves it, keeps its number:
        // the caches may have got pages of it behind the search.
        let mut cached = InoMap::<()>::default();
        let mut entries = 0;
        for slice in slices.iter() {
            entries += slice.each_object(|object| {
                cached.insert(object, ());
            });
        }
        let mut given = self.given.write();
        let Given {
            by_ino,
            by_number,
            sweeps,
            ..
        } = &mut *given;
        by_number.retain(|number, entry| {
            let stays = entry.users > 0 || entry.used_in == *sweeps || cached.contains_key(number);
            if !stays {
                by_ino.remove(&entry.ino);
            }
            stays
        });
        let more = SWEEP_FILES.max(entries / ENTRIES_PER_FILE);
        given.sweep_at = (given.by_number.len() + more).min(self.count as usize);
        given.is_sweeping = false;
    }
}

impl Given {
    /// Gives an inode the next number in the circle of `count` numbers after `before` that is not in use.
    fn give(&mut self, ino: Ino, before: u32, count: u32) -> Result<u32> {
        if self.by_number.len() >= count as usize {
            return Err(ENFILE);
        }
        let number = loop {
            self.last = if self.last < count { self.last + 1 } else { 1 };
            let number = before + self.last;
            if !self.by_number.contains_key(&u64::from(number)) {
                break number;
            }
        };
        let entry = Entry {
            ino,
            users: 0,
            used_in: self.sweeps,
        };
        self.by_number.insert(number.into(), entry);
        self.by_ino.insert(ino, number);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use jericho_cache::{
        Config, Error as CacheError, FRAMES_MIN, Intent, Object, PagePlace, PageRun,
    };

    use super::*;
    use jericho_metadata::shard::ShardMap;

    /// A file of zeros.
    struct Zeros(ObjectNumber);

    impl Object for Zeros {
        fn id(&self) -> u64 {
            self.0.get()
        }
        fn slice_of(&self, _page: u64) -> u16 {
            0
        }
        fn resolve(
            &self,
            _first: u64,
            count: u32,
            out: &mut Vec<PageRun>,
        ) -> std::result::Result<(), CacheError> {
            out.push(PageRun {
                pages: count,
                place: PagePlace::Hole,
            });
            Ok(())
        }
        fn allocate(
            &self,
            _first: u64,
            _count: u32,
            _out: &mut Vec<PageRun>,
        ) -> std::result::Result<(), CacheError> {
            panic!("no page is dirty");
        }
        fn written(&self, _first: u64, _count: u32) {}
        fn write_failed(&self, _first: u64, _count: u32, _error: &CacheError) {}
    }

    #[test]
    fn a_file_keeps_its_number_while_a_cache_has_a_page_of_it() {
        let config = Config {
            id: 0,
            frames: FRAMES_MIN,
            kernel_node: None,
            cpus: Vec::new(),
            dirty_age: Duration::from_secs(3600),
        };
        for drops in [false, true] {
            let slice = Slice::start(&config, &[]).unwrap();
            let slices: Appended<_> = [slice.clone()].into_iter().collect();
            let objects = Objects::with_range(0, 1 << 20);
            let file: Arc<dyn Object> = Arc::new(Zeros(objects.of(5, &slices).unwrap()));
            let object = file.id();
            let (tx, rx) = channel();
            let done = tx.clone();
            slice.get(&file, 9, 1, Intent::Read, move |got| {
                drop(got.unwrap());
                done.send(()).unwrap();
            });
            rx.recv().unwrap();
            if drops {
                let done = Box::new(move |result: std::result::Result<(), CacheError>| {
                    result.unwrap();
                    tx.send(()).unwrap();
                });
                slice.invalidate(object, 0..10, done);
                rx.recv().unwrap();
            }
            // No thread of the slice has the file then.
            slice.close();
            drop(file);
            objects.given.write().sweeps += 1;
            objects.sweep(&slices);
            assert_eq!(objects.ino_of(object), (!drops).then_some(5));
        }
    }

    #[test]
    fn a_file_keeps_its_number_until_a_sweep_and_no_file_in_memory_loses_it() {
        let objects = Objects::with_range(0, 3);
        let number = |ino| objects.of(ino, &Appended::default()).unwrap();
        let (first, second) = (number(1 << 40 | 7), number(2 << 40 | 7));
        assert_eq!((first.get(), second.get()), (1, 2));
        drop(first);
        let first = number(1 << 40 | 7);
        assert_eq!(first.get(), 1, "no sweep since");
        assert_eq!(objects.ino_of(1), Some(1 << 40 | 7));
        drop(second);
        let third = number(9);
        assert_eq!(third.get(), 3, "in a circle");
        // All numbers are in use now, and a sweep takes back the second.
        assert_eq!(number(10).get(), 2);
        assert_eq!(objects.ino_of(2), Some(10));
        let fourth = number(10);
        assert!(
            objects
                .of(11, &Appended::default())
                .is_err_and(|error| error.errno() == ENFILE.errno()),
            "{}",
            fourth.get()
        );
    }

    #[test]
    fn each_shard_has_numbers_of_its_own() {
        let (objects, map) = (AllObjects::new(), ShardMap::new(3));
        let none = Appended::default();
        for slice in 0..3 {
            for file in 7..9 {
                let ino = slice << 40 | file;
                let number = objects.of(ino, map.of_ino(ino), &none).unwrap();
                assert_eq!(objects.ino_of(number.get()), Some(ino));
                assert!((1..=OBJECT_MAX).contains(&number.get()));
            }
        }
        assert_eq!(objects.ino_of(0), None);
        assert_eq!(objects.ino_of(OBJECT_MAX), None);
    }

    #[test]
    fn a_file_that_was_used_during_a_sweep_keeps_its_number() {
        let objects = Objects::with_range(0, 3);
        let none = Appended::default();
        let held = objects.of(5, &none).unwrap();
        {
            let mut given = objects.given.write();
            given.is_sweeping = true;
            given.sweeps += 1;
        }
        // The search is over, and the file comes into memory and leaves it.
        drop(held);
        objects.sweep(&none);
        assert_eq!(objects.ino_of(1), Some(5));
        objects.given.write().sweeps += 1;
        objects.sweep(&none);
        assert_eq!(objects.ino_of(1), None);
    }
}
