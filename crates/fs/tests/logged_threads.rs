//! Logged pages under several threads: each syncs, overwrites, truncates, zeroes, moves and removes its own files while a checkpoint
//! follows the other, until the power is cut. Then each page has contents that its thread wrote at its last sync or later.
//!
//! `JERICHO_CRASH_SEED=1000 JERICHO_CRASH_CASES=500` runs other cases. The order of the threads is not part of a case, so a failure
//! may need several runs to come again. Each case keeps some 12 MiB: a slice that is closed with dirty pages never drops their files.

mod mount;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_fs::types::{Kind, ROOT, SetAttr};
use jericho_fs::{File, Result};
use jericho_sim::FaultPlan;

use mount::{CALLER, Mount, PAGE};

const CASES: u64 = 12;
const THREADS: u64 = 6;
/// Pages of a file at most.
const PAGES: u64 = 24;
const ZERO_RANGE: i32 = 0x10;
const PUNCH_HOLE: i32 = 0x2;
const KEEP_SIZE: i32 = 0x1;

/// Random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// A file, and what it may hold after a power cut. A page consists of one number, repeated.
struct Model {
    name: String,
    now: Vec<u64>,
    /// Numbers that each page may have.
    may: Vec<BTreeSet<u64>>,
    is_synced: bool,
    steps: Vec<String>,
}

impl Model {
    fn set(&mut self, pages: std::ops::Range<u64>, number: u64) {
        for page in pages.start as usize..pages.end as usize {
            self.now[page] = number;
            self.may[page].insert(number);
        }
    }

    fn synced(&mut self) {
        self.is_synced = true;
        self.may = self.now.iter().map(|now| BTreeSet::from([*now])).collect();
    }

    fn check(&self, mount: &Mount, case: u64) {
        let Ok(attr) = mount.fs().lookup(ROOT, self.name.as_bytes()) else {
            assert!(!self.is_synced, "case {case}: {} is gone", self.name);
            return;
        };
        let mut bytes = mount.read(&mount.fs().open_file(attr.ino).unwrap());
        bytes.resize((PAGES * PAGE) as usize, 0);
        for (page, bytes) in bytes.chunks(PAGE as usize).enumerate() {
            for number in bytes.chunks(8) {
                let number = u64::from_le_bytes(number.try_into().unwrap());
                assert!(
                    self.may[page].contains(&number),
                    "case {case}: page {page} of {} has {number:x} and may have {:x?}: {:#?}",
                    self.name,
                    self.may[page],
                    self.steps
                );
            }
        }
    }
}

/// One thread.
struct Worker<'a> {
    mount: &'a Mount,
    thread: u64,
    random: Random,
    /// The last number that was written.
    number: u64,
    /// Steps that the threads do until the power is cut.
    left: &'a AtomicU64,
    is_cut: &'a AtomicBool,
}

