//! A client's own area: the ring of pages that it made dirty, marks of use, counters.
//!
//! The client writes it and the daemon trusts nothing in it: whatever lies there costs the daemon a bounded
//! look, and every key is checked by whoever uses it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use jericho_sys::memory::Mapping;

use crate::entry::Key;
use crate::ring::Ring;
use crate::sync::{self, AtomicU32, Ordering};

/// Keys that the ring holds.
pub const RING_KEYS: usize = 8192;
/// Marks of use.
pub const TOUCHED: usize = 4096;
/// Where the word that cuts the client off is.
pub(crate) const CUT_OFF_AT: u64 = 8;
const VERSION: u32 = 1;
const RING_AT: usize = 4096;
const TOUCHED_AT: usize = RING_AT + 8 * RING_KEYS;
const COUNTERS_AT: usize = TOUCHED_AT + 8 * TOUCHED;
/// Threads with counters of their own; the last line is shared by all further ones.
const THREADS: usize = 16;
const COUNTED_SLICES: usize = 64;
const BYTES: usize = COUNTERS_AT + THREADS * COUNTED_SLICES * size_of::<Counter>();

#[repr(C, align(64))]
struct Header {
    version: AtomicU32,
    owner: AtomicU32,
    cut_off: AtomicU32,
    wanted: AtomicU32,
    overflow: AtomicU32,
    threads: AtomicU32,
    _unused: [u32; 10],
    given_out: sync::AtomicU64,
    done: sync::AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(Header, given_out) == 64);
#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(Header, cut_off) as u64 == CUT_OFF_AT);
const _: () = assert!(size_of::<Header>() <= RING_AT);

/// What a thread did with the pages of a slice.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Counter {
    /// Pages accessed from a CPU of the slice's node.
    pub local_pages: AtomicU64,
    /// Pages accessed from elsewhere.
    pub remote_pages: AtomicU64,
    /// Bytes of the former.
    pub local_bytes: AtomicU64,
    /// Bytes of the latter.
    pub remote_bytes: AtomicU64,
    /// Pages of these that were written.
    pub written_pages: AtomicU64,
    /// Bytes that were written.
    pub written_bytes: AtomicU64,
    /// Calls that read and needed nobody else.
    pub read_calls: AtomicU64,
    /// Calls that wrote and needed nobody else.
    pub write_calls: AtomicU64,
}

const _: () = assert!(size_of::<Counter>() == 64);

/// What a call did with the pages of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// On a CPU of the slice's node.
    pub local: bool,
    /// It wrote.
    pub write: bool,
    /// Pages.
    pub pages: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Calls that this was: 0 when part of one was done elsewhere.
    pub calls: u64,
}

impl Counter {
    /// Counts an access. `alone`: no other thread counts here, so no locked instruction is needed.
    #[inline]
    pub fn add(&self, access: Access, alone: bool) {
        let Access {
            local,
            write,
            pages,
            bytes,
            calls,
        } = access;
        if !alone {
            return self.add_shared(local, write, pages, bytes, calls);
        }
        let bump = |word: &AtomicU64, n: u64| {
            let sum = word.load(Ordering::Relaxed).wrapping_add(n);
            word.store(sum, Ordering::Relaxed);
        };
        self.each(local, write, pages, bytes, calls, bump);
    }

    #[cold]
    fn add_shared(&self, local: bool, write: bool, pages: u64, bytes: u64, calls: u64) {
        let bump = |word: &AtomicU64, n: u64| {
            word.fetch_add(n, Ordering::Relaxed);
        };
        self.each(local, write, pages, bytes, calls, bump);
    }

    #[inline(always)]
    fn each(
        &self,
        local: bool,
        write: bool,
        pages: u64,
        bytes: u64,
        calls: u64,
        bump: impl Fn(&AtomicU64, u64),
    ) {
        let (of_pages, of_bytes) = match local {
            true => (&self.local_pages, &self.local_bytes),
            false => (&self.remote_pages, &self.remote_bytes),
        };
        bump(of_pages, pages);
        bump(of_bytes, bytes);
        if write {
            bump(&self.written_pages, pages);
            bump(&self.written_bytes, bytes);
            bump(&self.write_calls, calls);
        } else {
            bump(&self.read_calls, calls);
        }
    }
}

/// The segment.
#[derive(Debug)]
pub struct Area {
    mapping: Mapping,
}

