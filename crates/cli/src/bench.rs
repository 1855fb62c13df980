//! `jericho bench`: the papers' workloads on directories and devices.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use jericho_daemon::{THREADS_VARIABLE, ThreadPolicy};
use jericho_storage::is_remote;
use jericho_topology::Topology;
use jericho_workload::kind::Kind;
use jericho_workload::machine::Cpio;
use jericho_workload::options::{Generator, Migration, Options};
use jericho_workload::placement::{Placement, Way};
use jericho_workload::plan::Plan;
use jericho_workload::reach::{KernelFiles, Reach, Route};
use jericho_workload::record::Record;
use jericho_workload::schedule::Planned;
use jericho_workload::target::Target;
use jericho_workload::{fio, fs_mark};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::args::{BenchArgs, GeneratorArg, PathArg};
use crate::failure::{Context, Failure, Outcome, both, print};
use crate::in_process::InProcess;
use crate::on_mounts::OnMounts;
use crate::{bench_nodes, control, predict, preload, served};

/// Set in the environment of this program when it runs for the second time.
const AGAIN: &str = "JERICHO_BENCH_AGAIN";

/// Longest measurement that a user may ask for: a week.
const SECONDS_MAX: f64 = 7.0 * 24.0 * 3600.0;
/// Shortest one: in less time the kernel counts hardly any CPU time.
const SECONDS_MIN: f64 = 0.1;

pub fn run(args: &BenchArgs) -> Outcome {
    match &args.model {
        Some(model) => predict::run(model, args),
        None => measure(args),
    }
}

fn measure(args: &BenchArgs) -> Outcome {
    let topology = bench_nodes::of(args.topology.as_deref(), &args.targets)?;
    let options = options(args)?;
    let route = route(args)?;
    // Closes the volumes after the last run, also after a failure.
    let in_process = match route {
        Route::Process => Some(Arc::new(InProcess::open(&args.targets, &topology)?)),
        _ => None,
    };
    let measured = targets(args, &topology, route, in_process.clone())
        .and_then(|reached| measure_by(args, &topology, options, reached));
    let closed = in_process.map_or(Ok(()), |volumes| volumes.close());
    both(measured, closed)
}

/// Returns the way to the volumes. For another way than the present one, runs this program again, with or without the library of `jericho run`.
fn route(args: &BenchArgs) -> Result<Route, Failure> {
    let is_loaded = preload::is_loaded();
    if matches!(args.path, None | Some(PathArg::Fast)) {
        check_policy(args, is_loaded)?;
    }
    let Some(wanted) = args.path else {
        let are_mounts = || {
            args.targets
                .iter()
                .all(|path| control::where_is(path).is_ok())
        };
        return Ok(match is_loaded && are_mounts() {
            true => Route::Fast,
            false => Route::Kernel,
        });
    };
    match (wanted, is_loaded) {
        (PathArg::Fast, true) => return Ok(Route::Fast),
        (PathArg::Mount, false) => return Ok(Route::Kernel),
        (PathArg::Process, _) => return Ok(Route::Process),
        (PathArg::Fast, false) | (PathArg::Mount, true) => {}
    }
    if std::env::var_os(AGAIN).is_some() {
        return Err(Failure::new(
            "the library of jericho run could not be loaded into this program, or removed from it; is this program set-user-ID?",
        ));
    }
    let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
    command.args(std::env::args_os().skip(1)).env(AGAIN, "1");
    match wanted {
        PathArg::Fast => {
            for target in &args.targets {
                control::where_is(target)?;
            }
            preload::set(&mut command, &preload::find()?, Some(args.migration), false)?;
        }
        _ => preload::unset(&mut command),
    }
    // This program begins again in the same process.
    let error = command.exec();
    Err(Failure::new(format!(
        "cannot run this program again: {error}"
    )))
}

/// Fails if this program runs with the library of `jericho run`, and was told another policy for its threads than that of the run.
fn check_policy(args: &BenchArgs, is_loaded: bool) -> Result<(), Failure> {
    let told = std::env::var(THREADS_VARIABLE).ok();
    let told = told.and_then(|told| told.parse::<ThreadPolicy>().ok());
    match told.filter(|told| is_loaded && *told != args.migration) {
        Some(told) => Err(Failure::new(format!(
            "jericho run sets the policy {told} for the threads of bench, and --migration is {}; give both the same policy, or leave out --threads of jericho run (or the variable {THREADS_VARIABLE})",
            args.migration
        ))),
        None => Ok(()),
    }
}

