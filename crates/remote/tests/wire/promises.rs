//! One test for each promise of the protocol. `docs/formats/wire.md` has the rules.

use std::time::Duration;

use jericho_format::wire::{
    CompletionRecord, FLAG_RESUMES, FLAG_TAKE_OVER, FrameHeader, HEADER_BYTES, Handshake,
    frame_kind,
};
use jericho_remote::{Action, Ended, UNREACHABLE};
use jericho_sim::WireFaults;
use zerocopy::FromBytes;

use crate::world::{Settings, World};

const WRITE: Action = Action::Write { is_durable: false };
const FUA: Action = Action::Write { is_durable: true };
const EIO: i32 = 5;
const ESTALE: i32 = 116;

/// Returns a world with this many good links, and its first host.
fn world_of(links: usize) -> (World, usize) {
    let mut settings = Settings::default();
    settings.links = vec![settings.links[0]; links];
    let mut world = World::new(1, settings);
    let host = world.start_host(1, false);
    (world, host)
}

fn ok(world: &mut World, host: usize, action: Action, block: usize, blocks: usize) {
    let tag = world.submit(host, action, block, blocks);
    assert_eq!(
        world.result(host, tag),
        Ok(()),
        "{action:?} of block {block}"
    );
}

fn flush(world: &mut World, host: usize) -> Result<(), i32> {
    let tag = world.submit(host, Action::Flush, 0, 0);
    world.result(host, tag)
}

fn is_of_a_write(header: &FrameHeader, _: &[u8]) -> bool {
    header.destination[4] == 0 && [frame_kind::REQUESTS, frame_kind::DATA].contains(&header.kind)
}

fn is_from_target(header: &FrameHeader, _: &[u8]) -> bool {
    header.source[4] == 0
}

#[test]
fn a_write_that_is_held_up_and_redone_does_nothing_when_it_arrives() {
    for links in [1, 2] {
        let (mut world, host) = world_of(links);
        ok(&mut world, host, WRITE, 0, 3);
        world.catch = Some(is_of_a_write);
        let held = world.submit(host, WRITE, 0, 3);
        world.run_until("two frames of the write", |world| world.caught.len() >= 2);
        world.catch = None;
        assert_eq!(world.result(host, held), Ok(()));
        ok(&mut world, host, WRITE, 1, 1);
        ok(&mut world, host, Action::Read, 0, 3);
        world.run_for(Duration::from_secs(60));
        for arrival in std::mem::take(&mut world.caught) {
            world.arrive(&arrival);
        }
        world.run_for(Duration::from_secs(1));
        ok(&mut world, host, Action::Read, 0, 3);
    }
}

#[test]
fn a_frame_of_a_session_that_ended_does_nothing() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 1);
    world.catch = Some(is_of_a_write);
    world.submit(host, WRITE, 0, 1);
    world.run_until("both frames of the write", |world| world.caught.len() >= 2);
    world.kill_host(host);
    world.catch = None;
    let next = world.start_host(1, false);
    ok(&mut world, next, WRITE, 0, 1);
    for arrival in std::mem::take(&mut world.caught) {
        world.arrive(&arrival);
    }
    world.run_for(Duration::from_secs(1));
    ok(&mut world, next, Action::Read, 0, 1);
}

#[test]
fn any_frame_may_be_lost() {
    let mut longest = 0;
    for lost in 0.. {
        let (mut world, host) = world_of(1);
        world.lose = Some(lost);
        ok(&mut world, host, WRITE, 0, 5);
        ok(&mut world, host, Action::Read, 0, 5);
        assert_eq!(flush(&mut world, host), Ok(()));
        ok(
            &mut world,
            host,
            Action::WriteZeroes { is_durable: true },
            2,
            1,
        );
        ok(&mut world, host, Action::Read, 0, 5);
        world.run_for(Duration::from_secs(1));
        longest = longest.max(world.frames);
        if lost > world.frames {
            break;
        }
    }
    assert!(longest > 20, "{longest}");
}

