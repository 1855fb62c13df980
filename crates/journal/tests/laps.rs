//! Appends over many laps, compared with a model in memory.
#![forbid(unsafe_code)]

mod support;

use std::collections::VecDeque;
use std::sync::Arc;

use jericho_journal::{AppendClass, AppendError, Journal, Position};
use jericho_sim::Random;
use support::{
    Calls, ProcessDevice, SLICE, VOLUME, area, create, device, payload, recover, reopen,
};

const ORDINARY: AppendClass = AppendClass::Ordinary;
const CHECKPOINT: AppendClass = AppendClass::Checkpoint;

/// A journal beside a list of its batches after the checkpoint.
struct Compared {
    blocks: u64,
    device: Arc<jericho_sim::SimDevice>,
    journal: Journal,
    checkpoint: Position,
    batches: VecDeque<(Vec<u8>, Position)>,
    appended: u64,
}

impl Compared {
    fn new(blocks: u64) -> Compared {
        let device = device(blocks);
        let journal = create(&device, blocks);
        Compared {
            blocks,
            device,
            checkpoint: journal.end(),
            journal,
            batches: VecDeque::new(),
            appended: 0,
        }
    }

    /// Appends a batch. Returns whether there was room.
    fn append(&mut self, bytes: usize, class: AppendClass) -> bool {
        let payload = payload(self.appended, bytes);
        let room = self.journal.room_bytes(class);
        match self.journal.append(&payload, class) {
            Ok(end) => {
                assert!(bytes as u64 <= room || bytes == 0);
                assert_eq!(end, self.journal.end());
                self.appended += 1;
                self.batches.push_back((payload, end));
                true
            }
            Err(AppendError::Full { .. } | AppendError::TooLong { .. }) => {
                assert!(bytes as u64 > room || room == 0, "{bytes} of {room}");
                false
            }
            Err(AppendError::Io(error)) => panic!("{error}"),
        }
    }

    /// Moves the checkpoint over some batches.
    fn checkpoint(&mut self, batches: usize) {
        for (_, end) in self.batches.drain(..batches) {
            self.checkpoint = end;
        }
        self.journal.set_tail(self.checkpoint);
        if self.batches.is_empty() {
            assert_eq!(self.journal.used_bytes(), 0);
        }
    }

    fn check(&self) {
        let copy = Arc::new(self.device.crash(0));
        let recovered = recover(copy, self.blocks, self.checkpoint).expect("a recovery");
        assert!(recovered.error.is_none(), "{:?}", recovered.error);
        let expected = self.batches.iter().map(|(payload, _)| payload);
        assert!(recovered.batches.iter().eq(expected));
        assert_eq!(
            recovered.end,
            self.batches.back().map_or(self.checkpoint, |b| b.1)
        );
    }

    fn restart(&mut self) {
        self.journal = reopen(&self.device, self.blocks, self.checkpoint);
        // The store has taken all batches.
        self.batches.clear();
        self.checkpoint = self.journal.end();
    }
}

#[test]
fn batches_come_back_in_order_over_many_laps() {
    for seed in 0..30 {
        let mut random = Random::of(seed, &[1]);
        let blocks = [18, 19, 30, 64, 150][seed as usize % 5];
        let mut compared = Compared::new(blocks);
        let first = compared.journal.end();
        for step in 0..400 {
            let room = compared.journal.room_bytes(ORDINARY);
            let bytes = match random.below(8) {
                0 => random.below(room + 3000),
                1 => room,
                2 => room + 1,
                3 => random.below(20_000),
                _ => random.below(4200),
            };
            let had_room = compared.append(bytes as usize, ORDINARY);
            let count = compared.batches.len();
            match random.below(12) {
                0 => compared.checkpoint(random.below(count as u64 + 1) as usize),
                1 if step % 7 == 0 => compared.restart(),
                _ if !had_room => compared.checkpoint(count.div_ceil(2)),
                _ => {}
            }
            if step % 15 == 0 {
                compared.check();
            }
        }
        compared.check();
        let blocks_written = 400 * 2;
        assert!(blocks_written / blocks >= 5, "several laps");
        assert!(compared.journal.end().seq > first.seq + 300);
    }
}

