//! Random sequences of requests, faults of the wire, and resets. `JERICHO_WIRE_CASES` sets their number, and `JERICHO_WIRE_SEED` the first seed.

use std::time::Duration;

use jericho_remote::{Action, Scheduler, Security};
use jericho_sim::{Random, WireFaults};

use crate::world::{Settings, World};

fn number_of(variable: &str, otherwise: u64) -> u64 {
    let set = std::env::var(variable);
    set.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Runs a test for each seed. The message of a failure has the seed.
fn for_each_seed(cases: u64, test: fn(u64)) {
    let first = number_of("JERICHO_WIRE_SEED", 1);
    let cases = number_of("JERICHO_WIRE_CASES", cases);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (first + thread..first + cases).step_by(threads as usize) {
                    let result = std::panic::catch_unwind(|| test(seed));
                    assert!(
                        result.is_ok(),
                        "JERICHO_WIRE_SEED={seed} JERICHO_WIRE_CASES=1"
                    );
                }
            });
        }
    });
}

fn random_faults(random: &mut Random) -> WireFaults {
    // Half of the wires are good in each respect.
    let mut chance = |most: u64| random.below(2) * random.below(most);
    WireFaults {
        loss: chance(50_000),
        repetition: chance(100_000),
        damage: chance(20_000),
        overtaking: chance(200_000),
        holding: chance(10_000),
        delay: Duration::from_micros(5),
        ..WireFaults::default()
    }
}

fn random_settings(random: &mut Random) -> Settings {
    let links = 1 + random.below(3);
    Settings {
        links: (0..links).map(|_| random_faults(random)).collect(),
        mtu: [1500, 4200, 9000][random.below(3) as usize],
        slots: [1, 4, 64][random.below(3) as usize],
        pool_pages: [256, 300, 1024][random.below(3) as usize],
        credit: [4, 64, 500][random.below(3) as usize],
        blocks: 48,
        security: [Security::None, Security::Mac, Security::Encrypt][random.below(3) as usize],
        // Few enough that some sequences change keys.
        frames_per_key: 1024,
        nodes: [vec![], vec![0, 1], vec![1, 0, 1]][random.below(3) as usize].clone(),
        scheduler: [
            Scheduler::Affinity,
            Scheduler::RoundRobin,
            Scheduler::Dynamic,
            Scheduler::Backlog,
        ][random.below(4) as usize],
        channels: 1 + (random.below(3) * random.below(2)) as u16,
        lateness: Duration::from_micros(random.below(2) * random.below(300)),
        reserves: random.below(2) == 0,
        ..Settings::default()
    }
}

/// Submits a random request.
fn submit(world: &mut World, host: usize) -> u64 {
    let blocks = world.settings.blocks as u64;
    let count = match world.random.below(10) {
        0 => 1 + world.random.below(blocks),
        _ => 1 + world.random.below(3),
    };
    let block = world.random.below(blocks - count + 1);
    let is_durable = world.random.below(8) == 0;
    let action = match world.random.below(20) {
        0..8 => Action::Write { is_durable },
        8 => Action::WriteZeroes { is_durable },
        9..17 => Action::Read,
        _ => Action::Flush,
    };
    match action {
        Action::Flush => world.submit(host, action, 0, 0),
        action => world.submit(host, action, block as usize, count as usize),
    }
}

/// Submits requests, at most 32 at a time, with something between them.
fn work(world: &mut World, host: usize, requests: u64, mut between: impl FnMut(&mut World)) {
    for _ in 0..requests {
        world.run_until("room for a request", |world| world.in_progress(host) < 32);
        submit(world, host);
        if world.random.below(4) == 0 {
            let pause = Duration::from_micros(world.random.below(300));
            world.run_for(pause);
        }
        between(world);
    }
    world.run_until("the end of all requests", |world| {
        world.in_progress(host) == 0
    });
}

/// Flushes, resets the target, and reads everything.
fn check_all(world: &mut World, host: usize) {
    let flush = world.submit(host, Action::Flush, 0, 0);
    assert_eq!(world.result(host, flush), Ok(()));
    world.kill_target(true);
    world.start_target();
    let all = world.settings.blocks;
    let read = world.submit(host, Action::Read, 0, all);
    assert_eq!(world.result(host, read), Ok(()));
    let errors = world.hosts[host].results.values().filter(|r| r.is_err());
    assert_eq!(errors.count(), 0);
    assert_eq!(world.hosts[host].ended, None);
}

