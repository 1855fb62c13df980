use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::Duration;

use jericho_cache::{Intent, Slice};
use jericho_fs::types::SetAttr;
use jericho_shm::{Area, Flags, Key, PageState, SlotInfo};

use super::*;
use crate::fast::client_table::{Client, IDLE_PER_ROUND};
use crate::fast::grants::tests::Bed;
use crate::simulated::{CALLER, create, wait_until};

/// Progress of a client's write when the client dies or its file is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Death {
    BeforeTheIntent,
    BeforeTheLatch,
    InTheCopy,
    BeforeTheReport,
    AfterTheReport,
}

use Death::*;

/// Clients with one thread each that write pages of one file.
struct Programs {
    bed: Bed,
    number: u64,
}

impl Programs {
    fn new() -> Programs {
        let bed = Bed::new();
        bed.extend(16 * 4096);
        bed.mounted.fast.absorb(bed.handle.file.ino());
        let programs = Programs { bed, number: 0 };
        programs.sync();
        programs
    }

    fn fast(&self) -> &Fast {
        &self.bed.mounted.fast
    }

    fn slice(&self) -> &Arc<Slice> {
        self.fast().volume.slice(0)
    }

    fn sync(&self) {
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |result| tx.send(result).unwrap());
        self.slice().sync_all(done);
        rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    }

    fn admit(&self, owner: u16, area: Arc<Area>, writes: bool) {
        let client = Client::for_test(self.number, area, 0, writes);
        self.fast().clients.lock().by_owner.insert(owner, client);
    }

    /// Admits a program that only reads. Returns its owner number, its area, and the block of its thread.
    fn reader(&mut self) -> (u16, Arc<Area>, u32) {
        self.number += 1;
        let owner = self.fast().clients.lock().free_owner().unwrap();
        let area = Arc::new(Area::create("test", owner).unwrap());
        let (block, _) = area.take_block(self.number as u32, |_| false);
        self.admit(owner, area.clone(), false);
        (owner, area, block)
    }

    /// Reads pages of a file into the cache.
    fn get(&self, file: &Arc<File>, page: u64, pages: u32) {
        let (tx, rx) = mpsc::channel();
        let slice = self.slice();
        slice.get(&file.object(), page, pages, Intent::Read, move |grant| {
            tx.send(grant.is_ok()).unwrap();
        });
        assert!(rx.recv_timeout(Duration::from_secs(60)).unwrap());
    }

    /// Creates a file that consists of one hole.
    fn hole(&self, name: &[u8], pages: u64) -> Arc<File> {
        let mounted = &self.bed.mounted;
        let handle = create(mounted, name);
        let set = SetAttr {
            size: Some(pages * 4096),
            ..SetAttr::default()
        };
        mounted.setattr(handle.file.ino(), set, CALLER).unwrap();
        handle.file.clone()
    }

    /// Runs a program with one thread that writes a page up to the step `death`. Returns its owner number, and the state that its
    /// latch stored.
    fn write(&mut self, key: Key, death: Death) -> (u16, Option<PageState>) {
        self.number += 1;
        let owner = self.fast().clients.lock().free_owner().unwrap();
        let area = Arc::new(Area::create("test", owner).unwrap());
        self.fast().rings.add(owner, area.clone());
        let (block, alone) = area.take_block(self.number as u32, |_| false);
        assert!(alone);
        let memory = self.slice().memory();
        let found = memory.lookup(key).unwrap();
        let entry = memory.entry(found.index);
        if let Some(file) = self.fast().slot_file_of(key.object()) {
            self.fast().slot(&file).writers().add(owner);
        }
        if death >= BeforeTheLatch {
            area.writer(owner, block, 0).about_to_latch(found.index);
        }
        let mut latched = None;
        if death >= InTheCopy {
            latched = entry.try_latch(found.state, owner);
            let latched = latched.expect("no other writer");
            if death >= BeforeTheReport {
                entry.unlatch(latched, Flags::DIRTY).expect("not broken");
            }
        }
        if death >= AfterTheReport {
            area.report(key, &self.fast().slots);
        }
        self.admit(owner, area, true);
        (owner, latched)
    }

    /// Runs a program that writes a page and continues with `rest` while another of its threads closes the file's last
    /// descriptor.
    fn close_amid(
        &mut self,
        key: Key,
        done: Death,
        rest: impl FnOnce(&Programs, u16, Option<PageState>),
    ) {
        let (owner, latched) = self.write(key, done);
        let (mounted, handle) = (&self.bed.mounted, &self.bed.handle);
        let no_writes = || {
            let slot_file = self.fast().written_file(handle.file.ino());
            slot_file
                .is_none_or(|file| self.fast().info(&file).word().flags() & SlotInfo::NO_WRITE != 0)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| mounted.fast.release(handle));
            wait_until("the close withholds writes", no_writes);
            rest(self, owner, latched);
        });
    }
}

