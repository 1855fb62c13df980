//! Damaged and hostile journals: what was durable and cannot be read is reported, and nothing panics or runs without end.
#![forbid(unsafe_code)]

mod support;

use std::sync::Arc;

use jericho_format::journal::{
    AREA_BLOCKS, JournalHeader, SEGMENT_CONTINUES, SegmentHeader, segment_kind,
};
use jericho_journal::{
    AppendClass, BeginError, CreateError, Evidence, Found, Journal, JournalArea, JournalVolume,
    Lost, Position, RecoverError,
};
use jericho_sim::{Operation, Random, SimDevice};
use support::{
    PAGE, Recovered, SLICE, VOLUME, area, change, create, device, flip, forge, payload, recover,
    reopen,
};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

const BLOCKS: u64 = 64;
const ORDINARY: AppendClass = AppendClass::Ordinary;

type ChangeHeader = fn(&mut SegmentHeader);

/// A journal with some batches, whose process has ended.
struct Written {
    device: Arc<SimDevice>,
    checkpoint: Position,
    /// The position before each batch.
    begins: Vec<Position>,
    batches: Vec<Vec<u8>>,
}

impl Written {
    fn new(sizes: &[usize]) -> Written {
        let device = device(BLOCKS);
        let mut journal = create(&device, BLOCKS);
        let mut written = Written {
            device,
            checkpoint: journal.end(),
            begins: vec![],
            batches: vec![],
        };
        for (number, bytes) in (0..).zip(sizes) {
            written.begins.push(journal.end());
            written.batches.push(payload(number, *bytes));
            let appended = journal.append(&written.batches[number as usize], ORDINARY);
            appended.expect("room");
        }
        written
    }

    fn recover(&self) -> Recovered {
        let copy = Arc::new(self.device.crash(0));
        recover(copy, BLOCKS, self.checkpoint).expect("a recovery")
    }

    /// Expects damage after some batches, and returns what was found.
    fn damage_after(&self, batches: usize) -> (u64, u64, Found, Evidence) {
        let recovered = self.recover();
        assert_eq!(recovered.batches, self.batches[..batches]);
        match recovered.error {
            Some(RecoverError::Damage(damage)) => {
                assert_eq!(&*damage.device, "disk");
                (
                    damage.block,
                    damage.expected_seq,
                    damage.found,
                    damage.evidence,
                )
            }
            other => panic!("{other:?}"),
        }
    }

    /// Expects damage, and returns what is lost with it.
    fn lost(&self) -> Lost {
        match self.recover().error {
            Some(RecoverError::Damage(damage)) => damage.lost,
            other => panic!("{other:?}"),
        }
    }

    /// Expects that the journal ends after some batches.
    fn ends_after(&self, batches: usize) {
        let recovered = self.recover();
        assert!(recovered.error.is_none(), "{:?}", recovered.error);
        assert_eq!(recovered.batches, self.batches[..batches]);
    }
}

#[test]
fn a_flipped_bit_is_damage_in_the_middle_and_a_torn_end_in_the_last_batch() {
    let sizes = [30, 5000, 4000, 0, 9000, 10];
    for (number, size) in sizes.iter().enumerate() {
        for byte in (0..96 + size).step_by(53) {
            let written = Written::new(&sizes);
            let begin = written.begins[number];
            flip(
                &written.device,
                begin.block + (byte / PAGE) as u32,
                byte % PAGE,
            );
            if number + 1 == sizes.len() {
                written.ends_after(number);
                continue;
            }
            let (block, seq, _, evidence) = written.damage_after(number);
            assert_eq!((block, seq), (u64::from(begin.block) + 5, begin.seq));
            let later = matches!(
                evidence,
                Evidence::Later {
                    is_before_tail: false,
                    ..
                }
            );
            assert!(later, "byte {byte} of batch {number}: {evidence:?}");
            let lost = Lost {
                first_seq: begin.seq,
                last_seq: sizes.len() as u64,
                batches: (sizes.len() - number) as u64,
            };
            assert_eq!(written.lost(), lost, "byte {byte} of batch {number}");
        }
        // Padding has no meaning.
        let written = Written::new(&sizes);
        let end = 96 + size;
        if end % PAGE != 0 {
            flip(
                &written.device,
                written.begins[number].block + (end / PAGE) as u32,
                end % PAGE,
            );
        }
        written.ends_after(sizes.len());
    }
}

