//! Tests of the simulated device, on which other tests rely.

use std::collections::HashSet;
use std::sync::Arc;

use jericho_sim::{Effect, Fault, FaultPlan, Operation, SimDevice};
use jericho_storage::{BLOCK_BYTES, Cause, Device, Direction, Segment, Transfer, open_queue};
use jericho_sys::errno::{EIO, ENOSPC};
use jericho_sys::memory::Mapping;

const BLOCK: usize = BLOCK_BYTES as usize;
const BLOCKS: u64 = 64;

fn device() -> SimDevice {
    SimDevice::new("sim", BLOCKS * BLOCK_BYTES)
}

fn write(device: &SimDevice, block: u64, byte: u8) -> Result<(), jericho_storage::IoError> {
    device.write_at(block * BLOCK_BYTES, &[byte; BLOCK])
}

fn read(device: &SimDevice, block: u64) -> Vec<u8> {
    let mut buf = vec![0xEE; BLOCK];
    device.read_at(block * BLOCK_BYTES, &mut buf).unwrap();
    buf
}

#[test]
fn a_write_that_was_synced_survives_every_power_cut() {
    let device = device();
    write(&device, 3, 7).unwrap();
    device.flush().unwrap();
    write(&device, 4, 8).unwrap();
    assert_eq!(device.volatile_changes(), 1);
    for seed in 0..100 {
        assert!(read(&device.crash(seed), 3) == [7; BLOCK], "seed {seed}");
    }
}

#[test]
fn a_write_that_was_not_synced_survives_is_lost_or_is_torn_at_sectors() {
    let device = device();
    write(&device, 0, 1).unwrap();
    device.flush().unwrap();
    write(&device, 0, 2).unwrap();
    let (mut whole, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..300 {
        let block = read(&device.crash(seed), 0);
        for sector in block.chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]));
            assert!(sector[0] == 1 || sector[0] == 2);
        }
        match block.iter().filter(|byte| **byte == 2).count() {
            BLOCK => whole += 1,
            0 => lost += 1,
            _ => torn += 1,
        }
    }
    assert!(
        whole > 50 && lost > 50 && torn > 50,
        "{whole} {lost} {torn}"
    );
}

#[test]
fn the_fates_of_two_writes_are_independent() {
    let device = device();
    write(&device, 0, 1).unwrap();
    write(&device, 1, 1).unwrap();
    let fates: HashSet<(bool, bool)> = (0..100)
        .map(|seed| device.crash(seed))
        .map(|after| (read(&after, 0) == [1; BLOCK], read(&after, 1) == [1; BLOCK]))
        .collect();
    assert_eq!(fates.len(), 4);
}

#[test]
fn a_seed_leaves_the_same_image_for_every_order_of_arrival() {
    let (forwards, backwards) = (device(), device());
    for block in 0..BLOCKS {
        write(&forwards, block, block as u8 + 1).unwrap();
        write(&backwards, BLOCKS - 1 - block, (BLOCKS - block) as u8).unwrap();
    }
    assert_eq!(forwards.digest(), backwards.digest());
    let digests: HashSet<u64> = (0..50)
        .map(|seed| {
            let digest = forwards.crash(seed).digest();
            assert_eq!(digest, forwards.crash(seed).digest());
            assert_eq!(digest, backwards.crash(seed).digest());
            digest
        })
        .collect();
    assert_eq!(digests.len(), 50, "seeds differ");
}

#[test]
fn only_the_nth_operation_of_a_kind_fails() {
    let device = device();
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Write), 2, EIO));
    write(&device, 0, 1).unwrap();
    read(&device, 0);
    let error = write(&device, 1, 1).unwrap_err();
    assert_eq!((error.operation, error.cause), ("write", Cause::Errno(EIO)));
    assert_eq!(
        (error.offset_bytes, error.length_bytes),
        (BLOCK_BYTES, BLOCK_BYTES)
    );
    assert!(read(&device, 1) == [0; BLOCK]);
    write(&device, 1, 1).unwrap();
    assert_eq!(device.operations(Some(Operation::Write)), 3);
    assert_eq!(device.operations(None), 5);
}

