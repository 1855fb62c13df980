//! The paths of bytes, from the node of the program's buffer to the node of the interface, in the paper's configurations (its tables 2 and 3).
//!
//! The kernel counts what each interface sends. A run has threads and buffers of one node only, so these counters say which path its bytes have
//! taken, whatever Jericho counts. A run with the threads of both nodes compares Jericho's own counters.

use std::time::{Duration, Instant};

use jericho_ether::{Mode, RemoteDevice, Scheduler};
use jericho_storage::{Device, Direction};

use super::hosts::{LAYOUTS, Layout, NODES, Target, Told, attach_by, node_of_pair};
use super::kernel::{pools, sent_bytes, threads};
use super::load::{Worker, transfer};

const KIB: usize = 1 << 10;
/// Bytes of a frame of the largest size.
const QUESTION_BYTES: u64 = 8192 + 64;
/// The paper's sizes of requests are between these.
const SIZES: [usize; 4] = [4 * KIB, 64 * KIB, 128 * KIB, 512 * KIB];

/// A configuration of the paper.
#[derive(Clone, Copy, Debug)]
struct Configuration {
    name: &'static str,
    /// What Jericho is told decides where it places memory and threads.
    told: Told,
    scheduler: Scheduler,
    mode: Mode,
    /// Nodes of the program's threads, each with the node of the thread's buffers.
    program: fn(Layout) -> Vec<(usize, usize)>,
    /// Sizes of requests.
    sizes: &'static [usize],
    /// Expected share of bytes that an interface of the buffer's node carries.
    local: fn(Layout) -> (f64, f64),
}

/// Threads and buffers on the nodes that have interfaces.
fn near(layout: Layout) -> Vec<(usize, usize)> {
    layout.nodes().iter().map(|node| (*node, *node)).collect()
}

/// As the program of table 2, if all interfaces are on one node; else, on both nodes.
fn far(layout: Layout) -> Vec<(usize, usize)> {
    let node = |node: &usize| (NODES - 1 - node, NODES - 1 - node);
    layout.nodes().iter().map(node).collect()
}

/// Threads on both nodes, each with buffers of its node: a program whose buffers are balanced.
fn balanced(_: Layout) -> Vec<(usize, usize)> {
    vec![(0, 0), (1, 1)]
}

/// Threads on both nodes, and all buffers on node 0: a program that does not place its memory.
fn on_node_0(_: Layout) -> Vec<(usize, usize)> {
    vec![(0, 0), (1, 0)]
}

/// Threads and buffers on both nodes, and no thread that knows where its buffers are: a program without affinity (figures 14 to 16).
fn scattered(_: Layout) -> Vec<(usize, usize)> {
    vec![(0, 0), (0, 1), (1, 0), (1, 1)]
}

fn half(_: Layout) -> (f64, f64) {
    (0.4, 0.6)
}

/// The share of the interfaces that are on node 0.
fn as_interfaces(layout: Layout) -> (f64, f64) {
    let share = layout.of(0) as f64 / layout.pairs().len() as f64;
    (share - 0.1, share + 0.1)
}

const CONFIGURATIONS: [Configuration; 10] = [
    Configuration {
        name: "Ideal",
        told: Told::Truth,
        scheduler: Scheduler::Affinity,
        mode: Mode::Auto,
        program: near,
        sizes: &SIZES,
        local: |_| (0.99, 1.0),
    },
    Configuration {
        name: "Worst",
        told: Told::Swapped,
        scheduler: Scheduler::Affinity,
        mode: Mode::Auto,
        program: far,
        sizes: &SIZES,
        local: |_| (0.0, 0.01),
    },
    Configuration {
        name: "T-Numa",
        told: Told::Truth,
        scheduler: Scheduler::RoundRobin,
        mode: Mode::Auto,
        program: balanced,
        sizes: &SIZES,
        local: half,
    },
    Configuration {
        name: "T-Numa, buffers on node 0",
        told: Told::Truth,
        scheduler: Scheduler::RoundRobin,
        mode: Mode::Auto,
        program: on_node_0,
        sizes: &[128 * KIB],
        local: as_interfaces,
    },
    Configuration {
        name: "No-Opt",
        told: Told::OneNode,
        scheduler: Scheduler::RoundRobin,
        mode: Mode::Auto,
        program: balanced,
        sizes: &SIZES,
        local: half,
    },
    Configuration {
        name: "No-Opt, buffers on node 0",
        told: Told::OneNode,
        scheduler: Scheduler::RoundRobin,
        mode: Mode::Auto,
        program: on_node_0,
        sizes: &[128 * KIB],
        local: as_interfaces,
    },
    Configuration {
        name: "I",
        told: Told::Truth,
        scheduler: Scheduler::Affinity,
        mode: Mode::Inline,
        program: scattered,
        sizes: &[128 * KIB],
        local: half,
    },
    Configuration {
        name: "Q",
        told: Told::Truth,
        scheduler: Scheduler::Affinity,
        mode: Mode::Queue,
        program: scattered,
        sizes: &[128 * KIB],
        local: half,
    },
    Configuration {
        name: "I-NU",
        told: Told::Truth,
        scheduler: Scheduler::Affinity,
        mode: Mode::Inline,
        program: near,
        sizes: &[128 * KIB],
        local: |_| (0.99, 1.0),
    },
    Configuration {
        name: "Q-NU",
        told: Told::Truth,
        scheduler: Scheduler::Affinity,
        mode: Mode::Queue,
        program: near,
        sizes: &[128 * KIB],
        local: |_| (0.99, 1.0),
    },
];