#[test]
fn burying_a_program_costs_one_check_for_each_of_its_threads() {
    let mut programs = Programs::new();
    let object = programs.bed.handle.file.object_id();
    let before = programs.slice().counters().dead_client_entries;
    let deaths = [
        BeforeTheIntent,
        BeforeTheLatch,
        InTheCopy,
        BeforeTheReport,
        AfterTheReport,
    ];
    for n in 0..1000 {
        let (death, page) = (deaths[n % deaths.len()], n as u64 % 16);
        let key = Key::new(object, page);
        let (owner, _) = programs.write(key, death);
        programs.fast().bury(owner);
        let memory = programs.slice().memory();
        let state = memory.lookup(key).expect("cached").state;
        assert!(!state.has(Flags::LATCH), "{death:?}");
        assert_eq!(state.has(Flags::DIRTY), death >= InTheCopy, "{death:?}");
        let dirty = programs.slice().first_dirty(object, 0);
        assert_eq!(dirty, (death >= InTheCopy).then_some(page), "{death:?}");
        programs.sync();
        let dirty = programs.slice().first_dirty(object, 0);
        assert_eq!(dirty, None, "{death:?}");
    }
    let searched = programs.slice().counters().dead_client_entries - before;
    assert!(searched <= 1000, "searched {searched} entries");
}

#[test]
fn a_page_that_is_written_while_the_last_descriptor_is_closed_is_known() {
    for done in [BeforeTheReport, InTheCopy] {
        let mut programs = Programs::new();
        let key = Key::new(programs.bed.handle.file.object_id(), 3);
        programs.close_amid(key, done, |programs, _, latched| {
            if done == InTheCopy {
                let memory = programs.slice().memory();
                let index = memory.lookup(key).unwrap().index;
                // The page is also dirty if its writer lost the latch for being too slow.
                let _ = memory.entry(index).unlatch(latched.unwrap(), Flags::DIRTY);
            }
        });
        assert_eq!(
            programs.slice().first_dirty(key.object(), 0),
            Some(3),
            "{done:?}"
        );
    }
}

#[test]
fn closing_a_file_costs_time_by_its_writers_and_not_by_the_number_of_clients() {
    let mut programs = Programs::new();
    let object = programs.bed.handle.file.object_id();
    let mounted = programs.bed.mounted.clone();
    let other = create(&mounted, b"other");
    let granted = mounted
        .fast
        .grant(&other.file, &mut other.grants.lock(), true);
    granted.unwrap();
    for _ in 0..900 {
        programs.write(Key::new(object, 0), BeforeTheLatch);
    }
    let slot_file = mounted.fast.slot_file(other.file.ino()).unwrap();
    let writers = mounted.fast.slot(&slot_file).writers();
    let owners: Vec<u16> = mounted
        .fast
        .clients
        .lock()
        .by_owner
        .keys()
        .copied()
        .collect();
    for writer in &owners[500..503] {
        writers.add(*writer);
    }
    let before = mounted.fast.visited.load(Relaxed);
    mounted.fast.release(&other);
    let visited = mounted.fast.visited.load(Relaxed) - before;
    // A few owner numbers share a bit.
    assert!((3..=12).contains(&visited), "visited {visited} clients");
    // The slot's next file has writers of its own.
    let granted = mounted
        .fast
        .grant(&other.file, &mut other.grants.lock(), true);
    let slot = mounted.fast.slot(&granted.unwrap().0);
    assert_eq!(slot.writers().owners().count(), 0);
    mounted.close_file(&other);
}

