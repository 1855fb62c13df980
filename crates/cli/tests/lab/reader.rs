//! An unmodified program whose threads read files (`reader.c`), and what became of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::guest::{node_of, succeed};

/// How long it reads.
const MILLISECONDS: &str = "6000";

/// What one of its threads is to do.
pub struct Task<'a> {
    pub begins_on: usize,
    pub is_placed_by_program: bool,
    pub file: &'a Path,
}

/// What became of a thread.
#[derive(Debug)]
pub struct Thread {
    /// Its first CPUs, with the bytes that it had read when it was seen there.
    pub steps: Vec<(usize, u64)>,
    /// Share of its second half that it was seen on each node.
    pub share_on: BTreeMap<usize, f64>,
    /// Where it might run, in the kernel's words: before its first read, after its last, and when it had rested.
    pub allowed: [String; 3],
}

impl Thread {
    /// Bytes that it had read when it was first seen on a node.
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

/// Runs it under `jericho run` with this policy; `None`: without, through the kernel.
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

/// Of `CPU:NUMBER,CPU:NUMBER,`.
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
