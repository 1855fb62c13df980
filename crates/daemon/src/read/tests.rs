//! A program that is stopped in the middle of a write delays only threads that access that page. A read that restarts counts its pages once.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use jericho_shm::{Flags, Key};

use super::{READ_TRIES, WaitingRead, Whole};
use crate::simulated::{self, LONG};
use crate::{Handle, Mounted, WriteMode};

const PAGE: usize = 4096;
const PAGES: u64 = 64;
/// An owner number that no client has.
const STOPPED: u16 = 700;

fn mounted() -> (Arc<Mounted>, Arc<Handle>) {
    let mounted = simulated::mount(&simulated::device());
    let handle = simulated::create(&mounted, b"f");
    (mounted, handle)
}

fn read(
    mounted: &Arc<Mounted>,
    handle: &Arc<Handle>,
    page: u64,
    pages: u32,
) -> mpsc::Receiver<Vec<u8>> {
    let bytes = (page * PAGE as u64, pages * PAGE as u32);
    simulated::read(mounted, handle, bytes, false)
}

fn write(
    mounted: &Arc<Mounted>,
    handle: &Arc<Handle>,
    at: u64,
    data: &[u8],
) -> mpsc::Receiver<u32> {
    simulated::write(mounted, handle, at, data, WriteMode::PLAIN)
}

#[test]
fn a_stopped_writer_delays_no_miss_of_another_page() {
    let (mounted, handle) = mounted();
    let data: Vec<u8> = (0..PAGES).flat_map(|page| [page as u8; PAGE]).collect();
    let written = write(&mounted, &handle, 0, &data);
    assert_eq!(written.recv_timeout(LONG).unwrap() as usize, data.len());
    let begun = Instant::now();
    loop {
        simulated::evict(&mounted, &handle);
        let first = read(&mounted, &handle, 0, 1).recv_timeout(LONG).unwrap();
        assert_eq!(first, data[..PAGE]);
        let memory = mounted.slice(handle.file.layout().home()).memory();
        let key = Key::new(handle.file.object_id(), 0);
        let found = memory.lookup(key).expect("just read");
        let entry = memory.entry(found.index);
        let Some(latched) = entry.try_latch(found.state, STOPPED) else {
            continue;
        };
        // The read covers pages that miss (8 and up), and the writes have to wait. So the pipeline completes all three, and meets
        // the latch of page 0 in each.
        let held_up = [0, 1, 2].map(|n| match n {
            0 => (Some(read(&mounted, &handle, 0, 16)), None),
            n => (None, Some(write(&mounted, &handle, 100 * n, &[9; 50]))),
        });
        let others = [32, 40, 48].map(|page| {
            let bytes = read(&mounted, &handle, page, 1).recv_timeout(LONG);
            assert_eq!(bytes.unwrap(), vec![page as u8; PAGE]);
        });
        let in_time = entry.state().is_same_holding(latched);
        if in_time {
            assert_eq!(others.len(), 3);
            entry.unlatch(latched, Flags::DIRTY);
        }
        for (read, write) in held_up {
            if let Some(read) = read {
                let bytes = read.recv_timeout(LONG).unwrap();
                assert_eq!(bytes[PAGE..], data[PAGE..16 * PAGE]);
            }
            if let Some(write) = write {
                assert_eq!(write.recv_timeout(LONG).unwrap(), 50);
            }
        }
        if in_time {
            return;
        }
        // The latch was taken away before the misses completed. That also happens on a slow host, so the test tries again for a
        // while.
        assert!(begun.elapsed() < LONG, "misses wait for the latch");
        let restored = write(&mounted, &handle, 0, &data[..PAGE]);
        restored.recv_timeout(LONG).unwrap();
    }
}

#[test]
fn a_read_that_restarts_counts_a_page_in_a_spill_range_once() {
    // The node has room for fewer frames than the slice has.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("topology");
    std::fs::write(&file, "node 0 cpus=0 memory=6M\nnode 1 memory=1G\n").unwrap();
    let topology = file.to_str().unwrap();
    let mounted = simulated::mount_on(&simulated::device(), topology, 4 << 20);
    let handle = simulated::create(&mounted, b"f");
    let slice = mounted.slice(0);
    let memory = slice.memory();
    assert!(memory.geometry().spill_ranges() > 0);
    let cache_bytes = mounted.stat().cache_bytes();
    assert!(cache_bytes > Some(0));
    // Node 1 has no CPUs, so all threads are far from the range.
    assert!(slice.take_range(0, None, 1).unwrap());
    assert_eq!(mounted.stat().cache_bytes(), cache_bytes);
    let pages = u64::from(memory.geometry().home_frames) + 100;
    let written = write(&mounted, &handle, pages * PAGE as u64 - 1, &[1]);
    assert_eq!(written.recv_timeout(LONG).unwrap(), 1);
    for page in 0..pages {
        let bytes = read(&mounted, &handle, page, 1).recv_timeout(LONG).unwrap();
        assert_eq!(bytes.len(), PAGE);
    }
    let is_spilled = |page: &u64| {
        let found = memory.lookup(Key::new(handle.file.object_id(), *page));
        found.is_some_and(|found| memory.is_spilled(found.state.frame()))
    };
    let page = (0..pages).find(is_spilled).expect("a page in the range");
    let reader = std::thread::spawn(move || {
        // The CPU of the slice's home.
        jericho_sys::affinity::set(None, &[0]).unwrap();
        let (tx, rx) = mpsc::channel();
        let before = mounted.locality.of(0);
        mounted.locality.count(0, 1);
        WaitingRead {
            mounted: mounted.clone(),
            handle: handle.clone(),
            offset: page * PAGE as u64,
            buffer: vec![],
            len: PAGE,
            done: 0,
            mapped: None,
            // The file has had an inline writer since the read began.
            whole: Whole::Unwritten(handle.file.first_writers().wrapping_sub(1)),
            tries: READ_TRIES,
            one_by_one: false,
            spilled: Default::default(),
            reply: move |read: jericho_fs::Result<usize>, _: Vec<u8>| tx.send(read).unwrap(),
        }
        .get_next();
        assert_eq!(rx.recv_timeout(LONG).unwrap().unwrap(), PAGE);
        let after = mounted.locality.of(0);
        assert_eq!((after.0 - before.0, after.1 - before.1), (0, 1));
    });
    reader.join().unwrap();
}
