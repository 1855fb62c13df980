//! The bytes are right on a network that loses, repeats, delays and reorders frames (the kernel's netem), and while the interfaces of a node are down.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jericho_ether::{RemoteDevice, Scheduler};
use jericho_storage::{ChannelStat, Device};
use jericho_sys::affinity;

use super::hosts::{Layout, Target, Told, attach, cpus_of, node_of_pair, on_host_of};
use super::kernel::sent_bytes;
use crate::commands::wait_until;

const LAYOUT: Layout = Layout(3, 1);
const PAGE: usize = 4096;
/// Bytes of the device that a thread uses.
const RANGE: usize = 4 << 20;

/// Applies one of netem's faults to the interfaces of both hosts until it is dropped.
struct Netem;

impl Netem {
    fn new(faults: &str) -> Netem {
        for interface in both_hosts() {
            let line = format!("/usr/bin/tc qdisc add dev {interface} root netem {faults}");
            on_host_of(&interface, &line);
        }
        Netem
    }

    /// Returns what the kernel has counted, for the log.
    fn counted() -> String {
        let of = |interface: &String| {
            let text = on_host_of(
                interface,
                &format!("/usr/bin/tc -s qdisc show dev {interface}"),
            );
            let sent = text.lines().find(|line| line.contains("Sent"));
            format!("{interface}:{}", sent.unwrap_or_default())
        };
        both_hosts().iter().map(of).collect::<Vec<_>>().join(";")
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        for interface in both_hosts() {
            let line = format!("/usr/bin/tc qdisc del dev {interface} root");
            on_host_of(&interface, &line);
        }
    }
}

fn both_hosts() -> Vec<String> {
    [LAYOUT.interfaces('i'), LAYOUT.interfaces('t')].concat()
}

/// The bytes of a page of a thread's range: its number, and the number of the write.
fn fill(page: &mut [u8], place: usize, version: u64) {
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        let value = version << 32 | (place as u64) << 12 | at as u64;
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Writes and reads pages in a thread's range, and compares each page that it reads with the page that it wrote there last. Ends when `ask` returns `false`.
fn verify(device: &RemoteDevice, thread: usize, ask: impl Fn(u64) -> bool) {
    affinity::set(None, &cpus_of(thread % 2)).expect("CPUs of the node");
    let start = (thread * RANGE) as u64;
    let pages = RANGE / PAGE;
    let mut versions = vec![0_u64; pages];
    let mut random = thread as u64 + 1;
    let mut buffer = vec![0; 32 * PAGE];
    for first in (0..pages).step_by(32) {
        for page in 0..32 {
            fill(&mut buffer[page * PAGE..][..PAGE], first + page, 0);
        }
        let offset = start + (first * PAGE) as u64;
        device.write_at(offset, &buffer).expect("write");
    }
    let mut round = 0;
    while ask(round) {
        round += 1;
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let count = 1 + (random >> 40) as usize % 32;
        let first = (random >> 20) as usize % (pages - count);
        let offset = start + (first * PAGE) as u64;
        let bytes = &mut buffer[..count * PAGE];
        if random >> 60 < 8 {
            for page in 0..count {
                versions[first + page] = round;
                fill(&mut bytes[page * PAGE..][..PAGE], first + page, round);
            }
            device.write_at(offset, bytes).expect("write");
        } else {
            check(device, offset, bytes, first, &versions);
        }
        if round % 16 == 0 {
            device.flush().expect("flush");
        }
    }
    for first in (0..pages).step_by(32) {
        let offset = start + (first * PAGE) as u64;
        check(device, offset, &mut buffer, first, &versions);
    }
}

fn check(device: &RemoteDevice, offset: u64, bytes: &mut [u8], first: usize, versions: &[u64]) {
    device.read_at(offset, bytes).expect("read");
    let mut expected = [0; PAGE];
    for (page, bytes) in bytes.chunks_exact(PAGE).enumerate() {
        fill(&mut expected, first + page, versions[first + page]);
        assert!(bytes == expected, "page {} at {offset}", first + page);
    }
}

fn channels(device: &RemoteDevice) -> Vec<ChannelStat> {
    device.network().expect("a network").channels
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_bytes_are_right_on_a_network_with_faults() {
    let faults = [
        "loss 2%",
        "duplicate 10%",
        "delay 3ms 2ms",
        "delay 4ms reorder 70% 50%",
        "loss 1% duplicate 3% delay 3ms 2ms reorder 30%",
    ];
    for faults in faults {
        let _target = Target::serve("/dev/pmem1", "faults", LAYOUT, Told::Truth);
        let device = attach("faults", LAYOUT, Told::Truth, Scheduler::Affinity);
        let netem = Netem::new(faults);
        let before: u64 = channels(&device).iter().map(|one| one.lost_frames).sum();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let device = &device;
                scope.spawn(move || verify(device, thread, |round| round < 60));
            }
        });
        let after = channels(&device);
        let sent: u64 = after.iter().map(|one| one.sent_frames).sum();
        let lost = after.iter().map(|one| one.lost_frames).sum::<u64>() - before;
        println!(
            "lab: faults, {faults}: {sent} frames, the content of {lost} sent again; {}",
            Netem::counted()
        );
        assert!(!faults.contains("loss") || lost > 0, "{after:?}");
        drop(netem);
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn requests_of_a_node_go_on_while_its_interfaces_are_down() {
    let _target = Target::serve("/dev/pmem1", "down", LAYOUT, Told::Truth);
    let device = attach("down", LAYOUT, Told::Truth, Scheduler::Affinity);
    let on_node_1: Vec<String> = LAYOUT
        .pairs()
        .iter()
        .filter(|pair| node_of_pair(**pair) == 1)
        .map(|pair| format!("i{pair}"))
        .collect();
    let stop = AtomicBool::new(false);
    let is_up = |is_up: bool| {
        let all = channels(&device);
        all.iter()
            .filter(|one| one.node == Some(1))
            .all(|one| one.is_up == is_up)
    };
    let remote = || -> u64 { channels(&device).iter().map(|one| one.remote_bytes).sum() };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, stop) = (&device, &stop);
            scope.spawn(move || verify(device, thread, |_| !stop.load(Ordering::Relaxed)));
        }
        std::thread::sleep(Duration::from_secs(2));
        let begun = remote();
        for interface in &on_node_1 {
            on_host_of(interface, &format!("/usr/bin/ip link set {interface} down"));
        }
        wait_until("the channel of node 1 is down", || is_up(false));
        let (sent, before) = (sent_bytes(&on_node_1), remote());
        std::thread::sleep(Duration::from_secs(3));
        let (during, after) = (sent_bytes(&on_node_1), remote());
        println!(
            "lab: interfaces of node 1 down: {} bytes by other channels before, {} while they were down",
            begun,
            after - before
        );
        assert_eq!(sent, during, "the interfaces are down");
        assert!(after > before, "node 1 has sent nothing");
        for interface in &on_node_1 {
            on_host_of(interface, &format!("/usr/bin/ip link set {interface} up"));
        }
        wait_until("the channel of node 1 is up", || is_up(true));
        let before = remote();
        let sent = sent_bytes(&on_node_1);
        std::thread::sleep(Duration::from_secs(3));
        let back = sent_bytes(&on_node_1)[0] - sent[0];
        println!(
            "lab: interfaces of node 1 up again: {back} bytes by them, {} by other channels",
            remote() - before
        );
        assert!(back > 0, "the interfaces are not used again");
        stop.store(true, Ordering::Relaxed);
    });
}