#[test]
fn a_reset_between_a_write_and_a_flush_loses_nothing() {
    for resets in 1..4 {
        let (mut world, host) = world_of(1);
        for block in 0..30 {
            ok(&mut world, host, WRITE, block, 1);
        }
        for reset in 0..resets {
            world.kill_target(true);
            world.start_target();
            if reset + 1 < resets {
                // In the middle of the replay.
                let replayed = world.hosts[host].replayed;
                world.run_until("a replay", |w| w.hosts[host].replayed > replayed);
                world.run_for(Duration::from_micros(150));
            }
        }
        ok(&mut world, host, Action::Read, 0, 30);
        assert!(world.hosts[host].replayed >= 30);
        assert_eq!(flush(&mut world, host), Ok(()));
        world.kill_target(true);
    }
}

#[test]
fn a_write_that_is_durable_is_not_undone_by_the_replay_of_an_older_one() {
    // The initiator ends in the middle of a replay, at any moment.
    for micros in (0..400_000).step_by(20_000) {
        let (mut world, host) = world_of(1);
        ok(&mut world, host, WRITE, 3, 30);
        ok(&mut world, host, FUA, 4, 1);
        world.kill_target(true);
        world.start_target();
        world.run_for(Duration::from_micros(micros));
        world.submit(host, Action::Read, 0, 1);
        world.run_for(Duration::from_micros(micros / 100));
        world.kill_host(host);
        world.oracle.initiator_replaced();
        world.kill_target(true);
    }
}

#[test]
fn nothing_is_replayed_after_a_flush() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 8);
    ok(&mut world, host, FUA, 9, 1);
    assert_eq!(flush(&mut world, host), Ok(()));
    world.kill_target(true);
    world.start_target();
    ok(&mut world, host, Action::Read, 0, 10);
    assert_eq!(world.hosts[host].replayed, 0);
}

#[test]
fn without_a_replay_a_reset_makes_each_flush_fail() {
    let mut world = World::new(
        1,
        Settings {
            replay: false,
            ..Settings::default()
        },
    );
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 1);
    world.kill_target(false);
    world.start_target();
    assert_eq!(flush(&mut world, host), Err(EIO));
    assert_eq!(flush(&mut world, host), Err(EIO));
    let durable = world.submit(host, FUA, 0, 1);
    assert_eq!(world.result(host, durable), Err(EIO));
    ok(&mut world, host, WRITE, 0, 1);
}

#[test]
fn a_flush_that_fails_is_repeated_after_a_replay_and_then_fails_for_ever() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 4);
    world.disk.fails_flushes = true;
    assert_eq!(flush(&mut world, host), Err(EIO));
    assert_eq!(world.hosts[host].replayed, 1);
    world.disk.fails_flushes = false;
    assert_eq!(flush(&mut world, host), Err(EIO));
}

#[test]
fn a_flush_that_fails_once_loses_nothing() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 4);
    world.disk.fails_flushes = true;
    let tag = world.submit(host, Action::Flush, 0, 0);
    world.run_until("the replay", |world| world.hosts[host].replayed > 0);
    world.disk.fails_flushes = false;
    assert_eq!(world.result(host, tag), Ok(()));
    world.kill_target(true);
    world.start_target();
    ok(&mut world, host, Action::Read, 0, 4);
}

#[test]
fn an_initiator_that_has_lost_the_export_never_writes_again() {
    for is_reset in [false, true] {
        let (mut world, first) = world_of(1);
        ok(&mut world, first, WRITE, 0, 1);
        // The first one does not hear that it is fenced.
        world.wire.set_cut(0, true);
        if is_reset {
            world.kill_target(false);
            world.start_target();
        }
        let waiting = world.submit(first, WRITE, 0, 1);
        world.catch = Some(|header, _| header.source[4] == 1 || header.destination[4] == 1);
        world.wire.set_cut(0, false);
        let second = world.start_host(2, true);
        ok(&mut world, second, WRITE, 0, 1);
        assert_eq!(flush(&mut world, second), Ok(()));
        if is_reset {
            // The target that knew both is gone, and so is the second one.
            world.kill_host(second);
            world.kill_target(true);
            world.start_target();
        }
        world.catch = None;
        assert_eq!(world.result(first, waiting), Err(ESTALE));
        assert_eq!(world.hosts[first].ended, Some(Ended::Fenced));
        let later = world.submit(first, WRITE, 0, 1);
        assert_eq!(world.result(first, later), Err(ESTALE));
        let third = world.start_host(2, true);
        ok(&mut world, third, Action::Read, 0, 1);
    }
}

