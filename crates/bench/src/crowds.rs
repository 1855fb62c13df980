//! Many threads of one program under `jericho run` on one file, and many attached programs that do nothing.
//!
//! The same program performs the same work with 1, 2, 8, 32 and 64 threads, in turn on the same CPUs. The result is the throughput
//! relative to two threads. It shows the cost of what threads share (counters, locks, reports, a table of programs).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Result;
use crate::compare::{Comparison, Side, in_turn};
use crate::mounts::{Volume, compile, run};
use crate::settings::Settings;

const SOURCE: &str = include_str!("../programs/crowd.c");
/// Number of attached programs.
const ATTACHED: usize = 1000;
/// Size of the file, the same for all numbers of threads, so that all use the CPUs' caches equally.
const FILE_MIB: usize = 64;
/// Target: throughput relative to two threads.
const TARGET: f64 = 0.95;

const BASELINE: &str = "2 threads";
const SIDES: [(u32, &str); 4] = [
    (1, "1 thread"),
    (8, "8 threads"),
    (32, "32 threads"),
    (64, "64 threads"),
];

const WORKS: [(&str, &str); 4] = [
    ("read", "4 KiB pread at random, one file"),
    (
        "apart",
        "8 KiB pwrite, one file, each thread in a part of its own",
    ),
    (
        "together",
        "8 KiB pwrite, one file, all threads in one segment of 64 KiB",
    ),
    (
        "append",
        "4 KiB write at the end of one file, which is emptied when it has 64 MiB",
    ),
];

struct Crowd<'a> {
    settings: &'a Settings,
    volume: Volume,
    program: PathBuf,
}

/// Idle programs. Dropping it ends them.
struct Attached(Child);

impl Drop for Attached {
    fn drop(&mut self) {
        // Closing their standard input ends them.
        drop(self.0.stdin.take());
        if let Err(e) = self.0.wait() {
            eprintln!("the idle programs did not end: {e}");
        }
    }
}

impl Crowd<'_> {
    fn make(settings: &Settings) -> Result<Crowd<'_>> {
        let mut volume = Volume::format(settings, "crowd", "1G")?;
        // The written data stays below a tenth of the cache, where write-back would begin.
        volume.mount("1536M")?;
        for (name, mib) in [("file", FILE_MIB), ("idle", 1), ("log", 0)] {
            fs::write(volume.mnt().join(name), vec![7; mib << 20])?;
        }
        let program = compile(settings, "crowd", SOURCE, "-pthread")?;
        Ok(Crowd {
            settings,
            volume,
            program,
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.settings.jericho);
        command.args(["run", "--"]).arg(&self.program);
        command
    }

    fn measure(&self, work: &str, threads: u32) -> Result<f64> {
        let name = if work == "append" { "log" } else { "file" };
        let seconds = self.settings.pick(1.5, 0.3).to_string();
        let mut command = self.command();
        command.args([work, &threads.to_string(), &seconds]);
        let said = run(command.arg(self.volume.mnt().join(name)))?;
        Ok(said
            .trim()
            .parse()
            .map_err(|e| format!("crowd printed no number ({e}): {said}"))?)
    }

    fn attach(&self, file: &Path) -> Result<Attached> {
        let mut command = self.command();
        command.args(["idle", &ATTACHED.to_string()]).arg(file);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut attached = Attached(child.spawn()?);
        let said = attached.0.stdout.take().ok_or("no standard output")?;
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let clients = self.volume.stat()?["clients"]
            .as_array()
            .map_or(0, Vec::len);
        if line != "ready\n" || clients < ATTACHED {
            return Err(format!("expected {ATTACHED} attached programs, found {clients}").into());
        }
        Ok(attached)
    }

    fn compare(&self, work: &str, conditions: &str, idle: &str) -> Result<Vec<Comparison>> {
        let name = |threads| format!("crowd {work} {threads}{idle}");
        let baseline = Side::new(BASELINE, || self.measure(work, 2));
        let others =
            SIDES.map(|(threads, side)| Side::new(side, move || self.measure(work, threads)));
        let mut sides: Vec<Side> = [baseline].into_iter().chain(others).collect();
        let values = in_turn(
            &format!("crowd {work}{idle}"),
            self.settings.rounds,
            &mut sides,
        )?;
        let rows = SIDES.iter().zip(&values[1..]);
        let row = |((threads, side), our_values): (&(u32, &'static str), &Vec<f64>)| Comparison {
            name: name(*threads),
            conditions: conditions.into(),
            unit: "operations/s".into(),
            ours: (*side).into(),
            baseline: BASELINE.into(),
            target_ratio: (*threads > 2).then_some(TARGET),
            our_values: our_values.clone(),
            baseline_values: values[0].clone(),
            ceilings: Vec::new(),
        };
        Ok(rows.map(row).collect())
    }
}

/// Runs the comparisons with `crowd` in their names.
pub fn run_all(settings: &Settings, selected: impl Fn(&str) -> bool) -> Result<Vec<Comparison>> {
    let idle = format!(", {ATTACHED} attached");
    let mut rows = Vec::new();
    let names = |idle: &str| -> Vec<(&str, &str)> {
        let works = WORKS.iter().copied();
        works
            .filter(|(work, _)| selected(&format!("crowd {work}{idle}")))
            .collect()
    };
    let (alone, beside) = (names(""), names(&idle));
    if settings.self_test || alone.is_empty() && beside.is_empty() {
        return Ok(rows);
    }
    let crowd = Crowd::make(settings)?;
    for (work, conditions) in alone {
        rows.extend(crowd.compare(work, conditions, "")?);
    }
    if !beside.is_empty() {
        let _attached = crowd.attach(&crowd.volume.mnt().join("idle"))?;
        for (work, conditions) in beside {
            let conditions = format!("{conditions}; {ATTACHED} programs attached that wait");
            rows.extend(crowd.compare(work, &conditions, &idle)?);
        }
    }
    Ok(rows)
}
