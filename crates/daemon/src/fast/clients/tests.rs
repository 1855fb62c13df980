use std::sync::mpsc;

use jericho_cache::Slice;
use jericho_shm::Flags;
use jericho_sys::process::uid;

use super::*;
use crate::fast::slots::tests::Bed;

/// What a client has done to a page when it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Death {
    BeforeTheNote,
    BeforeTheLatch,
    InTheCopy,
    BeforeTheReport,
    AfterTheReport,
}

use Death::*;

/// Clients with one thread each, which write pages of one file.
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

    /// A program that writes a page and dies. Gives its number.
    fn die(&mut self, key: Key, death: Death) -> u16 {
        self.number += 1;
        let owner = self.fast().clients.lock().free_owner().unwrap();
        let area = Area::create("test", owner).unwrap();
        let (block, alone) = area.take_block(self.number as u32, |_| false);
        assert!(alone);
        let memory = self.slice().memory();
        let found = memory.lookup(key).unwrap();
        let entry = memory.entry(found.index);
        if death >= BeforeTheLatch {
            area.writer(owner, block, 0).about_to_latch(found.index);
        }
        if death >= InTheCopy {
            let latched = entry.try_latch(found.state, owner).expect("nobody writes");
            if death >= BeforeTheReport {
                entry.unlatch(latched, Flags::DIRTY).expect("not broken");
            }
        }
        if death >= AfterTheReport {
            area.announce(key);
        }
        let client = Client {
            serial: self.number,
            area,
            reader: RingReader::default(),
            peer: Peer {
                pid: 0,
                uid: uid(),
                pidfd: std::fs::File::open("/dev/null").unwrap().into(),
            },
            writes: true,
        };
        self.fast().clients.lock().by_owner.insert(owner, client);
        owner
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
        let owner = programs.die(key, death);
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
