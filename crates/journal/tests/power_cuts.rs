//! Cuts the power, or ends the process, at each operation of a journal, and again during the recoveries after that.
//!
//! A life is one mount: recover, put all batches into the checkpoint store, begin an incarnation, append, checkpoint. The checkpoint
//! store is in the test's memory: it changes at once, and a power cut does not change it.
#![forbid(unsafe_code)]

mod support;

use std::sync::Arc;

use jericho_journal::{
    AppendClass, AppendError, BeginError, Journal, Position, RecoverError, Recovery,
};
use jericho_sim::{FaultPlan, Random, SimDevice};
use jericho_storage::{Device, IoError};
use support::{ProcessDevice, SLICE, VOLUME, area, create, device, payload, recover};

/// How a life ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The power is cut in this operation.
    Power(u64),
    /// The process dies before this operation. What it wrote stays in the device's cache.
    Process(u64),
    /// It ends by itself.
    Never,
}

#[derive(Clone)]
struct World {
    device: Arc<SimDevice>,
    blocks: u64,
    /// Position of the checkpoint store, and the number of batches in it.
    checkpoint: Position,
    stored: usize,
    /// The batches that every later recovery must return: the acknowledged ones and those that a recovery has returned.
    certain: Vec<Vec<u8>>,
    /// The batch whose append has failed.
    uncertain: Option<Vec<u8>>,
    appended: u64,
}

impl World {
    fn new(blocks: u64) -> World {
        let device = device(blocks);
        let checkpoint = create(&device, blocks).end();
        World {
            device,
            blocks,
            checkpoint,
            stored: 0,
            certain: vec![],
            uncertain: None,
            appended: 0,
        }
    }

    /// Lives one life, with random choices from `seed`. Returns whether it ended by itself. After a power cut, the seed `cut`
    /// decides what the device keeps.
    fn live(&mut self, end: End, seed: u64, cut: u64) -> bool {
        let mut random = Random::of(seed, &[7]);
        let device: Arc<dyn Device> = match end {
            End::Power(nth) => {
                self.device.set_plan(FaultPlan::cut_power_at(nth));
                self.device.clone()
            }
            End::Process(nth) => Arc::new(ProcessDevice::new(self.device.clone(), nth - 1)),
            End::Never => self.device.clone(),
        };
        let lived = self.mount(device, &mut random);
        if matches!(end, End::Power(_)) {
            self.device = Arc::new(self.device.crash(cut));
        }
        lived.is_ok()
    }

