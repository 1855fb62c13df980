//! Runs an unmodified program whose threads read files (`reader.c`), and parses where the threads ran.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::commands::succeed;
use crate::guest::node_of;

/// How long the program reads.
const MILLISECONDS: &str = "6000";

/// The task of one of the program's threads.
pub struct Task<'a> {
    pub begins_on: usize,
    pub is_placed_by_program: bool,
    pub file: &'a Path,
}

/// Where a thread ran and could run.
#[derive(Debug)]
pub struct Thread {
    /// The thread's first CPUs, each with the bytes that the thread had read when it was seen there.
    pub steps: Vec<(usize, u64)>,
    /// For each node, the share of the second half of the thread's time that it spent there.
    pub share_on: BTreeMap<usize, f64>,
    /// The CPUs where the thread may run, as the kernel prints them: before its first read, after its last read, and after its rest.
    pub allowed: [String; 3],
}

impl Thread {
    /// Returns the bytes that the thread had read when it was first seen on a node.
    pub fn came_to(&self, node: usize) -> Option<u64> {
        let mut steps = self.steps.iter();
        steps
            .find(|(cpu, _)| node_of(*cpu) == node)
            .map(|(_, bytes)| *bytes)
    }

    pub fn share_on(&self, node: usize) -> f64 {
        self.share_on.get(&node).copied().unwrap_or(0.0)
    }
}

/// Runs the program under `jericho run` with this policy. With `None`, runs it without the library, so that it reads through the
/// kernel.
pub fn read(policy: Option<&str>, tasks: &[Task]) -> Vec<Thread> {
    let mut command = match policy {
        Some(policy) => {
            let mut command = Command::new("/usr/bin/jericho");
            command.args(["run", "--threads", policy, "--", "/usr/bin/reader"]);
            command
        }
        None => Command::new("/usr/bin/reader"),
    };
    command.arg(MILLISECONDS);
    for task in tasks {
        let kind = if task.is_placed_by_program {
            "own"
        } else {
            "free"
        };
        command.arg(format!("{},{kind},{}", task.begins_on, task.file.display()));
    }
    let threads: Vec<Thread> = succeed(&mut command).lines().map(parse).collect();
    assert_eq!(threads.len(), tasks.len());
    threads
}

fn parse(line: &str) -> Thread {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [steps, seen, allowed @ ..] = words.as_slice() else {
        panic!("the reader said {line:?}");
    };
    let mut times: BTreeMap<usize, f64> = BTreeMap::new();
    for (cpu, seen) in pairs(seen) {
        *times.entry(node_of(cpu)).or_default() += seen as f64;
    }
    let all: f64 = times.values().sum();
    Thread {
        steps: pairs(steps),
        share_on: times
            .into_iter()
            .map(|(node, seen)| (node, seen / all))
            .collect(),
        allowed: <[&str; 3]>::try_from(allowed)
            .expect("three lists")
            .map(str::to_owned),
    }
}

/// Parses `CPU:NUMBER,CPU:NUMBER,`.
fn pairs(text: &str) -> Vec<(usize, u64)> {
    let pair = |pair: &str| {
        let (cpu, number) = pair.split_once(':')?;
        Some((cpu.parse().ok()?, number.parse().ok()?))
    };
    let pairs = text.split_terminator(',').map(pair);
    pairs
        .collect::<Option<_>>()
        .unwrap_or_else(|| panic!("the reader said {text:?}"))
}
