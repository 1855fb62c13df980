//! Who sends frames: the threads that ask, or threads of the network interface (Tyche, figures 14 to 16), and whether small requests wait for each other.

use std::fmt::Write as _;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jericho_ether::{Mode, RemoteDevice};
use jericho_storage::{AlignedBuffer, Device, IoError, LockStat};
use serde::Serialize;

use crate::Result;
use crate::remote::hosts::Host;
use crate::remote::modes::{Behind, PLAIN};
use crate::remote::plan::Plan;
use crate::remote::record::{Record, ratios, spread};
use crate::remote::sides::{HERE, THERE};
use crate::remote::targets;

const THREADS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
const BLOCKS: [usize; 3] = [4 << 10, 128 << 10, 512 << 10];

/// A way to send.
struct Side {
    name: &'static str,
    mode: Mode,
    batches: bool,
}

const SIDES: [Side; 4] = [
    Side {
        name: "inline",
        mode: Mode::Inline,
        batches: true,
    },
    Side {
        name: "queue",
        mode: Mode::Queue,
        batches: true,
    },
    Side {
        name: "auto",
        mode: Mode::Auto,
        batches: true,
    },
    Side {
        name: "inline, no batches",
        mode: Mode::Inline,
        batches: false,
    },
];

/// What a side reached in a round.
#[derive(Serialize)]
struct Line<'a> {
    table: &'static str,
    row: &'a str,
    side: &'static str,
    round: u32,
    rate_per_s: f64,
    locks: &'a [LockStat],
}

/// Measures the table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let host = Host::of_targets(plan)?;
    host.join(HERE, THERE)?;
    let served = crate::remote::modes::Mode {
        behind: Behind::Memory,
        ..PLAIN
    };
    let _target = targets::jericho(plan, &host, &served, &[THERE])?;
    let mut text = format!(
        "## Who sends\n\nThreads with one request each, to a file in memory; {} rounds. Requests in a second of *inline*, and the others relative to it in the same round. Wait: mean \
         time for the turn to send (the paper's lock of an interface), and for the lock of the protocol, for each acquisition.\n\n\
         | load | threads | inline | {} | wait for the interface, inline (queue), us | wait for the protocol, us |\n|---|---|---|---|---|---|---|---|\n",
        plan.rounds,
        SIDES[1..]
            .iter()
            .map(|side| side.name)
            .collect::<Vec<_>>()
            .join(" | ")
    );
    for (is_write, block) in [false, true]
        .into_iter()
        .flat_map(|w| BLOCKS.map(|b| (w, b)))
    {
        for threads in THREADS {
            let what = if is_write { "write" } else { "read" };
            let row = format!("{what} {} KiB, threads {threads}", block >> 10);
            let is_left_out =
                plan.is_quick && (![1, 16, 128].contains(&threads) || block == BLOCKS[2]);
            if is_left_out || !plan.selects(&row) {
                continue;
            }
            let mut rates = SIDES.map(|_| Vec::new());
            let mut waits = SIDES.map(|_| (Vec::new(), Vec::new()));
            for round in 0..plan.rounds {
                for turn in 0..SIDES.len() {
                    let at = (turn + round as usize) % SIDES.len();
                    let side = &SIDES[at];
                    let mut config = served.attach_config(&[HERE])?;
                    (config.mode, config.batches) = (side.mode, side.batches);
                    let device = RemoteDevice::attach(&config)?;
                    let rate = load(&device, is_write, block, threads, plan.time)?;
                    let locks = device.network().map_or(Vec::new(), |stat| stat.locks);
                    record.write(&Line {
                        table: "senders",
                        row: &row,
                        side: side.name,
                        round,
                        rate_per_s: rate,
                        locks: &locks,
                    })?;
                    rates[at].push(rate);
                    waits[at].0.push(wait_us(&locks, "interface"));
                    waits[at].1.push(wait_us(&locks, "protocol"));
                }
            }
            let others: Vec<String> = rates[1..]
                .iter()
                .map(|values| spread(&ratios(values, &rates[0])))
                .collect();
            let _ = writeln!(
                text,
                "| {what} {} KiB | {threads} | {} | {} | {} ({}) | {} |",
                block >> 10,
                spread(&rates[0]),
                others.join(" | "),
                spread(&waits[0].0),
                spread(&waits[1].0),
                spread(&waits[0].1),
            );
        }
    }
    Ok(text)
}

/// Returns the mean wait of an acquisition of the locks whose names begin with a word.
fn wait_us(locks: &[LockStat], name: &str) -> f64 {
    let of_name = || locks.iter().filter(|lock| lock.name.starts_with(name));
    let wait: u64 = of_name().map(|lock| lock.wait_us).sum();
    let count: u64 = of_name().map(|lock| lock.acquisitions).sum();
    wait as f64 / count.max(1) as f64
}

/// Has threads read or write blocks, each one after the other. Returns how many ended in a second.
fn load(
    device: &RemoteDevice,
    is_write: bool,
    block: usize,
    threads: u64,
    time: Duration,
) -> Result<f64> {
    let (ends, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let blocks = device.size_bytes() / block as u64;
    let start = Instant::now();
    let work = |thread: u64| -> std::result::Result<(), IoError> {
        let mut buffer = AlignedBuffer::new(block);
        buffer.as_mut_slice().fill(thread as u8);
        // Threads stay apart: overlapping writes would wait for each other.
        let mut number = thread;
        while !ends.load(Ordering::Relaxed) {
            number = (number + threads * 7) % (blocks / threads * threads);
            let at = number * block as u64;
            match is_write {
                true => device.write_at(at, buffer.as_slice())?,
                false => device.read_at(at, buffer.as_mut_slice())?,
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    let failed = std::thread::scope(|scope| {
        let start = |thread| {
            let work = &work;
            scope.spawn(move || work(thread))
        };
        let all: Vec<_> = (0..threads).map(start).collect();
        std::thread::sleep(time);
        ends.store(true, Ordering::Relaxed);
        let ended = all.into_iter().map(|one| one.join());
        let results = ended.map(|result| result.unwrap_or_else(|cause| resume_unwind(cause)));
        results.filter_map(std::result::Result::err).next()
    });
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()),
    }
}