#[test]
fn an_export_has_one_client_until_it_is_detached() {
    let (mut world, first) = world_of(2);
    ok(&mut world, first, WRITE, 0, 1);
    let second = world.start_host(2, false);
    world.run_until("a refusal", |world| world.hosts[second].ended.is_some());
    assert_eq!(world.hosts[second].ended, Some(Ended::InUse));
    ok(&mut world, first, Action::Read, 0, 1);
    let now = world.time;
    world.hosts[first].initiator.detach(now);
    world.run_until("the end", |world| world.hosts[first].ended.is_some());
    assert_eq!(world.hosts[first].ended, Some(Ended::Detached));
    let third = world.start_host(2, false);
    ok(&mut world, third, Action::Read, 0, 1);
}

#[test]
fn a_dead_target_fails_requests_after_the_time_that_was_set_and_comes_back_by_itself() {
    for seed in 0..30 {
        dead_target(seed);
    }
}

fn dead_target(seed: u64) {
    let mut world = World::new(
        seed,
        Settings {
            dead_after: Some(Duration::from_secs(30)),
            ..Settings::default()
        },
    );
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 2);
    world.wire.set_cut(0, true);
    let (begun, write) = (world.time, world.submit(host, WRITE, 0, 2));
    assert_eq!(world.result(host, write), Err(UNREACHABLE));
    assert!(world.hosts[host].initiator.has_abandoned());
    let waited = world.time - begun;
    assert!(waited >= Duration::from_secs(30) && waited < Duration::from_secs(32));
    // New ones fail at once.
    let (begun, read) = (world.time, world.submit(host, Action::Read, 0, 1));
    assert_eq!(world.result(host, read), Err(UNREACHABLE));
    assert_eq!(world.time, begun);
    world.wire.set_cut(0, false);
    world.run_until("the target", |world| world.hosts[host].is_reachable);
    // The write that failed may have an effect, but none after this one.
    ok(&mut world, host, WRITE, 0, 2);
    assert!(!world.hosts[host].initiator.has_abandoned());
    world.run_for(Duration::from_secs(120));
    ok(&mut world, host, Action::Read, 0, 2);
}

#[test]
fn a_link_that_carries_small_frames_only_is_used_with_them() {
    let mut settings = Settings::default();
    settings.links[0].longest_bytes = 64 + 4096;
    let mut world = World::new(1, settings);
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 20);
    ok(&mut world, host, Action::Read, 0, 20);
    let sent = world.frames_to_target.iter();
    let longest = sent.filter(|frame| frame.kind == frame_kind::DATA);
    assert_eq!(
        longest.map(|frame| frame.payload_bytes.get()).max(),
        Some(4096)
    );
}

#[test]
fn a_link_that_is_cut_costs_no_request_and_is_used_again() {
    let (mut world, host) = world_of(2);
    ok(&mut world, host, WRITE, 0, 40);
    for _ in 0..3 {
        for link in [0, 1] {
            world.wire.set_cut(link, true);
            for _ in 0..50 {
                ok(&mut world, host, WRITE, 0, 40);
                ok(&mut world, host, Action::Read, 0, 40);
            }
            world.wire.set_cut(link, false);
            world.run_for(Duration::from_secs(2));
            world.frames_to_target.clear();
            ok(&mut world, host, WRITE, 0, 40);
            for link in [0, 1] {
                let is_data = |frame: &&FrameHeader| {
                    frame.kind == frame_kind::DATA && frame.source[5] == link
                };
                assert!(world.frames_to_target.iter().any(|frame| is_data(&frame)));
            }
        }
    }
}

#[test]
fn a_write_that_needs_the_whole_pool_gets_it_from_writes_that_were_copied_early() {
    let settings = Settings {
        pool_pages: 256,
        blocks: 512,
        ..Settings::default()
    };
    let mut world = World::new(31, settings);
    let host = world.start_host(1, false);
    world.run_until("a session", |world| world.hosts[0].size_bytes.is_some());
    let write = Action::Write { is_durable: false };
    let early = [(300, 10), (400, 20)].map(|(block, blocks)| world.reserve(host, block, blocks));
    let mut tags = vec![world.submit(host, write, 0, 256)];
    for reserved in early {
        tags.push(world.submit_reserved(host, reserved));
    }
    for tag in tags {
        assert_eq!(world.result(host, tag), Ok(()));
    }
    let read = world.submit(host, Action::Read, 200, 256);
    assert_eq!(world.result(host, read), Ok(()));
}

