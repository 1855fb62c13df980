//! FUA and flushes reach the device: on a simulated device, a power cut loses everything else, as its seed decides.

mod support;

use std::sync::Arc;

use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::{Device, DiscardEffect};
use support::{BLOCK, FLUSH, FUA, Served, TRIM, WRITE_ZEROES};

const SEEDS: u64 = 24;

/// Returns whether the range holds `byte` after each of many power cuts.
fn survives(device: &SimDevice, offset: usize, length: usize, byte: u8) -> bool {
    (0..SEEDS).all(|seed| {
        let after = device.crash(seed);
        let mut bytes = vec![0; after.size_bytes() as usize];
        after.read_at(0, &mut bytes).unwrap();
        bytes[offset..offset + length].iter().all(|b| *b == byte)
    })
}

fn served(device: SimDevice) -> (Arc<SimDevice>, Served) {
    let device = Arc::new(device);
    let served = Served::new(device.clone());
    (device, served)
}

fn device() -> SimDevice {
    SimDevice::new("sim", 64 << 12)
}

#[test]
fn a_write_without_fua_may_be_lost() {
    let (device, served) = served(device());
    assert_eq!(served.client().write(0, 0, &[5; 8 * BLOCK]), 0);
    // Otherwise the other tests prove nothing.
    assert!(!survives(&device, 0, 8 * BLOCK, 5));
}

#[test]
fn a_write_with_fua_survives_a_power_cut_whole_blocks_or_not() {
    for (offset, length) in [(0, BLOCK), (100, 50), (4000, 9000), (8192, 32 * BLOCK)] {
        for device in [device(), device().without_fua()] {
            let (device, served) = served(device);
            let mut client = served.client();
            assert_eq!(client.write(FUA, offset as u64, &vec![5; length]), 0);
            assert!(survives(&device, offset, length, 5), "{length} at {offset}");
        }
    }
}

#[test]
fn zeros_with_fua_survive_a_power_cut() {
    for (offset, length) in [(0, 4 * BLOCK), (100, 50), (4000, 9000)] {
        let (device, served) = served(device());
        let mut client = served.client();
        client.write(FUA, 0, &[5; 8 * BLOCK]);
        let error = client.ask(WRITE_ZEROES, FUA, offset as u64, length as u32);
        assert_eq!(error, 0);
        assert!(survives(&device, offset, length, 0), "{length} at {offset}");
    }
}

#[test]
fn a_trim_with_fua_is_flushed() {
    let (device, served) = served(device().with_discards());
    assert_eq!(device.discard_effect(), DiscardEffect::FreesSpace);
    let mut client = served.client();
    assert_eq!(client.ask(TRIM, 0, 0, 8192), 0);
    assert_eq!(device.volatile_changes(), 1);
    assert_eq!(client.ask(TRIM, FUA, 8192, 8192), 0);
    assert_eq!(device.volatile_changes(), 0);
}

#[test]
fn a_flush_makes_the_writes_of_all_connections_durable() {
    let (device, served) = served(device());
    let mut clients = [served.client(), served.client(), served.client()];
    for (index, client) in clients.iter_mut().enumerate() {
        let offset = index * 9000;
        assert_eq!(client.write(0, offset as u64, &[5; 9000]), 0);
    }
    assert!(device.volatile_changes() > 0);
    assert_eq!(clients[2].ask(FLUSH, 0, 0, 0), 0);
    assert!(survives(&device, 0, 27_000, 5));
}

#[test]
fn the_end_of_the_server_flushes() {
    let (device, mut served) = served(device());
    let mut client = served.client();
    client.write(0, 0, &[5; BLOCK]);
    served.stop().unwrap();
    assert!(survives(&device, 0, BLOCK, 5));
    assert!(!served.path.exists());
}

#[test]
fn failures_of_the_device_reach_the_client_as_errors_of_the_protocol() {
    const EIO: u32 = 5;
    const ENOSPC: u32 = 28;
    let (device, mut served) = served(device());
    let mut client = served.client();
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Write), 1, 28));
    assert_eq!(client.write(0, 0, &[5; BLOCK]), ENOSPC);
    assert_eq!(client.write(0, 0, &[5; BLOCK]), 0);
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Read), 1, 61));
    assert_eq!(client.ask(support::READ, 0, 0, 10), EIO);
    // A failed reply has no data: the next reply follows at once.
    assert_eq!(client.read(0, 10), [5; 10]);
    device.set_plan(FaultPlan::panic_at(Some(Operation::Read), 1));
    assert_eq!(client.ask(support::READ, 0, 0, 10), EIO);
    assert_eq!(client.read(0, 10), [5; 10]);
    device.set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, 5));
    assert_eq!(client.ask(FLUSH, 0, 0, 0), EIO);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), EIO);
    let mut structured = served.structured_client();
    structured.request(FLUSH, 0, 9, 0, 0);
    assert_eq!(structured.chunk_error(9), EIO);
    assert!(served.stop().unwrap_err().to_string().contains("flush"));
}