impl Worker<'_> {
    /// Makes files until the power is cut. Returns those that were not removed.
    fn run(mut self) -> Vec<Model> {
        let mut models = Vec::new();
        for number in 0.. {
            let name = format!("{}-{number}", self.thread);
            let fs = self.mount.fs();
            let Ok(attr) = fs.mknod(ROOT, name.as_bytes(), Kind::File, 0o644, 0, CALLER) else {
                break;
            };
            let Ok(file) = fs.open_file(attr.ino) else {
                break;
            };
            let mut model = Model {
                name,
                now: vec![0; PAGES as usize],
                may: vec![BTreeSet::from([0]); PAGES as usize],
                is_synced: false,
                steps: Vec::new(),
            };
            let steps = 5 + self.random.below(60);
            let ended = (0..steps).try_for_each(|_| self.step(&file, &mut model));
            let is_cut = ended.is_err() || self.is_cut.load(Ordering::Acquire);
            if is_cut || self.random.below(6) == 0 {
                models.push(model);
            } else {
                // Its blocks go to other files.
                let _ = fs.unlink(ROOT, model.name.as_bytes());
                fs.forget(attr.ino, 1);
            }
            fs.close_file(&file);
            if is_cut {
                break;
            }
        }
        models
    }

    /// Fails when the power is cut.
    fn step(&mut self, file: &Arc<File>, model: &mut Model) -> Result<()> {
        let fs = self.mount.fs();
        // Many steps meet on the first pages.
        let among = [3, PAGES][self.random.below(2) as usize];
        let first = self.random.below(among);
        let pages = first..(first + 1 + self.random.below(6)).min(PAGES);
        let step = self.random.below(16);
        model.steps.push(format!("step {step} of pages {pages:?}"));
        match step {
            0..=5 => {
                self.number += 1;
                model.set(pages.clone(), self.number);
                let bytes = self.number.to_le_bytes().repeat(512);
                let bytes = bytes.repeat((pages.end - pages.start) as usize);
                self.mount.try_write(file, first * PAGE, &bytes)?;
            }
            6..=12 => {
                self.sync(file, step.is_multiple_of(2), step < 11)?;
                model.synced();
            }
            13 => {
                model.set(first..PAGES, 0);
                let set = SetAttr {
                    size: Some(first * PAGE),
                    ..SetAttr::default()
                };
                fs.setattr(file.ino(), set, CALLER)?;
            }
            14 => {
                model.set(pages.clone(), 0);
                let mode = [ZERO_RANGE, PUNCH_HOLE][self.random.below(2) as usize];
                let len = (pages.end - pages.start) * PAGE;
                fs.fallocate(file, mode | KEEP_SIZE, first * PAGE, len)?;
            }
            // May find a slice full.
            _ => drop(fs.move_to(file.ino(), self.random.below(2) as u16)),
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.mount.device.cut_power();
            self.is_cut.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn sync(&self, file: &Arc<File>, datasync: bool, may_block: bool) -> Result<()> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        match may_block {
            true => self.mount.fs().fsync_blocking(file, datasync, done),
            false => self.mount.fs().fsync(file, datasync, done),
        }
        receiver.recv().unwrap()
    }
}

fn run_case(case: u64) {
    // The volume is small, so that blocks soon have other owners.
    let mut mount = match case % 2 {
        0 => Mount::new(24 << 20),
        _ => Mount::busy(24 << 20),
    };
    // Lets the threads meet at more points.
    mount.device.set_plan(FaultPlan {
        latency_max: (!case.is_multiple_of(3)).then(|| Duration::from_micros(200 << (case % 4))),
        seed: case,
        ..FaultPlan::default()
    });
    let left = AtomicU64::new(200 + case.wrapping_mul(7919) % 1200);
    let is_cut = AtomicBool::new(false);
    let models: Vec<Model> = std::thread::scope(|scope| {
        let start = |thread: u64| {
            let worker = Worker {
                mount: &mount,
                thread,
                random: Random((case << 8 | thread).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
                number: thread << 48,
                left: &left,
                is_cut: &is_cut,
            };
            scope.spawn(|| worker.run())
        };
        let threads: Vec<_> = (1..=THREADS).map(start).collect();
        while !is_cut.load(Ordering::Acquire) && threads.iter().any(|thread| !thread.is_finished())
        {
            let _ = mount.fs().checkpoint();
        }
        let models = threads.into_iter().map(|thread| thread.join().unwrap());
        models.flatten().collect()
    });
    assert!(is_cut.into_inner(), "case {case}: a step has failed");
    mount.power_cut(case);
    models.iter().for_each(|model| model.check(&mount, case));
    mount.down();
}

#[test]
fn after_a_power_cut_each_file_has_what_its_thread_has_synced() {
    let number = |name, default| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let first = number("JERICHO_CRASH_SEED", 1);
    let cases = number("JERICHO_CRASH_CASES", CASES);
    (first..first + cases).for_each(run_case);
}
