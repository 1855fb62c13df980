//! A client's own area: the ring in which it reports the pages that it made dirty, and a block for each of its threads with
//! reference marks and counters.
//!
//! The client writes the area, and the daemon trusts nothing in it. Any contents cost the daemon bounded work, and the
//! code that uses a key checks it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, AtomicU64};

use jericho_sys::memory::Mapping;

use crate::entry::Key;
use crate::intent;
use crate::lent::{Lent, Loan, LoanWord, SlotLock};
use crate::lock::Holding;
use crate::ring::{Ring, RingReader};
use crate::slots::Slots;
use crate::sync::{self, AtomicU32, Ordering};
use crate::wish::Wishing;

/// Keys that the ring holds.
pub const RING_KEYS: usize = 8192;
/// Offset of the word that revokes the client.
pub(crate) const REVOKED_AT: u64 = 8;
/// Number of blocks for threads. Threads that find no free block share the last one.
pub const BLOCKS: usize = 1024;
/// Reference marks in a block.
pub const MARKS: usize = 4096;
/// Reference marks that one bit of `Head::marked` covers.
const MARKS_PER_BIT: usize = MARKS / 64;
const VERSION: u32 = 7;
const RING_AT: usize = 4096;
const BLOCKS_AT: usize = RING_AT + 8 * RING_KEYS;
const COUNTED_SLICES: usize = 64;
/// Number of blocks that a new thread checks, to find one whose thread has ended. Once all blocks are assigned, it checks every
/// block.
const PROBES: u32 = 4;
const BYTES: usize = BLOCKS_AT + BLOCKS * size_of::<Block>();

#[repr(C, align(64))]
struct Header {
    version: AtomicU32,
    owner: AtomicU32,
    revoked: AtomicU32,
    /// Number of assigned blocks.
    blocks: AtomicU32,
    /// Block where the next search for an ended thread begins.
    hand: AtomicU32,
    _unused: [u32; 11],
    given_out: sync::AtomicU64,
    done: sync::AtomicU64,
    _unused_behind_done: [u64; 6],
    /// Only the daemon stores to this word.
    taken: sync::AtomicU64,
    _unused_behind_taken: [u64; 7],
    /// For each block: when its thread last said that it works away from its data's node, in seconds of the system's clock modulo 2^16; 0: never.
    away: [AtomicU16; BLOCKS],
}

#[cfg(not(loom))]
const _: () = assert!(
    std::mem::offset_of!(Header, given_out) == 64
        && std::mem::offset_of!(Header, taken) == 128
        && std::mem::offset_of!(Header, away) == 192
);
#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(Header, revoked) as u64 == REVOKED_AT);
const _: () = assert!(size_of::<Header>() <= RING_AT);

/// The block of one thread: no other thread of the program stores to it. Only the last block may be shared. Untouched pages of a
/// block take no memory.
#[repr(C, align(4096))]
struct Block {
    head: Head,
    counters: [Counter; COUNTED_SLICES],
    loan: Loan,
    marks: Marks,
}

#[repr(C, align(64))]
struct Head {
    /// Kernel thread id of the block's present or last owner; 0: none yet.
    holder: AtomicU32,
    /// See `Lent`.
    loan: LoanWord,
    /// See `intent`.
    intent: sync::AtomicU64,
    /// Each bit tells whether any of its `MARKS_PER_BIT` marks is new.
    marked: AtomicU64,
    wishing: Wishing,
}

#[repr(C, align(4096))]
struct Marks([AtomicU64; MARKS]);

#[cfg(not(loom))]
const _: () = assert!(
    size_of::<Block>() == 40960
        && std::mem::offset_of!(Head, loan) == 4
        && std::mem::offset_of!(Block, counters) == 64
        && std::mem::offset_of!(Block, loan) == 4160
        && std::mem::offset_of!(Block, marks) == 8192
        && std::mem::offset_of!(Block, head.wishing) == 24
);

