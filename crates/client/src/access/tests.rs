use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_shm::{
    Area, Control, Flags, Geometry, Key, Miss, Segments, SliceMemory, Slot, SlotInfo, Slots,
    SourceParts, pieces,
};

use super::kept::Begun;
use super::*;
use crate::session::{self, InlineFile, Session, Why};
use crate::thread::{self, Doing};

const PAGE: usize = 4096;

const OBJECT: u64 = 7;
const DAEMON: u16 = 1;

/// A volume with one slice and one file, and the daemon's part of the work.
struct Volume {
    control: Control,
    slots: Slots,
    memory: SliceMemory,
    frames_used: AtomicU64,
    clients: AtomicU64,
}

impl Volume {
    fn new(frames: u32) -> Volume {
        Volume::with(Geometry::for_frames(frames))
    }

    fn with(geometry: Geometry) -> Volume {
        let control = Control::create("test", &[(geometry, 0)], 4, &[0; 64], 42).unwrap();
        control.slot(0).unwrap().set(OBJECT, 0, 0);
        Volume {
            control,
            slots: Slots::create("test", 4).unwrap(),
            memory: SliceMemory::create("test", geometry, None).unwrap(),
            frames_used: AtomicU64::new(0),
            clients: AtomicU64::new(0),
        }
    }

    fn client(&self, writable: bool) -> Session {
        let number = self.clients.fetch_add(1, Ordering::Relaxed);
        let own = |mapping: &jericho_sys::memory::Mapping| {
            if writable {
                mapping.fd().try_clone_to_owned().unwrap()
            } else {
                mapping.read_only_fd().unwrap()
            }
        };
        let control = Control::attach(self.control.mapping().read_only_fd().unwrap()).unwrap();
        let slots = Slots::attach(own(self.slots.mapping()), 4, writable).unwrap();
        let area = Area::create("test", 2 + number as u16).unwrap();
        let segments = self.memory.segments().map(own);
        let geometry = self.control.geometry_of(0).unwrap();
        let memory = SliceMemory::attach(geometry, segments, writable).unwrap();
        let mark = session::mark().unwrap();
        let memory = vec![memory];
        let mut session = Session::new(number as usize, mark, control, slots, area, memory);
        session.set_own(true);
        session
    }

    fn slot(&self) -> &Slot {
        self.slots.slot(0).unwrap()
    }

    /// Adds pages of zeros with space reserved.
    fn reserve(&self, pages: std::ops::Range<u64>) {
        for page in pages {
            let key = Key::new(OBJECT, page);
            let frame = self.frames_used.fetch_add(1, Ordering::Relaxed) as u32;
            let index = self.memory.insert(key, frame, 0);
            self.memory.zero(frame);
            self.memory.entry(index).publish(Flags::BACKED);
        }
    }

    fn bytes(&self, page: u64) -> Vec<u8> {
        let mut out = vec![0; PAGE];
        let key = Key::new(OBJECT, page);
        self.memory.read(key, 0, &mut out, 0).unwrap();
        out
    }

    fn write_as_daemon(&self, at: u64, data: &[u8]) {
        let mut done = 0;
        for (page, within, len) in pieces(at, data.len()) {
            let data = &data[done..done + len];
            while self
                .memory
                .write_own(Key::new(OBJECT, page), within, data, DAEMON, 0)
                == Err(Miss::Busy)
            {}
            done += len;
        }
    }
}

fn file(session: &Session) -> InlineFile<'_> {
    let generation = session.control.slot(0).unwrap().word().generation();
    let file = InlineFile::of(session, 0, generation, OBJECT).unwrap();
    file.for_writing()
}

fn write(file: InlineFile<'_>, at: u64, data: &[u8]) -> Result<(), Why> {
    let written = file.write(at, data.len(), SourceParts::new(&[IoSlice::new(data)]));
    written.map_err(|failed| failed.why)
}

fn append(file: InlineFile<'_>, data: &[u8]) -> Result<u64, Why> {
    file.append(data.len(), SourceParts::new(&[IoSlice::new(data)]))
}

