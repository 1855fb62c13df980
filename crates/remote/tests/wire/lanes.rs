//! Which channels carry which requests: section *Lanes* of `docs/formats/wire.md`.

use std::collections::VecDeque;
use std::time::Duration;

use jericho_format::wire::{FLAG_FROM_TARGET, FrameHeader, HEADER_BYTES, Handshake, frame_kind};
use jericho_remote::{Action, Scheduler};
use jericho_sim::WireFaults;
use zerocopy::FromBytes;

use crate::world::{Settings, World};

const WRITE: Action = Action::Write { is_durable: false };

/// Returns a world with a link for each node, and its host.
fn world(nodes: &[u32], scheduler: Scheduler) -> (World, usize) {
    world_of(nodes, scheduler, |_| ())
}

/// Does the same as `world`, with changes to each link.
fn world_of(
    nodes: &[u32],
    scheduler: Scheduler,
    change: impl Fn(&mut WireFaults),
) -> (World, usize) {
    let mut settings = Settings::default();
    settings.links = vec![settings.links[0]; nodes.len()];
    settings.links.iter_mut().for_each(change);
    settings.nodes = nodes.to_vec();
    settings.scheduler = scheduler;
    let mut world = World::new(1, settings);
    let host = world.start_host(1, false);
    let is_there = |world: &World| {
        let channels = world.hosts[host].initiator.channels();
        channels.iter().all(|one| one.is_some_and(|one| one.is_up))
    };
    world.run_until("all channels", is_there);
    world.sent = Some(Vec::new());
    (world, host)
}

fn ok(world: &mut World, host: usize, action: Action, block: usize, blocks: usize) {
    let tag = world.submit(host, action, block, blocks);
    assert_eq!(world.result(host, tag), Ok(()));
}

/// Writes and reads on a node, and returns the bytes of content on each link: to the target, and from it.
fn used(world: &mut World, host: usize, node: u32, rounds: usize) -> [Vec<u64>; 2] {
    world.sent = Some(Vec::new());
    world.submits_on = Some(node);
    for _ in 0..rounds {
        ok(world, host, WRITE, 0, 8);
        ok(world, host, Action::Read, 0, 8);
    }
    carried(world)
}

/// Returns the bytes of content on each link since `sent` was set: to the target, and from it.
fn carried(world: &mut World) -> [Vec<u64>; 2] {
    let mut bytes = [0, 1].map(|_| vec![0; world.settings.links.len()]);
    for arrival in world.sent.take().unwrap_or_default() {
        let (header, _) = FrameHeader::read_from_prefix(&arrival.frame).unwrap();
        let is_back = header.flags & FLAG_FROM_TARGET != 0;
        if (frame_kind::REQUESTS..=frame_kind::DATA).contains(&header.kind) {
            let payload = u64::from(header.payload_bytes.get());
            bytes[usize::from(is_back)][usize::from(arrival.link)] += payload;
        }
    }
    bytes
}

#[test]
fn requests_use_the_links_of_their_node_in_both_directions() {
    let (mut world, host) = world(&[1, 0, 1], Scheduler::Affinity);
    for bytes in used(&mut world, host, 0, 10) {
        assert_eq!((bytes[0], bytes[2]), (0, 0), "{bytes:?}");
    }
    for bytes in used(&mut world, host, 1, 40) {
        // A flush that makes room in the pool belongs to no node.
        assert!(bytes[1] <= 64, "{bytes:?}");
        // The same number of bytes, although small frames and large ones take turns.
        let difference = bytes[0].abs_diff(bytes[2]);
        assert!(difference <= 16_384, "{bytes:?}");
    }
    let channels = world.hosts[host].initiator.channels();
    let remote: u64 = channels.iter().flatten().map(|one| one.remote_bytes).sum();
    assert!(remote <= 64, "{remote}");
}

#[test]
fn without_nodes_all_links_carry_the_same() {
    let settings = Settings {
        links: vec![Settings::default().links[0]; 3],
        ..Settings::default()
    };
    let mut world = World::new(2, settings);
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 8);
    world.run_for(Duration::from_secs(2));
    for bytes in used(&mut world, host, 0, 40) {
        let (most, least) = (bytes.iter().max().unwrap(), bytes.iter().min().unwrap());
        assert!(most - least <= 16_384, "{bytes:?}");
    }
}

#[test]
fn the_round_robin_scheduler_uses_all_links() {
    let (mut world, host) = world(&[0, 1], Scheduler::RoundRobin);
    for bytes in used(&mut world, host, 0, 20) {
        // The target answers on the lane of the request's first frame.
        assert!(bytes.iter().all(|&bytes| bytes > 0), "{bytes:?}");
    }
    let channels = world.hosts[host].initiator.channels();
    let remote: u64 = channels.iter().flatten().map(|one| one.remote_bytes).sum();
    assert!(remote > 0);
}