#[test]
fn a_report_of_a_file_without_a_slot_is_not_lost() {
    let mut programs = Programs::new();
    let key = Key::new(programs.bed.handle.file.object_id(), 3);
    let (mounted, handle) = (programs.bed.mounted.clone(), programs.bed.handle.clone());
    mounted.fast.release(&handle);
    assert!(mounted.fast.slot_file_of(key.object()).is_none());
    programs.write(key, AfterTheReport);
    let (tx, rx) = mpsc::channel();
    mounted.fsync(&handle, false, Box::new(move |done| tx.send(done).unwrap()));
    rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    let found = programs.slice().memory().lookup(key).expect("cached");
    assert!(
        !found.state.has(Flags::DIRTY),
        "the write was acknowledged before the fsync"
    );
}

#[test]
fn a_page_that_was_written_and_not_reported_is_not_lost_when_the_file_moves() {
    let mut programs = Programs::new();
    let handle = programs.bed.handle.clone();
    let key = Key::new(handle.file.object_id(), 3);
    programs.write(key, BeforeTheReport);
    // A move of a file to another slice calls this before it writes dirty pages back and drops the others.
    assert!(programs.slice().revoke_writes(&handle.file.object()));
    assert_eq!(programs.slice().first_dirty(key.object(), 0), Some(3));
}

#[test]
fn absorbing_costs_time_by_the_reports_and_not_by_the_number_of_clients() {
    let mut programs = Programs::new();
    let (ino, object) = {
        let file = &programs.bed.handle.file;
        (file.ino(), file.object_id())
    };
    for _ in 0..1000 {
        programs.write(Key::new(object, 0), BeforeTheLatch);
    }
    let fast = |programs: &Programs| programs.bed.mounted.fast.rings.drained();
    let before = fast(&programs);
    for _ in 0..100 {
        programs.bed.mounted.fast.absorb(ino);
        programs.sync();
    }
    assert_eq!(fast(&programs), before, "no client has reported anything");
    for page in 0..10 {
        programs.write(Key::new(object, page), AfterTheReport);
    }
    programs.bed.mounted.fast.absorb(ino);
    let dirty = (0..10).all(|page| programs.slice().first_dirty(object, page) == Some(page));
    assert!(dirty);
    // The thread that drains the rings periodically may have seen the first reports, and may drain a ring during this call.
    let drained = fast(&programs) - before;
    assert!((10..=20).contains(&drained), "drained {drained} rings");
}

#[test]
fn a_page_whose_latch_was_taken_away_is_written_back_without_a_search() {
    let mut programs = Programs::new();
    let object = programs.bed.handle.file.object_id();
    let before = programs.slice().counters().dead_client_entries;
    let key = Key::new(object, 3);
    programs.write(key, InTheCopy);
    let state = |programs: &Programs| programs.slice().memory().lookup(key).unwrap().state;
    assert!(state(&programs).has(Flags::LATCH));
    // Waits until the latch has been held too long.
    assert!(programs.slice().drain_writers(object, 3..4));
    programs.fast().drain_reports();
    assert_eq!(programs.slice().first_dirty(object, 0), Some(3));
    programs.sync();
    assert!(!state(&programs).has(Flags::DIRTY));
    assert_eq!(programs.slice().counters().dead_client_entries, before);
}

#[test]
fn a_query_waits_for_a_page_that_another_thread_is_absorbing() {
    let mut programs = Programs::new();
    let (ino, object) = {
        let file = &programs.bed.handle.file;
        (file.ino(), file.object_id())
    };
    programs.write(Key::new(object, 3), InTheCopy);
    // Blocks the thread that absorbs the page, because it looks the file up in this part.
    let files = programs.fast().files.part(ino).write();
    assert!(programs.slice().drain_writers(object, 3..4));
    let found = std::thread::scope(|scope| {
        scope.spawn(|| programs.fast().drain_reports());
        wait_until("a thread takes the page in", || {
            programs.fast().unreported.is_absorbing()
        });
        let (tx, rx) = mpsc::channel();
        let asker = scope.spawn({
            let programs = &programs;
            move || {
                tx.send(std::fs::read_link("/proc/thread-self").unwrap())
                    .unwrap();
                programs.fast().drain_reports();
                programs.slice().first_dirty(object, 0)
            }
        });
        let thread = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        let syscall = std::path::Path::new("/proc").join(thread).join("syscall");
        let futex = format!("{} ", libc::SYS_futex);
        wait_until("the asking thread waits, or has an answer", || {
            let waits = |line: String| line.starts_with(&futex);
            asker.is_finished() || std::fs::read_to_string(&syscall).is_ok_and(waits)
        });
        drop(files);
        asker.join().unwrap()
    });
    assert_eq!(found, Some(3));
}

