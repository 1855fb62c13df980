//! Damages a journal, with right checksums where the input says so, and recovers it.

use std::sync::{Arc, OnceLock};

use jericho_format::journal::{
    JournalHeader, POSITION_BYTES, SEGMENT_BLOCKS_MAX, SEGMENT_HEADER_BYTES, SegmentHeader,
};
use jericho_journal::{
    AppendClass, BeginError, Journal, JournalArea, JournalVolume, Position, RecoverError,
};
use jericho_storage::{BLOCK_BYTES, Device};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use crate::input::Input;
use crate::volume::Memory;

const BLOCK: usize = BLOCK_BYTES as usize;
const VOLUME: JournalVolume = JournalVolume {
    uuid: [7; 16],
    secret: [8; 8],
};
const AREA: JournalArea = JournalArea {
    first_block: 0,
    blocks: 40,
};
/// Payloads of the batches: one has two segments, and there is a pad.
const SIZES: [usize; 7] = [10, 9000, 4000, 50_000, 0, 30_000, 100];

/// The bytes of an area with two incarnations, and its checkpoint position.
fn sample() -> &'static (Vec<u8>, Position) {
    static SAMPLE: OnceLock<(Vec<u8>, Position)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let device = Arc::new(Memory::default());
        let mut journal = Journal::create(device.clone(), AREA, VOLUME, 0).expect("a journal");
        let mut checkpoint = journal.end();
        for _ in 0..2 {
            let recovery = Journal::recover(device.clone(), AREA, VOLUME, 0, checkpoint);
            let mut recovery = recovery.expect("a recovery");
            while recovery.next_batch().expect("a batch").is_some() {}
            checkpoint = recovery.end();
            journal = recovery
                .begin_incarnation(checkpoint)
                .expect("an incarnation");
            checkpoint = journal.end();
            for (number, bytes) in (0..).zip(SIZES) {
                let appended = journal.append(&vec![number; bytes], AppendClass::Ordinary);
                appended.expect("room");
            }
        }
        let mut bytes = vec![0; AREA.blocks as usize * BLOCK];
        device.read_at(0, &mut bytes).expect("the area");
        (bytes, checkpoint)
    })
}

/// Changes bytes of a journal and recovers it, then continues it.
pub fn journal(data: &[u8]) {
    let (sample, checkpoint) = sample();
    let (mut bytes, mut checkpoint) = (sample.clone(), *checkpoint);
    let mut input = Input(data);
    while !input.is_empty() {
        let what = input.number(1);
        let block = input.below(AREA.blocks as usize) * BLOCK;
        // Most changes are in a header.
        let at = match what % 4 {
            0 => input.below(BLOCK - 8),
            _ => input.below(SEGMENT_HEADER_BYTES - 7),
        };
        let count = 1 + input.below(8);
        let new = input.take(count);
        match what % 16 {
            15 => {
                let mut position = checkpoint.encode();
                let at = at % (POSITION_BYTES - 7);
                position[at..at + new.len()].copy_from_slice(new);
                checkpoint = Position::decode(&position).expect("a position");
            }
            _ => bytes[block + at..block + at + new.len()].copy_from_slice(new),
        }
        if what >= 64 {
            seal(&mut bytes, block);
        }
    }
    let device = Arc::new(Memory::default());
    device.write_at(0, &bytes).expect("memory");
    recover(&device, checkpoint);
}

/// Makes the checksum of a header or segment right.
fn seal(area: &mut [u8], block: usize) {
    if let Ok((header, _)) = JournalHeader::read_from_prefix(&area[block..])
        && block < 2 * BLOCK
    {
        area[block..block + BLOCK].copy_from_slice(&header.encode());
    } else if let Some(mut header) = SegmentHeader::read(&area[block..]) {
        let most = (area.len() - block).min(SEGMENT_BLOCKS_MAX as usize * BLOCK);
        let end = (header.checked_bytes()).min(most as u64) as usize;
        let crc = header.checksum(&area[block + SEGMENT_HEADER_BYTES..block + end]);
        header.crc = U32::new(crc);
        area[block..block + SEGMENT_HEADER_BYTES].copy_from_slice(header.as_bytes());
    }
}

fn recover(device: &Arc<Memory>, checkpoint: Position) {
    let recovery = Journal::recover(device.clone(), AREA, VOLUME, 0, checkpoint);
    let Ok(mut recovery) = recovery else { return };
    let mut batches = 0;
    let is_damaged = loop {
        match recovery.next_batch() {
            Ok(Some(_)) => batches += 1,
            Ok(None) => break false,
            Err(RecoverError::Damage(damage)) => break !damage.to_string().is_empty(),
            Err(error) => panic!("{error}"),
        }
        assert!(batches < AREA.blocks, "recovery does not end");
    };
    assert!(recovery.bytes_read() < AREA.blocks * BLOCK_BYTES);
    let end = recovery.end();
    let begun = match is_damaged {
        true => recovery.begin_incarnation_after_damage(end),
        false => recovery.begin_incarnation(end),
    };
    let mut journal = match begun {
        Err(BeginError::LastIncarnation) => return,
        begun => begun.expect("an incarnation"),
    };
    let end = journal.end();
    journal
        .append(b"new", AppendClass::Ordinary)
        .expect("an empty ring has room");
    let again = Journal::recover(device.clone(), AREA, VOLUME, 0, end);
    let mut again = again.expect("a recovery");
    let batch = again.next_batch().expect("no damage");
    assert_eq!(batch.expect("a batch").payload, b"new");
    match again.next_batch() {
        Ok(after) => assert!(after.is_none()),
        // The first recovery has not looked into the blocks of a pad.
        Err(_) => assert!(!is_damaged, "damage after a repair"),
    }
}