#[test]
fn a_lasting_fault_stays() {
    let device = device();
    let effect = Effect::Errno(EIO);
    let fault = Fault {
        operation: None,
        nth: 2,
        is_lasting: true,
        effect,
    };
    device.set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    write(&device, 0, 1).unwrap();
    for _ in 0..3 {
        write(&device, 0, 2).unwrap_err();
    }
}

#[test]
fn failing_every_nth_operation_ends_with_a_run_without_faults() {
    let story = |device: &SimDevice| {
        write(device, 0, 1)?;
        device.flush()?;
        write(device, 1, 2)?;
        device.discard(0, BLOCK_BYTES)?;
        device.flush()
    };
    for nth in 1..100 {
        let device = device();
        device.set_plan(FaultPlan::fail_nth(None, nth, EIO));
        let told = story(&device);
        if device.operations(None) < nth {
            told.unwrap();
            assert_eq!(nth, 6);
            return;
        }
        assert_eq!(told.unwrap_err().cause, Cause::Errno(EIO));
    }
    panic!("the story never ran untouched");
}

#[test]
fn short_transfers_transfer_the_reported_bytes() {
    let device = device();
    device.write_at(0, &[5; 4 * BLOCK]).unwrap();
    let effect = Effect::Short {
        done_bytes: 2 * BLOCK_BYTES,
    };
    let fault = Fault {
        operation: None,
        nth: 1,
        is_lasting: true,
        effect,
    };
    device.set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    let mut buf = vec![0; 4 * BLOCK];
    let error = device.read_at(0, &mut buf).unwrap_err();
    assert_eq!(
        error.cause,
        Cause::Short {
            done_bytes: 2 * BLOCK_BYTES
        }
    );
    assert!(buf[..2 * BLOCK].iter().all(|byte| *byte == 5));
    device.write_at(0, &[6; 4 * BLOCK]).unwrap_err();
    device.set_plan(FaultPlan::default());
    assert!(read(&device, 1) == [6; BLOCK] && read(&device, 2) == [5; BLOCK]);
    // A transfer of a single block cannot be partial.
    device.set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    let error = device.read_at(0, &mut buf[..BLOCK]).unwrap_err();
    assert_eq!(error.cause, Cause::Short { done_bytes: 0 });
}

#[test]
fn a_full_device_is_enospc_at_new_blocks_and_takes_rewrites_and_reuse() {
    let device = device();
    device.set_plan(FaultPlan {
        room_blocks: Some(3),
        ..FaultPlan::default()
    });
    write(&device, 10, 1).unwrap();
    let error = device
        .write_at(20 * BLOCK_BYTES, &[2; 4 * BLOCK])
        .unwrap_err();
    assert_eq!(error.cause, Cause::Errno(ENOSPC));
    assert_eq!(
        (error.offset_bytes, error.length_bytes),
        (22 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    );
    assert!(read(&device, 21) == [2; BLOCK]);
    write(&device, 10, 3).unwrap();
    write(&device, 30, 3).unwrap_err();
    device.discard(10 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    write(&device, 30, 3).unwrap();
}

#[test]
fn a_failed_flush_is_final_and_makes_nothing_durable() {
    let device = device();
    write(&device, 0, 1).unwrap();
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, ENOSPC));
    assert_eq!(device.flush().unwrap_err().cause, Cause::Errno(ENOSPC));
    assert_eq!(device.flush().unwrap_err().cause, Cause::Errno(ENOSPC));
    assert!((0..100).any(|seed| read(&device.crash(seed), 0) == [0; BLOCK]));
}