    fn mount(&mut self, device: Arc<dyn Device>, random: &mut Random) -> Result<(), IoError> {
        let recovery = Journal::recover(device, area(self.blocks), VOLUME, SLICE, self.checkpoint);
        let mut recovery = io(recovery)?;
        self.take_batches(&mut recovery, random)?;
        let end = recovery.end();
        (self.checkpoint, self.stored) = (end, self.certain.len());
        let mut journal = match recovery.begin_incarnation(end) {
            Ok(journal) => journal,
            Err(BeginError::Io(error)) => return Err(error),
            Err(error) => panic!("{error}"),
        };
        for _ in 0..random.below(40) {
            match random.below(8) {
                0 => {
                    (self.checkpoint, self.stored) = (journal.end(), self.certain.len());
                    if random.coin() {
                        journal.set_tail(self.checkpoint);
                    }
                }
                _ => self.append(&mut journal, random)?,
            }
        }
        if random.below(4) == 0 {
            (self.checkpoint, self.stored) = (journal.end(), self.certain.len());
            if let Err(AppendError::Io(error)) = journal.close() {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes all batches of a recovery, and compares them with those that are certain.
    fn take_batches(
        &mut self,
        recovery: &mut Recovery,
        random: &mut Random,
    ) -> Result<(), IoError> {
        let mut number = self.stored;
        while let Some(batch) = io(recovery.next_batch())? {
            if number == self.certain.len() {
                let uncertain = self
                    .uncertain
                    .take()
                    .expect("no batch that was never appended");
                self.certain.push(uncertain);
            }
            assert!(batch.payload == self.certain[number], "batch {number}");
            number += 1;
            if random.below(4) == 0 {
                (self.checkpoint, self.stored) = (batch.end, number);
            }
        }
        assert_eq!(number, self.certain.len(), "every certain batch");
        // If this recovery has not returned the uncertain batch, no later recovery may return it, even after a second crash.
        self.uncertain = None;
        Ok(())
    }

    fn append(&mut self, journal: &mut Journal, random: &mut Random) -> Result<(), IoError> {
        let bytes = match random.below(6) {
            0 => random.below(60_000),
            1 => random.below(12_000),
            _ => random.below(4200),
        };
        let payload = payload(self.appended, bytes as usize);
        self.appended += 1;
        match journal.append(&payload, AppendClass::Ordinary) {
            Ok(_) => self.certain.push(payload),
            Err(AppendError::Io(error)) => {
                self.uncertain = Some(payload);
                return Err(error);
            }
            Err(AppendError::Full { .. } | AppendError::TooLong { .. }) => {
                (self.checkpoint, self.stored) = (journal.end(), self.certain.len());
                journal.set_tail(self.checkpoint);
            }
        }
        Ok(())
    }
}

/// Expects that only I/O fails: a cut is never taken for damage.
fn io<T>(result: Result<T, RecoverError>) -> Result<T, IoError> {
    match result {
        Ok(value) => Ok(value),
        Err(RecoverError::Io(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

/// Returns the number of seeds of the random lives. A soak run sets more.
fn seeds() -> u64 {
    let seeds = std::env::var("JERICHO_JOURNAL_SEEDS");
    seeds.map_or(1000, |seeds| seeds.parse().expect("a number"))
}

#[test]
fn acknowledged_batches_survive_cuts_in_every_life() {
    let mut ends = [0; 3];
    for seed in 0..seeds() {
        let mut random = Random::of(seed, &[3]);
        let mut world = World::new([18, 21, 40, 90][seed as usize % 4]);
        for _ in 0..6 {
            // Early operations are those of recovery and of the new incarnation.
            let most = [8, 20, 80][random.below(3) as usize];
            let nth = 1 + random.below(most);
            let end = match random.below(8) {
                0..=4 => End::Power(nth),
                5 | 6 => End::Process(nth),
                _ => End::Never,
            };
            let survived = world.live(end, random.next_u64(), random.next_u64());
            let kind = match end {
                _ if survived => 2,
                End::Power(_) => 0,
                _ => 1,
            };
            ends[kind] += 1;
        }
        world.device = Arc::new(world.device.crash(seed));
        assert!(world.live(End::Never, seed, 0), "seed {seed}");
    }
    println!(
        "{} power cuts, {} dead processes, {} whole lives",
        ends[0], ends[1], ends[2]
    );
    assert!(ends[0] > 2 * seeds() && ends[1] > seeds() / 2, "{ends:?}");
}

#[test]
fn acknowledged_batches_survive_a_cut_in_every_operation_and_in_every_operation_of_the_recovery() {
    let mut cases = 0;
    for run in 0..4 {
        // The next life continues with segments of an older incarnation in its ring.
        let mut before = World::new([18, 30][run as usize % 2]);
        before.live(End::Never, run, 0);
        'operations: for nth in 1.. {
            for cut in 0..4 {
                let mut world = copy(&before);
                if world.live(End::Power(nth), run + 100, cut) {
                    break 'operations;
                }
                // Operations of the recovery and of the new incarnation, and the first appends.
                for second in 1..12 {
                    let mut again = copy(&world);
                    again.live(End::Power(second), cut, second);
                    assert!(again.live(End::Never, cut, 0));
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 2000, "{cases}");
}

/// Returns the world with a device of its own, which has lost nothing.
fn copy(world: &World) -> World {
    assert_eq!(world.device.volatile_changes(), 0);
    World {
        device: Arc::new(world.device.crash(0)),
        ..world.clone()
    }
}

#[test]
fn batches_that_a_recovery_returned_survive_a_later_cut() {
    for seed in 0..200 {
        let device = device(30);
        let checkpoint = create(&device, 30).end();
        // Operations of the second mount: flush, headers, ring, two headers written and flushed, then the batches.
        let operations = 1 + 1 + 2 + 4 + 2 * (seed % 4) + 1;
        let process = Arc::new(ProcessDevice::new(device.clone(), operations));
        let mut recovery =
            Journal::recover(process, area(30), VOLUME, SLICE, checkpoint).expect("a recovery");
        while recovery.next_batch().expect("no damage").is_some() {}
        let mut journal = recovery
            .begin_incarnation(checkpoint)
            .expect("an incarnation");
        let checkpoint = journal.end();
        while journal
            .append(&payload(seed, 5000), AppendClass::Ordinary)
            .is_ok()
        {}
        let first = recover(device.clone(), 30, checkpoint).expect("a recovery");
        let cut = Arc::new(device.crash(seed));
        let second = recover(cut, 30, checkpoint).expect("a recovery");
        assert_eq!(first.batches, second.batches, "seed {seed}");
        assert!(
            !first.batches.is_empty(),
            "the last batch was seen before it was durable"
        );
    }
}

#[test]
fn a_cut_in_create_leaves_no_journal_or_an_empty_one() {
    let blocks = 40;
    for nth in 1..20 {
        for seed in 0..20 {
            let device = device(blocks);
            let mut old = create(&device, blocks);
            let checkpoint = old.end();
            old.append(&payload(1, 50_000), AppendClass::Ordinary)
                .expect("room");
            device.set_plan(FaultPlan::cut_power_at(nth));
            let created = Journal::create(device.clone(), area(blocks), VOLUME, SLICE);
            let is_done = created.is_ok();
            let image = Arc::new(device.crash(seed));
            match recover(image, blocks, checkpoint) {
                Err(RecoverError::NoHeader { .. }) if !is_done => {}
                // The zeros of the headers are not durable before the second operation.
                Ok(recovered) if nth <= 2 && recovered.batches.len() == 1 => {}
                Ok(recovered) => {
                    assert!(recovered.batches.is_empty() && recovered.error.is_none());
                }
                Err(error) => panic!("operation {nth}, seed {seed}: {error}"),
            }
        }
    }
}

#[test]
fn a_failed_operation_ends_all_appends_with_its_cause() {
    let mut failed = 0;
    for nth in 1..40 {
        let device = device(40);
        let mut journal = create(&device, 40);
        let checkpoint = journal.end();
        device.set_plan(FaultPlan::fail_nth(None, nth, 28));
        let mut acknowledged = vec![];
        let error = (0..20).find_map(|number| {
            let payload = payload(number, [10, 5000, 40_000][number as usize % 3]);
            match journal.append(&payload, AppendClass::Ordinary) {
                Ok(_) => acknowledged.push(payload),
                Err(AppendError::Io(error)) => return Some(error),
                Err(_) => journal.set_tail(checkpoint),
            }
            None
        });
        let Some(error) = error else { continue };
        failed += 1;
        for _ in 0..3 {
            let again = journal
                .append(b"more", AppendClass::Checkpoint)
                .unwrap_err();
            assert_eq!(
                again.to_string(),
                AppendError::Io(error.clone()).to_string()
            );
        }
        assert!(journal.poisoned().is_some());
        assert!(journal.close().is_err());
        device.set_plan(FaultPlan::default());
        for seed in 0..5 {
            let image = Arc::new(device.crash(seed));
            let recovered = recover(image, 40, checkpoint).expect("a recovery");
            assert!(recovered.error.is_none());
            assert!(recovered.batches.starts_with(&acknowledged));
            assert!(recovered.batches.len() <= acknowledged.len() + 1);
        }
    }
    assert!(failed > 5, "{failed}");
}