#[test]
fn written_bytes_are_read_up_to_the_end_of_the_file() {
    let volume = Volume::new(64);
    volume.reserve(0..4);
    let (writer, reader) = (volume.client(true), volume.client(false));
    let data: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
    write(file(&writer), 0, &data).unwrap();
    assert_eq!(volume.slot().size().bytes(), 10_000);
    assert!(volume.slot().modified() > 0);
    let mut out = vec![0xee; 20_000];
    let read = file(&reader).read(100, &mut out);
    assert_eq!((read.done, read.rest), (9_900, None));
    assert_eq!(out[..9_900], data[100..]);
    assert!(out[9_900..].iter().all(|b| *b == 0xee));
    for at in [10_000, 10_001, 1 << 40] {
        let read = file(&reader).read(at, &mut out);
        assert_eq!((read.done, read.rest), (0, None), "at {at}");
    }
    // Within the file, over a page border, and in parts that do not match pages.
    let (a, b, c) = ([1; 50], [2; 4096], [3; 5]);
    let parts = [IoSlice::new(&a), IoSlice::new(&b), IoSlice::new(&c)];
    file(&writer)
        .write(4000, 4151, SourceParts::new(&parts))
        .unwrap();
    let read = file(&reader).read(3999, &mut out);
    assert_eq!(read.done, 6001);
    let wanted = [&data[3999..4000], &a, &b, &c, &data[8151..]].concat();
    assert_eq!(out[..6001], wanted);
}

#[test]
fn each_page_that_became_dirty_is_reported_once() {
    let volume = Volume::new(64);
    volume.reserve(0..4);
    let writer = volume.client(true);
    write(file(&writer), 0, &[1; 3 * PAGE]).unwrap();
    write(file(&writer), 5, &[2; 100]).unwrap();
    let (mut reader, mut pages) = (jericho_shm::RingReader::default(), vec![]);
    writer.area.drain(&mut reader, |key| pages.push(key.page()));
    assert_eq!(pages, [0, 1, 2]);
}

#[test]
fn a_miss_ends_a_read_at_the_page_and_a_write_before_it_begins() {
    let volume = Volume::new(64);
    volume.reserve(0..2);
    volume.reserve(3..4);
    let client = volume.client(true);
    volume.write_as_daemon(0, &[1; 2 * PAGE]);
    volume.write_as_daemon(3 * 4096, &[1; PAGE]);
    volume.slot().set_size(4 * 4096, false);
    let mut out = vec![0; 4 * PAGE];
    let read = file(&client).read(0, &mut out);
    assert_eq!((read.done, read.rest), (2 * PAGE, Some(Why::Absent)));
    assert_eq!(write(file(&client), 4096, &[9; 3 * PAGE]), Err(Why::Absent));
    assert_eq!(volume.bytes(1), [1; PAGE], "nothing was written");
    let key = Key::new(OBJECT, 1);
    let index = volume.memory.lookup(key).unwrap().index;
    volume.memory.entry(index).unmark(Flags::BACKED);
    assert_eq!(write(file(&client), 4096, &[9]), Err(Why::Unbacked));
}

#[test]
fn writes_that_make_holes_or_impossible_ends_are_not_made_inline() {
    let volume = Volume::new(64);
    volume.reserve(0..3);
    let client = volume.client(true);
    write(file(&client), 0, &[1; 100]).unwrap();
    assert_eq!(write(file(&client), 2 * 4096, b"x"), Err(Why::Far));
    // The last page of the file has zeros beyond its end.
    write(file(&client), 200, &[2; 10]).unwrap();
    let mut out = [9; 300];
    assert_eq!(file(&client).read(0, &mut out).done, 210);
    assert_eq!(
        out[..210],
        [vec![1; 100], vec![0; 100], vec![2; 10]].concat()
    );
    for at in [FILE_BYTES_MAX - 1, FILE_BYTES_MAX, u64::MAX] {
        assert_eq!(write(file(&client), at, b"x"), Err(Why::Far));
    }
    volume.slot().set_size(FILE_BYTES_MAX - 1, true);
    assert_eq!(append(file(&client), b"x"), Err(Why::Far));
}