/// Returns the targets, and how a run reaches them.
fn targets(
    args: &BenchArgs,
    topology: &Topology,
    route: Route,
    in_process: Option<Arc<InProcess>>,
) -> Result<(Vec<Target>, Reach), Failure> {
    if let Some(volumes) = in_process {
        let targets = volumes.targets();
        let reach = Reach {
            route,
            files: volumes.clone(),
            daemon: volumes,
        };
        return Ok((targets, reach));
    }
    let daemon = OnMounts::of(&args.targets, route);
    let targets = args.targets.iter();
    let targets = targets.map(|path| Target::of(path, topology, &daemon));
    let targets = targets.collect::<Result<Vec<_>, _>>().map_err(failure)?;
    let reach = Reach {
        route,
        files: Arc::new(KernelFiles),
        daemon: Arc::new(daemon),
    };
    Ok((targets, reach))
}

fn measure_by(
    args: &BenchArgs,
    topology: &Topology,
    options: Options,
    (targets, reach): (Vec<Target>, Reach),
) -> Outcome {
    // Another process may use the device, for example a mount. Held until the end.
    let written = targets
        .iter()
        .filter(|target| args.force && !target.is_directory && !is_remote(&target.path));
    let _claims = written
        .map(|target| served::claim(&target.path, false, "write to"))
        .collect::<Result<Vec<_>, _>>()?;
    // Each thread of zmio has several.
    jericho_sys::limits::raise_open_files();
    // Before the first directory is made.
    let interrupted = listen()?;
    let plan = Plan::new(topology, targets, &reach, options).map_err(failure)?;
    if args.placement_trace.is_some() && plan.runs.len() != 1 {
        return Err(Failure::new(format!(
            "--placement-trace is of one run, and these are {}; choose one workload with --variant and one number of --threads",
            plan.runs.len()
        )));
    }
    let mut kinds = plan.runs.iter().map(|run| run.kind);
    if args.placement_trace.is_some() && kinds.any(|kind| kind.way() == Way::Memory) {
        return Err(Failure::new(
            "--placement-trace: mstress uses memory only; choose another workload",
        ));
    }
    let mut out = args.out.as_deref().map(open_out).transpose()?;
    let trace = args.placement_trace.as_deref();
    let mut trace = trace
        .map(|path| open_trace(path, args.targets.iter().chain(&args.out)))
        .transpose()?;
    let seconds = plan.duration().as_secs_f64();
    print(&format!(
        "{} runs, about {seconds:.0} s together\n",
        plan.runs.len()
    ))?;
    for note in plan.notes() {
        print(&format!("{note}\n"))?;
    }
    print(&heading())?;
    let digest = jericho_probe::digest(topology);
    let bar = progress(plan.runs.len());
    for planned in &plan.runs {
        bar.set_message(name(planned));
        bar.tick();
        let (mut record, outcome) = plan.run(planned, &interrupted).map_err(failure)?;
        record.machine.topology_digest = Some(digest.clone());
        if let Some((file, path)) = &mut out {
            append(file, &record).context(path.display())?;
        }
        if let Some((file, path)) = &mut trace {
            let lines = plan.trace(planned, &outcome).map_err(failure)?;
            write_trace(file, &lines).context(path.display())?;
        }
        bar.suspend(|| print(&line(&record)))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(ExitCode::SUCCESS)
}

/// Returns what signals set from now on.
fn listen() -> Result<Arc<AtomicBool>, Failure> {
    // A second signal ends the program at once.
    let interrupted = Arc::new(AtomicBool::new(false));
    // A program under nohup(1) goes on when its terminal is gone.
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        if signal == SIGHUP && is_ignored(signal) {
            continue;
        }
        signal_hook::flag::register_conditional_shutdown(signal, 130, interrupted.clone())
            .and_then(|_| signal_hook::flag::register(signal, interrupted.clone()))
            .context("cannot listen for signals")?;
    }
    Ok(interrupted)
}

/// Returns whether the parent process had this one ignore a signal: `SigIgn` of proc_pid_status(5).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn failure(error: jericho_workload::Error) -> Failure {
    Failure::new(error.to_string())
}