#[test]
fn the_pages_of_a_replay_that_is_given_up_are_not_used_while_it_still_sends_them() {
    for seed in 0..5 {
        let settings = Settings {
            pool_pages: 256,
            blocks: 512,
            operation: Duration::from_micros(2),
            // Many frames, so that some are not sent yet when the error arrives.
            mtu: 1500,
            ..Settings::default()
        };
        let mut world = World::new(seed, settings);
        let host = world.start_host(1, false);
        world.run_until("a session", |world| world.hosts[0].size_bytes.is_some());
        for (block, count) in [(0, 1), (10, 100)] {
            ok(&mut world, host, WRITE, block, count);
        }
        let before: Vec<_> = (10..110).map(|block| *world.disk.block(block)).collect();
        world.kill_target(true);
        world.disk.fails_block = Some(0);
        world.start_target();
        world.run_until("the replay", |world| world.hosts[host].replayed > 0);
        // It has room in the pool only when the pages of the replay were given back.
        let mut next = Some(world.ask(WRITE, 300, 156));
        let end = world.time + Duration::from_secs(20);
        while world.step(end) {
            let run = next
                .as_ref()
                .and_then(|asked| world.copy_early(host, asked));
            if run.is_some() {
                next = None;
            }
        }
        assert!(next.is_none(), "the pool has room in the end");
        for (block, old) in (10..).zip(&before) {
            let now = world.disk.block(block);
            let is_lost = now.iter().all(|&byte| byte == 0);
            assert!(
                now == old || is_lost,
                "block {block} has other bytes, seed {seed}"
            );
        }
    }
}

#[test]
fn writes_of_more_than_the_pool_flush_by_themselves() {
    let mut world = World::new(
        1,
        Settings {
            pool_pages: 256,
            blocks: 300,
            ..Settings::default()
        },
    );
    let host = world.start_host(1, false);
    for round in 0..20 {
        for block in 0..30 {
            world.submit(host, WRITE, block * 10, 7 + round % 3);
        }
        world.submit(host, WRITE, 0, 256);
    }
    world.run_until("the end of the writes", |world| {
        world.in_progress(host) == 0
    });
    assert!(
        world.hosts[host]
            .results
            .values()
            .all(|result| result.is_ok())
    );
    world.kill_target(true);
    world.start_target();
    for at in [0, 150] {
        ok(&mut world, host, Action::Read, at, 150);
    }
}

#[test]
fn nothing_is_sent_and_no_timer_runs_while_nothing_is_in_progress() {
    let (mut world, host) = world_of(2);
    ok(&mut world, host, WRITE, 0, 40);
    world.run_for(Duration::from_secs(1));
    let frames = world.frames;
    world.run_for(Duration::from_secs(3600));
    assert_eq!(world.frames, frames);
    assert_eq!(world.hosts[host].initiator.timer(), None);
    assert_eq!(world.target.as_ref().and_then(|t| t.timer()), None);
    // Also beside a host that is gone.
    world.submit(host, Action::Read, 0, 40);
    world.kill_host(host);
    world.run_for(Duration::from_secs(60));
    let frames = world.frames;
    world.run_for(Duration::from_secs(3600));
    assert_eq!(world.frames, frames);
}

#[test]
fn answers_that_are_lost_are_sent_again_until_they_arrive() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 1);
    world.catch = Some(is_from_target);
    let tag = world.submit(host, WRITE, 0, 1);
    // Longer than the target sends PING.
    world.run_for(Duration::from_secs(15));
    assert!(!world.hosts[host].results.contains_key(&tag));
    world.catch = None;
    assert_eq!(world.result(host, tag), Ok(()));
    ok(&mut world, host, Action::Read, 0, 1);
}