#[test]
fn a_flush_that_fails_and_is_forgotten_may_lose_what_was_written_before_it_only() {
    let survives = |seed| {
        let device = device();
        write(&device, 0, 1).unwrap();
        write(&device, 1, 1).unwrap();
        device.set_plan(FaultPlan {
            forgets_failed_flushes: true,
            seed,
            ..FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO)
        });
        assert_eq!(device.flush().unwrap_err().cause, Cause::Errno(EIO));
        write(&device, 1, 2).unwrap();
        device.flush().unwrap();
        assert_eq!(read(&device, 0), [1; BLOCK], "reads still see it");
        let after = device.crash(0);
        assert_eq!(read(&after, 1), [2; BLOCK], "it was written later");
        read(&after, 0) == [1; BLOCK]
    };
    let survived: HashSet<bool> = (0..20).map(survives).collect();
    assert_eq!(survived.len(), 2);
}

#[test]
fn after_the_power_is_cut_everything_fails_and_the_interrupted_write_may_be_torn() {
    let device = device();
    device.set_plan(FaultPlan::cut_power_at(2));
    write(&device, 0, 1).unwrap();
    assert_eq!(write(&device, 1, 1).unwrap_err().cause, Cause::Errno(EIO));
    device.flush().unwrap_err();
    device.read_at(0, &mut [0; BLOCK]).unwrap_err();
    let remains: HashSet<usize> = (0..100)
        .map(|seed| {
            read(&device.crash(seed), 1)
                .iter()
                .filter(|byte| **byte == 1)
                .count()
        })
        .collect();
    assert!(remains.contains(&0) && remains.contains(&BLOCK) && remains.len() > 2);
}

#[test]
fn a_flush_interrupted_by_a_power_cut_promises_nothing() {
    let device = device();
    write(&device, 0, 1).unwrap();
    device.set_plan(FaultPlan::cut_power_at(1));
    device.flush().unwrap_err();
    assert!((0..100).any(|seed| read(&device.crash(seed), 0) == [0; BLOCK]));
}

#[test]
fn the_log_lists_the_operations() {
    let device = device();
    write(&device, 2, 1).unwrap();
    device.set_plan(FaultPlan::fail_nth(None, 1, EIO));
    device.flush().unwrap_err();
    device.read_at(1, &mut [0; 3]).unwrap_err();
    let lines: Vec<String> = device.log().iter().map(ToString::to_string).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(
        lines[0].split_whitespace().collect::<Vec<_>>(),
        ["1", "write", "4096", "at", "8192"]
    );
    assert!(lines[1].contains("flush") && lines[1].contains("FAILED: Input/output error"));
    assert!(lines[2].contains("Invalid argument"));
}

#[test]
fn a_queue_serves_a_simulated_device_and_delivers_its_faults() {
    let device = Arc::new(device().on_node(1));
    assert_eq!(device.home_node(), Some(1));
    let mapping = Arc::new(Mapping::create("jericho-sim-test", 4 * BLOCK, false).unwrap());
    mapping.copy_in(0, &[9; 4 * BLOCK]);
    let devices: [Arc<dyn Device>; 1] = [Arc::clone(&device) as Arc<dyn Device>];
    let mut queue = open_queue(&devices, &[], 4).unwrap();
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Write), 3, EIO));
    for tag in 0..4 {
        let offset = tag as usize * BLOCK;
        queue.submit(Transfer {
            tag,
            device: 0,
            direction: Direction::Write,
            offset_bytes: tag * BLOCK_BYTES,
            segments: vec![Segment {
                mapping: Arc::clone(&mapping),
                offset,
                len: BLOCK,
            }],
        });
    }
    let mut completions = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, None);
    }
    let failed: Vec<u64> = completions
        .iter()
        .filter(|completion| completion.result.is_err())
        .map(|completion| completion.tag)
        .collect();
    assert_eq!(failed.len(), 1);
    for block in 0..4 {
        let expected = if failed[0] == block { 0 } else { 9 };
        assert!(read(&device, block) == [expected; BLOCK]);
    }
}