#[test]
fn every_request_is_executed_once_on_a_bad_wire() {
    for_each_seed(4000, |seed| {
        let mut random = Random::of(seed, &[3]);
        let mut world = World::new(seed, random_settings(&mut random));
        let host = world.start_host(1, false);
        // One flush fails, and loses what it should have made durable. A second failure, in the replay, would be final.
        let fails_at = random.below(120);
        let mut submitted = 0;
        work(&mut world, host, 60, |world| {
            world.disk.fails_next_flush |= submitted == fails_at;
            submitted += 1;
        });
        world.disk.fails_next_flush = false;
        check_all(&mut world, host);
    });
}

#[test]
fn nothing_that_completed_is_lost_while_the_target_is_reset_and_links_are_cut() {
    for_each_seed(4000, |seed| {
        let mut random = Random::of(seed, &[4]);
        let mut world = World::new(seed, random_settings(&mut random));
        let host = world.start_host(1, false);
        work(&mut world, host, 60, |world| match world.random.below(30) {
            0 => {
                let is_reset = world.random.below(2) == 0;
                world.kill_target(is_reset);
                let pause = Duration::from_micros(world.random.below(20_000));
                world.run_for(pause);
                world.start_target();
            }
            1 => {
                let links = world.settings.links.len() as u64;
                let link = world.random.below(links) as u16;
                world.wire.set_cut(link, true);
                let pause = Duration::from_micros(world.random.below(400_000));
                world.run_for(pause);
                world.wire.set_cut(link, false);
            }
            _ => {}
        });
        check_all(&mut world, host);
    });
}

#[test]
fn no_write_of_a_dead_initiator_arrives_after_the_next_one_has_begun() {
    for_each_seed(2000, |seed| {
        let mut random = Random::of(seed, &[5]);
        let mut world = World::new(seed, random_settings(&mut random));
        let mut client = 2;
        let mut host = world.start_host(client, false);
        for _ in 0..4 {
            for _ in 0..20 {
                submit(&mut world, host);
            }
            let pause = Duration::from_micros(world.random.below(3000));
            world.run_for(pause);
            world.kill_host(host);
            // The next one has not read or written anything yet, so the oracle counts on nothing more than before.
            world.oracle.initiator_replaced();
            if world.random.below(2) == 0 {
                world.kill_target(true);
                world.start_target();
            }
            let is_other = world.random.below(2) == 0;
            client ^= u8::from(is_other);
            host = world.start_host(client, is_other);
            work(&mut world, host, 20, |_| {});
        }
        check_all(&mut world, host);
    });
}

/// Links that send a frame in some microseconds, and lose frames when some are waiting.
fn short_queues(settings: &mut Settings, random: &mut Random) {
    for faults in &mut settings.links {
        faults.frame_time = Duration::from_micros(1 + random.below(40));
        faults.queue_frames = 4 + random.below(60) as u32;
        faults.delay = Duration::from_micros(5 + random.below(200));
    }
}

/// Frames without content grow with the frames with content and with the time, at the rate of the fastest probes. If frames without content caused
/// each other, they would take as much of a link as there is.
#[test]
fn frames_without_content_are_few_on_links_that_lose_what_waits_too_long() {
    // `PROBE_MIN` of the protocol, and the longest time of a probe.
    const PROBE_MIN: Duration = Duration::from_millis(1);
    const PROBE_MAX: Duration = Duration::from_millis(200);
    for_each_seed(300, |seed| {
        let mut random = Random::of(seed, &[6]);
        let mut settings = random_settings(&mut random);
        short_queues(&mut settings, &mut random);
        let channels = u64::from(settings.channels);
        let links = settings.links.len() as u64;
        let mut world = World::new(seed, settings);
        let host = world.start_host(1, false);
        let begun = world.time;
        work(&mut world, host, 200, |world| {
            if world.random.below(100) == 0 {
                let link = world.random.below(links) as u16;
                world.wire.set_cut(link, true);
                let pause = Duration::from_micros(world.random.below(400_000));
                world.run_for(pause);
                world.wire.set_cut(link, false);
            }
        });
        let probes = (world.time - begun).div_duration_f64(PROBE_MIN) as u64;
        for (nic, carried) in &world.carried {
            let [with, without] = *carried;
            let most = with + channels * probes / 2 + 50;
            assert!(
                without <= most,
                "link {nic}: {without} beside {with} with content, {probes} probes"
            );
        }
        // Nobody waits for anything: only a suspect channel sends.
        world.run_for(Duration::from_secs(2));
        let (before, quiet) = (world.frames, Duration::from_secs(60));
        world.run_for(quiet);
        let most = 4 * links * channels * quiet.div_duration_f64(PROBE_MAX) as u64;
        assert!(
            world.frames - before <= most,
            "{} frames",
            world.frames - before
        );
    });
}
