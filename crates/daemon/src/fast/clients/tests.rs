use std::sync::mpsc;
use std::time::Duration;

use jericho_cache::Slice;
use jericho_shm::{Flags, Key, SlotInfo, State};
use jericho_sys::process::uid;

use super::*;
use crate::fast::slots::tests::{Bed, wait_until};

/// Progress of a client's write when the client dies or its file is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Death {
    BeforeTheNote,
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
        bed.mounted.settle(bed.handle.file.ino());
        let programs = Programs { bed, number: 0 };
        programs.sync();
        programs
    }

    fn fast(&self) -> &Fast {
        &self.bed.mounted.fast
    }

    fn slice(&self) -> &Arc<Slice> {
        &self.fast().slices[0]
    }

    fn sync(&self) {
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |result| tx.send(result).unwrap());
        self.slice().sync_all(done);
        rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    }

    /// Runs a program with one thread that writes a page up to the step `death`. Returns its owner number and what its
    /// latch left.
    fn write(&mut self, key: Key, death: Death) -> (u16, Option<State>) {
        self.number += 1;
        let owner = self.fast().clients.lock().free_owner().unwrap();
        let area = Arc::new(Area::create("test", owner).unwrap());
        self.fast().rings.add(owner, area.clone());
        let (block, alone) = area.take_block(self.number as u32, |_| false);
        assert!(alone);
        let memory = self.slice().memory();
        let found = memory.lookup(key).unwrap();
        let entry = memory.entry(found.index);
        if death >= BeforeTheLatch {
            area.writer(owner, block, 0).about_to_latch(found.index);
        }
        let mut latched = None;
        if death >= InTheCopy {
            latched = entry.try_latch(found.state, owner);
            let latched = latched.expect("nobody writes");
            if death >= BeforeTheReport {
                entry.unlatch(latched, Flags::DIRTY).expect("not broken");
            }
        }
        if death >= AfterTheReport {
            area.report(key, &self.fast().slots);
        }
        let client = Client {
            serial: self.number,
            area,
            peer: Peer {
                pid: 0,
                uid: uid(),
                pidfd: std::fs::File::open("/dev/null").unwrap().into(),
            },
            writes: true,
        };
        self.fast().clients.lock().by_owner.insert(owner, client);
        (owner, latched)
    }

    /// Runs a program that writes a page and continues with `rest` while another of its threads closes the file's last descriptor.
    fn close_amid(
        &mut self,
        key: Key,
        done: Death,
        rest: impl FnOnce(&Programs, u16, Option<State>),
    ) {
        let (owner, latched) = self.write(key, done);
        let (mounted, handle) = (&self.bed.mounted, &self.bed.handle);
        let no_writes = || {
            let slot_file = self.fast().written_file(key.object());
            slot_file
                .is_none_or(|file| self.fast().info(&file).word().flags() & SlotInfo::NO_WRITE != 0)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| mounted.fast.release(mounted, handle));
            wait_until("it is noticed", no_writes);
            rest(self, owner, latched);
        });
    }
}

#[test]
fn burying_a_program_costs_what_it_has_threads_whenever_it_died() {
    let mut programs = Programs::new();
    let ino = programs.bed.handle.file.ino();
    let before = programs.slice().searched();
    let deaths = [
        BeforeTheNote,
        BeforeTheLatch,
        InTheCopy,
        BeforeTheReport,
        AfterTheReport,
    ];
    for n in 0..1000 {
        let (death, page) = (deaths[n % deaths.len()], n as u64 % 16);
        let key = Key::new(ino, page);
        let (owner, _) = programs.write(key, death);
        programs.fast().bury(owner);
        let memory = programs.slice().memory();
        let state = memory.lookup(key).expect("cached").state;
        assert!(!state.has(Flags::LATCH), "{death:?}");
        assert_eq!(state.has(Flags::DIRTY), death >= InTheCopy, "{death:?}");
        let dirty = programs.slice().first_dirty(ino, 0);
        assert_eq!(dirty, (death >= InTheCopy).then_some(page), "{death:?}");
        programs.sync();
        let dirty = programs.slice().first_dirty(ino, 0);
        assert_eq!(dirty, None, "{death:?}");
    }
    let searched = programs.slice().searched() - before;
    assert!(searched <= 1000, "looked at {searched} entries");
}