#[test]
fn a_lost_or_replaced_block_in_the_middle_is_damage() {
    for number in 0..4 {
        let written = Written::new(&[10, 20, 30, 40, 50]);
        change(&written.device, written.begins[number].block, |block| {
            block.fill(0)
        });
        let (_, _, found, _) = written.damage_after(number);
        assert_eq!(found, Found::Nothing);
    }
    // The next segment is in the place of this one.
    let written = Written::new(&[10, 20, 30]);
    let mut next = vec![0; PAGE];
    change(&written.device, written.begins[2].block, |block| {
        next.copy_from_slice(block)
    });
    change(&written.device, written.begins[1].block, |block| {
        block.copy_from_slice(&next)
    });
    let (_, _, found, evidence) = written.damage_after(1);
    assert!(matches!(found, Found::Other { seq: 3, .. }), "{found:?}");
    assert!(
        matches!(evidence, Evidence::Later { seq: 3, .. }),
        "{evidence:?}"
    );
}

#[test]
fn damage_in_any_segment_of_a_long_batch_keeps_the_batches_before_it() {
    // Three segments: in this ring a segment has at most 15 blocks.
    let segment = 15 * PAGE - 96;
    for index in 0..3 {
        let written = Written::new(&[100, 2 * segment + 500, 7]);
        flip(&written.device, written.begins[1].block + 15 * index, 300);
        let (_, seq, found, _) = written.damage_after(1);
        assert_eq!((seq, found), (2 + u64::from(index), Found::Checksum));
    }
    // If any segment of the last batch is lost, the batch is a torn end.
    for index in 0..3 {
        let written = Written::new(&[100, 2 * segment + 500]);
        flip(&written.device, written.begins[1].block + 15 * index, 300);
        written.ends_after(1);
    }
}

#[test]
fn a_damaged_journal_is_not_continued_unless_the_caller_says_so() {
    let written = Written::new(&[10, 20, 30]);
    flip(&written.device, written.begins[1].block, 100);
    let recovery = || {
        let device = written.device.clone();
        let mut recovery =
            Journal::recover(device, area(BLOCKS), VOLUME, SLICE, written.checkpoint)
                .expect("a recovery");
        let end = recovery
            .next_batch()
            .expect("a batch")
            .expect("a batch")
            .end;
        for _ in 0..3 {
            let damage = recovery.next_batch().unwrap_err();
            let text = damage.to_string();
            assert!(matches!(damage, RecoverError::Damage(_)), "{damage:?}");
            assert_eq!(
                text,
                "the journal on disk is damaged: block 8 should begin segment 2, but its checksum is wrong; \
                 segment 3 at block 9 was written after it; segments 2 to 3 are lost, with at least 2 batches of changes"
            );
        }
        assert_eq!(recovery.end(), end);
        recovery
    };
    let end = recovery().end();
    let refused = recovery().begin_incarnation(end).unwrap_err();
    assert!(
        matches!(refused, BeginError::Recover(RecoverError::Damage(_))),
        "{refused:?}"
    );
    let begun = recovery().begin_incarnation_after_damage(end);
    let mut journal = begun.expect("an incarnation");
    journal.append(b"new", ORDINARY).expect("room");
    let recovered = recover(written.device.clone(), BLOCKS, end).expect("a recovery");
    assert_eq!(recovered.batches, [b"new"]);
    assert!(recovered.error.is_none());
}

#[test]
fn an_incarnation_begins_only_at_the_end_and_at_the_position_of_the_store() {
    let written = Written::new(&[10, 20]);
    let recovery = || {
        let device = written.device.clone();
        Journal::recover(device, area(BLOCKS), VOLUME, SLICE, written.checkpoint)
            .expect("a recovery")
    };
    let mut early = recovery();
    let first = early.next_batch().expect("a batch").expect("a batch").end;
    assert!(matches!(
        early.begin_incarnation(first),
        Err(BeginError::NotAtEnd)
    ));
    let mut late = recovery();
    while late.next_batch().expect("a batch").is_some() {}
    let refused = late.begin_incarnation(first).unwrap_err();
    assert!(
        matches!(refused, BeginError::Checkpoint { .. }),
        "{refused:?}"
    );
    written.ends_after(2);
}

