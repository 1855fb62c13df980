//! fs_mark in place of our own threads, for the variant `create` of fsmark, so that users need not trust the generator of `bench`.
//!
//! Equal seats share a fs_mark, which takes the CPUs and the memory policy of the thread that starts it. fs_mark makes the files of one round, removes them
//! and ends. The thread starts it again until the time is over: with its option `-L`, fs_mark would keep the files of all rounds.
//!
//! fs_mark adds up the rates of its threads. That is right only if they work at the same time. With a fs_mark for each seat, a fs_mark that
//! waits for a CPU before it begins would not count the wait, and the sum of the rates would be many times too high.
//!
//! fs_mark has a process for each thread. All are in a process group, which `bench` kills when the run ends early. If `bench` is killed, the kernel kills
//! fs_mark, and its processes fail with their next files, because the paths of their directories lead through `bench`.

use std::io::{self, PipeReader, Read};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use jericho_sys::process::kill_with_parent;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::case::Case;
use crate::error::{Context, Error, Result};
use crate::kind::Kind;
use crate::meter::Meter;
use crate::reach::{Files, KernelFiles};
use crate::run::{LOOK, Outcome, Seen, Timing, Watched, both};
use crate::seats::Seat;
use crate::target::{Scratch, Target};
use crate::work;

/// Numbers of a line of results, with the option `-v`.
const COLUMNS: usize = 23;
/// Most threads of a fs_mark.
const THREADS_MAX: usize = 64;

/// Returns fs_mark's version. Has it make one file of a byte, because it tells its version only when it runs. Fails if fs_mark is not installed.
pub fn version() -> Result<String> {
    let own = own_dir()?;
    let log = own.dir(0).join("log");
    let round = Round {
        dirs: &[own.dir(0)],
        log: &log,
        files: 1,
        file_bytes: 1,
    };
    let text = Running::default().finish(round, &AtomicBool::new(false), |_| Ok(()))?;
    let version = text.lines().find_map(|line| {
        let rest = line.strip_prefix("#\tVersion ")?;
        Some(format!("fs_mark-{}", rest.split(',').next()?))
    });
    version.ok_or_else(|| not_understood(&text))
}

/// Fails if fs_mark has no such workload.
pub fn check(kind: Kind) -> Result<()> {
    match kind {
        Kind::Fsmark => Ok(()),
        _ => Err(Error::new(format!(
            "fs_mark does not run {}; it runs the variant create of fsmark",
            kind.name()
        ))),
    }
}

/// Makes a directory for fs_mark's logs. In the target, they would be a part of the load.
fn own_dir() -> Result<Scratch> {
    let files: Arc<dyn Files> = Arc::new(KernelFiles);
    let target = Target {
        path: std::env::temp_dir(),
        is_directory: true,
        is_jericho: false,
        node: None,
    };
    Scratch::make(&files, &[target], 1)
}

/// Seats that share a fs_mark.
struct Group<'a> {
    seat: &'a Seat,
    /// The directories, one for each seat.
    dirs: Vec<&'a Path>,
}

/// Puts equal seats together.
fn groups<'a>(seats: &'a [Seat], scratch: &'a Scratch) -> Vec<Group<'a>> {
    let mut groups: Vec<Group> = Vec::new();
    for (index, seat) in seats.iter().enumerate() {
        let mut open = groups.iter_mut();
        let dir = scratch.dir(index);
        match open.find(|group| group.seat == seat && group.dirs.len() < THREADS_MAX) {
            Some(group) => group.dirs.push(dir),
            None => groups.push(Group {
                seat,
                dirs: vec![dir],
            }),
        }
    }
    groups
}

/// Runs the workload of a case with fs_mark. The last round of each group ends after the time of the measurement.
pub fn run(
    case: &Case,
    timing: Timing,
    watched: Watched,
    interrupted: &AtomicBool,
) -> Result<Outcome> {
    let begin = Instant::now() + timing.warm_up;
    let time = begin..begin + timing.measured;
    let groups = groups(case.seats, case.scratch()?);
    let (first, ended) = run_groups(case, &groups, time, watched, interrupted)?;
    let last = watched.now()?;
    let (mut meters, mut failures) = (Vec::new(), Vec::new());
    let (mut confirmed, mut in_calls) = (None, Duration::ZERO);
    for (group, measured) in groups.iter().zip(ended) {
        match measured {
            Ok(measured) => {
                confirmed = both(confirmed, measured.confirmed);
                in_calls += measured.in_calls;
                meters.push((group.seat.clone(), measured.meter));
            }
            Err(error) => failures.push(error),
        }
    }
    // One failure interrupts the other threads.
    failures.sort_by_key(Error::is_interruption);
    if let Some(failure) = failures.into_iter().next() {
        return Err(failure);
    }
    let outcome = Outcome::of(watched, (&first, &last), meters)?;
    let mean = in_calls.as_nanos() / u128::from(outcome.meter.operations.max(1));
    Ok(Outcome {
        confirmed,
        latency_ns_mean: Some(mean as u64),
        // Ours, not fs_mark's.
        inline_pages: None,
        ..outcome
    })
}