#[test]
fn a_client_that_may_not_write_inline_does_not() {
    let volume = Volume::new(64);
    volume.reserve(0..1);
    volume.slot().set_size(100, false);
    let (reader, writer) = (volume.client(false), volume.client(true));
    assert_eq!(write(file(&reader), 0, b"x"), Err(Why::Withheld));
    let info = volume.control.slot(0).unwrap();
    info.set_flags(SlotInfo::NO_WRITE, 0);
    assert_eq!(write(file(&writer), 0, b"x"), Err(Why::Withheld));
    assert_eq!(file(&writer).read(0, &mut [0; 10]).done, 10);
    info.set_flags(0, SlotInfo::NO_WRITE);
    volume.memory.set_throttled(true);
    assert_eq!(write(file(&writer), 0, b"x"), Err(Why::Throttled));
    volume.memory.set_throttled(false);
    assert_eq!(write(file(&writer), 0, b"x"), Ok(()));
    info.set_flags(SlotInfo::KERNEL, 0);
    let generation = info.word().generation();
    let of = |generation, object| InlineFile::of(&writer, 0, generation, object).map(|_| ());
    assert_eq!(of(generation, OBJECT), Err(Why::Withheld));
    info.set_flags(0, SlotInfo::KERNEL);
    assert_eq!(of(generation, OBJECT), Ok(()));
    writer.area.revoke();
    assert_eq!(of(generation, OBJECT), Err(Why::Withheld));
}

#[test]
fn a_slot_that_was_given_to_another_file_is_noticed() {
    let volume = Volume::new(64);
    volume.reserve(0..1);
    volume.slot().set_size(100, false);
    let client = volume.client(true);
    let held = file(&client);
    let info = volume.control.slot(0).unwrap();
    let generation = info.word().generation();
    info.set(OBJECT + 1, 0, 0);
    assert_eq!(held.read(0, &mut [0; 10]).rest, Some(Why::Stale));
    assert_eq!(held.read(1000, &mut [0; 10]).rest, Some(Why::Stale));
    assert_eq!(write(held, 0, b"x"), Err(Why::Stale));
    assert_eq!(append(held, b"x"), Err(Why::Stale));
    for (generation, object) in [(generation, OBJECT), (generation + 1, OBJECT)] {
        let again = InlineFile::of(&client, 0, generation, object);
        assert_eq!(again.map(|_| ()), Err(Why::Stale));
    }
}

#[test]
fn a_writer_that_saw_the_file_before_a_truncation_writes_nothing() {
    let volume = Volume::new(64);
    volume.reserve(0..2);
    volume.slot().set_size(8000, false);
    let client = volume.client(true);
    let before = volume.slot().size();
    volume.slot().set_size(5000, true);
    let (bytes, held) = ([0x55; 100], file(&client));
    let parts = [IoSlice::new(&bytes)];
    let why = |late: Result<(), Failed<'_>>| late.unwrap_err().why;
    let late = held.write_within(before, 6000, 100, SourceParts::new(&parts));
    assert_eq!(why(late), Why::Changed);
    for (at, append) in [(7950, false), (8000, true)] {
        let (extend, _) = held.lock_size().unwrap();
        let late = held.extend(extend, before, at, 100, SourceParts::new(&parts), append);
        assert_eq!(why(late), Why::Changed);
    }
    assert_eq!(volume.bytes(1), [0; PAGE]);
    assert_eq!(volume.slot().size().bytes(), 5000);
}

#[test]
fn a_reader_that_saw_the_file_before_a_truncation_reads_again() {
    let volume = Volume::new(64);
    volume.reserve(0..2);
    volume.slot().set_size(8000, false);
    let (client, mut out) = (volume.client(false), [9; 100]);
    let before = volume.slot().size();
    volume.slot().set_size(5000, true);
    let held = file(&client);
    assert_eq!(held.read_as_of(before, 6000, &mut out), None);
    assert_eq!(held.read_as_of(before, 0, &mut out), None);
    let now = volume.slot().size();
    let read = held.read_as_of(now, 4950, &mut out).unwrap();
    assert_eq!((read.done, read.rest), (50, None));
}

#[test]
fn a_lock_that_is_never_released_sends_writers_to_the_kernel() {
    let volume = Volume::new(64);
    volume.reserve(0..3);
    volume.slot().set_size(2 * 4096, false);
    let client = volume.client(true);
    assert!(volume.slot().extend_lock().try_lock(99).is_some());
    assert_eq!(append(file(&client), b"x"), Err(Why::Busy));
    assert_eq!(write(file(&client), 2 * 4096, b"x"), Err(Why::Busy));
    assert_eq!(write(file(&client), 0, b"x"), Ok(()), "within the file");
    assert!(volume.slot().word(0).try_lock(99).is_some());
    assert_eq!(write(file(&client), 0, &[1; 5000]), Err(Why::Busy));
    assert_eq!(write(file(&client), 0, b"x"), Ok(()), "within a page");
    volume.slot().open_dead(99);
    assert_eq!(write(file(&client), 0, &[1; 9000]), Ok(()));
    assert_eq!(append(file(&client), b"x"), Ok(9001));
}