#[test]
fn the_loss_of_either_header_copy_loses_nothing() {
    for copy in 0..2 {
        for incarnations in 0..3 {
            let device = device(BLOCKS);
            let mut journal = create(&device, BLOCKS);
            let mut checkpoint = journal.end();
            for _ in 0..incarnations {
                checkpoint = journal.append(b"old", ORDINARY).expect("room");
                journal = reopen(&device, BLOCKS, checkpoint);
            }
            journal.append(b"new", ORDINARY).expect("room");
            flip(&device, copy, 1000);
            let recovered = recover(device.clone(), BLOCKS, checkpoint).expect("a recovery");
            assert_eq!(recovered.batches, [b"new"]);
            // The next header is written over the lost copy first, so that a torn write leaves the other one.
            let device = Arc::new(device.crash(0));
            reopen(&device, BLOCKS, checkpoint);
            let log = device.log();
            let write = log
                .iter()
                .find(|entry| entry.operation != Operation::Read && entry.length_bytes > 0);
            let block = write.expect("a header is written").offset_bytes / PAGE as u64;
            assert_eq!(block, 5 + u64::from(copy));
        }
    }
    let device = device(BLOCKS);
    let checkpoint = create(&device, BLOCKS).end();
    (0..2).for_each(|copy| flip(&device, copy, 1000));
    let lost = recover(device, BLOCKS, checkpoint).unwrap_err();
    assert!(
        matches!(lost, RecoverError::NoHeader { block: 5, .. }),
        "{lost}"
    );
}

#[test]
fn segments_of_a_lost_header_are_damage() {
    let device = device(BLOCKS);
    let mut journal = create(&device, BLOCKS);
    let checkpoint = journal.append(b"old", ORDINARY).expect("room");
    let mut headers = vec![];
    (0..2).for_each(|copy| change(&device, copy, |block| headers.push(block.to_vec())));
    let mut journal = reopen(&device, BLOCKS, checkpoint);
    let end = journal.append(b"new", ORDINARY).expect("room");
    (0..2).for_each(|copy| {
        change(&device, copy, |block| {
            block.copy_from_slice(&headers[copy as usize])
        })
    });
    let recovered = recover(device.clone(), BLOCKS, checkpoint).expect("a recovery");
    let Some(RecoverError::Damage(damage)) = recovered.error else {
        panic!("{recovered:?}");
    };
    assert!(
        matches!(damage.evidence, Evidence::Newer { incarnation: 2, .. }),
        "{damage}"
    );
    // With a later checkpoint the header itself is too old.
    let refused = recover(device.clone(), BLOCKS, end).unwrap_err();
    assert!(
        matches!(refused, RecoverError::Checkpoint { .. }),
        "{refused}"
    );
    // A repair begins a greater incarnation than that of the segments it gives up.
    let opened = Journal::recover(device.clone(), area(BLOCKS), VOLUME, SLICE, checkpoint);
    let mut recovery = opened.expect("a recovery");
    assert!(recovery.next_batch().is_err());
    let begun = recovery.begin_incarnation_after_damage(checkpoint);
    let begin = begun.expect("an incarnation").end();
    assert_eq!(begin.incarnation, 3);
    let recovered = recover(device, BLOCKS, begin).expect("a recovery");
    assert!(recovered.batches.is_empty() && recovered.error.is_none());
}

