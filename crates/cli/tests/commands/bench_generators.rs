//! `jericho bench` beside fio: the same runs by another program, and the cost of our generator.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::support::{Volume, fail, jericho, succeed};

/// A directory on a disk, because /tmp may be without direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn bench(workload: &str, target: &Path, more: &[&str]) -> Vec<Value> {
    bench_for("0.3", workload, target, more)
}

fn bench_for(seconds: &str, workload: &str, target: &Path, more: &[&str]) -> Vec<Value> {
    let out = directory();
    let lines = out.path().join("results.jsonl");
    let mut command = jericho(["bench", workload, "--seconds", seconds]);
    command.arg(target).args(more).arg("--out").arg(&lines);
    succeed(&mut command);
    let text = std::fs::read_to_string(&lines).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn fio_makes_the_operations_of_the_same_runs() {
    let dir = directory();
    let fio = ["--generator", "fio", "--threads", "2"];
    let placed = ["--placement", "best", "--topology", "virtual:2"];
    for workload in ["scan", "zmio", "dd"] {
        let own = bench(workload, dir.path(), &[&fio[2..], &placed].concat());
        let theirs = bench(workload, dir.path(), &[&fio[..], &placed].concat());
        assert_eq!(own.len(), theirs.len());
        for (own, theirs) in own.iter().zip(&theirs) {
            assert_eq!(own["generator"], "jericho");
            assert!(theirs["generator"].as_str().unwrap().starts_with("fio-"));
            for same in ["workload", "variant", "threads", "seats", "data_bytes"] {
                assert_eq!(own[same], theirs[same]);
            }
            let number = |record: &Value, key: &str| record[key].as_f64().unwrap();
            assert!(number(theirs, "iops") > 0.0, "{theirs}");
            for direction in ["read_bytes_per_s", "written_bytes_per_s"] {
                let (own, theirs) = (number(own, direction), number(theirs, direction));
                assert_eq!(own > 0.0, theirs > 0.0, "{workload} {direction}");
            }
            // Bytes of an operation.
            let size = |record: &Value| {
                let bytes = number(record, "throughput_bytes_per_s");
                (bytes / number(record, "iops")).round()
            };
            assert_eq!(size(own), size(theirs));
            let latency = |key: &str| theirs["latency_ns"][key].as_u64().unwrap();
            assert!(
                latency("p50") > 0 && latency("p50") <= latency("p99.99"),
                "{theirs}"
            );
        }
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn fio_uses_the_file_that_the_user_names_whatever_its_name_is() {
    let dir = directory();
    let data = vec![7u8; 4 << 20];
    // fio would take the name up to the # or ;, without the blanks.
    let other = dir.path().join("a");
    std::fs::write(&other, &data).unwrap();
    let force = ["--generator", "fio", "--threads", "2", "--force"];
    let force = [&force[..], &["--variant", "write-1m"]].concat();
    for name in ["a#b", "a;b", "a ", "a\\x20b", "a:b"] {
        let named = dir.path().join(name);
        std::fs::write(&named, &data).unwrap();
        let records = bench("zmio", &named, &force);
        assert_eq!(records.len(), 1);
        assert!(
            std::fs::read(&named).unwrap() != data,
            "{name} is as it was"
        );
        assert!(
            std::fs::read(&other).unwrap() == data,
            "{name}: a is written"
        );
    }
}

/// Returns a child process of a process, if there is one.
fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.ok()?.split_whitespace().next()?.parse().ok()
}

#[test]
fn fio_ends_when_bench_is_killed() {
    let dir = directory();
    let file = dir.path().join("device");
    std::fs::write(&file, vec![7u8; 4 << 20]).unwrap();
    let mut command = jericho(["bench", "zmio", "--seconds", "1000", "--threads", "1"]);
    let command = command.args(["--generator", "fio"]).arg(&file);
    let mut run = command.stdout(Stdio::null()).spawn().unwrap();
    // The first child only tells its version. It ends by itself.
    let is_running = |pid: &u32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&arguments).contains("--time_based")
    };
    let fio = loop {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        if let Some(fio) = child_of(run.id()).filter(is_running) {
            break fio;
        }
        std::thread::yield_now();
    };
    let fio = jericho_sys::process::Process::open(fio).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    // Without a limit of the wait, a fio that goes on would be seen after 1000 seconds.
    let has_ended = fio.wait(Some(Duration::from_secs(60))).unwrap();
    if !has_ended {
        fio.send(jericho_sys::process::Signal::Kill).unwrap();
    }
    assert!(has_ended, "fio goes on");
}