#[test]
fn a_batch_of_several_mebibytes_comes_back_whole() {
    let mut compared = Compared::new(2048);
    for bytes in [3 << 20, 100, 5 << 20, (1 << 20) - 96, (1 << 20) - 95] {
        if !compared.append(bytes, ORDINARY) {
            compared.checkpoint(compared.batches.len());
            assert!(compared.append(bytes, ORDINARY));
        }
        compared.check();
    }
}

#[test]
fn an_append_of_one_segment_is_one_durable_write() {
    let process = Arc::new(ProcessDevice::new(device(64), u64::MAX));
    let mut journal = Journal::create(process.clone(), area(64), VOLUME, SLICE).expect("a journal");
    let mut calls_of = |bytes: usize| {
        let before = process.calls();
        journal.append(&payload(1, bytes), ORDINARY).expect("room");
        let after = process.calls();
        Calls {
            reads: after.reads - before.reads,
            writes: after.writes - before.writes,
            durable_writes: after.durable_writes - before.durable_writes,
            flushes: after.flushes - before.flushes,
        }
    };
    let one = Calls {
        reads: 0,
        writes: 0,
        durable_writes: 1,
        flushes: 0,
    };
    for bytes in [0, 1, 4000, 4001, 15 * 4096 - 96] {
        assert_eq!(calls_of(bytes), one, "{bytes} bytes");
    }
    let three = Calls {
        reads: 0,
        writes: 3,
        durable_writes: 0,
        flushes: 1,
    };
    assert_eq!(calls_of(2 * (15 * 4096 - 96) + 1), three);
}

#[test]
fn a_full_journal_can_still_be_emptied() {
    for blocks in [40, 64, 150] {
        let mut compared = Compared::new(blocks);
        for round in 0..20 {
            while compared.append(1 + 700 * round, ORDINARY) {}
            let room = compared.journal.room_bytes(CHECKPOINT);
            let reserve = (blocks - 2) / 8;
            assert!(
                room >= reserve.div_ceil(2) * 4096 - 96,
                "{room} bytes for a checkpoint"
            );
            assert!(compared.append(room as usize, CHECKPOINT));
            compared.check();
            compared.checkpoint(compared.batches.len());
        }
    }
}

#[test]
fn a_refused_append_changes_nothing() {
    let mut compared = Compared::new(40);
    while compared.append(4000, ORDINARY) {}
    let (end, used) = (compared.journal.end(), compared.journal.used_bytes());
    let digest = compared.device.digest();
    assert!(!compared.append(1, ORDINARY));
    assert!(!compared.append(64 << 20, CHECKPOINT));
    assert_eq!(
        (end, used),
        (compared.journal.end(), compared.journal.used_bytes())
    );
    assert_eq!(digest, compared.device.digest());
    compared.check();
}

#[test]
fn a_whole_ring_of_segments_comes_back() {
    let mut compared = Compared::new(18);
    compared.append(4000, ORDINARY);
    compared.checkpoint(1);
    while compared.append(4000, CHECKPOINT) {}
    assert_eq!(compared.journal.used_bytes(), compared.journal.ring_bytes());
    compared.check();
    compared.checkpoint(1);
    assert_eq!(
        compared.journal.used_bytes(),
        compared.journal.ring_bytes() - 4096
    );
    assert!(compared.append(4000, CHECKPOINT));
    compared.check();
}

#[test]
fn a_closed_journal_is_recovered_from_its_headers() {
    let (device, blocks) = (device(64), 64);
    let mut journal = create(&device, blocks);
    let mut checkpoint = journal.end();
    for round in 0..3 {
        checkpoint = journal
            .append(&payload(round, 9000), ORDINARY)
            .expect("room");
        journal.close().expect("a close");
        let recovered = recover(device.clone(), blocks, checkpoint).expect("a recovery");
        assert_eq!((recovered.batches.len(), recovered.bytes_read), (0, 0));
        assert_eq!(recovered.end, checkpoint);
        journal = reopen(&device, blocks, checkpoint);
    }
    let end = journal.append(b"more", ORDINARY).expect("room");
    let recovered = recover(device, blocks, checkpoint).expect("a recovery");
    assert_eq!(recovered.batches, [b"more"]);
    assert_eq!(recovered.end, end);
}

#[test]
#[should_panic(expected = "is not from")]
fn a_tail_beyond_the_end_is_a_defect_of_the_caller() {
    let mut journal = create(&device(40), 40);
    let end = journal.end();
    journal.set_tail(Position {
        seq: end.seq + 1,
        ..end
    });
}