/// Runs a thread for each group. Returns the state of the machine when the measurement began, and what the groups have done.
fn run_groups(
    case: &Case,
    groups: &[Group],
    time: Range<Instant>,
    watched: Watched,
    interrupted: &AtomicBool,
) -> Result<(Seen, Vec<Result<Measured>>)> {
    let own = own_dir()?;
    let files = work::fsmark_files(case.variant, case.seats.len(), case.scale);
    let running: Vec<Running> = groups.iter().map(|_| Running::default()).collect();
    // The rounds that begin in the warm-up do not count, so neither does the CPU time of their rests.
    let counts = AtomicBool::new(false);
    let stop = || {
        case.stopping.store(true, Ordering::Relaxed);
        running.iter().for_each(Running::kill);
    };
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, (group, running)) in groups.iter().zip(&running).enumerate() {
            let (log, time) = (own.dir(0).join(index.to_string()), time.clone());
            let counts = &counts;
            let body = move || {
                let round = Round {
                    dirs: &group.dirs,
                    log: &log,
                    files,
                    file_bytes: case.variant.request_bytes as u64,
                };
                let measured = repeat(case, group.seat, round, running, time, counts);
                if measured.is_err() {
                    case.stopping.store(true, Ordering::Relaxed);
                }
                measured
            };
            let builder = thread::Builder::new().name(format!("bench-{index}"));
            match builder.spawn_scoped(scope, body) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    stop();
                    return Err(Error::new(format!(
                        "cannot start thread {index} of the run: {error}; use fewer threads, or raise the limit (ulimit -u)"
                    )));
                }
            }
        }
        let mut first = None;
        while threads.iter().any(|thread| !thread.is_finished()) {
            if interrupted.load(Ordering::Relaxed) || case.stopping.load(Ordering::Relaxed) {
                stop();
            }
            if first.is_none() && counts.load(Ordering::Relaxed) {
                first = Some(watched.now());
            }
            thread::sleep(LOOK);
        }
        let ended = threads.into_iter().map(|thread| {
            let joined = thread.join();
            joined.unwrap_or_else(|_| Err(Error::new("a thread of the run has panicked")))
        });
        let ended = ended.collect();
        // There is none if the run has failed before.
        Ok((first.unwrap_or_else(|| watched.now())?, ended))
    })
}

/// What a group has done.
struct Measured {
    meter: Meter,
    /// Time in calls that create, write and close files.
    in_calls: Duration,
    confirmed: Option<bool>,
}

/// Runs the fs_mark of a group in its seat, round after round, and counts the rounds that begin in `time`, or the first one after it if there is none.
/// Sets `counts` when the first one that counts begins.
fn repeat(
    case: &Case,
    seat: &Seat,
    round: Round,
    running: &Running,
    time: Range<Instant>,
    counts: &AtomicBool,
) -> Result<Measured> {
    seat.take(case.topology)?;
    seat.bind_pages(case.topology)?;
    let mut measured = Measured {
        meter: Meter::new()?,
        in_calls: Duration::ZERO,
        // Of the threads only: fs_mark removes its files before anyone can ask where their pages are.
        confirmed: None,
    };
    loop {
        let began = Instant::now();
        if began >= time.end && measured.meter.operations > 0 {
            return Ok(measured);
        }
        if began >= time.start {
            counts.store(true, Ordering::Relaxed);
        }
        let mut on_node = None;
        let text = running.finish(round, case.stopping, |pid| {
            on_node = seat.confirm_of(case.topology, Some(pid))?;
            Ok(())
        })?;
        if began < time.start {
            continue;
        }
        let files = round.files * round.dirs.len() as u64;
        let result = parse(&text, files, round.file_bytes)?;
        measured.confirmed = both(measured.confirmed, on_node);
        measured.in_calls += result.in_calls;
        measured.meter.operations += files;
        measured.meter.written_bytes += files * round.file_bytes;
        measured.meter.active += result.took;
    }
}