#[test]
fn comparing_generators_keeps_the_files_of_the_directory() {
    let dir = directory();
    for name in ["file", "file.topology"] {
        std::fs::write(dir.path().join(name), "mine").unwrap();
    }
    let script = "../../scripts/compare-generators";
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script));
    // In the place of jericho: the script ends with its first run, and removes what it has made.
    let command = command.arg("false").arg(dir.path()).args(["--mib", "1"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("CalledProcessError"), "{said}");
    let left = std::fs::read_dir(dir.path()).unwrap();
    assert_eq!(left.count(), 2);
    for name in ["file", "file.topology"] {
        assert_eq!(std::fs::read(dir.path().join(name)).unwrap(), b"mine");
    }
}

#[test]
fn fio_on_the_fast_path_runs_with_the_library() {
    let volume = Volume::of_size("80M");
    volume.mount();
    let report = volume.beside("report");
    let out = volume.beside("results");
    // In order, because a file is fast after some calls, and there are 64.
    let mut command = jericho(["bench", "scan", "--variant", "read", "--threads", "1"]);
    command.args([
        "--seconds",
        "0.5",
        "--generator",
        "fio",
        "--path",
        "fast",
        "--out",
    ]);
    command.arg(&out).arg(volume.mnt());
    succeed(command.env("JERICHO_REPORT", &report));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(record["path"], "fast");
    // Reads of each process: inline, and through the kernel. Bench itself reads none.
    let report = std::fs::read_to_string(&report).unwrap();
    let reads = report.lines().filter(|line| line.contains("reads: "));
    let reads = reads.map(|line| {
        let numbers = line.split(|c: char| !c.is_ascii_digit());
        let numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
        (numbers[0], numbers[2])
    });
    let (inline, kernel) = reads.max().unwrap();
    assert!(inline > 5 * kernel, "{report}");
}

#[test]
fn what_fio_cannot_do_is_refused_and_a_missing_fio_is_named() {
    let dir = directory();
    let refused = |workload: &str, more: &[&str]| {
        let mut command = jericho(["bench", workload, "--generator", "fio"]);
        fail(command.arg(dir.path()).args(more), 1)
    };
    assert!(refused("fsmark", &[]).contains("zmio, scan and dd"));
    assert!(refused("scan", &["--with-mstress"]).contains("--with-mstress"));
    assert!(refused("zmio", &["--placement", "TLORPLIR"]).contains("adds up no bytes"));
    let trace = dir.path().join("trace");
    std::fs::write(&trace, "a former trace").unwrap();
    let traced = ["--placement-trace", trace.to_str().unwrap()];
    assert!(refused("scan", &traced).contains("does not tell the nodes"));
    assert_eq!(std::fs::read(&trace).unwrap(), b"a former trace");
    let mut missing = jericho(["bench", "scan", "--generator", "fio"]);
    missing.arg(dir.path()).env("PATH", "/does/not/exist");
    assert!(fail(&mut missing, 1).contains("package fio"));
}

/// Runs a command under strace. Returns the calls of io_uring_enter(2) for each transfer that they have submitted.
fn enters(command: &Command, dir: &Path) -> f64 {
    let calls = dir.join("calls");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-e", "trace=io_uring_enter", "-o"]);
    strace.arg(&calls).arg("--").arg(command.get_program());
    succeed(strace.args(command.get_args()));
    let calls = std::fs::read_to_string(&calls).unwrap();
    // A call that another thread interrupts has two lines. The result, how many were submitted, is at the end of the second.
    let count = calls.matches("io_uring_enter(").count();
    let results = calls.lines().filter_map(|line| line.rsplit_once(" = "));
    let submitted = results.filter_map(|(_, result)| result.parse::<u64>().ok());
    let submitted: u64 = submitted.sum();
    assert!(submitted > 0, "{calls}");
    count as f64 / submitted as f64
}

#[test]
fn our_generator_enters_the_kernel_no_more_often_than_fio_for_each_operation() {
    let dir = directory();
    let file = dir.path().join("device");
    std::fs::write(&file, vec![7u8; 16 << 20]).unwrap();
    let mut own = jericho(["bench", "zmio", "--variant", "read-64k", "--threads", "1"]);
    own.arg(&file).args(["--seconds", "0.5"]);
    let own = enters(&own, dir.path());

    let mut fio = Command::new("fio");
    fio.arg("--name=reads")
        .arg(format!("--filename={}", file.display()));
    fio.args([
        "--thread",
        "--rw=read",
        "--bs=64k",
        "--direct=1",
        "--readonly",
    ]);
    fio.args([
        "--ioengine=io_uring",
        "--iodepth=32",
        "--time_based",
        "--runtime=500ms",
    ]);
    let fio = enters(&fio, dir.path());
    assert!(
        own <= fio,
        "calls for each operation: {own:.3}, fio {fio:.3}"
    );
}
