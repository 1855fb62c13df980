//! `jericho bench` beside fio and fs_mark: the same runs by another program, and the cost of our generator.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use jericho_sys::process::{Process, Signal};

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
    let fio = Process::open(fio).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    // Without a limit of the wait, a fio that goes on would be seen after 1000 seconds.
    let has_ended = fio.wait(Some(Duration::from_secs(60))).unwrap();
    if !has_ended {
        fio.send(Signal::Kill).unwrap();
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

#[test]
fn fs_mark_creates_the_files_of_the_same_runs() {
    let dir = directory();
    let common = ["--variant", "create", "--threads", "2"];
    let placed = ["--placement", "best", "--topology", "virtual:2"];
    let own = [&common[..], &placed].concat();
    let theirs = [&own[..], &["--generator", "fs_mark"]].concat();
    let own = bench("fsmark", dir.path(), &own).remove(0);
    let theirs = bench("fsmark", dir.path(), &theirs).remove(0);
    assert_eq!(own["generator"], "jericho");
    let generator = theirs["generator"].as_str().unwrap();
    assert!(generator.starts_with("fs_mark-3."), "{generator}");
    for same in ["workload", "variant", "threads", "seats", "data_bytes"] {
        assert_eq!(own[same], theirs[same]);
    }
    for record in [&own, &theirs] {
        let number = |key: &str| record[key].as_f64().unwrap();
        assert!(number("iops") > 0.0, "{record}");
        assert_eq!(number("read_bytes_per_s"), 0.0);
        let bytes = number("throughput_bytes_per_s") / number("iops");
        assert_eq!(bytes.round(), 51200.0, "{record}");
        assert_eq!(number("threads"), 2.0);
        let by_node = record["throughput_bytes_per_s_by_node"].as_object();
        assert_eq!(by_node.unwrap().len(), 2, "{record}");
        assert!(record["latency_ns"]["mean"].as_u64().unwrap() > 0);
        let notes = record["notes"].to_string();
        assert!(notes.contains("leave out the time"), "{notes}");
    }
    assert_eq!(own["confirmed"], true, "{own}");
    let asked = serde_json::json!(["threads", "cached pages"]);
    assert_eq!(own["confirmed_for"], asked, "{own}");
    // fs_mark has removed its files before the kernel can be asked about them.
    assert_eq!(theirs["confirmed"], true, "{theirs}");
    let asked = serde_json::json!(["threads"]);
    assert_eq!(theirs["confirmed_for"], asked, "{theirs}");
    assert!(own["latency_ns"]["p99"].as_u64().unwrap() > 0);
    let latencies = theirs["latency_ns"].as_object().unwrap();
    assert_eq!(latencies.len(), 1, "{theirs}");
    let notes = theirs["notes"].to_string();
    assert!(notes.contains("no latency but the mean"), "{notes}");
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    let (lines, page) = (dir.path().join("lines"), dir.path().join("page"));
    std::fs::write(&lines, format!("{own}\n{theirs}\n")).unwrap();
    let mut report = jericho(["report"]);
    succeed(report.arg(&lines).arg("--out").arg(&page));
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("fsmark create") && page.contains(generator));
}

#[test]
fn fs_mark_runs_on_a_volume_and_on_its_fast_path() {
    let volume = Volume::of_size("80M");
    volume.mount();
    for path in ["mount", "fast"] {
        let more = ["--generator", "fs_mark", "--threads", "2", "--path", path];
        let placed = ["--placement", "best", "--topology", "virtual:2"];
        let records = bench("fsmark", &volume.mnt(), &[&more[..], &placed].concat());
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record["path"], path);
        assert_eq!(record["variant"], "create");
        // The CPUs of fs_mark. Where the pages are, the volume says.
        assert_eq!(record["confirmed"], true, "{record}");
        assert!(record["inline_pages"].is_null());
        assert!(record["iops"].as_f64().unwrap() > 0.0, "{record}");
    }
}

/// A program in the place of fs_mark: a script, in a directory that is the first of the path.
struct Replaced(tempfile::TempDir);

impl Replaced {
    /// Has the real fs_mark tell its version, which takes one file, and the script do the rest.
    fn by(script: &str) -> Replaced {
        let dir = directory();
        let path = dir.path().join("fs_mark");
        let real = Command::new("sh")
            .args(["-c", "command -v fs_mark"])
            .output();
        let real = String::from_utf8(real.unwrap().stdout).unwrap();
        let real = real.trim();
        assert!(!real.is_empty(), "fs_mark is not installed");
        let text = format!(
            "#!/bin/sh\ncase \"$*\" in *'-n 1 '*) exec {real} \"$@\" ;; esac\nreal={real}\n{script}\n"
        );
        std::fs::write(&path, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).unwrap();
        Replaced(dir)
    }

    fn command(&self, target: &Path, more: &[&str]) -> Command {
        let mut command = jericho(["bench", "fsmark", "--generator", "fs_mark"]);
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.0.path().display()));
        // A bench that is killed leaves its directories.
        command.env("TMPDIR", self.0.path());
        command.arg(target).args(more);
        command
    }
}