#[test]
fn a_store_that_was_left_behind_is_refused() {
    let device = device(BLOCKS);
    let mut journal = create(&device, BLOCKS);
    let old = journal.append(b"1", ORDINARY).expect("room");
    let end = journal.append(b"2", ORDINARY).expect("room");
    reopen(&device, BLOCKS, old);
    let refused = recover(device.clone(), BLOCKS, old).unwrap_err();
    assert!(
        matches!(refused, RecoverError::Checkpoint { .. }),
        "{refused}"
    );
    let wrong = [
        Position { crc: 1, ..end },
        Position { block: 9, ..end },
        Position { seq: 9, ..end },
        Position {
            incarnation: 3,
            ..end
        },
        Position {
            incarnation: 2,
            seq: 9,
            block: 1,
            crc: 0,
        },
        Position {
            incarnation: 2,
            seq: 9,
            block: 64,
            crc: 0,
        },
        Position {
            incarnation: 2,
            seq: u64::MAX,
            block: 9,
            crc: 0,
        },
    ];
    for wrong in wrong {
        let refused = recover(device.clone(), BLOCKS, wrong).unwrap_err();
        assert!(
            matches!(refused, RecoverError::Checkpoint { .. }),
            "{wrong:?}: {refused}"
        );
    }
    assert!(recover(device, BLOCKS, end).is_ok());
}

#[test]
fn a_tail_that_moved_before_the_checkpoint_is_reported() {
    let device = device(18);
    let mut journal = create(&device, 18);
    let checkpoint = journal.end();
    for number in 0..20 {
        journal
            .append(&payload(number, 4000), ORDINARY)
            .expect("room");
        journal.set_tail(journal.end());
    }
    let recovered = recover(device, 18, checkpoint).expect("a recovery");
    let Some(RecoverError::Damage(damage)) = recovered.error else {
        panic!("{recovered:?}");
    };
    let older = matches!(
        damage.evidence,
        Evidence::Later {
            is_before_tail: true,
            ..
        }
    );
    assert!(older, "{damage}");
}

#[test]
fn another_volume_or_slice_or_version_or_area_is_refused() {
    let device = device(BLOCKS);
    let checkpoint = create(&device, BLOCKS).end();
    let open = |volume, slice, blocks| {
        let opened = Journal::recover(device.clone(), area(blocks), volume, slice, checkpoint);
        opened.map(|_| ()).unwrap_err().to_string()
    };
    let belongs = |what| format!("the journal at block 5 of disk belongs to another {what}");
    let other = JournalVolume {
        uuid: [1; 16],
        ..VOLUME
    };
    assert_eq!(open(other, SLICE, BLOCKS), belongs("volume"));
    assert_eq!(open(VOLUME, SLICE + 1, BLOCKS), belongs("slice"));
    assert_eq!(open(VOLUME, SLICE, BLOCKS - 1), belongs("area"));
    change(&device, 1, |block| {
        let mut header = JournalHeader::decode(block).expect("a header");
        header.version = U32::new(2);
        block.copy_from_slice(&header.encode());
    });
    let refused = recover(device, BLOCKS, checkpoint).unwrap_err();
    assert!(
        matches!(refused, RecoverError::Newer { version: 2, .. }),
        "{refused}"
    );
}

#[test]
fn an_area_that_cannot_be_on_its_device_is_refused() {
    let device = device(BLOCKS);
    let checkpoint = create(&device, BLOCKS).end();
    let areas = [
        (0, AREA_BLOCKS.start() - 1),
        (10, BLOCKS),
        (u64::MAX, BLOCKS),
        (0, u64::MAX),
        (0, AREA_BLOCKS.end() + 1),
    ];
    for (first_block, blocks) in areas {
        let area = JournalArea {
            first_block,
            blocks,
        };
        let created = Journal::create(device.clone(), area, VOLUME, SLICE).unwrap_err();
        assert!(matches!(created, CreateError::Area(_)), "{created}");
        let opened = Journal::recover(device.clone(), area, VOLUME, SLICE, checkpoint).unwrap_err();
        assert!(matches!(opened, RecoverError::Area(_)), "{opened}");
    }
}