impl Area {
    /// The daemon makes one for a client with this owner number.
    pub fn create(name: &str, owner: u16) -> io::Result<Area> {
        let mapping = Mapping::create(&format!("jericho-{name}-area-{owner}"), BYTES, false)?;
        let area = Area { mapping };
        area.header().version.store(VERSION, Ordering::Relaxed);
        area.header()
            .owner
            .store(u32::from(owner), Ordering::Relaxed);
        Ok(area)
    }

    /// A client maps its own. Errors as `Mapping::from_fd`; `InvalidData` for another version.
    pub fn attach(fd: OwnedFd) -> io::Result<Area> {
        let area = Area {
            mapping: Mapping::from_fd(fd, BYTES, true)?,
        };
        if area.header().version.load(Ordering::Relaxed) != VERSION {
            let what = "the daemon's areas are of another version than this library's";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(area)
    }

    /// The segment, to be handed over.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the mapping is BYTES long, page-aligned, and lives as long as `self`; the fields are
        // atomics, valid for every bit pattern.
        unsafe { &*self.mapping.as_ptr().cast::<Header>() }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= BYTES);
        // SAFETY: inside of the mapping and aligned (asserted); as in `header`.
        unsafe { &*self.mapping.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// The client's owner number, as it was handed over. The daemon has its own record of it.
    #[inline]
    pub fn owner(&self) -> u16 {
        self.header().owner.load(Ordering::Relaxed) as u16
    }

    /// Whether the daemon has cut this client off.
    #[inline]
    pub fn is_cut_off(&self) -> bool {
        self.header().cut_off.load(Ordering::Relaxed) != 0
    }

    /// The daemon cuts the client off.
    pub fn cut_off(&self) {
        self.header().cut_off.store(1, Ordering::SeqCst);
    }

    /// The client announces a page that it made dirty, before it acknowledges the write. True: the daemon
    /// wants the bell rung.
    #[inline]
    pub fn announce(&self, key: Key) -> bool {
        self.ring().announce(key)
    }

    /// The daemon is about to sleep, or awake: whether it wants the bell. It looks at the ring once more
    /// after it has said that it does.
    pub fn want_bell(&self, wanted: bool) {
        self.ring().want_bell(wanted);
    }

    #[inline]
    pub(crate) fn ring(&self) -> Ring<'_, RING_KEYS> {
        let header = self.header();
        Ring {
            wanted: &header.wanted,
            overflow: &header.overflow,
            given_out: &header.given_out,
            done: &header.done,
            // SAFETY: the mapping has room for RING_KEYS words at RING_AT, which is aligned; as in `header`.
            words: unsafe { &*self.mapping.as_ptr().add(RING_AT).cast() },
        }
    }