/// Starts all threads together, awake. A thread that has to be woken comes too late to meet the others.
#[derive(Default)]
struct Gate {
    arrived: AtomicU64,
    broken: AtomicBool,
}

impl Gate {
    fn pass(&self, round: u64, threads: u64) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        while self.arrived.load(Ordering::SeqCst) < (round + 1) * threads {
            assert!(!self.broken.load(Ordering::SeqCst), "another has failed");
            std::thread::yield_now();
        }
    }
}

/// Keeps the others from waiting for a thread that has failed.
struct Breaks<'a>(&'a Gate);

impl Drop for Breaks<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn of_overlapping_writes_over_several_pages_one_covers_the_other() {
    const PAGES: usize = 80;
    const SHIFT: usize = 3000;
    let volume = Volume::new(256);
    volume.reserve(0..2 * PAGES as u64);
    let sessions = [volume.client(true), volume.client(true)];
    let (start, end) = (Gate::default(), Gate::default());
    // Every other round extends the file, too.
    let len_of = |round: u64| (PAGES / 2 + PAGES * (round % 2) as usize) * PAGE;
    std::thread::scope(|scope| {
        for (who, session) in sessions.iter().enumerate() {
            let (start, end) = (&start, &end);
            scope.spawn(move || {
                let _breaks = (Breaks(start), Breaks(end));
                for round in 0..300 {
                    let data = vec![1 + who as u8; len_of(round)];
                    // The first write gathers its bytes and is slower. The second starts later, or it would always overtake the
                    // first.
                    let piece = [100, data.len()][who];
                    let parts: Vec<_> = data.chunks(piece).map(IoSlice::new).collect();
                    start.pass(round, 3);
                    for _ in 0..who as u64 * round * 50 {
                        std::hint::spin_loop();
                    }
                    let at = 100 + (who * SHIFT) as u64;
                    let write = || file(session).write(at, data.len(), SourceParts::new(&parts));
                    while let Err(why) = write() {
                        assert_eq!(why.why, Why::Busy);
                    }
                    end.pass(round, 3);
                }
            });
        }
        let _breaks = (Breaks(&start), Breaks(&end));
        let mut all = vec![0; 2 * PAGES * PAGE];
        for round in 0..300 {
            volume.slot().set_size((PAGES * PAGE) as u64, true);
            start.pass(round, 3);
            end.pass(round, 3);
            let len = len_of(round);
            let size = (PAGES * PAGE).max(100 + SHIFT + len);
            assert_eq!(file(&sessions[0]).read(0, &mut all).done, size);
            // Each write has its own bytes, and the common bytes are all of one write.
            assert!(all[100..100 + SHIFT].iter().all(|b| *b == 1));
            assert!(all[100 + len..][..SHIFT].iter().all(|b| *b == 2));
            let both = &all[100 + SHIFT..100 + len];
            assert!(both.iter().all(|b| *b == both[0]), "round {round}");
        }
    });
}

#[test]
fn a_read_of_several_pages_never_sees_half_of_a_write() {
    const PAGES: usize = 5;
    let volume = Volume::new(64);
    volume.reserve(0..PAGES as u64);
    volume.slot().set_size((PAGES * PAGE) as u64, false);
    let (writer, reader) = (volume.client(true), volume.client(false));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in 1..=3000u32 {
                write(file(&writer), 0, &[byte as u8; PAGES * PAGE])
                    .expect("no thread keeps a lock");
                // Otherwise readers have no gap.
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let (mut out, mut whole) = ([0; PAGES * PAGE], 0);
        while !stop.load(Ordering::Relaxed) || whole == 0 {
            let read = file(&reader).read(0, &mut out);
            if read.rest.is_none() {
                assert!(out.iter().all(|byte| *byte == out[0]), "half of a write");
                whole += 1;
            }
        }
    });
}