/// Counts of a thread's accesses to the pages of a slice.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Counter {
    /// Pages accessed from a CPU of the slice's node.
    pub local_pages: AtomicU64,
    /// Pages accessed from other CPUs.
    pub remote_pages: AtomicU64,
    /// Bytes accessed from a CPU of the slice's node.
    pub local_bytes: AtomicU64,
    /// Bytes accessed from other CPUs.
    pub remote_bytes: AtomicU64,
    /// Pages written, local and remote.
    pub written_pages: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Reads that were made inline as a whole.
    pub read_calls: AtomicU64,
    /// Writes that were made inline as a whole.
    pub write_calls: AtomicU64,
}

const _: () = assert!(size_of::<Counter>() == 64);

/// An access of one call to the pages of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// It was made on a CPU of the slice's node.
    pub local: bool,
    /// It was a write.
    pub write: bool,
    /// Pages accessed.
    pub pages: u64,
    /// Bytes accessed.
    pub bytes: u64,
    /// Calls that the access counts as: 0 when a part of the call was made elsewhere.
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

/// Seconds for which a thread counts as working away after it has said so.
const AWAY_SECONDS: usize = 3;

fn away_stamp(now_s: u64) -> u16 {
    (now_s as u16).max(1)
}

/// A client's area, mapped.
#[derive(Debug)]
pub struct Area {
    mapping: Mapping,
}

impl Area {
    /// Creates the area of the client with this owner number. Only the daemon calls this.
    pub fn create(name: &str, owner: u16) -> io::Result<Area> {
        let mapping = Mapping::create(&format!("jericho-{name}-area-{owner}"), BYTES, false)?;
        let area = Area { mapping };
        area.header().version.store(VERSION, Ordering::Relaxed);
        area.header()
            .owner
            .store(u32::from(owner), Ordering::Relaxed);
        Ok(area)
    }

    /// Maps the client's own area. Fails with the errors of `Mapping::from_fd`, and with `InvalidData` for another version.
    pub fn attach(fd: OwnedFd) -> io::Result<Area> {
        let area = Area {
            mapping: Mapping::from_fd(fd, BYTES, true)?,
        };
        if area.header().version.load(Ordering::Relaxed) != VERSION {
            let what = "the daemon's area has another version than this library";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(area)
    }

    /// Returns the segment, to be sent to the client.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the mapping is BYTES long, page-aligned, and lives as long as `self`; the fields are
        // atomics, valid for every bit pattern.
        unsafe { &*self.mapping.as_ptr().cast::<Header>() }
    }

    /// Returns a block by number (modulo the number of blocks).
    #[inline]
    fn block(&self, number: u32) -> &Block {
        // SAFETY: the number is below BLOCKS, for which the mapping has room at BLOCKS_AT, which is aligned; as in `header`.
        unsafe {
            &*self
                .mapping
                .as_ptr()
                .add(BLOCKS_AT)
                .cast::<Block>()
                .add(number as usize % BLOCKS)
        }
    }

    /// Returns the client's owner number, as the handshake gave it. The daemon has its own record of it.
    #[inline]
    pub fn owner(&self) -> u16 {
        self.header().owner.load(Ordering::Relaxed) as u16
    }