fn options(args: &BenchArgs) -> Result<Options, Failure> {
    let seconds = match args.seconds {
        Some(seconds) if !(SECONDS_MIN..=SECONDS_MAX).contains(&seconds) => {
            return Err(Failure::new(format!(
                "--seconds {seconds}: use a number from {SECONDS_MIN} to {SECONDS_MAX}"
            )));
        }
        seconds => seconds.map(Duration::from_secs_f64),
    };
    if args.generator.is_some() && args.placement_trace.is_some() {
        return Err(Failure::new(
            "--placement-trace: another program does not tell the nodes of its accesses; leave out --generator",
        ));
    }
    let threads = args.threads.iter().map(|count| *count as usize).collect();
    Ok(Options {
        variants: args.variant.clone(),
        generator: match args.generator {
            Some(GeneratorArg::Fio) => Generator::Fio(fio::version().map_err(failure)?),
            Some(GeneratorArg::FsMark) => Generator::FsMark(fs_mark::version().map_err(failure)?),
            None => Generator::Own,
        },
        kinds: Kind::named(args.workload.as_deref().unwrap_or("all")).map_err(failure)?,
        placement: Placement::named(args.placement.as_deref().unwrap_or("native"))
            .map_err(failure)?,
        threads: (!args.threads.is_empty()).then_some(threads),
        seconds,
        as_paper: args.as_paper,
        with_mstress: args.with_mstress,
        migration: match args.migration {
            ThreadPolicy::Never => Migration::Never,
            ThreadPolicy::Adaptive => Migration::Adaptive,
            ThreadPolicy::Always => Migration::Always,
        },
        may_destroy: args.force,
        seed: args.seed,
    })
}

/// Opens the file for records before the first run, so that no run is lost.
fn open_out(path: &Path) -> Result<(File, &Path), Failure> {
    let what = || format!("{}: cannot open it for results", path.display());
    let mut options = OpenOptions::new();
    let file = options.read(true).append(true).create(true).open(path);
    // A pipe or a terminal may be open for writing only.
    let file = file.or_else(|_| OpenOptions::new().append(true).open(path));
    let mut file = file.context(what())?;
    if has_cut_line(&file).unwrap_or(false) {
        file.write_all(b"\n").context(what())?;
    }
    Ok((file, path))
}

/// Opens the file for the trace before the run, so that the run is not in vain. A former trace stays in it until there is a new one. Fails if the
/// file is one of `others`.
fn open_trace<'a>(
    path: &'a Path,
    mut others: impl Iterator<Item = &'a PathBuf>,
) -> Result<(File, &'a Path), Failure> {
    if let Some(other) = others.find(|other| is_same_file(path, other)) {
        return Err(Failure::new(format!(
            "{}: the placement trace would overwrite {}; name another file",
            path.display(),
            other.display()
        )));
    }
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(path);
    let file = file.context(format_args!(
        "{}: cannot open it for the placement trace",
        path.display()
    ))?;
    Ok((file, path))
}

/// Returns whether two paths lead to the same file, which exists.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

/// Writes a trace in the place of a former one.
fn write_trace(file: &mut File, lines: &[impl Serialize]) -> Result<(), Failure> {
    let mut text = String::new();
    for line in lines {
        text += &serde_json::to_string(line).context("cannot write JSON")?;
        text.push('\n');
    }
    // A pipe or a terminal has no length.
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    let emptied = match is_file {
        true => file.set_len(0),
        false => Ok(()),
    };
    let written = emptied.and_then(|()| file.write_all(text.as_bytes()));
    written.context("cannot write the placement trace")
}

/// Returns whether the last line of a file has no end, because a program was killed or the disk was full.
fn has_cut_line(file: &File) -> std::io::Result<bool> {
    let bytes = file.metadata()?.len();
    let mut last = [0];
    Ok(bytes > 0 && file.read_at(&mut last, bytes - 1)? == 1 && last != *b"\n")
}