#[test]
fn appended_records_are_all_there_and_whole() {
    const RECORDS: u32 = 1000;
    let volume = Volume::new(2048);
    volume.reserve(0..2000);
    let sessions = [volume.client(true), volume.client(true)];
    let start = Gate::default();
    let len_of = |record: u32| 9 + (record as usize * 61) % 3000;
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let session = &sessions[usize::from(thread) % 2];
            let start = &start;
            scope.spawn(move || {
                start.pass(0, 4);
                for record in 0..RECORDS {
                    let mut data = vec![thread; len_of(record)];
                    data[1..5].copy_from_slice(&record.to_ne_bytes());
                    let end = loop {
                        match append(file(session), &data) {
                            Ok(end) => break end,
                            Err(why) => assert_eq!(why, Why::Busy),
                        }
                    };
                    let mut seen = vec![0; data.len()];
                    let at = end - data.len() as u64;
                    // Appends of the other threads may interfere with this read. The library would then read through the kernel.
                    // This test has no file in the kernel, so it reads again.
                    while let Some(why) = file(session).read(at, &mut seen).rest {
                        assert!(matches!(why, Why::Changed | Why::Busy), "{why:?}");
                    }
                    assert!(seen == data, "an append says where it went");
                }
            });
        }
    });
    let mut all = vec![0; volume.slot().size().bytes() as usize];
    assert_eq!(file(&sessions[0]).read(0, &mut all).done, all.len());
    let (mut next, mut rest) = ([0; 4], &all[..]);
    while !rest.is_empty() {
        let thread = usize::from(rest[0]);
        let record = u32::from_ne_bytes(rest[1..5].try_into().unwrap());
        assert_eq!(record, next[thread], "in the order of its thread");
        next[thread] += 1;
        let (data, others) = rest.split_at(len_of(record));
        assert!(data[5..].iter().all(|b| *b == thread as u8));
        rest = others;
    }
    assert_eq!(next, [RECORDS; 4]);
}

#[test]
fn a_reader_never_sees_zeros_that_a_truncation_left() {
    let volume = Volume::new(64);
    volume.reserve(0..3);
    volume.write_as_daemon(0, &[0xaa; 10_000]);
    volume.slot().set_size(10_000, false);
    let client = volume.client(false);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut out, mut long, mut short) = (vec![0; 12_000], 0, 0);
            while !stop.load(Ordering::Relaxed) {
                let read = file(&client).read(0, &mut out);
                assert!(out[..read.done].iter().all(|b| *b == 0xaa));
                match (read.done, read.rest) {
                    (10_000, None) => long += 1,
                    (5_000, None) => short += 1,
                    (_, rest) => assert!(matches!(rest, Some(Why::Busy | Why::Changed))),
                }
            }
            (long, short)
        });
        for _ in 0..20_000 {
            volume.slot().set_size(5_000, true);
            volume.write_as_daemon(5_000, &[0; 5_000]);
            volume.write_as_daemon(5_000, &[0xaa; 5_000]);
            volume.slot().grow(|| 10_000);
        }
        stop.store(true, Ordering::Relaxed);
        let (long, short) = reader.join().unwrap();
        assert!(long + short > 0);
    });
}

#[test]
fn a_writer_that_stops_half_way_leaves_zeros_beyond_the_end() {
    let volume = Volume::new(64);
    volume.reserve(0..3);
    volume.slot().set_size(4000, false);
    let client = volume.client(true);
    // Makes the two steps of a write that stops half-way: puts bytes beyond the end, and wipes them.
    let held = file(&client);
    let seen = volume.slot().size();
    held.put(
        4000,
        5000,
        SourceParts::new(&[IoSlice::new(&[7; 5000])]),
        |_| true,
    )
    .unwrap();
    held.wipe(seen, 4000, 9000);
    assert!(volume.bytes(0)[4000..].iter().all(|b| *b == 0));
    assert_eq!(volume.bytes(1), [0; PAGE]);
    assert!(volume.bytes(2)[..1000].iter().all(|b| *b == 0));
}

