//! Tests of durable writes, of devices that lose their power together, and of recorded changes.

use std::collections::HashSet;

use jericho_sim::{DeviceSet, Effect, Fault, FaultPlan, Operation, SimDevice, Traffic};
use jericho_storage::{BLOCK_BYTES, Cause, Device};
use jericho_sys::errno::EIO;

const BLOCK: usize = BLOCK_BYTES as usize;
const BLOCKS: u64 = 16;
const SEEDS: u64 = 200;

fn device(name: &str) -> SimDevice {
    SimDevice::new(name, BLOCKS * BLOCK_BYTES)
}

fn two() -> DeviceSet {
    DeviceSet::new([device("one"), device("two")])
}

fn write(device: &SimDevice, block: u64, byte: u8) {
    device
        .write_at(block * BLOCK_BYTES, &[byte; BLOCK])
        .unwrap();
}

fn write_durable(device: &SimDevice, block: u64, byte: u8) {
    device
        .write_durable(block * BLOCK_BYTES, &[byte; BLOCK])
        .unwrap();
}

/// Returns the byte that a block is full of, or `None` for a mixture.
fn byte(device: &SimDevice, block: u64) -> Option<u8> {
    let mut buf = [0xEE; BLOCK];
    device.read_at(block * BLOCK_BYTES, &mut buf).unwrap();
    buf.iter().all(|byte| *byte == buf[0]).then_some(buf[0])
}

/// Returns what a block may be full of after a power cut now.
fn after_cuts(device: &SimDevice, block: u64) -> HashSet<Option<u8>> {
    (0..SEEDS)
        .map(|seed| byte(&device.crash(seed), block))
        .collect()
}

#[test]
fn a_durable_write_survives_and_leaves_earlier_writes_volatile() {
    let device = device("sim");
    write(&device, 0, 1);
    write_durable(&device, 1, 2);
    assert_eq!(device.volatile_changes(), 1);
    assert_eq!(after_cuts(&device, 1), HashSet::from([Some(2)]));
    assert!(after_cuts(&device, 0).is_superset(&HashSet::from([Some(0), Some(1), None])));
}

#[test]
fn a_durable_write_without_fua_makes_earlier_writes_durable() {
    let device = device("sim").without_fua();
    write(&device, 0, 1);
    write_durable(&device, 1, 2);
    assert_eq!(after_cuts(&device, 0), HashSet::from([Some(1)]));
    assert_eq!(after_cuts(&device, 1), HashSet::from([Some(2)]));
    let traffic = device.traffic();
    let counts = (traffic.writes, traffic.durable_writes, traffic.flushes);
    assert_eq!(counts, (2, 0, 1));
}

#[test]
fn an_earlier_write_never_comes_back_over_a_durable_one() {
    let device = device("sim");
    device.write_at(0, &[1; 3 * BLOCK]).unwrap();
    device.discard(4 * BLOCK_BYTES, 3 * BLOCK_BYTES).unwrap();
    write_durable(&device, 1, 2);
    write_durable(&device, 5, 2);
    for block in [1, 5] {
        assert_eq!(after_cuts(&device, block), HashSet::from([Some(2)]));
    }
    for block in [0, 2] {
        assert!(after_cuts(&device, block).is_superset(&HashSet::from([Some(0), Some(1)])));
    }
    for block in [4, 6] {
        let discarded = byte(&device, block);
        assert_eq!(
            after_cuts(&device, block),
            HashSet::from([Some(0), discarded])
        );
    }
}

#[test]
fn a_later_write_over_a_durable_one_is_volatile() {
    let device = device("sim");
    write_durable(&device, 0, 1);
    write(&device, 0, 2);
    assert_eq!(
        after_cuts(&device, 0),
        HashSet::from([Some(1), Some(2), None])
    );
}

#[test]
fn a_durable_write_that_a_power_cut_interrupts_may_be_lost_or_torn() {
    let device = device("sim");
    device.set_plan(FaultPlan::cut_power_at(1));
    device.write_durable(0, &[1; BLOCK]).unwrap_err();
    assert_eq!(
        after_cuts(&device, 0),
        HashSet::from([Some(0), Some(1), None])
    );
}

#[test]
fn durable_writes_fail_as_planned_and_after_a_failed_flush() {
    let device = device("sim");
    device.set_plan(FaultPlan::fail_nth(Some(Operation::DurableWrite), 2, EIO));
    write_durable(&device, 0, 1);
    let error = device.write_durable(0, &[2; BLOCK]).unwrap_err();
    assert_eq!(
        (error.operation, error.cause),
        ("durable write", Cause::Errno(EIO))
    );
    assert_eq!(after_cuts(&device, 0), HashSet::from([Some(1)]));
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO));
    device.flush().unwrap_err();
    device.write_durable(0, &[3; BLOCK]).unwrap_err();
    assert_eq!(after_cuts(&device, 0), HashSet::from([Some(1)]));
}

#[test]
fn a_short_durable_write_makes_nothing_durable() {
    let device = device("sim");
    let effect = Effect::Short {
        done_bytes: BLOCK_BYTES,
    };
    let fault = Fault {
        operation: Some(Operation::DurableWrite),
        nth: 1,
        is_lasting: false,
        effect,
    };
    device.set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    let error = device.write_durable(0, &[1; 2 * BLOCK]).unwrap_err();
    let done_bytes = BLOCK_BYTES;
    assert_eq!(error.cause, Cause::Short { done_bytes });
    assert!(after_cuts(&device, 0).contains(&Some(0)));
}