#[test]
fn requests_that_are_wrong_fail_alone() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 1);
    let blocks = world.settings.blocks;
    let beyond = world.submit_unchecked(host, WRITE, blocks - 1, 2);
    let read = world.submit_unchecked(host, Action::Read, blocks, 1);
    assert_eq!(world.result(host, beyond), Err(22));
    assert_eq!(world.result(host, read), Err(22));
    ok(&mut world, host, Action::Read, 0, 1);
}

#[test]
fn a_frame_with_damage_does_nothing() {
    let mut settings = Settings::default();
    settings.links[0] = WireFaults {
        damage: 300_000,
        ..settings.links[0]
    };
    let mut world = World::new(1, settings);
    let host = world.start_host(1, false);
    for _ in 0..50 {
        ok(&mut world, host, WRITE, 0, 10);
        ok(&mut world, host, Action::Read, 0, 10);
    }
}

#[test]
fn a_link_whose_frames_become_smaller_is_used_with_smaller_ones() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, WRITE, 0, 20);
    let mut faults = world.settings.links[0];
    for longest in [64 + 4096, 64 + 1408] {
        faults.longest_bytes = longest;
        world.wire.set_faults(0, faults);
        ok(&mut world, host, WRITE, 0, 20);
        ok(&mut world, host, Action::Read, 0, 20);
    }
}

#[test]
fn an_initiator_that_was_replaced_by_another_of_its_client_does_not_disturb_it() {
    let (mut world, first) = world_of(1);
    ok(&mut world, first, WRITE, 0, 1);
    // The first one does not hear that it is fenced.
    world.catch = Some(|header, _| header.source[4] == 1 || header.destination[4] == 1);
    let second = world.start_host(1, false);
    ok(&mut world, second, WRITE, 0, 1);
    world.catch = None;
    let late = world.submit(first, WRITE, 0, 1);
    assert_eq!(world.result(first, late), Err(ESTALE));
    for _ in 0..10 {
        ok(&mut world, second, WRITE, 0, 1);
        world.run_for(Duration::from_secs(1));
    }
    assert_eq!(world.hosts[second].ended, None);
}

/// The first request of a host that has no other one has slot 0.
fn is_completion_in_slot_0(header: &FrameHeader, frame: &[u8]) -> bool {
    let records = <[CompletionRecord]>::ref_from_bytes(&frame[HEADER_BYTES..]);
    let has_slot_0 = |records: &[CompletionRecord]| records.iter().any(|r| r.slot.get() == 0);
    header.kind == frame_kind::COMPLETIONS && records.is_ok_and(has_slot_0)
}

#[test]
fn a_read_does_not_return_a_write_that_may_still_be_lost() {
    for seed in 0..100 {
        let mut world = World::new(seed, Settings::default());
        let host = world.start_host(1, false);
        ok(&mut world, host, WRITE, 0, 1);
        assert_eq!(flush(&mut world, host), Ok(()));
        // The write is executed, but the initiator does not hear of it.
        world.catch = Some(is_completion_in_slot_0);
        let write = world.submit(host, WRITE, 0, 1);
        world.run_until("a completion", |world| !world.caught.is_empty());
        let read = world.submit(host, Action::Read, 0, 1);
        world.run_for(Duration::from_micros(500));
        world.catch = None;
        world.kill_target(true);
        world.start_target();
        ok(&mut world, host, Action::Read, 0, 1);
        assert_eq!(world.result(host, write), Ok(()));
        assert_eq!(world.result(host, read), Ok(()));
    }
}

#[test]
fn a_handshake_of_a_dead_initiator_that_arrives_late_disturbs_nobody() {
    let (mut world, dead) = world_of(1);
    world.catch = Some(|header, _| header.kind == frame_kind::HANDSHAKE);
    world.run_until("a handshake", |world| !world.caught.is_empty());
    world.kill_host(dead);
    world.catch = None;
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 1);
    for arrival in std::mem::take(&mut world.caught) {
        world.arrive(&arrival);
    }
    world.run_for(Duration::from_secs(1));
    ok(&mut world, host, WRITE, 0, 1);
    assert_eq!(world.hosts[host].ended, None);
}

#[test]
fn a_flush_that_fails_with_nothing_to_replay_fails() {
    let (mut world, host) = world_of(1);
    ok(&mut world, host, Action::Read, 0, 1);
    world.disk.fails_flushes = true;
    assert_eq!(flush(&mut world, host), Err(EIO));
    assert_eq!(flush(&mut world, host), Err(EIO));
    ok(&mut world, host, Action::Read, 0, 1);
}