/// Appends a line. If the disk is full, takes back what is written of it, so that other lines stay whole.
fn append(file: &mut File, record: &Record) -> Result<(), Failure> {
    let mut line = serde_json::to_string(record).context("cannot write JSON")?;
    line.push('\n');
    let before = file.metadata().map(|metadata| metadata.len());
    let (mut left, mut result) = (line.as_bytes(), Ok(()));
    while !left.is_empty() && result.is_ok() {
        result = match file.write(left) {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            Ok(count) => {
                left = &left[count..];
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        };
    }
    if result.is_err()
        && let Ok(before) = before
    {
        take_back(file, before, (line.len() - left.len()) as u64);
    }
    result.context("cannot write a result")
}

/// Takes back the bytes that were appended to a file. Does nothing if another program has appended, too: its line would be lost.
fn take_back(file: &File, before_bytes: u64, appended_bytes: u64) {
    let now_bytes = file.metadata().map(|metadata| metadata.len());
    if now_bytes.is_ok_and(|now_bytes| now_bytes == before_bytes + appended_bytes) {
        // A pipe has no length. The error of the write says what is wrong.
        let _ = file.set_len(before_bytes);
    }
}

/// Returns a bar on standard error. It hides itself where that is no terminal.
fn progress(runs: usize) -> ProgressBar {
    let bar = ProgressBar::new(runs as u64);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn name(planned: &Planned) -> String {
    format!(
        "{} {}, {} threads",
        planned.kind.name(),
        planned.variant.name,
        planned.threads
    )
}

fn heading() -> String {
    format!(
        "{:<24} {:<9} {:>7} {:>11} {:>11} {:>10} {:>10} {:>7} {:>10} {:>11}\n",
        "workload",
        "placement",
        "threads",
        "MB/s",
        "IOPS",
        "p50 us",
        "p99 us",
        "local",
        "cycles/IO",
        "cycles/512B"
    )
}

/// Returns the line of a run. Cycles are those of busy CPUs: per I/O for each sector of the devices, and for each 512 bytes that the programs moved. `-`
/// stands for those that the record does not have, for example per I/O if the data was cached.
fn line(record: &Record) -> String {
    let latency = |key: &str| match record.latency_ns.get(key) {
        Some(ns) => format!("{:.1}", *ns as f64 / 1000.0),
        None => "-".to_owned(),
    };
    let local = record
        .local_share
        .map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0));
    let busy = |cycles: Option<Cpio>| {
        cycles.map_or("-".to_owned(), |cycles| {
            let busy = cycles.user + cycles.system + cycles.irq + cycles.soft_irq;
            format!("{busy:.0}")
        })
    };
    let beside = record.mstress.map(|mstress| {
        format!(
            "{:<24} {:<9} {:>7} {:>11.1}\n",
            "  beside: mstress",
            "",
            mstress.threads,
            mstress.bytes_per_s / 1e6
        )
    });
    let line = format!(
        "{:<24} {:<9} {:>7} {:>11.1} {:>11.0} {:>10} {:>10} {:>7} {:>10} {:>11}\n",
        format!("{} {}", record.workload, record.variant),
        record.placement,
        record.threads,
        record.throughput_bytes_per_s / 1e6,
        record.iops,
        latency("p50"),
        latency("p99"),
        local,
        busy(record.cpio),
        busy(record.cycles_per_moved_sector)
    );
    line + &beside.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_another_program_is_never_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results");
        std::fs::write(&path, "one\ntw").unwrap();
        let file = File::options().append(true).open(&path).unwrap();
        take_back(&file, 4, 2);
        assert_eq!(std::fs::read(&path).unwrap(), b"one\n");
        // Between the look at the length and the write, another program has appended.
        std::fs::write(&path, "one\nother\ntw").unwrap();
        take_back(&file, 4, 2);
        assert_eq!(std::fs::read(&path).unwrap(), b"one\nother\ntw");
    }

    #[test]
    fn a_former_trace_stays_until_there_is_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (dir.path().join("trace"), dir.path().join("out"));
        std::fs::write(&path, "a former trace, which is long").unwrap();
        let (mut file, _) = open_trace(&path, [&out].into_iter()).unwrap();
        assert!(std::fs::read(&path).unwrap().starts_with(b"a former"));
        write_trace(&mut file, &[1, 2]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"1\n2\n");
        std::fs::hard_link(&path, &out).unwrap();
        let refused = open_trace(&path, [&out].into_iter()).unwrap_err();
        assert!(refused.to_string().contains("would overwrite"), "{refused}");
    }

    #[test]
    fn the_table_has_cycles_of_devices_and_of_programs_in_their_own_columns() {
        let cycles = |user: u32| {
            format!(
                r#"{{"user":{user}.0,"system":0.0,"idle":7.0,"io_wait":7.0,"irq":0.0,"soft_irq":0.0,"steal":0.0}}"#
            )
        };
        let last_columns = |cpio: &str| {
            let text = format!(
                r#"{{"format":1,"workload":"scan","variant":"read","targets":["/mnt"],"placement":"best","threads":1,"seats":[],"with_mstress":false,"seconds":1.0,"data_bytes":0,"as_paper":false,"seed":1,"engine":[],"throughput_bytes_per_s":1.0,"read_bytes_per_s":1.0,"written_bytes_per_s":0.0,"iops":1.0,"throughput_bytes_per_s_by_node":{{}},"latency_ns":{{}},"local_share":null,"cpu_seconds":{0},"device_sectors":null,"cpio":{cpio},"cycles_per_moved_sector":{0},"sampled":[],"machine":{{"cpu_model":"Example CPU","cpus":1,"nodes":1,"topology":"sysfs","kernel":"6.18","tsc_hz":null,"jericho":"0.1.0"}},"notes":[]}}"#,
                cycles(42)
            );
            let record: Record = serde_json::from_str(&text).unwrap();
            let line = line(&record);
            let columns: Vec<&str> = line.split_ascii_whitespace().collect();
            columns[columns.len() - 2..].join(" ")
        };
        assert_eq!(last_columns("null"), "- 42");
        assert_eq!(last_columns(&cycles(99)), "99 42");
        let heading = heading();
        assert!(heading.ends_with("  cycles/IO cycles/512B\n"), "{heading}");
    }
}