    /// A client that may not write stamps marks an entry as used. Lossy.
    #[inline]
    pub fn touch(&self, slice: u16, entry: u32) {
        let mark = u64::from(slice) << 32 | u64::from(entry);
        let at = (mark.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize;
        let word = self.word(TOUCHED_AT + 8 * at);
        if word.load(Ordering::Relaxed) != mark {
            word.store(mark, Ordering::Relaxed);
        }
    }

    /// The daemon takes the marks: calls `each` with slice and entry, unchecked.
    pub fn take_touched(&self, mut each: impl FnMut(u16, u32)) {
        for at in 0..TOUCHED {
            let word = self.word(TOUCHED_AT + 8 * at);
            // Zero is slice 0's entry 0, which loses its marks: it is one of millions.
            if word.load(Ordering::Relaxed) != 0 {
                let mark = word.swap(0, Ordering::Relaxed);
                each((mark >> 32) as u16, mark as u32);
            }
        }
    }

    /// A thread takes a line of counters: its number, and whether it is the thread's alone.
    pub fn take_thread(&self) -> (u32, bool) {
        let thread = self.header().threads.fetch_add(1, Ordering::Relaxed);
        let last = THREADS as u32 - 1;
        (thread.min(last), thread < last)
    }

    /// Number of the counter of a thread's line for a slice.
    #[inline]
    pub fn counter_number(thread: u32, slice: u16) -> u32 {
        let line = (thread as usize).min(THREADS - 1) * COUNTED_SLICES;
        (line + usize::from(slice) % COUNTED_SLICES) as u32
    }

    /// The counter with a number (mod what there are).
    #[inline]
    pub fn counter_at(&self, number: u32) -> &Counter {
        let number = number as usize % (THREADS * COUNTED_SLICES);
        // SAFETY: `number` is below THREADS * COUNTED_SLICES, for which the mapping has room; aligned to 64 as
        // COUNTERS_AT is; as in `header`.
        unsafe {
            &*self
                .mapping
                .as_ptr()
                .add(COUNTERS_AT)
                .cast::<Counter>()
                .add(number)
        }
    }

    /// The counter of a thread's line for a slice.
    #[inline]
    pub fn counter(&self, thread: u32, slice: u16) -> &Counter {
        self.counter_at(Area::counter_number(thread, slice))
    }

    /// The counters of all threads for a slice (numbers from 64 on share those of the number mod 64).
    pub fn counters_of(&self, slice: u16) -> impl Iterator<Item = &Counter> {
        (0..THREADS as u32).map(move |thread| self.counter(thread, slice))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ring::RingReader;

    fn keys(reader: &mut RingReader, area: &Area) -> (Vec<u64>, bool) {
        let mut out = vec![];
        let complete = reader.drain(area, |key| out.push(key.page()));
        (out, complete)
    }

    #[test]
    fn keys_come_out_once_and_lost_ones_are_noticed() {
        let area = Area::create("test", 5).unwrap();
        let mut reader = RingReader::default();
        assert_eq!(area.owner(), 5);
        for page in 0..10 {
            area.announce(Key::new(1, page));
        }
        assert_eq!(keys(&mut reader, &area), ((0..10).collect(), true));
        assert_eq!(keys(&mut reader, &area), (vec![], true));
        for page in 0..RING_KEYS as u64 + 1 {
            area.announce(Key::new(1, page));
        }
        let (seen, complete) = keys(&mut reader, &area);
        assert_eq!((seen.len(), complete), (RING_KEYS, false));
        area.announce(Key::new(1, 77));
        assert_eq!(keys(&mut reader, &area), (vec![77], true));
    }

    #[test]
    fn a_writer_held_up_between_its_steps_hides_nobody() {
        let area = Area::create("test", 5).unwrap();
        let mut reader = RingReader::default();
        // Takes a position and is held up.
        let header = area.header();
        let held = header.given_out.fetch_add(1, Ordering::AcqRel) as usize;
        area.announce(Key::new(1, 2));
        assert_eq!(keys(&mut reader, &area), (vec![2], true));
        area.word(RING_AT + 8 * held)
            .store(Key::new(1, 1).0, Ordering::Release);
        assert_eq!(keys(&mut reader, &area), (vec![1], true));
        header.done.fetch_add(1, Ordering::Release);
        assert_eq!(keys(&mut reader, &area), (vec![], true));
    }

    #[test]
    fn nothing_in_an_area_makes_the_reader_run_long_or_out_of_bounds() {
        let area = Area::create("test", 5).unwrap();
        let mut reader = RingReader::default();
        for round in 0u64..50 {
            let junk = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            area.header().given_out.store(junk, Ordering::Relaxed);
            for at in 0..RING_KEYS {
                area.word(RING_AT + 8 * at)
                    .store(junk ^ at as u64, Ordering::Relaxed);
            }
            let (seen, _) = keys(&mut reader, &area);
            assert!(seen.len() <= 2 * RING_KEYS);
        }
    }

    #[test]
    fn the_bell_is_wanted_once() {
        let area = Area::create("test", 5).unwrap();
        area.announce(Key::new(1, 0)); // position 0 rings anyway
        area.want_bell(true);
        assert!(area.announce(Key::new(1, 1)));
        assert!(!area.announce(Key::new(1, 2)));
    }

    #[test]
    fn marks_of_use_arrive() {
        let area = Area::create("test", 5).unwrap();
        area.touch(3, 1234);
        let mut seen = vec![];
        area.take_touched(|slice, entry| seen.push((slice, entry)));
        assert_eq!(seen, [(3, 1234)]);
        area.take_touched(|_, _| panic!("taken already"));
    }

    #[test]
    fn threads_beyond_the_last_line_share_it() {
        let area = Area::create("test", 5).unwrap();
        let lines: Vec<_> = (0..20).map(|_| area.take_thread()).collect();
        assert_eq!(lines[0], (0, true));
        assert_eq!(lines[14], (14, true));
        assert!(lines[15..].iter().all(|line| *line == (15, false)));
        let access = Access {
            local: true,
            write: true,
            pages: 3,
            bytes: 100,
            calls: 1,
        };
        area.counter(15, 2).add(access, false);
        let pages: u64 = area
            .counters_of(2)
            .map(|c| c.local_pages.load(Ordering::Relaxed))
            .sum();
        assert_eq!(pages, 3);
    }
}