/// Files that fs_mark creates, and then removes.
#[derive(Clone, Copy)]
struct Round<'a> {
    /// One for each thread of fs_mark.
    dirs: &'a [&'a Path],
    log: &'a Path,
    /// Of each thread.
    files: u64,
    file_bytes: u64,
}

impl Round<'_> {
    /// Returns fs_mark with the sizes of the round. It calls neither fsync(2) nor sync(2).
    fn command(&self) -> Command {
        let mut command = Command::new("fs_mark");
        command.args(["-v", "-S", "0", "-t"]);
        command.arg(self.dirs.len().to_string());
        for dir in self.dirs {
            command.arg("-d").arg(dir);
        }
        command.arg("-l").arg(self.log);
        command.arg("-n").arg(self.files.to_string());
        command.arg("-s").arg(self.file_bytes.to_string());
        command.arg("-w").arg(work::FSMARK_CHUNK_BYTES.to_string());
        command
    }
}

/// The fs_mark of a group, while it runs.
#[derive(Default)]
struct Running(Mutex<Option<Child>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, Option<Child>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills fs_mark and the processes that make files, if they run.
    fn kill(&self) {
        if let Some(child) = &*self.lock()
            && let Some(group) = Pid::from_raw(child.id() as i32)
        {
            // The id is theirs: fs_mark is reaped under the lock. All of the group may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Runs fs_mark to its end, and returns what it has printed. Calls `confirm` with its process id after its end. Fails if `stopping` is set, or if
    /// fs_mark fails.
    fn finish(
        &self,
        round: Round,
        stopping: &AtomicBool,
        confirm: impl FnOnce(u32) -> Result<()>,
    ) -> Result<String> {
        let mut output = self.start(round, stopping)?;
        let mut text = Vec::new();
        // All processes have the other end of the pipe, so all have closed it.
        let read = output.read_to_end(&mut text);
        let mut running = self.lock();
        let Some(mut child) = running.take() else {
            return Err(Error::interrupted());
        };
        let confirmed = confirm(child.id());
        let status = child.wait().doing("wait for fs_mark")?;
        drop(running);
        // Each round would make it longer.
        let _ = std::fs::remove_file(round.log);
        if stopping.load(Ordering::Relaxed) {
            return Err(Error::interrupted());
        }
        read.doing("read the output of fs_mark")?;
        let text = String::from_utf8_lossy(&text).into_owned();
        if !status.success() {
            return Err(Error::new(format!(
                "fs_mark has failed ({status}): {}",
                cause(&text)
            )));
        }
        confirmed.map(|()| text)
    }

    /// Starts fs_mark. Returns its output and its errors.
    fn start(&self, round: Round, stopping: &AtomicBool) -> Result<PipeReader> {
        let (output, end) = io::pipe().doing("make a pipe")?;
        let other_end = end.try_clone().doing("make a pipe")?;
        let mut command = round.command();
        command.stdin(Stdio::null()).stdout(end).stderr(other_end);
        command.process_group(0);
        let mut running = self.lock();
        // The flag is set before the lock is taken to kill what runs.
        if stopping.load(Ordering::Relaxed) {
            return Err(Error::interrupted());
        }
        let spawned = kill_with_parent(&mut command).spawn();
        *running = Some(spawned.map_err(|error| {
            Error::new(format!(
                "fs_mark cannot be started: {error}; install it (Debian's package fsmark), or leave out --generator"
            ))
        })?);
        Ok(output)
    }
}

/// What fs_mark prints about a round.
struct Printed {
    /// Time in which its threads have created the files.
    took: Duration,
    /// Time of all threads together in calls that create, write and close.
    in_calls: Duration,
}

/// Reads the line of results.
fn parse(text: &str, files: u64, file_bytes: u64) -> Result<Printed> {
    let lines = text.lines().map(numbers);
    let columns = lines.flatten().next_back();
    let columns = columns.ok_or_else(|| not_understood(text))?;
    let (count, files_per_s) = (columns[1], columns[3]);
    let (create_us, write_us, close_us) = (columns[6], columns[9], columns[18]);
    if count != files as f64 {
        return Err(Error::new(format!(
            "fs_mark reports {count} files instead of {files}"
        )));
    }
    if files_per_s <= 0.0 {
        return Err(Error::new(
            "fs_mark reports 0.0 files per second: it rounds to tenths, and this target is slower; leave out --generator",
        ));
    }
    let writes = file_bytes.div_ceil(work::FSMARK_CHUNK_BYTES as u64);
    let each_us = create_us + write_us * writes as f64 + close_us;
    Ok(Printed {
        took: Duration::from_secs_f64(files as f64 / files_per_s),
        // The numbers may be anything.
        in_calls: Duration::try_from_secs_f64(each_us * 1e-6 * files as f64).unwrap_or_default(),
    })
}

/// Returns the numbers of a line of results, and `None` for other lines.
fn numbers(line: &str) -> Option<Vec<f64>> {
    let columns: Option<Vec<f64>> = line
        .split_whitespace()
        .map(|word| word.parse().ok().filter(|number: &f64| number.is_finite()))
        .collect();
    columns.filter(|columns| columns.len() == COLUMNS)
}

/// Returns what fs_mark has printed besides its options and results: why it has failed.
fn cause(text: &str) -> String {
    let lines = text.lines().map(str::trim);
    let said = lines.filter(|line| {
        let is_heading = line.starts_with('#') || line.starts_with("FSUse%");
        !line.is_empty() && !is_heading && numbers(line).is_none()
    });
    said.collect::<Vec<_>>().join("; ")
}

fn not_understood(text: &str) -> Error {
    Error::new(format!(
        "fs_mark's output is not understood; is it another version? {}",
        cause(text)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Variant;
    use crate::options::Generator;

    const HEADING: &str = "
#  fs_mark  -v
#\tVersion 3.3, 1 thread(s) starting at Sat Nov 28 15:21:07 2026

FSUse%        Count         Size    Files/sec     App Overhead        CREAT (Min/Avg/Max)
";
    const LINE: &str = "    69          128        51200       8000.0             1000       52      132     4445        4       25     4139        0        0        0        0        0        0        1        2        4        10        20        30\n";

    #[test]
    fn a_line_of_results_gives_the_time_of_creation_without_the_removals() {
        let printed = parse(&format!("{HEADING}{LINE}"), 128, 51200).unwrap();
        assert_eq!(printed.took, Duration::from_millis(16));
        // Creation, four writes and the close of each file.
        let each = Duration::from_micros(132 + 4 * 25 + 2);
        assert_eq!(printed.in_calls.as_micros(), (each * 128).as_micros());
    }

    #[test]
    fn equal_seats_share_a_fs_mark_up_to_its_number_of_threads() {
        let story = Story::with(Kind::Fsmark, "best", 70, 1);
        let case = story.case();
        let sizes = |seats| {
            let groups = groups(seats, case.scratch.unwrap());
            let sizes = groups.iter().map(|group| group.dirs.len());
            sizes.collect::<Vec<_>>()
        };
        // Two nodes in turn.
        assert_eq!(sizes(case.seats), [35, 35]);
        assert_eq!(sizes(&vec![Seat::default(); 70]), [64, 6]);
    }

    #[test]
    fn output_of_another_form_is_an_error() {
        let error = |text: String, files| parse(&text, files, 51200).err().unwrap().to_string();
        assert!(error(HEADING.to_owned(), 128).contains("another version"));
        assert!(error(format!("{HEADING}{LINE}"), 64).contains("128 files instead of 64"));
        let slow = LINE.replace("8000.0", "   0.0");
        assert!(error(slow, 128).contains("rounds to tenths"));
        let endless = LINE.replace("8000.0", "   inf");
        assert!(error(endless, 128).contains("another version"));
    }

    #[test]
    fn the_cause_of_a_failure_is_what_fs_mark_says_besides_its_results() {
        let text = format!(
            "{HEADING}{LINE}Error in creat: No space left on device\nfopen failed to open: /tmp/log.7\n"
        );
        let expected = "Error in creat: No space left on device; fopen failed to open: /tmp/log.7";
        assert_eq!(cause(&text), expected);
    }

    #[test]
    fn fs_mark_runs_only_what_it_does() {
        check(Kind::Fsmark).unwrap();
        assert!(
            check(Kind::Scan)
                .unwrap_err()
                .to_string()
                .contains("create of fsmark")
        );
        let generator = Generator::FsMark(String::new());
        for variant in Kind::Fsmark.variants() {
            let checked = generator.check_variant(Kind::Fsmark, *variant);
            assert_eq!(checked.is_ok(), *variant == Variant::CREATE);
        }
    }
}