#[test]
fn segments_of_a_torn_batch_are_not_taken_after_recovery() {
    // Three segments of 15 blocks; the power cut loses the first one.
    let segment = 15 * PAGE - 96;
    let long = payload(1, 2 * segment + 100);
    let device = device(BLOCKS);
    let mut journal = create(&device, BLOCKS);
    let checkpoint = journal.end();
    journal.append(&long, ORDINARY).expect("room");
    flip(&device, checkpoint.block, 200);
    let recovered = recover(device.clone(), BLOCKS, checkpoint).expect("a recovery");
    assert!(recovered.error.is_none() && recovered.batches.is_empty());
    let mut journal = reopen(&device, BLOCKS, checkpoint);
    let checkpoint = journal.end();
    // Its segment has the number and the size of the lost one. The old second segment is behind it.
    let new = payload(2, segment);
    journal.append(&new, ORDINARY).expect("room");
    let recovered = recover(device.clone(), BLOCKS, checkpoint).expect("a recovery");
    assert!(recovered.error.is_none(), "{:?}", recovered.error);
    assert_eq!(recovered.batches, [new.as_slice()]);
}

#[test]
fn a_segment_of_another_chain_is_not_taken() {
    let written = Written::new(&[10, 20, 30]);
    forge(&written.device, written.begins[1].block, |header| {
        header.prev_crc = U32::new(header.prev_crc.get() ^ 1);
    });
    let (_, _, found, evidence) = written.damage_after(1);
    assert_eq!((found, evidence), (Found::Chain, Evidence::Whole));
    // The same holds for the last segment, and for the first one after the checkpoint.
    let written = Written::new(&[10, 20, 30]);
    forge(&written.device, written.begins[2].block, |header| {
        header.prev_crc = U32::new(0)
    });
    written.damage_after(2);
    let written = Written::new(&[10, 20, 30]);
    forge(&written.device, written.begins[0].block, |header| {
        header.prev_crc = U32::new(7)
    });
    written.damage_after(0);
}

#[test]
fn bytes_that_look_like_a_segment_but_lack_the_secret_are_neither_taken_nor_evidence() {
    let written = Written::new(&[10, 20, 30]);
    // As the contents of a file would, whose writer knows everything about the journal but the secret.
    forge(&written.device, written.begins[2].block, |header| {
        header.secret = VOLUME.uuid[..8].try_into().unwrap();
    });
    let recovered = written.recover();
    assert_eq!(recovered.batches, written.batches[..2]);
    assert!(recovered.error.is_none(), "a torn end");
}

#[test]
fn fields_that_contradict_each_other_are_refused_even_with_a_right_checksum() {
    let changes: [(&str, ChangeHeader); 13] = [
        ("no blocks", |h| h.blocks = U32::new(0)),
        ("too many blocks", |h| h.blocks = U32::new(257)),
        ("more blocks than needed", |h| h.blocks = U32::new(2)),
        ("a payload beyond its blocks", |h| {
            h.payload_bytes = U32::new(4001)
        }),
        ("a payload without end", |h| {
            h.payload_bytes = U32::new(u32::MAX)
        }),
        ("pages", |h| h.pages = U32::new(u32::MAX)),
        ("requirements", |h| h.requires = U32::new(1)),
        ("an unknown kind", |h| h.kind = 9),
        ("a pad in the lap", |h| h.kind = segment_kind::PAD),
        ("an index without a batch", |h| h.batch_index = U32::new(1)),
        ("an index of a batch that began before", |h| {
            h.batch_index = U32::new(1);
            h.durable_seq = U64::new(0);
        }),
        ("durable before it was written", |h| {
            h.durable_seq = U64::new(h.seq.get())
        }),
        ("a tail beyond it", |h| {
            h.tail_seq = U64::new(h.seq.get() + 1)
        }),
    ];
    for (what, change) in changes {
        let written = Written::new(&[10, 20, 30]);
        forge(&written.device, written.begins[1].block, change);
        let recovered = written.recover();
        assert_eq!(recovered.batches, written.batches[..1], "{what}");
        assert!(
            matches!(recovered.error, Some(RecoverError::Damage(_))),
            "{what}"
        );
    }
    let written = Written::new(&[10, 20, 30]);
    forge(&written.device, written.begins[1].block, |h| {
        h.version = U16::new(2)
    });
    assert_eq!(written.damage_after(1).2, Found::Version(2));
    let written = Written::new(&[10, 20, 30]);
    forge(&written.device, written.begins[1].block, |h| {
        h.slice = U16::new(0)
    });
    assert_eq!(written.damage_after(1).2, Found::Foreign);
}