    /// Returns whether the daemon has revoked this client.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.header().revoked.load(Ordering::Relaxed) != 0
    }

    /// Revokes the client. Only the daemon and its keeper call this.
    pub fn revoke(&self) {
        self.header().revoked.store(1, Ordering::SeqCst);
    }

    /// Reports a page that the client made dirty, before the client acknowledges the write. Returns true if the caller must
    /// ring the doorbell.
    #[inline]
    pub fn report(&self, key: Key, slots: &Slots) -> bool {
        self.ring().report(key, self.owner(), slots.reports())
    }

    /// Returns whether a thread of the client may make a clean page dirty, which needs room for the page's key. Without room the
    /// thread writes through the kernel, and the daemon drains the ring.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.ring().has_room()
    }

    #[inline]
    pub(crate) fn ring(&self) -> Ring<'_, RING_KEYS> {
        let header = self.header();
        Ring {
            threads: BLOCKS as u64,
            given_out: &header.given_out,
            done: &header.done,
            taken: &header.taken,
            // SAFETY: the mapping has room for RING_KEYS words at RING_AT, which is aligned; as in `header`.
            words: unsafe { &*self.mapping.as_ptr().add(RING_AT).cast() },
        }
    }

    /// Marks an entry as used, in the block of a thread that may not write reference ages. A mark may be lost.
    #[inline]
    pub fn touch(&self, block: u32, slice: u16, entry: u32) {
        let block = self.block(block);
        let mark = u64::from(slice) << 32 | u64::from(entry);
        let at = (mark.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize % MARKS;
        let word = &block.marks.0[at];
        if word.load(Ordering::Relaxed) == mark {
            return;
        }
        word.store(mark, Ordering::Relaxed);
        let bit = 1u64 << (at / MARKS_PER_BIT);
        let marked = block.head.marked.load(Ordering::Relaxed);
        if marked & bit == 0 {
            // No locked instruction is needed: if the daemon takes the bits at the same moment, it only reads some marks twice.
            block.head.marked.store(marked | bit, Ordering::Relaxed);
        }
    }

    /// Takes the reference marks for the daemon: calls `each` with slice and entry, unchecked. Reads only new marks, and one cache
    /// line of each assigned block.
    pub fn take_touched(&self, mut each: impl FnMut(u16, u32)) {
        for block in self.blocks() {
            if block.head.marked.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Clears the bits before it takes the marks: a later mark sets its bit again.
            let marked = block.head.marked.swap(0, Ordering::Relaxed);
            let bits = (0..64).filter(|bit| marked >> bit & 1 != 0);
            for word in bits.flat_map(|bit| &block.marks.0[bit * MARKS_PER_BIT..][..MARKS_PER_BIT])
            {
                // The word 0 also stands for entry 0 of slice 0, whose marks are lost. That is one entry among
                // millions.
                if word.load(Ordering::Relaxed) != 0 {
                    let mark = word.swap(0, Ordering::Relaxed);
                    each((mark >> 32) as u16, mark as u32);
                }
            }
        }
    }

    /// Returns the blocks that were ever assigned, and the shared block when all others are assigned. Before that, no thread has
    /// used the shared block, and reading it would take memory.
    fn blocks(&self) -> impl Iterator<Item = &Block> {
        let last = BLOCKS as u32 - 1;
        let given_out = self.header().blocks.load(Ordering::Acquire).min(last);
        let shared = (given_out == last).then_some(last);
        (0..given_out).chain(shared).map(|at| self.block(at))
    }

    /// Assigns a block to the thread with kernel thread id `tid`: the block of a thread that `has_ended`, or a fresh one. Returns
    /// its number, and whether the thread has it for itself.
    pub fn take_block(&self, tid: u32, has_ended: impl Fn(u32) -> bool) -> (u32, bool) {
        let header = self.header();
        let last = BLOCKS as u32 - 1;
        let given_out = header.blocks.load(Ordering::Acquire).min(last);
        let looks = match given_out == last {
            true => last,
            false => PROBES.min(given_out),
        };
        for _ in 0..looks {
            let at = header.hand.fetch_add(1, Ordering::Relaxed) % given_out;
            let holder = &self.block(at).head.holder;
            let seen = holder.load(Ordering::Relaxed);
            // A holder with the same thread id has ended too, because the kernel has reused the id.
            if (seen == tid || has_ended(seen))
                && holder
                    .compare_exchange(seen, tid, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                return (at, true);
            }
        }
        if given_out == last {
            return (last, false);
        }
        let at = header.blocks.fetch_add(1, Ordering::AcqRel);
        if at >= last {
            // Other threads took the last ones.
            header.blocks.store(last, Ordering::Release);
            return (last, false);
        }
        self.block(at).head.holder.store(tid, Ordering::Release);
        (at, true)
    }

    /// Returns the wish of a block's thread, and its answer.
    #[inline]
    pub fn wishing(&self, block: u32) -> &Wishing {
        &self.block(block).head.wishing
    }

    /// Returns the word in which the thread of a block notes the entry that it is about to latch.
    #[inline]
    pub(crate) fn intent(&self, block: u32) -> &crate::sync::AtomicU64 {
        &self.block(block).head.intent
    }

    /// Takes all keys that the client has reported and calls `each` for each one. The work is bounded, even for a malicious
    /// client.
    pub fn drain(&self, reader: &mut RingReader, each: impl FnMut(Key)) {
        reader.drain_ring(&self.ring(), each);
    }

    /// Calls `each` with the slice and entry that each thread latched last or was about to latch, unchecked.
    pub fn intents(&self, mut each: impl FnMut(u16, u32)) {
        for block in self.blocks() {
            if let Some((slice, entry)) = intent::read(&block.head.intent) {
                each(slice, entry);
            }
        }
    }

    /// Returns the words in which the thread of a block notes its loan.
    pub fn lent(&self, block: u32) -> Lent<'_> {
        Self::lent_of(self.block(block))
    }

    fn lent_of(block: &Block) -> Lent<'_> {
        Lent {
            word: &block.head.loan,
            loan: &block.loan,
        }
    }

    /// Returns the threads' loans of a slot. A block's `Loan` lies on another page than its loan word, so this reads the `Loan`
    /// only in the blocks of lenders.
    fn loans(&self, slot: u32) -> impl Iterator<Item = Lent<'_>> {
        let lenders = self
            .blocks()
            .filter(move |block| block.head.loan.is_of(slot));
        lenders.map(Self::lent_of)
    }

    /// Returns whether a thread of the client lends a lock of a slot that it holds as `held`, and has not stopped; see
    /// `Lent::lends`.
    pub fn lends(&self, slot: u32, lock: SlotLock, held: Holding, now_ns: u64) -> bool {
        self.loans(slot)
            .any(|lent| lent.lends(slot, lock, held, now_ns))
    }

    /// Returns whether a thread of the client lends a lock of a slot that it holds as `held`.
    pub fn has_lent(&self, slot: u32, lock: SlotLock, held: Holding) -> bool {
        self.loans(slot).any(|lent| lent.has_lent(slot, lock, held))
    }

    /// Counts that the daemon has borrowed a word, which a thread of the client holds as `held`; see `Lent::note_borrowed`.
    pub fn note_borrowed(&self, slot: u32, word: usize, held: Holding) {
        for lent in self.loans(slot) {
            lent.note_borrowed(slot, word, held);
        }
    }

    /// Records that the thread of a block works on another node than that of its data, because that node has too few CPUs.
    pub fn works_away(&self, block: u32, now_s: u64) {
        let word = &self.header().away[block as usize % BLOCKS];
        let stamp = away_stamp(now_s);
        if word.load(Ordering::Relaxed) != stamp {
            word.store(stamp, Ordering::Relaxed);
        }
    }

    /// Returns how many threads have said in the last seconds that they work away. A client may store any number of them, up to all blocks.
    pub fn count_away(&self, now_s: u64) -> usize {
        let recent: [u16; AWAY_SECONDS] =
            std::array::from_fn(|ago| away_stamp(now_s.saturating_sub(ago as u64)));
        let away = self.header().away.iter();
        away.filter(|word| recent.contains(&word.load(Ordering::Relaxed)))
            .count()
    }

    /// Returns the counter of a block for a slice.
    #[inline]
    pub fn counter(&self, block: u32, slice: u16) -> &Counter {
        &self.block(block).counters[usize::from(slice) % COUNTED_SLICES]
    }

    /// Returns the counters of all threads, living and ended, for a slice. Slices from 64 on share those of their number
    /// modulo 64.
    pub fn counters_of(&self, slice: u16) -> impl Iterator<Item = &Counter> {
        let number = usize::from(slice) % COUNTED_SLICES;
        self.blocks().map(move |block| &block.counters[number])
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::reports::Draining;

    fn keys(reader: &mut RingReader, area: &Area) -> Vec<u64> {
        let mut out = vec![];
        area.drain(reader, |key| out.push(key.page()));
        out
    }

    fn slots() -> Slots {
        Slots::create("test", 1).unwrap()
    }

    #[test]
    fn keys_come_out_once_and_a_full_ring_has_no_room_until_then() {
        let (area, slots) = (Area::create("test", 5).unwrap(), slots());
        let mut reader = RingReader::default();
        assert_eq!(area.owner(), 5);
        for round in 0..3 {
            for page in 0..10 {
                area.report(Key::new(1, page), &slots);
            }
            assert_eq!(keys(&mut reader, &area), Vec::from_iter(0..10));
            assert_eq!(keys(&mut reader, &area), []);
            let mut pages = 0;
            while area.has_room() {
                area.report(Key::new(1, pages), &slots);
                pages += 1;
            }
            // Each thread may have found room before the others reported.
            for page in 0..BLOCKS as u64 - 1 {
                area.report(Key::new(1, pages + page), &slots);
            }
            assert_eq!(pages, (RING_KEYS - BLOCKS + 1) as u64, "round {round}");
            assert_eq!(keys(&mut reader, &area).len(), RING_KEYS);
            assert!(area.has_room());
        }
    }

    #[test]
    fn a_client_without_reports_is_visited_only_while_it_is_drained() {
        let (area, slots, draining) = (
            Area::create("test", 777).unwrap(),
            slots(),
            Draining::default(),
        );
        let reporters = || slots.reporters(&draining).collect::<Vec<_>>();
        assert_eq!(reporters(), []);
        for page in 0..3 {
            area.report(Key::new(1, page), &slots);
            assert_eq!(reporters(), [777]);
        }
        slots.begin_drain(&draining, 777);
        assert_eq!(reporters(), [777], "the drain is not over");
        slots.end_drain(&draining, 777);
        assert_eq!(reporters(), []);
        for owner in [2, 63, 64, 1023] {
            Area::create("test", owner)
                .unwrap()
                .report(Key::new(1, 0), &slots);
        }
        assert_eq!(reporters(), [2, 63, 64, 1023]);
    }

    #[test]
    fn a_writer_delayed_between_its_steps_hides_no_other_report() {
        let area = Area::create("test", 5).unwrap();
        let mut reader = RingReader::default();
        // Takes a position and is delayed.
        let header = area.header();
        let held = header.given_out.fetch_add(1, Ordering::AcqRel) as usize;
        area.report(Key::new(1, 2), &slots());
        assert_eq!(keys(&mut reader, &area), [2]);
        area.ring().words[held].store(Key::new(1, 1).0, Ordering::Release);
        assert_eq!(keys(&mut reader, &area), [1]);
        header.done.fetch_add(1, Ordering::Release);
        assert_eq!(keys(&mut reader, &area), []);
    }

    #[test]
    fn no_contents_of_an_area_make_the_reader_run_long_or_out_of_bounds() {
        let area = Area::create("test", 5).unwrap();
        let mut reader = RingReader::default();
        for round in 0u64..50 {
            let junk = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            area.header().given_out.store(junk, Ordering::Relaxed);
            for at in 0..RING_KEYS {
                area.ring().words[at].store(junk ^ at as u64, Ordering::Relaxed);
            }
            let seen = keys(&mut reader, &area);
            assert!(seen.len() <= 2 * RING_KEYS);
        }
    }

    #[test]
    fn an_armed_doorbell_rings_once() {
        let (area, slots) = (Area::create("test", 5).unwrap(), slots());
        area.report(Key::new(1, 0), &slots); // position 0 rings anyway
        slots.arm_doorbell(true);
        assert!(area.report(Key::new(1, 1), &slots));
        assert!(!area.report(Key::new(1, 2), &slots));
    }

    fn touched(area: &Area) -> Vec<(u16, u32)> {
        let mut seen = vec![];
        area.take_touched(|slice, entry| seen.push((slice, entry)));
        seen.sort_unstable();
        seen
    }

    /// Assigns a block to a thread that never ends.
    fn take(area: &Area, tid: u32) -> (u32, bool) {
        area.take_block(tid, |_| false)
    }

    #[test]
    fn the_daemon_gets_each_mark_once_from_every_block() {
        let area = Area::create("test", 5).unwrap();
        let blocks = [1, 2, 3].map(|tid| take(&area, tid).0);
        for block in blocks {
            area.touch(block, 3, 1234 + block);
        }
        // Assigns all blocks, so that the next thread gets the shared one.
        for tid in 4..BLOCKS as u32 {
            assert!(take(&area, tid).1);
        }
        let (shared, alone) = take(&area, BLOCKS as u32);
        assert!(!alone);
        area.touch(shared, 0, 77);
        let expected = [(0, 77), (3, 1234), (3, 1235), (3, 1236)];
        assert_eq!(touched(&area), expected);
        assert_eq!(touched(&area), []);
    }

    #[test]
    fn the_daemon_takes_no_memory_when_it_reads_a_clients_area() {
        use std::os::unix::fs::MetadataExt;

        let area = Area::create("test", 5).unwrap();
        take(&area, 1);
        let file = area.mapping().fd().try_clone_to_owned().unwrap();
        let file = std::fs::File::from(file);
        let memory = || file.metadata().unwrap().blocks();
        let before = memory();
        area.take_touched(|_, _| ());
        area.intents(|_, _| ());
        assert_eq!(memory(), before);
    }

    #[test]
    fn a_thread_stores_its_marks_only_in_its_own_block() {
        let area = Area::create("test", 5).unwrap();
        let (mine, other) = (take(&area, 1).0, take(&area, 2).0);
        let bytes = |block: u32| -> Vec<u64> {
            let block = area.block(block);
            let words = block.marks.0.iter().chain([&block.head.marked]);
            words.map(|word| word.load(Ordering::Relaxed)).collect()
        };
        let before = bytes(other);
        for entry in 0..3 * MARKS as u32 {
            area.touch(mine, 0, entry);
        }
        assert_eq!(bytes(other), before);
        let seen = touched(&area).len();
        assert!(seen > MARKS / 2 && seen <= MARKS, "{seen} of the last");
    }

    #[test]
    fn a_thread_that_works_away_counts_until_it_has_not_said_so_for_some_seconds() {
        let area = Area::create("test", 5).unwrap();
        let now = 0x1_ffff_fffe_u64;
        assert_eq!(area.count_away(now), 0);
        area.works_away(3, now);
        area.works_away(BLOCKS as u32 - 1, now + 2);
        assert_eq!(
            [now, now + 2, now + 4].map(|now| area.count_away(now)),
            [1, 2, 1]
        );
        assert_eq!(area.count_away(now + 100), 0);
    }

    #[test]
    fn every_thread_counts_alone_and_its_counts_stay_when_it_ends() {
        let area = Area::create("test", 5).unwrap();
        let access = Access {
            local: true,
            write: true,
            pages: 3,
            bytes: 100,
            calls: 1,
        };
        let mut numbers = std::collections::HashSet::new();
        for tid in 1..=500 {
            let (block, alone) = take(&area, tid);
            assert!(alone && numbers.insert(block), "thread {tid}");
            area.counter(block, 2).add(access, alone);
        }
        // Each thread ends before the next one begins.
        for tid in 501..10_501u32 {
            let (block, alone) = area.take_block(tid, |holder| holder > 500);
            assert!(alone, "thread {tid}");
            area.counter(block, 2).add(access, alone);
            numbers.insert(block);
        }
        assert!(numbers.len() < BLOCKS, "{} blocks", numbers.len());
        let pages = area.counters_of(2);
        let pages = pages.map(|c| c.local_pages.load(Ordering::Relaxed));
        assert_eq!(pages.sum::<u64>(), 3 * 10_500);
    }

    #[test]
    fn threads_that_find_no_block_share_the_last_until_one_ends() {
        let area = Area::create("test", 5).unwrap();
        let last = BLOCKS as u32 - 1;
        for tid in 1..=last {
            assert!(take(&area, tid).1);
        }
        assert_eq!(take(&area, 5000), (last, false));
        assert_eq!(take(&area, 5001), (last, false));
        let (block, alone) = area.take_block(5002, |holder| holder == 700);
        assert!(alone && block < last);
        assert_eq!(take(&area, 5003), (last, false));
        // Corrupt header values must not cost more.
        area.header().blocks.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(take(&area, 5004), (last, false));
        assert_eq!(area.counters_of(0).count(), BLOCKS);
    }
}
