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
    pub first_cpu: usize,
    /// Bytes that it had read when it was first seen on another CPU.
    pub moved_after: Option<u64>,
    /// Share of its second half that it was seen on each node.
    pub share_on: BTreeMap<usize, f64>,
    /// Where it might run, in the kernel's words: before its first read, after its last, and when it had rested.
    pub allowed: [String; 3],
}

impl Thread {
    pub fn share_on(&self, node: usize) -> f64 {
        self.share_on.get(&node).copied().unwrap_or(0.0)
    }
}

/// Runs it under `jericho run` with this policy; `None`: without, through the kernel.
pub fn read(policy: Option<&str>, tasks: &[Task]) -> Vec<Thread> {
    let mut command = match policy {
        Some(policy) => {
            let mut command = Command::new("/usr/bin/jericho");
            command.args(["run", "--placement", policy, "--", "/usr/bin/reader"]);
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
    let [first, moved, seen, allowed @ ..] = words.as_slice() else {
        panic!("the reader said {line:?}");
    };
    let mut times: BTreeMap<usize, f64> = BTreeMap::new();
    for pair in seen.split_terminator(',') {
        let (cpu, seen) = pair.split_once(':').expect("CPU:TIMES");
        *times
            .entry(node_of(cpu.parse().expect("a CPU")))
            .or_default() += seen.parse::<f64>().expect("a number");
    }
    let all: f64 = times.values().sum();
    Thread {
        first_cpu: first.parse().expect("a CPU"),
        moved_after: moved.parse().ok(),
        share_on: times
            .into_iter()
            .map(|(node, seen)| (node, seen / all))
            .collect(),
        allowed: <[&str; 3]>::try_from(allowed)
            .expect("three lists")
            .map(str::to_owned),
    }
}