#[test]
fn a_page_is_known_that_is_written_while_the_last_descriptor_is_closed() {
    for done in [BeforeTheReport, InTheCopy] {
        let mut programs = Programs::new();
        let key = Key::new(programs.bed.handle.file.ino(), 3);
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
fn a_report_of_a_file_that_has_no_slot_any_more_is_no_less_heard() {
    let mut programs = Programs::new();
    let key = Key::new(programs.bed.handle.file.ino(), 3);
    let (mounted, handle) = (programs.bed.mounted.clone(), programs.bed.handle.clone());
    mounted.fast.release(&mounted, &handle);
    assert!(mounted.fast.slot_file(key.object()).is_none());
    programs.write(key, AfterTheReport);
    let (tx, rx) = mpsc::channel();
    mounted.fsync(&handle, false, Box::new(move |done| tx.send(done).unwrap()));
    rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    let found = programs.slice().memory().lookup(key).expect("cached");
    assert!(
        !found.state.has(Flags::DIRTY),
        "it was acknowledged before the fsync"
    );
}

#[test]
fn a_page_that_was_written_and_not_reported_is_not_lost_when_the_file_moves() {
    let mut programs = Programs::new();
    let handle = programs.bed.handle.clone();
    let key = Key::new(handle.file.ino(), 3);
    programs.write(key, BeforeTheReport);
    // Migration of a file calls this before it writes dirty pages back and drops the others.
    assert!(programs.slice().withdraw(&handle.file.object()));
    assert_eq!(programs.slice().first_dirty(key.object(), 0), Some(3));
}

#[test]
fn settling_a_file_costs_what_clients_have_reported_and_not_how_many_there_are() {
    let mut programs = Programs::new();
    let ino = programs.bed.handle.file.ino();
    for _ in 0..1000 {
        programs.write(Key::new(ino, 0), BeforeTheLatch);
    }
    let fast = |programs: &Programs| programs.bed.mounted.fast.rings.drained();
    let before = fast(&programs);
    for _ in 0..100 {
        programs.bed.mounted.settle(ino);
        programs.sync();
    }
    assert_eq!(fast(&programs), before, "nobody has reported anything");
    for page in 0..10 {
        programs.write(Key::new(ino, page), AfterTheReport);
    }
    programs.bed.mounted.settle(ino);
    let dirty = (0..10).all(|page| programs.slice().first_dirty(ino, page) == Some(page));
    assert!(dirty);
    // The thread that drains the rings periodically may have seen the first reports, and may drain one ring during a
    // settle.
    let drained = fast(&programs) - before;
    assert!((10..=20).contains(&drained), "drained {drained} rings");
}

#[test]
fn a_page_whose_latch_was_taken_away_is_written_back_without_a_search() {
    let mut programs = Programs::new();
    let ino = programs.bed.handle.file.ino();
    let before = programs.slice().searched();
    let key = Key::new(ino, 3);
    programs.write(key, InTheCopy);
    let state = |programs: &Programs| programs.slice().memory().lookup(key).unwrap().state;
    assert!(state(&programs).has(Flags::LATCH));
    // Waits until the latch has been held too long.
    assert!(programs.slice().drain_writers(ino, 3..4));
    programs.fast().hear();
    assert_eq!(programs.slice().first_dirty(ino, 0), Some(3));
    programs.sync();
    assert!(!state(&programs).has(Flags::DIRTY));
    assert_eq!(programs.slice().searched(), before);
}

#[test]
fn a_page_that_another_thread_is_taking_in_is_known_to_who_asks() {
    let mut programs = Programs::new();
    let ino = programs.bed.handle.file.ino();
    programs.write(Key::new(ino, 3), InTheCopy);
    // The thread that takes the page in looks the file up there.
    let files = programs.fast().files.write();
    assert!(programs.slice().drain_writers(ino, 3..4));
    let found = std::thread::scope(|scope| {
        scope.spawn(|| programs.fast().hear());
        wait_until("a thread takes the page in", || {
            programs.fast().unreported.is_absorbing()
        });
        let (tx, rx) = mpsc::channel();
        let asker = scope.spawn({
            let programs = &programs;
            move || {
                tx.send(std::fs::read_link("/proc/thread-self").unwrap())
                    .unwrap();
                programs.fast().hear();
                programs.slice().first_dirty(ino, 0)
            }
        });
        let thread = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        let syscall = std::path::Path::new("/proc").join(thread).join("syscall");
        let futex = format!("{} ", libc::SYS_futex);
        wait_until("it waits, or has an answer", || {
            let waits = |line: String| line.starts_with(&futex);
            asker.is_finished() || std::fs::read_to_string(&syscall).is_ok_and(waits)
        });
        drop(files);
        asker.join().unwrap()
    });
    assert_eq!(found, Some(3));
}