#[test]
fn pages_and_bytes_are_counted_for_the_node_of_the_slice() {
    let volume = Volume::new(64);
    volume.reserve(0..2);
    volume.slot().set_size(8000, false);
    let client = volume.client(true);
    thread::enter(Doing::Writing, |thread| {
        thread.account(&file(&client), false, 4000..4200, 1);
        thread.account(&file(&client), true, 10..30, 1);
        thread.account(&file(&client), true, 10..10, 1);
    })
    .unwrap();
    let sum = |of: fn(&jericho_shm::Counter) -> &AtomicU64| {
        let counters = client.area.counters_of(0);
        counters.map(|c| of(c).load(Ordering::Relaxed)).sum::<u64>()
    };
    assert_eq!(sum(|c| &c.local_pages) + sum(|c| &c.remote_pages), 3);
    assert_eq!(sum(|c| &c.local_bytes) + sum(|c| &c.remote_bytes), 220);
    assert_eq!(
        (sum(|c| &c.written_pages), sum(|c| &c.written_bytes)),
        (1, 20)
    );
    assert_eq!((sum(|c| &c.read_calls), sum(|c| &c.write_calls)), (1, 1));
}

#[test]
fn a_page_that_a_reader_used_is_marked_in_its_area() {
    let volume = Volume::new(64);
    volume.reserve(0..2);
    volume.slot().set_size(8000, false);
    let client = volume.client(false);
    for _ in 0..5 {
        volume.memory.next_epoch();
    }
    file(&client).read(4096, &mut [0; 10]);
    let mut seen = vec![];
    client
        .area
        .take_touched(|slice, entry| seen.push((slice, entry)));
    let entry = volume.memory.lookup(Key::new(OBJECT, 1)).unwrap().index;
    assert_eq!(seen, [(0, entry)]);
}

#[test]
fn a_thread_counts_alone_after_many_threads_have_ended() {
    let volume = Volume::new(16);
    let client = volume.client(false);
    let mut blocks = std::collections::HashSet::new();
    for n in 0..10_000 {
        let counted = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                thread::enter(Doing::Reading, |thread| {
                    let tally = thread.tally(&file(&client));
                    (std::ptr::from_ref(tally.counter) as usize, tally.alone)
                })
            });
            thread.join().unwrap()
        });
        let (counter, alone) = counted.expect("a new thread is in no call");
        assert!(alone, "thread {n} counts with locked instructions");
        blocks.insert(counter);
    }
    assert!(
        blocks.len() < jericho_shm::BLOCKS / 2,
        "{} blocks",
        blocks.len()
    );
}

/// Returns a volume with a file of `bytes` ones, and a client whose ring is full. Only the first page is dirty, so that it can be
/// written without a report.
fn first_page_writable(bytes: usize) -> (Volume, Session) {
    let volume = Volume::new(64);
    volume.reserve(0..4);
    volume.slot().set_size(bytes as u64, false);
    volume.write_as_daemon(0, &vec![1; bytes]);
    for page in [1, 2] {
        let found = volume.memory.lookup(Key::new(OBJECT, page)).unwrap();
        volume.memory.entry(found.index).unmark(Flags::DIRTY);
    }
    let client = volume.client(true);
    for page in 0..jericho_shm::RING_KEYS as u64 - 1000 {
        client.report(Key::new(OBJECT + 1, page));
    }
    (volume, client)
}