#[test]
fn an_export_can_be_had_after_its_owner_could_not_be_recorded() {
    let mut world = World::new(1, Settings::default());
    world.fails_records = 1;
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 1);
    assert_eq!(world.fails_records, 0);
}

#[test]
fn a_restarted_target_keeps_the_export_for_the_client_that_had_it() {
    let (mut world, first) = world_of(1);
    ok(&mut world, first, WRITE, 0, 1);
    // The first one cannot be heard for a while.
    world.catch = Some(|header, _| header.source[4] == 1);
    world.kill_target(true);
    world.start_target();
    let stranger = world.start_host(2, false);
    world.run_until("a refusal", |world| world.hosts[stranger].ended.is_some());
    assert_eq!(world.hosts[stranger].ended, Some(Ended::InUse));
    assert_eq!(world.hosts[stranger].size_bytes, None);
    world.catch = None;
    assert_eq!(flush(&mut world, first), Ok(()));
    ok(&mut world, first, Action::Read, 0, 1);
}

#[test]
fn a_session_begins_when_the_operations_of_the_former_one_have_ended() {
    for seed in 0..20 {
        let settings = Settings {
            operation: Duration::from_secs(1),
            ..Settings::default()
        };
        let mut world = World::new(seed, settings);
        let first = world.start_host(1, false);
        world.run_until("a session", |world| world.hosts[first].size_bytes.is_some());
        world.submit(first, WRITE, 0, 1);
        world.run_until("an operation", World::is_executing);
        // The former one is fenced, or leaves without waiting for its request.
        let is_fenced = seed % 2 == 0;
        if !is_fenced {
            let now = world.time;
            world.hosts[first].initiator.detach(now);
            world.run_until("the end", |world| world.hosts[first].ended.is_some());
        }
        let second = world.start_host(2, is_fenced);
        while world.is_executing() {
            assert_eq!(world.hosts[second].size_bytes, None);
            world.run_for(Duration::from_millis(1));
        }
        ok(&mut world, second, WRITE, 0, 1);
    }
}

/// Returns whether a frame is a HANDSHAKE that resumes a session and would take the export from another client.
fn is_late_take_over(header: &FrameHeader, frame: &[u8]) -> bool {
    let handshake = Handshake::read_from_prefix(&frame[HEADER_BYTES..]);
    header.kind == frame_kind::HANDSHAKE
        && handshake
            .is_ok_and(|(handshake, _)| handshake.flags.get() == FLAG_RESUMES + FLAG_TAKE_OVER)
}

#[test]
fn an_initiator_takes_the_export_from_others_only_with_its_first_session() {
    let mut world = World::new(1, Settings::default());
    let host = world.start_host(1, true);
    ok(&mut world, host, WRITE, 0, 1);
    world.catch = Some(is_late_take_over);
    world.kill_target(true);
    world.start_target();
    ok(&mut world, host, WRITE, 0, 1);
    assert!(world.caught.is_empty());
}

#[test]
fn an_initiator_whose_export_was_taken_while_its_target_was_away_says_so() {
    let mut world = World::new(
        1,
        Settings {
            dead_after: Some(Duration::from_secs(30)),
            ..Settings::default()
        },
    );
    let first = world.start_host(1, false);
    ok(&mut world, first, WRITE, 0, 1);
    world.wire.set_cut(0, true);
    let waiting = world.submit(first, WRITE, 0, 1);
    assert_eq!(world.result(first, waiting), Err(UNREACHABLE));
    assert!(world.hosts[first].initiator.has_abandoned());
    world.catch = Some(|header, _| header.source[4] == 1 || header.destination[4] == 1);
    world.wire.set_cut(0, false);
    let second = world.start_host(2, true);
    ok(&mut world, second, WRITE, 0, 1);
    world.catch = None;
    world.run_until("the fence", |world| world.hosts[first].ended.is_some());
    assert_eq!(world.hosts[first].ended, Some(Ended::Fenced));
    let later = world.submit(first, WRITE, 0, 1);
    assert_eq!(world.result(first, later), Err(ESTALE));
    assert!(!world.hosts[first].initiator.has_abandoned());
}
