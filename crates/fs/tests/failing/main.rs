//! The Nth read, write, flush, durable write or discard of a device fails, for every N, once or for ever, during short sequences of
//! operations on a volume with two devices, one for each slice. The slices share a metadata store, or each has its own. A sequence includes
//! the mount, with or without a recovery, and the unmount.
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
use model::Contents;
use steps::{Case, KINDS, SEQUENCES, SEQUENCES_OF_STORES, Sequence};

/// Number of cases of each sequence in an ordinary run.
const CASES: usize = 18;
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

/// Returns the cases of a run: all of each sequence, or a sample.
fn cases(templates: &Templates) -> Vec<Case> {
    let is_all = std::env::var("JERICHO_FAILING_CASES").is_ok();
    let (mut random, mut all, mut chosen) = (Random::new(1), 0, Vec::new());
    for text in SEQUENCES.iter().chain(&SEQUENCES_OF_STORES) {
        let mut cases = cases_of(templates, &text.parse().unwrap());
        all += cases.len();
        while cases.len() > CASES && !is_all {
            cases.swap_remove(random.below(cases.len() as u64) as usize);
        }
        chosen.append(&mut cases);
    }
    println!("{} of {all} cases", chosen.len());
    chosen
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
    let cases = match std::env::var("JERICHO_FAILING_CASE") {
        Ok(text) => vec![text.parse().unwrap()],
        Err(_) => cases(&templates),
    };
    run_all(&templates, &cases);
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "threads panicked");
}

#[test]
fn after_a_failed_write_a_later_one_of_the_whole_file_and_a_sync_leave_one_contents() {
    let mut contents = Contents::new(0, vec![1; 100], 0);
    contents.may_change([vec![1; 50], vec![2; 100]].concat(), 50..150);
    contents.synced();
    assert!(contents.judge(&[1; 100]).is_ok() && contents.judge(&[2; 150]).is_err());
    contents.write(vec![3; 200], 0..200);
    assert!(contents.judge(&[1; 100]).is_ok());
    contents.synced();
    assert!(contents.judge(&[3; 200]).is_ok());
    assert!(contents.judge(&[1; 100]).is_err() && contents.judge(&[3; 150]).is_err());
    // Half of the bytes that may be old.
    contents.may_change([vec![3; 100], vec![4; 100]].concat(), 100..200);
    contents.write([vec![3; 150], vec![5; 50]].concat(), 150..200);
    contents.synced();
    for (middle, last, is_right) in [(3, 5, true), (4, 5, true), (3, 3, false), (4, 4, false)] {
        let found = [[3; 100].as_slice(), &[middle; 50], &[last; 50]].concat();
        assert_eq!(contents.judge(&found).is_ok(), is_right);
    }
    // A read shows what memory has.
    let found = [[3; 100].as_slice(), &[4; 50], &[5; 50]].concat();
    contents.read(found.clone()).unwrap();
    contents.synced();
    assert!(contents.judge(&found).is_ok());
    assert!(
        contents
            .judge(&[[3; 150].as_slice(), &[5; 50]].concat())
            .is_err()
    );
}

#[test]
fn a_case_is_what_its_text_says() {
    for text in [
        "clean,append:a,fsync:a one write 3 once 5",
        "crashed,move:b two flush 1 lasting 28",
        "crashed-stores-summed,link:b two durable 1 once 5",
    ] {
        let case: Case = text.parse().unwrap();
        assert_eq!(case.to_string(), text);
    }
}