#[test]
fn rates_are_those_that_fs_mark_prints_of_the_creation_alone() {
    // Of each round, the creation takes 256 / 16000 s = 16 ms. The rest of the round does not count.
    let line =
        "sleep 0.05; echo 69 256 51200 16000.0 1600 52 132 4445 4 25 4139 0 0 0 0 0 0 1 2 4 9 9 9";
    let replaced = Replaced::by(&format!("echo \"$*\" >>\"$0.arguments\"\n{line}"));
    let dir = directory();
    let out = replaced.0.path().join("out");
    let more = ["--seconds", "0.3", "--threads", "2", "--out"];
    let more = [&more[..], &[out.to_str().unwrap()]].concat();
    succeed(&mut replaced.command(dir.path(), &more));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(out).unwrap()).unwrap();
    let number = |value: &Value| value.as_f64().unwrap().round();
    assert_eq!(number(&record["iops"]), 16_000.0);
    assert_eq!(number(&record["written_bytes_per_s"]), 16_000.0 * 51200.0);
    // Creation, four writes and the close.
    let mean = number(&record["latency_ns"]["mean"]);
    assert!((mean - 234_000.0).abs() <= 1.0, "{mean}");
    let arguments = std::fs::read_to_string(replaced.0.path().join("fs_mark.arguments")).unwrap();
    let is_short = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let directory = words[words.iter().position(|word| *word == "-d").unwrap() + 1];
        directory.len() < 40
    };
    for line in arguments.lines() {
        assert!(line.starts_with("-v -S 0 -t 2 -d /proc/"), "{line}");
        assert_eq!(line.matches(" -d /proc/").count(), 2, "{line}");
        assert!(line.ends_with(" -n 128 -s 51200 -w 16384"), "{line}");
        // fs_mark takes no longer ones.
        assert!(is_short(line), "{line}");
    }
    // One round in the warm-up, and one that counts.
    assert!(arguments.lines().count() >= 2, "{arguments}");
}

#[test]
fn a_round_of_fs_mark_in_the_warm_up_is_no_part_of_the_measurement() {
    // The first round outlasts the warm-up, and notes the time of its end.
    let line = "echo 69 128 51200 16000.0 1600 52 132 4445 4 25 4139 0 0 0 0 0 0 1 2 4 9 9 9";
    let first = "[ -e \"$0.ended\" ] || { sleep 2; touch \"$0.ended\"; }";
    let replaced = Replaced::by(&format!("{first}\n{line}"));
    let dir = directory();
    let out = replaced.0.path().join("out");
    let more = ["--seconds", "0.3", "--threads", "1", "--out"];
    let more = [&more[..], &[out.to_str().unwrap()]].concat();
    succeed(&mut replaced.command(dir.path(), &more));
    let ended = std::fs::metadata(replaced.0.path().join("fs_mark.ended"));
    let after = ended.unwrap().modified().unwrap().elapsed().unwrap();
    let record: Value = serde_json::from_str(&std::fs::read_to_string(out).unwrap()).unwrap();
    let seconds = record["seconds"].as_f64().unwrap();
    assert!(seconds <= after.as_secs_f64(), "{seconds} s in {after:?}");
}