/// Runs writes of a block on node 0, with some always in progress, and returns whether the lanes are open afterwards. A frame occupies a link for 1 ms. The
/// link's queue takes all frames, so none waits at the initiator.
fn opens_with(in_progress: usize) -> bool {
    let (mut world, host) = world_of(&[0, 1], Scheduler::Backlog, |faults| {
        faults.frame_time = Duration::from_millis(1);
        faults.queue_frames = 64;
    });
    world.submits_on = Some(0);
    let mut tags = VecDeque::new();
    for round in 0..400 {
        tags.push_back(world.submit(host, WRITE, round % 64, 1));
        if tags.len() >= in_progress
            && let Some(tag) = tags.pop_front()
        {
            assert_eq!(world.result(host, tag), Ok(()));
        }
    }
    world.hosts[host].initiator.schedule().0
}

#[test]
fn the_scheduler_with_backlog_sees_queues_below_the_sockets() {
    assert!(opens_with(12));
    assert!(!opens_with(1));
}

#[test]
fn links_in_turn_carry_the_same_number_of_bytes_of_small_writes() {
    let (mut world, host) = world(&[0, 0, 1, 1], Scheduler::RoundRobin);
    world.submits_on = Some(0);
    for _ in 0..200 {
        ok(&mut world, host, WRITE, 0, 1);
    }
    let [bytes, _] = carried(&mut world);
    let (most, least) = (bytes.iter().max().unwrap(), bytes.iter().min().unwrap());
    assert!(most - least <= 16_384, "{bytes:?}");
}

#[test]
fn links_in_turn_carry_reads_after_uneven_writes() {
    let (mut world, host) = world(&[0, 1], Scheduler::RoundRobin);
    world.submits_on = Some(0);
    ok(&mut world, host, WRITE, 0, 1);
    world.sent = Some(Vec::new());
    for _ in 0..20 {
        ok(&mut world, host, Action::Read, 0, 8);
    }
    let [_, from_target] = carried(&mut world);
    let all: u64 = from_target.iter().sum();
    assert!(
        from_target.iter().all(|one| one * 3 > all),
        "{from_target:?}"
    );
}

#[test]
fn the_dynamic_scheduler_uses_other_nodes_links_while_one_node_has_the_load() {
    let (mut world, host) = world(&[0, 1], Scheduler::Dynamic);
    let [to_target, _] = used(&mut world, host, 0, 5);
    assert_eq!(to_target[1], 0);
    world.run_for(Duration::from_secs(5));
    used(&mut world, host, 0, 5);
    let [to_target, _] = used(&mut world, host, 0, 20);
    assert!(to_target[1] > 0, "{to_target:?}");
    assert_eq!(world.hosts[host].initiator.schedule(), (true, 1));
    // Both nodes have load.
    for round in 0..20 {
        used(&mut world, host, round % 2, 1);
        world.run_for(Duration::from_millis(600));
    }
    let [to_target, _] = used(&mut world, host, 0, 5);
    assert_eq!(to_target[1], 0);
    assert_eq!(world.hosts[host].initiator.schedule(), (false, 2));
}

#[test]
fn requests_of_a_node_whose_link_is_cut_use_the_other_one_until_it_is_back() {
    let (mut world, host) = world(&[0, 1], Scheduler::Affinity);
    used(&mut world, host, 0, 2);
    world.wire.set_cut(0, true);
    let start = world.time;
    let [to_target, from_target] = used(&mut world, host, 0, 20);
    assert!(to_target[1] > 0 && from_target[1] > 0);
    assert!(world.time - start < Duration::from_secs(1));
    world.wire.set_cut(0, false);
    world.run_for(Duration::from_secs(2));
    for bytes in used(&mut world, host, 0, 20) {
        assert_eq!(bytes[1], 0, "{bytes:?}");
    }
}

/// Channels on one interface share its receive buffer, so they share the frames that may be in flight.
#[test]
fn channels_of_a_link_share_its_credit() {
    let settings = Settings {
        channels: 3,
        credit: 60,
        ..Settings::default()
    };
    let mut world = World::new(1, settings);
    world.sent = Some(Vec::new());
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 8);
    world.run_for(Duration::from_secs(2));
    let channels = world.hosts[host].initiator.channels();
    assert!(channels.iter().all(|one| one.is_some_and(|one| one.is_up)));
    let sent = world.sent.take().unwrap();
    let record = |kind| {
        let of_kind = sent.iter().filter(move |arrival| {
            let (header, _) = FrameHeader::read_from_prefix(&arrival.frame).unwrap();
            header.kind == kind
        });
        of_kind.map(|arrival| arrival.frame[HEADER_BYTES..].to_vec())
    };
    let handshakes = record(frame_kind::HANDSHAKE);
    for bytes in handshakes {
        let (handshake, _) = Handshake::read_from_prefix(&bytes).unwrap();
        assert_eq!(handshake.lane, 0);
    }
    for block in 0..20 {
        ok(&mut world, host, WRITE, block, 8);
    }
    let windows = world.hosts[host].initiator.channels();
    let windows = windows.iter().flatten().map(|one| one.window);
    assert!(windows.sum::<u32>() <= 60);
}