/// Returns the bytes of each interface that sends the data of transfers in this direction, during a run.
fn carried(layout: Layout, direction: Direction, run: impl FnOnce()) -> Vec<u64> {
    let host = match direction {
        Direction::Write => 'i',
        Direction::Read => 't',
    };
    let interfaces = layout.interfaces(host);
    let before = sent_bytes(&interfaces);
    run();
    let after = sent_bytes(&interfaces);
    after.iter().zip(before).map(|(now, b)| now - b).collect()
}

/// Lets interfaces count as idle that have sent no more than the questions of their channels whether the other host is there: a frame of the largest size after
/// each 200 ms without others, and some repetitions. Emulation makes them a noticeable part.
fn without_questions(carried: &mut [u64], time: Duration) {
    let most = (time.as_millis() as u64 / 100 + 8) * QUESTION_BYTES;
    for bytes in carried.iter_mut().filter(|bytes| **bytes <= most) {
        *bytes = 0;
    }
}

fn worker((node, buffers): (usize, usize), bytes: usize) -> Worker {
    Worker {
        node,
        buffers,
        bytes,
        depth: ((512 * KIB) / bytes).clamp(2, 16),
    }
}

/// Runs the threads of a program one after the other. Returns the share of the bytes that interfaces of the buffers' nodes have carried, as the kernel
/// counts, and the share of each interface.
fn local_share(
    device: &RemoteDevice,
    layout: Layout,
    direction: Direction,
    program: &[(usize, usize)],
    (bytes, is_by_affinity): (usize, bool),
) -> (f64, Vec<f64>) {
    let amount = (64 * bytes).clamp(2 << 20, 8 << 20);
    let mut local = 0;
    let mut sums = vec![0; layout.pairs().len()];
    for (node, buffers) in program {
        let workers = [worker((*node, *buffers), bytes)];
        let start = Instant::now();
        let mut carried = carried(layout, direction, || {
            transfer(device, direction, &workers, amount);
        });
        // With turns, no interface is idle.
        if is_by_affinity {
            without_questions(&mut carried, start.elapsed());
        }
        for ((sum, bytes), pair) in sums.iter_mut().zip(carried).zip(layout.pairs()) {
            *sum += bytes;
            local += bytes * u64::from(node_of_pair(pair) == *buffers);
        }
    }
    let all: u64 = sums.iter().sum();
    let shares = sums.iter().map(|sum| *sum as f64 / all as f64).collect();
    (local as f64 / all as f64, shares)
}

/// Runs all threads of a program together. Returns the share of local bytes in Jericho's counters, and checks these counters against the kernel's.
fn counted_share(
    device: &RemoteDevice,
    layout: Layout,
    program: &[(usize, usize)],
    bytes: usize,
) -> f64 {
    let counters = || {
        let channels = device.network().expect("a network").channels;
        let pair = |channel: &jericho_storage::ChannelStat| {
            (channel.local_bytes, channel.remote_bytes, channel.node)
        };
        channels.iter().map(pair).collect::<Vec<_>>()
    };
    let workers: Vec<Worker> = program.iter().map(|one| worker(*one, bytes)).collect();
    let before = counters();
    let carried = carried(layout, Direction::Write, || {
        transfer(device, Direction::Write, &workers, 4 << 20);
    });
    let (mut local, mut remote) = (0, 0);
    for ((after, before), sent) in counters().iter().zip(&before).zip(carried) {
        let (own, others) = (after.0 - before.0, after.1 - before.1);
        // The kernel also counts headers and acknowledgements.
        let counted = own + others;
        assert!(sent >= counted, "{sent} {counted}");
        assert!(sent < counted * 11 / 10 + 100_000, "{sent} {counted}");
        local += own;
        remote += others;
    }
    local as f64 / (local + remote) as f64
}

