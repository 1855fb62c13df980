//! The Nth read, write, flush, durable write or discard of a device fails, for every N, once or for ever, during short sequences of
//! operations on a volume with two devices. The sequence includes the mount, with or without a recovery, and the unmount.
//!
//! Nothing may panic or hang. An error names the device and the operation. An operation on names that fails has no effect. A read
//! that succeeds returns the right bytes. After a power cut and without the fault, the volume is sound, mounts, and has everything
//! that was acknowledged. `bed` runs a sequence and judges what is left, `model` says what may be left.
//!
//! - `JERICHO_FAILING_CASES=all`: every case. An ordinary run tries a sample.
//! - `JERICHO_FAILING_CASE='clean,append:a,fsync:a one write 3 once 5'`: one case, as a failure prints it.

mod bed;
mod model;
mod steps;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_sim::Random;

use bed::Templates;
use steps::{Case, KINDS, SEQUENCES, Sequence};

/// Number of cases of an ordinary run.
const CASES: usize = 350;
/// The run ends after this number of failures.
const FAILURES_MAX: usize = 5;
/// A case that takes longer hangs.
const HANGS: Duration = Duration::from_secs(300);
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// Not an errno: the device transfers a block at most.
const SHORT: i32 = 0;

/// Returns all cases of a sequence: each operation of each kind on each device fails.
fn cases_of(templates: &Templates, sequence: &Sequence) -> Vec<Case> {
    let counts = bed::count(templates, sequence);
    let mut cases = Vec::new();
    for (device, of_device) in counts.iter().enumerate() {
        for (kind, operations) in KINDS.iter().zip(of_device) {
            for nth in 1..=*operations {
                // A flush, a read and a discard need no space.
                let errnos: &[i32] = match kind.1 {
                    "write" | "durable" => &[EIO, ENOSPC, SHORT],
                    "read" => &[EIO, SHORT],
                    _ => &[EIO],
                };
                for (is_lasting, errno) in [false, true]
                    .into_iter()
                    .flat_map(|lasting| errnos.iter().map(move |errno| (lasting, *errno)))
                {
                    cases.push(Case {
                        sequence: sequence.clone(),
                        device,
                        operation: kind.0,
                        nth,
                        is_lasting,
                        errno,
                    });
                }
            }
        }
    }
    cases
}

/// Runs `attempt`, and turns a panic into an error.
fn caught(attempt: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|_| Err("a panic".into()))
}

/// The case that each thread runs, and since when.
type Running = Mutex<Option<(String, Instant)>>;

/// Ends the process if a case hangs. Returns when all threads have ended.
fn watch(running: &[Running], left: &AtomicUsize) {
    while left.load(Ordering::Relaxed) > 0 {
        for case in running {
            if let Some((case, begun)) = &*case.lock().unwrap()
                && begun.elapsed() > HANGS
            {
                eprintln!("JERICHO_FAILING_CASE='{case}'\n  hangs");
                std::process::abort();
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn run_all(templates: &Templates, cases: &[Case]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let running: Vec<Running> = (0..threads).map(|_| Mutex::default()).collect();
    let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(threads));
    let failures: Mutex<Vec<String>> = Mutex::default();
    std::thread::scope(|scope| {
        for own in &running {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed))
                    && failures.lock().unwrap().len() < FAILURES_MAX
                {
                    *own.lock().unwrap() = Some((case.to_string(), Instant::now()));
                    if let Err(why) = caught(|| bed::try_case(templates, case)) {
                        let text = format!("JERICHO_FAILING_CASE='{case}'\n  {why}");
                        failures.lock().unwrap().push(text);
                    }
                    *own.lock().unwrap() = None;
                }
                left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        watch(&running, &left);
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn whichever_device_operation_fails_the_volume_keeps_what_was_acknowledged() {
    // A panic in a thread of the filesystem may go unnoticed otherwise.
    static PANICS: AtomicU64 = AtomicU64::new(0);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        hook(info);
    }));
    let templates = Templates::new();
    let chosen = std::env::var("JERICHO_FAILING_CASE");
    let mut cases = match &chosen {
        Ok(text) => vec![text.parse().unwrap()],
        Err(_) => SEQUENCES
            .iter()
            .flat_map(|text| cases_of(&templates, &text.parse().unwrap()))
            .collect(),
    };
    let all = cases.len();
    if std::env::var("JERICHO_FAILING_CASES").is_err() {
        let mut random = Random::new(1);
        while cases.len() > CASES {
            cases.swap_remove(random.below(cases.len() as u64) as usize);
        }
    }
    run_all(&templates, &cases);
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "threads panicked");
    println!("{} of {all} cases", cases.len());
}

#[test]
fn a_case_is_what_its_text_says() {
    for text in [
        "clean,append:a,fsync:a one write 3 once 5",
        "crashed,move:b two flush 1 lasting 28",
    ] {
        let case: Case = text.parse().unwrap();
        assert_eq!(case.to_string(), text);
    }
}