#[test]
fn a_round_of_the_evictor_visits_few_idle_clients_and_each_in_turn() {
    let mut programs = Programs::new();
    let readers: Vec<_> = (0..1000).map(|_| programs.reader()).collect();
    let memory = programs.slice().memory();
    let visits_of_a_round = || {
        let before = programs.fast().visited.load(Relaxed);
        programs.fast().take_touched();
        programs.fast().visited.load(Relaxed) - before
    };
    let few = IDLE_PER_ROUND as u64;
    assert!((0..20).all(|_| visits_of_a_round() <= few));
    // Some clients read something. Other clients end meanwhile, and none misses its turn.
    memory.next_epoch();
    let reading = readers.chunks(100).map(|some| &some[0]);
    for (_, area, block) in reading.clone() {
        area.touch(*block, 0, u32::from(area.owner()));
    }
    for some in readers.chunks(100).chain(readers.chunks(150)).take(17) {
        assert!(visits_of_a_round() <= few + 10);
        programs.fast().bury(some[some.len() / 2].0);
    }
    let epoch = memory.epoch();
    let mut entries = reading.clone().map(|(owner, _, _)| u32::from(*owner));
    assert!(entries.all(|entry| memory.is_marked(entry, epoch)));
    // Clients that continue to read do not have to wait for their turn.
    let (owner, area, block) = &readers[0];
    let entry = u32::from(*owner);
    for _ in 0..5 {
        memory.next_epoch();
        area.touch(*block, 0, entry);
        visits_of_a_round();
        assert!(memory.is_marked(entry, memory.epoch()));
    }
    assert!((0..20).all(|_| visits_of_a_round() <= few + 10));
    assert_eq!(visits_of_a_round(), few, "no client reads");
}

#[test]
fn a_page_that_one_of_many_programs_reads_all_the_time_stays_in_the_cache() {
    const HOT: u64 = 100;
    const SCANS: u64 = 20;
    let mut programs = Programs::new();
    for _ in 0..300 {
        programs.reader();
    }
    let (_, area, block) = programs.reader();
    let frames = u64::from(programs.slice().memory().geometry().frames);
    let (hot, scanned) = (
        programs.hole(b"hot", HOT),
        programs.hole(b"scanned", SCANS * frames),
    );
    programs.get(&hot, 0, HOT as u32);
    let mut missed = 0;
    for first in (0..SCANS * frames).step_by(16) {
        let memory = programs.slice().memory();
        for page in 0..HOT {
            match memory.lookup(Key::new(hot.object_id(), page)) {
                Some(found) => area.touch(block, 0, found.index),
                None => {
                    missed += 1;
                    programs.get(&hot, page, 1);
                }
            }
        }
        programs.get(&scanned, first, 16);
    }
    // Without the reference marks, each scan would evict each page once.
    assert!(missed <= 2 * HOT, "{missed} pages were evicted");
}

#[test]
fn a_process_of_another_pid_namespace_gets_no_area_of_another_process() {
    let programs = Programs::new();
    let area = Arc::new(Area::create("test", 5).unwrap());
    // The daemon sees every process of another pid namespace with this id.
    programs.admit(5, area.clone(), false);
    let peer = Client::for_test(1, area, 0, false).peer;
    let request = jericho_shm::Request { owner: 5, token: 0 };
    let refused = programs.fast().enter(request, peer, 1);
    assert_eq!(refused, Err(libc::ESRCH));
}