#[test]
fn a_gap_of_three_segments_is_damage_even_if_nothing_says_that_they_were_durable() {
    for (lost, is_damage) in [(1, false), (2, false), (3, true)] {
        let written = Written::new(&[10, 20, 30, 40, 50, 60]);
        for number in 0..6 {
            let block = written.begins[number].block;
            match (2..2 + lost).contains(&number) {
                true => change(&written.device, block, |block| block.fill(0)),
                // This changes the checksum and breaks the chain here, too. Recovery needs the chain of the first two segments
                // only.
                false if number >= 2 => {
                    forge(&written.device, block, |header| {
                        header.durable_seq = U64::new(2)
                    });
                }
                false => {}
            }
        }
        // One segment behind the gap only.
        for number in 3 + lost..6 {
            change(&written.device, written.begins[number].block, |block| {
                block.fill(0)
            });
        }
        match is_damage {
            true => drop(written.damage_after(2)),
            false => written.ends_after(2),
        }
    }
}

/// Fills a ring of 16 blocks with segments of one block, whose chain continues over the whole ring.
fn whole_ring(change: ChangeHeader) -> (Arc<SimDevice>, Position) {
    let device = device(18);
    let mut journal = create(&device, 18);
    let checkpoint = journal.end();
    for number in 0..16 {
        let class = AppendClass::Checkpoint;
        journal.append(&payload(number, 4000), class).expect("room");
    }
    let mut crc = checkpoint.crc;
    for block in 2..18 {
        forge(&device, block, |header| {
            header.prev_crc = U32::new(crc);
            change(header);
        });
        support::change(&device, block, |bytes| {
            crc = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        });
    }
    (device, checkpoint)
}

#[test]
fn a_chain_around_the_whole_ring_ends() {
    let (device, checkpoint) = whole_ring(|_| {});
    let recovered = recover(device, 18, checkpoint).expect("a recovery");
    assert_eq!(
        (recovered.batches.len(), recovered.bytes_read),
        (16, 16 * 4096)
    );
    assert!(recovered.error.is_none());
    // A batch that never ends.
    let (device, checkpoint) = whole_ring(|header| {
        header.flags = U16::new(SEGMENT_CONTINUES);
        header.batch_index = U32::new(header.seq.get() as u32 - 1);
        header.durable_seq = U64::new(0);
    });
    let recovered = recover(device, 18, checkpoint).expect("a recovery");
    assert_eq!(
        (recovered.batches.len(), recovered.bytes_read),
        (0, 16 * 4096)
    );
}

#[test]
fn any_bytes_in_a_segment_neither_panic_nor_run_without_end() {
    let mut outcomes = [0; 2];
    for seed in 0..3000 {
        let mut random = Random::of(seed, &[5]);
        let (device, checkpoint) = match seed % 2 {
            0 => whole_ring(|_| {}),
            _ => {
                let written = Written::new(&[10, 5000, 70_000, 20, 4000]);
                (written.device, written.checkpoint)
            }
        };
        let blocks = if seed % 2 == 0 { 18 } else { BLOCKS };
        for _ in 0..1 + random.below(3) {
            let block = 2 + random.below(if seed % 2 == 0 { 16 } else { 3 }) as u32;
            let (at, word) = (8 * random.below(12) as usize, random.next_u64());
            let word = [0, 1, 2, u64::MAX, word, word >> 32, word >> 56][random.below(7) as usize];
            let bytes = 1 << random.below(4);
            change(&device, block, |block| {
                block[at..at + bytes].copy_from_slice(&word.to_le_bytes()[..bytes]);
            });
            let mut is_segment = false;
            change(&device, block, |block| {
                is_segment = block.starts_with(b"JSEG")
            });
            if is_segment {
                forge(&device, block, |_| {});
            }
        }
        let recovered = recover(device, blocks, checkpoint).expect("a recovery");
        outcomes[usize::from(recovered.error.is_some())] += 1;
    }
    assert!(outcomes.iter().all(|count| *count > 50), "{outcomes:?}");
}
