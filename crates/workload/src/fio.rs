//! fio in place of our own threads: the same files, sizes, depth and placement, so that users need not trust the generator of `bench`.
//!
//! Our threads make the files and then end, so cached pages are where the seats say. fio reads or writes these files, one job for each seat, with
//! `cpus_allowed` and `numa_mem_policy`. Its JSON has a histogram for each job.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use jericho_sys::process::kill_with_parent;
use serde::Deserialize;

use crate::case::Case;
use crate::direct::Devices;
use crate::error::{Context, Error, Result};
use crate::kind::Kind;
use crate::meter::Meter;
use crate::placement::{Placement, Use, Way};
use crate::run::{self, Outcome, Thread, Watched};
use crate::seats::Seat;
use crate::target::path_of;
use crate::work;

/// Time between two looks for the end of fio.
const LOOK: Duration = Duration::from_millis(10);

/// Returns fio's version. Fails if fio is not installed.
pub fn version() -> Result<String> {
    let output = Command::new("fio").arg("--version").output();
    let output = output.map_err(|error| {
        Error::new(format!(
            "fio cannot be started: {error}; install it (package fio), or leave out --generator"
        ))
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Fails if fio has no such workload, or does not do what the name of the placement says.
pub fn check(kind: Kind, placement: Placement) -> Result<()> {
    let reason = match (placement.only, placement.usage) {
        (Some(Way::Direct), Use::Load(_)) => {
            "fio adds up no bytes; use TLORP0I0 or TRORP0I0, or leave out --generator"
        }
        (Some(Way::Cached), _) => {
            "fio drops no cached pages, so after its first pass the devices move nothing; use best, worst or native, or leave out --generator"
        }
        _ => "",
    };
    if !reason.is_empty() {
        let name = placement.name;
        return Err(Error::new(format!("the placement {name}: {reason}")));
    }
    match kind {
        Kind::Zmio | Kind::Scan | Kind::Dd => Ok(()),
        _ => Err(Error::new(format!(
            "fio does not run {}; it runs zmio, scan and dd",
            kind.name()
        ))),
    }
}

/// Runs the workload of a case with fio for this time. `threads`: ours, which make the files.
pub fn run(
    case: &Case,
    threads: Vec<Thread>,
    measured: Duration,
    watched: Watched,
    interrupted: &AtomicBool,
) -> Result<Outcome> {
    run::prepare(case.topology, threads, interrupted, case.stopping)?;
    let opened = Opened::of(case)?;
    let mut command = Command::new("fio");
    command.args(arguments(case, &opened, measured)?);
    let first = watched.now()?;
    let text = finish(&mut command, interrupted)?;
    let last = watched.now()?;
    let (meters, seconds) = parse(&text, case.seats)?;
    let mut outcome = Outcome::of(watched, (&first, &last), meters)?;
    // Of fio's measurement. The times of the CPUs are also of its start.
    outcome.span.seconds = seconds;
    // Ours, not fio's.
    outcome.inline_pages = None;
    Ok(outcome)
}

/// The devices and files of a run, which this process holds open while fio runs.
///
/// fio takes `:`, `#`, `;` and blanks at the ends of a name for its own, and would so read or write another file than the user names. The paths of
/// descriptors have none of these. They also lead to the same file whatever others rename.
struct Opened(Vec<(PathBuf, File)>);

impl Opened {
    /// Opens the targets. Opens nothing if they are directories: the paths of their files already go through descriptors.
    fn of(case: &Case) -> Result<Opened> {
        let open = |path: &Path| File::open(path).at(path, "open it for fio");
        let opened = case
            .devices()
            .iter()
            .map(|target| Ok((target.path.clone(), open(&target.path)?)));
        opened.collect::<Result<_>>().map(Opened)
    }

    /// Returns the path by which fio opens a file.
    fn path_for_fio(&self, path: &Path) -> PathBuf {
        let mut opened = self.0.iter();
        match opened.find(|(named, _)| named == path) {
            Some((_, file)) => path_of(file),
            None => path.to_owned(),
        }
    }
}

/// Returns the arguments of fio.
fn arguments(case: &Case, opened: &Opened, measured: Duration) -> Result<Vec<OsString>> {
    let variant = case.variant;
    let direction = match (variant.writes, variant.is_random) {
        (false, false) => "read",
        (true, false) => "write",
        (false, true) => "randread",
        (true, true) => "randwrite",
    };
    let (engine, direct, depth) = match case.kind {
        Kind::Zmio => ("io_uring", 1, work::ZMIO_DEPTH),
        Kind::Dd => ("psync", 1, 1),
        _ => ("psync", 0, 1),
    };
    let common = [
        "--output-format=json+".to_owned(),
        "--thread".into(),
        format!("--rw={direction}"),
        format!("--bs={}", variant.request_bytes),
        format!("--ioengine={engine}"),
        format!("--direct={direct}"),
        format!("--iodepth={depth}"),
        "--time_based".into(),
        format!("--runtime={}ms", measured.as_millis().max(1)),
        // The files and their cached pages stay as our threads have made them.
        "--allow_file_create=0".into(),
        "--fallocate=none".into(),
        "--invalidate=0".into(),
        // Random offsets may repeat, as ours.
        "--norandommap=1".into(),
        format!("--randseed={}", case.seed),
        "--lat_percentiles=1".into(),
        "--clat_percentiles=0".into(),
    ];
    let mut all: Vec<OsString> = common.into_iter().map(Into::into).collect();
    all.push(match variant.writes {
        true => "--overwrite=1".into(),
        false => "--readonly".into(),
    });
    // This process closes them again before fio starts.
    let devices = Devices::open(case)?;
    for (index, seat) in case.seats.iter().enumerate() {
        all.push(format!("--name=thread-{index}").into());
        let part = work::part(case, &devices, index)?;
        let mut names = OsString::from("--filename=");
        for (number, path) in part.paths.iter().enumerate() {
            if number > 0 {
                names.push(":");
            }
            names.push(opened.path_for_fio(path));
        }
        all.push(names);
        all.push(format!("--offset={}", part.offset).into());
        all.push(format!("--size={}", part.bytes * part.paths.len() as u64).into());
        let service = match variant.is_random {
            true => "random",
            false => "sequential",
        };
        all.push(format!("--file_service_type={service}").into());
        if let Some(node) = seat.thread {
            let cpus = case.topology.cpus_of(node);
            let cpus: Vec<String> = cpus.iter().map(u32::to_string).collect();
            all.push(format!("--cpus_allowed={}", cpus.join(",")).into());
        }
        if let Some(node) = seat.kernel_node(case.topology) {
            all.push(format!("--numa_mem_policy=bind:{node}").into());
        }
    }
    Ok(all)
}

/// Runs a command to its end, and returns what it has printed. Ends it, and fails, if `interrupted` is set meanwhile.
fn finish(command: &mut Command, interrupted: &AtomicBool) -> Result<String> {
    let spawned = kill_with_parent(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child =
        spawned.map_err(|error| Error::new(format!("fio cannot be started: {error}")))?;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        // Both pipes are emptied at the same time, so that fio waits for neither.
        let read = |pipe: &mut dyn Read| {
            let mut text = Vec::new();
            // What came before a failure is reported.
            let _ = pipe.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        };
        let out = scope.spawn(move || out.as_mut().map(|pipe| read(pipe)).unwrap_or_default());
        let err = scope.spawn(move || err.as_mut().map(|pipe| read(pipe)).unwrap_or_default());
        let status = wait(&mut child, interrupted);
        let text = |joined: thread::Result<String>| joined.unwrap_or_default();
        let (out, err) = (text(out.join()), text(err.join()));
        match status? {
            true => Ok(out),
            false => Err(Error::new(format!(
                "fio has failed: {}{}",
                err.trim(),
                out.trim()
            ))),
        }
    })
}

/// Waits for the end of the program. Returns whether it has succeeded.
fn wait(child: &mut Child, interrupted: &AtomicBool) -> Result<bool> {
    loop {
        let ended = child.try_wait();
        match ended.map_err(|error| Error::new(format!("cannot wait for fio: {error}")))? {
            Some(status) => return Ok(status.success()),
            None if interrupted.load(Ordering::Relaxed) => {
                // It may have ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::interrupted());
            }
            None => thread::sleep(LOOK),
        }
    }
}

#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    jobname: String,
    error: i32,
    read: Side,
    write: Side,
}

/// What a job has done in one direction.
#[derive(Deserialize)]
struct Side {
    io_bytes: u64,
    total_ios: u64,
    /// Milliseconds.
    runtime: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    /// Operations by latency. Missing if there was no operation.
    #[serde(default)]
    bins: BTreeMap<String, u64>,
}

/// Returns what each job has done, with its seat, and the length of the measurement in seconds.
fn parse(text: &str, seats: &[Seat]) -> Result<(Vec<(Seat, Meter)>, f64)> {
    // Notes to the user may precede the JSON.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let report: Report = serde_json::from_str(json).map_err(|error| {
        Error::new(format!(
            "fio's output is not understood: {error}; is it another version?"
        ))
    })?;
    if report.jobs.len() != seats.len() {
        return Err(Error::new(format!(
            "fio reports {} jobs instead of {}",
            report.jobs.len(),
            seats.len()
        )));
    }
    let mut seconds: f64 = 0.0;
    let mut meters = Vec::new();
    for (job, seat) in report.jobs.iter().zip(seats) {
        if job.error != 0 {
            let error = std::io::Error::from_raw_os_error(job.error);
            return Err(Error::new(format!("fio: {}: {error}", job.jobname)));
        }
        let mut meter = Meter::new()?;
        (meter.read_bytes, meter.written_bytes) = (job.read.io_bytes, job.write.io_bytes);
        meter.operations = job.read.total_ios + job.write.total_ios;
        for side in [&job.read, &job.write] {
            seconds = seconds.max(side.runtime / 1000.0);
            for (latency_ns, count) in &side.lat_ns.bins {
                let latency_ns = latency_ns.parse().map_err(|error| {
                    Error::new(format!("fio reports the latency {latency_ns:?}: {error}"))
                })?;
                meter.latency_ns.saturating_record_n(latency_ns, *count);
            }
        }
        meters.push((seat.clone(), meter));
    }
    Ok((meters, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = r#"{"jobname": "thread-0", "error": 0,
        "read": {"io_bytes": 8192, "total_ios": 2, "runtime": 500, "lat_ns": {"min": 900, "bins": {"1000": 1, "3000": 1}}},
        "write": {"io_bytes": 0, "total_ios": 0, "runtime": 0, "lat_ns": {"min": 0}}}"#;

    #[test]
    fn jobs_become_meters_with_their_histograms() {
        let text = format!("fio: a note\n{{\"fio version\": \"fio-3.33\", \"jobs\": [{JOB}]}}");
        let (meters, seconds) = parse(&text, &[Seat::default()]).unwrap();
        let meter = &meters[0].1;
        assert_eq!(
            (meter.operations, meter.read_bytes, meter.written_bytes),
            (2, 8192, 0)
        );
        assert_eq!(
            (meter.latency_ns.len(), meter.latency_ns.max() / 10),
            (2, 300)
        );
        assert_eq!(seconds, 0.5);
    }

    #[test]
    fn fio_is_not_called_what_it_does_not_do() {
        let check = |kind, name| check(kind, Placement::named(name).unwrap());
        for (kind, name) in [
            (Kind::Zmio, "TLORP0I0"),
            (Kind::Dd, "TRORP0I0"),
            (Kind::Zmio, "best"),
            (Kind::Scan, "native"),
            (Kind::Scan, "worst"),
        ] {
            check(kind, name).unwrap();
        }
        for (kind, name, reason) in [
            (Kind::Zmio, "TLORPLIR", "adds up no bytes"),
            (Kind::Zmio, "TRORPRIR", "adds up no bytes"),
            (Kind::Scan, "TRLCPL", "drops no cached pages"),
            (Kind::Scan, "TRRCPR", "drops no cached pages"),
        ] {
            let refused = check(kind, name).unwrap_err().to_string();
            assert!(
                refused.contains(reason) && refused.contains(name),
                "{refused}"
            );
        }
    }

    #[test]
    fn output_of_another_form_and_failed_jobs_are_errors() {
        let error = |text: &str, count| {
            let seats = vec![Seat::default(); count];
            parse(text, &seats).unwrap_err().to_string()
        };
        assert!(error("fio: no such option", 1).contains("another version"));
        assert!(error(r#"{"jobs": []}"#, 1).contains("0 jobs instead of 1"));
        let failed = JOB.replace("\"error\": 0", "\"error\": 28");
        let text = format!("{{\"jobs\": [{failed}]}}");
        assert!(error(&text, 1).contains("thread-0: No space left"));
    }
}