fn run(layout: Layout, configuration: &Configuration) {
    let Configuration {
        name,
        told,
        scheduler,
        mode,
        ..
    } = *configuration;
    let target = Target::serve("null:1G", "paths", layout, told);
    let device = attach_by("paths", layout, told, (scheduler, mode));
    let program = (configuration.program)(layout);
    // Channels ask more often until they know how long an answer takes.
    for one in &program {
        transfer(
            &device,
            Direction::Write,
            &[worker(*one, 64 * KIB)],
            1 << 20,
        );
    }
    let (least, most) = (configuration.local)(layout);
    let mut wrong = Vec::new();
    for &bytes in configuration.sizes {
        for direction in [Direction::Write, Direction::Read] {
            let (local, shares) = local_share(
                &device,
                layout,
                direction,
                &program,
                (bytes, scheduler == Scheduler::Affinity),
            );
            let (kib, shares) = (bytes / KIB, percent(&shares));
            let line =
                format!("{layout}, {name}, {direction:?}, {kib} KiB: {local:.4} local; {shares}");
            println!("lab: paths, {line}");
            if !(least..=most).contains(&local) {
                wrong.push(line);
            }
        }
    }
    let counted = counted_share(&device, layout, &program, 128 * KIB);
    let here = u64::from(std::process::id());
    for (of, pid) in [("initiator", here), ("target", target.pid())] {
        let (placed, prefix) = (pools(pid), if of == "target" { "serve" } else { "remote" });
        println!(
            "lab: paths, {layout}, {name}, {of}: pool pages by node asked for and node: {:?}; threads: {:?}",
            placed.pages,
            threads(pid, prefix)
                .iter()
                .map(|thread| (thread.name.as_str(), thread.may_run_on.clone()))
                .collect::<Vec<_>>()
        );
        let (right, all) = placed.right();
        assert_eq!(right, all, "{placed:?}");
        // The kernel was asked for pages of the nodes that Jericho takes for those of the interfaces.
        for node in 0..NODES {
            let told = layout
                .nodes()
                .iter()
                .any(|real| told.node(*real) == Some(node));
            let has = placed.pages[node].iter().sum::<u64>() > 0;
            assert!(!has || told, "{placed:?}");
        }
    }
    println!("lab: paths, {layout}, {name}: {counted:.4} local, as Jericho counts");
    if mode != Mode::Auto {
        check_senders(&device, layout, (name, mode));
    }
    match (scheduler, told, layout.nodes().len()) {
        (_, Told::OneNode, _) | (_, _, 1) => {}
        (Scheduler::Affinity, ..) => assert!(counted >= 0.99, "{counted}"),
        _ => assert!((0.3..=0.7).contains(&counted), "{counted}"),
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Prints the locks, and asserts that the mode is the one that was asked for, with threads on the nodes of the interfaces.
fn check_senders(device: &RemoteDevice, layout: Layout, (name, mode): (&str, Mode)) {
    let network = device.network().expect("a network");
    println!("lab: locks, {layout}, {name}: {:?}", network.locks);
    for channel in &network.channels {
        assert_eq!(channel.is_queueing, mode == Mode::Queue, "{channel:?}");
    }
    let senders = threads(std::process::id().into(), "send-");
    let expected = match mode {
        Mode::Inline => 0,
        _ => 3 * layout.pairs().len(),
    };
    assert_eq!(senders.len(), expected, "{senders:?}");
    for sender in senders {
        let [node] = sender.may_run_on[..] else {
            panic!("{sender:?}");
        };
        assert!(layout.nodes().contains(&node), "{sender:?}");
    }
}

fn percent(shares: &[f64]) -> String {
    let words: Vec<String> = shares.iter().map(|s| format!("{:.0}", s * 100.0)).collect();
    format!("% of each interface: {}", words.join(" "))
}

#[test]
#[ignore = "for the guest of make lab"]
fn bytes_take_the_paths_of_the_papers_configurations() {
    for layout in LAYOUTS {
        for configuration in &CONFIGURATIONS {
            run(layout, configuration);
        }
    }
}