#[test]
fn a_cut_at_a_change_of_one_device_takes_the_power_of_all() {
    let set = two();
    let [one, two] = set.devices() else { panic!() };
    write(one, 0, 1);
    set.supply().cut_at(2);
    write(two, 0, 1);
    // Reads do not count.
    assert_eq!(byte(one, 0), Some(1));
    one.flush().unwrap_err();
    two.write_at(0, &[2; BLOCK]).unwrap_err();
    two.read_at(0, &mut [0; BLOCK]).unwrap_err();
    // The interrupted flush promises nothing.
    assert!(after_cuts(one, 0).contains(&Some(0)));
    assert_eq!(set.supply().changes(), 3);
}

#[test]
fn a_planned_cut_of_one_device_takes_the_power_of_the_others() {
    let set = two();
    let [one, two] = set.devices() else { panic!() };
    one.set_plan(FaultPlan::cut_power_at(1));
    write(two, 0, 1);
    one.write_at(0, &[1; BLOCK]).unwrap_err();
    two.flush().unwrap_err();
}

#[test]
fn devices_lose_their_writes_independently() {
    let set = two();
    for device in set.devices() {
        write(device, 0, 1);
    }
    let fates: HashSet<(Option<u8>, Option<u8>)> = (0..SEEDS)
        .map(|seed| {
            let after = set.crash(seed);
            let again = set.crash(seed);
            let digests = |set: &DeviceSet| {
                let devices = set.devices().iter();
                devices.map(|device| device.digest()).collect::<Vec<_>>()
            };
            assert_eq!(digests(&after), digests(&again));
            (byte(&after.devices()[0], 0), byte(&after.devices()[1], 0))
        })
        .collect();
    assert_eq!(
        fates.len(),
        9,
        "each device has its write, lost it or has it torn"
    );
}

#[test]
fn the_devices_after_a_cut_share_a_supply_that_is_on() {
    let set = two();
    set.supply().cut();
    let after = set.crash(0);
    write(&after.devices()[0], 0, 1);
    after.supply().cut();
    after.devices()[1].flush().unwrap_err();
}

/// Writes on two devices, with flushes between. Change number 5 is the flush of the second device.
fn story(set: &DeviceSet) -> Result<(), jericho_storage::IoError> {
    let [one, two] = set.devices() else { panic!() };
    one.write_at(0, &[1; 2 * BLOCK])?;
    two.write_at(0, &[1; BLOCK])?;
    one.flush()?;
    one.write_durable(0, &[2; BLOCK])?;
    two.flush()?;
    two.discard(0, BLOCK_BYTES)?;
    one.write_at(BLOCK_BYTES, &[3; BLOCK])
}

#[test]
fn a_recording_gives_the_same_devices_as_a_cut_at_each_change() {
    let recorded = two();
    // The changes before the recording count as well.
    write(&recorded.devices()[0], 9, 9);
    recorded.record();
    story(&recorded).unwrap();
    for nth in 1..=8 {
        let cut = two();
        write(&cut.devices()[0], 9, 9);
        cut.supply().cut_at(nth);
        assert_eq!(story(&cut).is_ok(), nth == 8, "change {nth}");
        for seed in 0..SEEDS {
            let (cut, recorded) = (cut.crash(seed), recorded.crash_at(nth + 1, seed));
            for (a, b) in cut.devices().iter().zip(recorded.devices()) {
                assert_eq!(a.digest(), b.digest(), "change {nth}, seed {seed}");
            }
        }
    }
}

#[test]
fn a_device_as_of_an_earlier_flush_lacks_all_later_changes() {
    let set = two();
    set.record();
    story(&set).unwrap();
    let one = &set.devices()[0];
    assert_eq!(byte(&one.as_of_flush(0), 0), Some(0));
    assert_eq!(byte(&one.as_of_flush(1), 0), Some(1));
    let stale = set.crash(0).with(0, one.as_of_flush(1));
    assert_eq!(byte(&stale.devices()[0], 0), Some(1));
    stale.supply().cut();
    stale.devices()[0].flush().unwrap_err();
    assert_eq!(set.without(0).devices().len(), 1);
}

#[test]
fn traffic_counts_operations_and_bytes_of_each_device() {
    let set = two();
    let [one, two] = set.devices() else { panic!() };
    write(one, 0, 1);
    let before = one.traffic();
    one.write_at(0, &[1; 3 * BLOCK]).unwrap();
    write_durable(one, 0, 2);
    byte(one, 0);
    one.flush().unwrap();
    one.discard(0, BLOCK_BYTES).unwrap();
    let expected = Traffic {
        reads: 1,
        read_bytes: BLOCK_BYTES,
        writes: 1,
        durable_writes: 1,
        written_bytes: 4 * BLOCK_BYTES,
        flushes: 1,
        discards: 1,
    };
    assert_eq!(one.traffic() - before, expected);
    assert_eq!(two.traffic(), Traffic::default());
}