#[test]
fn a_write_that_stops_half_way_keeps_its_locks_and_lends_them() {
    let (volume, client) = first_page_writable(3 * PAGE);
    for (len, extends) in [(3 * PAGE, false), (3 * PAGE + 10, true)] {
        let bytes = vec![9; len];
        let parts = [IoSlice::new(&bytes)];
        let failed = file(&client)
            .write(0, len, SourceParts::new(&parts))
            .unwrap_err();
        assert_eq!(failed.why, Why::Throttled);
        assert_eq!(
            (volume.bytes(0), volume.bytes(1)),
            (vec![9; PAGE], vec![1; PAGE])
        );
        let kept = failed.kept.expect("half of it is there");
        let all = Segments::of(0, len as u64);
        assert!(
            volume.slot().range_counts(all).is_none(),
            "nobody reads the half"
        );
        assert_eq!(volume.slot().is_extended_by(client.owner), extends);
        let lends = |word, held| {
            client
                .area
                .has_lent(0, jericho_shm::SlotLock::Word(word), held)
        };
        let borrow = || {
            let slot = volume.slot();
            let taken = slot.take_range(all, DAEMON, lends, |_| jericho_shm::Kept::GiveUp);
            assert!(taken.is_all(), "lent");
            for (word, held) in taken.borrowed() {
                client.area.note_borrowed(0, word, held);
            }
            slot.give_range_back(&taken, lends);
        };
        assert_eq!(kept.done(), PAGE);
        assert!(kept.is_one_write(0));
        borrow();
        assert!(!kept.is_one_write(0), "somebody was there before");
        assert!(kept.is_one_write(1), "that was the lender's request");
        borrow();
        assert!(!kept.is_one_write(1), "another write came in between");
        assert!(volume.slot().range_counts(all).is_none());
        drop(kept);
        assert!(
            volume.slot().range_counts(all).is_some()
                && !volume.slot().is_extended_by(client.owner)
        );
    }
    // These writes leave nothing visible: the first page cannot be written, or all bytes are beyond the end.
    let failed = file(&client).write(
        4096,
        2 * PAGE,
        SourceParts::new(&[IoSlice::new(&[9; 2 * PAGE])]),
    );
    assert!(failed.unwrap_err().kept.is_none());
    assert_eq!(append(file(&client), &[9; 4097]), Err(Why::Absent));
    assert!(
        volume
            .slot()
            .range_counts(Segments::of(0, 1 << 20))
            .is_some()
    );
    assert!(!volume.slot().is_extended_by(client.owner));
}

#[test]
fn a_request_that_writes_more_than_the_rest_borrows_the_expected_words() {
    let (volume, client) = first_page_writable(2 * PAGE);
    let parts = [IoSlice::new(&[9; 2 * PAGE])];
    let failed = file(&client).write(0, 2 * PAGE, SourceParts::new(&parts));
    let kept = failed.unwrap_err().kept.expect("half of it is there");
    assert_eq!(kept.own_borrows(PAGE), Some(0), "one page takes no word");
    // A long write is made in pieces. The kernel's request for the rest of one piece also writes all later pieces.
    assert_eq!(kept.own_borrows(PAGE + 1), Some(1));
    // The rest begins on the second page. It ends at the next segment that the rest's first word covers.
    let words = (jericho_shm::WORDS << 16) - PAGE;
    assert_eq!(kept.own_borrows(words), Some(1));
    assert_eq!(kept.own_borrows(words + 1), None);
    drop(kept);
    assert!(volume.slot().range_counts(Segments::of(0, 1)).is_some());
}

#[test]
fn a_child_does_not_end_its_parents_loan() {
    let volume = Volume::new(64);
    let mut client = volume.client(true);
    let all = Segments::of(0, 3 * PAGE_BYTES);
    let held = volume.slot().lock_range(all, client.owner).unwrap();
    let (block, _) = client.area.take_block(4711, |_| false);
    client.area.lent(block).lend(0, &held, None, 0);
    let is_free = |client: &Session| {
        drop(KeptLocks {
            session: client,
            info: client.control.slot(0).unwrap(),
            slot: volume.slot(),
            lent: client.area.lent(block),
            begun: Begun {
                at: 0,
                done: PAGE,
                removals: 0,
            },
            generation: 0,
        });
        volume.slot().range_counts(all).is_some()
    };
    client.set_own(false);
    assert!(!is_free(&client), "the child has opened its parent's locks");
    client.set_own(true);
    assert!(is_free(&client));
}

#[test]
fn a_write_that_answers_half_of_another_write_is_not_lost() {
    let (volume, client) = first_page_writable(3 * PAGE);
    let bytes = vec![9; 3 * PAGE];
    let parts = [IoSlice::new(&bytes)];
    let failed = file(&client).write(0, 3 * PAGE, SourceParts::new(&parts));
    let kept = failed.unwrap_err().kept.expect("half of it is there");
    // Another program reads a byte of that write, and answers it.
    let other = volume.client(true);
    let mut seen = [0; 8];
    let read = file(&other).read(0, &mut seen);
    assert_eq!(
        (read.rest, seen),
        (None, [9; 8]),
        "the read sees the first page"
    );
    let answer = [IoSlice::new(&[5; 8])];
    file(&other).write(0, 8, SourceParts::new(&answer)).unwrap();
    // The daemon serves the lender's request.
    assert!(kept.is_one_write(0));
    volume.write_as_daemon(kept.done() as u64, &bytes[kept.done()..]);
    assert!(kept.is_one_write(1));
    drop(kept);
    assert_eq!(volume.bytes(0)[..8], [5; 8], "the answer");
    assert_eq!(
        (volume.bytes(1), volume.bytes(2)),
        (vec![9; PAGE], vec![9; PAGE])
    );
}