#[test]
fn a_failure_of_fs_mark_ends_the_run_and_names_the_cause() {
    let dir = directory();
    let seconds = ["--seconds", "1000", "--threads", "2"];
    let failure = |script: &str| fail(&mut Replaced::by(script).command(dir.path(), &seconds), 1);
    let said = failure("exec $real \"$@\" -t 3 -d /does/not/exist");
    assert!(said.contains("fs_mark has failed"), "{said}");
    assert!(
        said.contains("/does/not/exist failed: No such file"),
        "{said}"
    );
    assert!(!said.contains("FSUse%"), "{said}");
    let said = failure("echo 1 2 3");
    assert!(said.contains("another version"), "{said}");
    let said = failure("kill -9 $$");
    assert!(said.contains("signal: 9"), "{said}");
    // One of two programs fails, and the other would go on.
    let placed = ["--placement", "best", "--topology", "virtual:2"];
    let seconds = [&seconds[..], &placed].concat();
    let failure = |script: &str| fail(&mut Replaced::by(script).command(dir.path(), &seconds), 1);
    let said = failure("mkdir \"$0.one\" 2>/dev/null && { echo bad luck; exit 1; }; sleep 1000");
    assert!(said.contains("bad luck"), "{said}");
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

/// Returns the processes below a process, with it, whose command line has this word.
fn below(pid: u32, word: &str) -> Vec<u32> {
    let children = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter();
    let children = children.flatten().flatten().flat_map(|task| {
        let text = std::fs::read_to_string(task.path().join("children"));
        let pids = text.unwrap_or_default();
        pids.split(' ')
            .filter_map(|pid| pid.parse().ok())
            .collect::<Vec<u32>>()
    });
    let mut found: Vec<u32> = children.flat_map(|child| below(child, word)).collect();
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if String::from_utf8_lossy(&arguments).starts_with(word) {
        found.push(pid);
    }
    found
}

#[test]
fn fs_mark_and_its_process_run_on_the_node_of_the_seat_in_a_directory_of_their_own() {
    let dir = directory();
    let mut command = jericho([
        "bench",
        "fsmark",
        "--generator",
        "fs_mark",
        "--threads",
        "1",
    ]);
    let placed = ["--placement", "best", "--topology", "virtual:2"];
    let command = command.args(["--seconds", "1000"]).args(placed);
    let mut run = command
        .arg(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // Of the CPUs of this machine, node 0 has the first half.
    let cpus = jericho_sys::affinity::get(None).unwrap();
    let expected = &cpus[..cpus.len().div_ceil(2)];
    let (mut programs, mut files) = (0, 0);
    while programs < 20 || files == 0 {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        for pid in below(run.id(), "fs_mark\0-v\0-S\x000\0-t\x001\0-d\0/proc") {
            let Ok(cpus) = jericho_sys::affinity::get(Some(pid)) else {
                // It has ended meanwhile.
                continue;
            };
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // The one that tells the version runs anywhere.
            if !String::from_utf8_lossy(&arguments).contains("\x00128\0") {
                continue;
            }
            assert!(cpus.iter().all(|cpu| expected.contains(cpu)), "{cpus:?}");
            programs += 1;
        }
        for own in std::fs::read_dir(dir.path()).unwrap().flatten() {
            let name = own.file_name().into_string().unwrap();
            // Before the run, bench measures how fast files are made.
            if !name.starts_with(&format!("jericho-bench.{}.", run.id())) {
                continue;
            }
            let made = std::fs::read_dir(own.path())
                .into_iter()
                .flatten()
                .flatten();
            files += made.filter(|file| file.file_name().len() == 40).count();
        }
    }
    // A signal ends fs_mark, too, and bench removes all files.
    Process::open(run.id())
        .unwrap()
        .send(Signal::Terminate)
        .unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(1));
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn fs_mark_ends_with_bench_also_when_it_hangs_and_when_bench_is_killed() {
    let dir = directory();
    // In the place of fs_mark and its process.
    let replaced = Replaced::by("sleep 1000 & wait");
    for signal in [Signal::Terminate, Signal::Kill] {
        let mut command = replaced.command(dir.path(), &["--threads", "1"]);
        let mut run = command.stdout(Stdio::null()).spawn().unwrap();
        let (script, sleep) = loop {
            assert!(run.try_wait().unwrap().is_none(), "the run has ended");
            let found = (below(run.id(), "/bin/sh"), below(run.id(), "sleep"));
            if let ([script], [sleep]) = (&found.0[..], &found.1[..]) {
                break (*script, *sleep);
            }
            std::thread::yield_now();
        };
        let (script, sleep) = (
            Process::open(script).unwrap(),
            Process::open(sleep).unwrap(),
        );
        Process::open(run.id()).unwrap().send(signal).unwrap();
        run.wait().unwrap();
        let limit = Some(Duration::from_secs(60));
        assert!(script.wait(limit).unwrap(), "fs_mark goes on");
        match signal {
            Signal::Terminate => assert!(sleep.wait(limit).unwrap(), "its process goes on"),
            // The process of fs_mark itself would fail with its next file.
            _ => sleep.send(Signal::Kill).unwrap(),
        }
    }
}

#[test]
fn what_fs_mark_cannot_do_is_refused_and_a_missing_fs_mark_is_named() {
    let dir = directory();
    let refused = |workload: &str, more: &[&str]| {
        let mut command = jericho(["bench", workload, "--generator", "fs_mark"]);
        fail(command.arg(dir.path()).args(more), 1)
    };
    let said = refused("fsmark", &["--variant", "files"]);
    assert!(
        said.contains("reads none") && said.contains("--variant create"),
        "{said}"
    );
    assert!(refused("fsmark", &["--variant", "create,files"]).contains("reads none"));
    assert!(refused("scan", &[]).contains("create of fsmark"));
    assert!(refused("fsmark", &["--with-mstress"]).contains("--with-mstress"));
    assert!(refused("fsmark", &["--placement", "TRORP0I0"]).contains("TRORP0I0"));
    let trace = dir.path().join("trace");
    let traced = ["--placement-trace", trace.to_str().unwrap()];
    assert!(refused("fsmark", &traced).contains("does not tell the nodes"));
    let mut missing = jericho(["bench", "fsmark", "--generator", "fs_mark"]);
    missing.arg(dir.path()).env("PATH", "/does/not/exist");
    let said = fail(&mut missing, 1);
    assert!(said.contains("Debian's package fsmark"), "{said}");
    let volume = Volume::of_size("80M");
    let mut in_process = jericho(["bench", "fsmark", "--generator", "fs_mark"]);
    in_process.args(["--path", "process"]).arg(volume.file());
    assert!(fail(&mut in_process, 1).contains("mount the volume"));
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
