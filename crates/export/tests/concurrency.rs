//! Requests of one connection and of several run at the same time, and none undoes another one.

mod support;

use std::sync::Arc;
use std::time::Duration;

use jericho_sim::{FaultPlan, Operation, SimDevice};
use support::{BLOCK, READ, Served, WRITE, WRITE_ZEROES};

#[test]
fn partial_writes_to_one_block_from_several_connections_are_all_kept() {
    let device = Arc::new(SimDevice::new("sim", 4 << 12));
    // Between the read and the write of a block there is time for the other connections.
    device.set_plan(FaultPlan {
        latency_max: Some(Duration::from_micros(500)),
        ..FaultPlan::default()
    });
    let served = Served::new(device);
    const PART: usize = 1024;
    for round in 1..=40u8 {
        std::thread::scope(|scope| {
            for part in 0..8 {
                let served = &served;
                scope.spawn(move || {
                    let mut client = served.client();
                    let offset = (part * PART) as u64;
                    assert_eq!(client.write(0, offset, &[round; PART]), 0);
                    assert_eq!(client.ask(WRITE_ZEROES, 0, offset + 100, 50), 0);
                });
            }
            // A whole block beside them.
            assert_eq!(served.client().write(0, 2 << 12, &[round; BLOCK]), 0);
        });
        let mut expected = [round; 3 * BLOCK];
        for part in 0..8 {
            expected[part * PART + 100..part * PART + 150].fill(0);
        }
        let read = served.client().read(0, 3 << 12);
        assert!(read == expected, "round {round}");
    }
}

#[test]
fn a_partial_write_waits_for_a_write_of_the_whole_block() {
    let device = Arc::new(SimDevice::new("sim", 4 << 12));
    let served = Served::new(device.clone());
    let (has_begun, go) = device.block_next(Operation::Write);
    let (mut whole, mut part) = (served.client(), served.client());
    whole.request(WRITE, 0, 1, 0, BLOCK as u32);
    whole.send(&[1; BLOCK]);
    has_begun.wait();
    part.request(WRITE, 0, 2, 10, 10);
    part.send(&[2; 10]);
    std::thread::sleep(Duration::from_millis(50));
    // Had it read the block by now, it would write zeros back over the whole block.
    assert_eq!(device.operations(Some(Operation::Read)), 0);
    drop(go);
    assert_eq!((whole.reply(), part.reply()), ((1, 0), (2, 0)));
    let mut expected = [1; BLOCK];
    expected[10..20].fill(2);
    assert_eq!(served.client().read(0, BLOCK as u32), expected);
}

#[test]
fn a_slow_request_does_not_delay_later_ones_of_its_connection() {
    let device = Arc::new(SimDevice::new("sim", 4 << 12));
    let served = Served::new(device.clone());
    let mut client = served.client();
    let (has_begun, go) = device.block_next(Operation::Write);
    client.request(WRITE, 0, 1, 0, BLOCK as u32);
    client.send(&[1; BLOCK]);
    has_begun.wait();
    client.request(READ, 0, 2, 8192, 3);
    assert_eq!(client.reply(), (2, 0));
    assert_eq!(client.take(3), [0; 3]);
    drop(go);
    assert_eq!(client.reply(), (1, 0));
}

#[test]
fn many_requests_in_flight_all_get_their_own_data() {
    let served = Served::new(Arc::new(SimDevice::new("sim", 256 << 12)));
    let mut client = served.client();
    for block in 0..256u64 {
        client.write(0, block << 12, &[block as u8; BLOCK]);
    }
    let mut sender = support::Client {
        stream: client.stream.try_clone().unwrap(),
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for block in 0..256u64 {
                sender.request(READ, 0, block, (block << 12) + 1, 4094);
            }
        });
        let mut seen = [false; 256];
        for _ in 0..256 {
            let (cookie, error) = client.reply();
            assert_eq!(error, 0);
            assert_eq!(client.take(4094), vec![cookie as u8; 4094]);
            assert!(!std::mem::replace(&mut seen[cookie as usize], true));
        }
    });
}

#[test]
fn requests_in_progress_end_before_the_server() {
    let device = Arc::new(SimDevice::new("sim", 4 << 12));
    let mut served = Served::new(device.clone());
    let mut client = served.client();
    let (has_begun, go) = device.block_next(Operation::Write);
    client.request(WRITE, 0, 1, 0, BLOCK as u32);
    client.send(&[1; BLOCK]);
    has_begun.wait();
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| served.stop());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!stopping.is_finished());
        drop(go);
        assert_eq!(client.reply(), (1, 0));
        assert!(client.rest().is_empty());
        stopping.join().unwrap().unwrap();
    });
    assert_eq!(device.volatile_changes(), 0);
}