#[test]
fn a_write_is_repeated_when_the_file_was_truncated_after_its_first_half() {
    let (volume, client) = first_page_writable(3 * PAGE);
    let bytes = [9; 3 * PAGE];
    let half = || {
        let failed = file(&client).write(0, 3 * PAGE, SourceParts::new(&[IoSlice::new(&bytes)]));
        failed.unwrap_err().kept.expect("half of it is there")
    };
    let kept = half();
    volume.slot().raise_truncation_count();
    assert!(kept.is_one_write(0), "nothing of it was removed");
    volume.slot().note_removal();
    assert!(!kept.is_one_write(0) && !kept.is_one_write(1));
    drop(kept);
    // The word was taken away, so other writers may have written over both halves.
    let kept = half();
    let taken = volume.slot().take_range(
        Segments::of(0, 1),
        DAEMON,
        |_, _| false,
        |_| jericho_shm::Kept::TakeAway,
    );
    assert!(!kept.is_one_write(0));
    volume.slot().give_range_back(&taken, |_, _| false);
    assert!(!kept.is_one_write(1));
}

#[test]
fn bytes_that_a_write_has_put_beyond_the_end_belong_to_its_rest() {
    let (volume, client) = first_page_writable(100);
    let bytes = [9; 2 * PAGE];
    let failed = file(&client).write(40, 2 * PAGE, SourceParts::new(&[IoSlice::new(&bytes)]));
    let kept = failed.unwrap_err().kept.expect("60 bytes of it are seen");
    assert_eq!(kept.done(), 60);
    assert_eq!(
        volume.bytes(0)[..100],
        [[1; 40].as_slice(), &[9; 60]].concat()
    );
    assert_eq!(
        volume.bytes(0)[100..],
        [0; PAGE - 100],
        "zeros behind the end"
    );
}

#[test]
fn pages_in_spill_ranges_count_by_their_own_node() {
    let volume = Volume::with(Geometry::new(1024, 512).unwrap());
    volume.memory.back_range(0, Some(0)).unwrap();
    // Three pages on the home node, two in the range.
    volume.frames_used.store(509, Ordering::Relaxed);
    volume.reserve(0..5);
    volume.slot().set_size(5 * 4096, false);
    let client = volume.client(true);
    let counts = || {
        let sum = |of: fn(&jericho_shm::Counter) -> &AtomicU64| {
            let counters = client.area.counters_of(0);
            counters.map(|c| of(c).load(Ordering::Relaxed)).sum::<u64>()
        };
        [
            sum(|c| &c.local_pages),
            sum(|c| &c.remote_pages),
            sum(|c| &c.local_bytes),
            sum(|c| &c.remote_bytes),
            sum(|c| &c.read_calls) + sum(|c| &c.write_calls),
        ]
    };
    let mut expected = [0; 5];
    // All CPUs are on node 0, and so is the home of the slice.
    for (node, remote_pages) in [(1, 2), (0, 0)] {
        volume.memory.set_node_of_range(0, Some(node));
        thread::enter(Doing::Writing, |thread| {
            let mut out = [0; 5 * PAGE];
            let read = file(&client).read(100, &mut out);
            assert_eq!((read.done, read.rest), (5 * PAGE - 100, None));
            thread.account(&file(&client), false, 100..5 * 4096, 1);
            write(file(&client), 2 * 4096, &[7; 3 * PAGE]).unwrap();
            thread.account(&file(&client), true, 2 * 4096..5 * 4096, 1);
        })
        .unwrap();
        let (pages, bytes) = (2 * remote_pages, 2 * remote_pages * 4096);
        let all_bytes = 8 * 4096 - 100;
        let counted = [8 - pages, pages, all_bytes - bytes, bytes, 2];
        for (sum, more) in expected.iter_mut().zip(counted) {
            *sum += more;
        }
        assert_eq!(counts(), expected, "the range is on node {node}");
    }
    assert_eq!(volume.bytes(4), [7; PAGE]);
}
