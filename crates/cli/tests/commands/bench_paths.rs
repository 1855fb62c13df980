//! `jericho bench` on a Jericho volume: through the mount, on the fast path, and in its own process; and the traces that it writes.

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::support::{Volume, fail, jericho, succeed};

const SHORT: [&str; 4] = ["--seconds", "0.3", "--topology", "virtual:2"];

/// A volume whose runs have files that fit into the cache of its mount.
fn small_volume() -> Volume {
    Volume::of_size("80M")
}

fn command(workload: &str, target: &Path, more: &[&str]) -> Command {
    let mut command = jericho(["bench", workload]);
    command.arg(target).args(SHORT).args(more);
    command
}

/// Runs the workload. Returns the records and the output.
fn run(workload: &str, target: &Path, more: &[&str]) -> (Vec<Value>, String) {
    let out = tempfile::tempdir().unwrap();
    let lines = out.path().join("results.jsonl");
    let shown = succeed(command(workload, target, more).arg("--out").arg(&lines));
    let text = std::fs::read_to_string(&lines).unwrap();
    let records = text.lines().map(|line| serde_json::from_str(line).unwrap());
    (records.collect(), shown)
}

fn bench(workload: &str, target: &Path, more: &[&str]) -> Vec<Value> {
    run(workload, target, more).0
}

fn operations(record: &Value) -> f64 {
    record["iops"].as_f64().unwrap() * record["seconds"].as_f64().unwrap()
}

#[test]
fn on_the_fast_path_jericho_counts_the_hits_inline_and_on_the_nodes_of_the_placement() {
    let volume = small_volume();
    volume.mount();
    let scan = ["--variant", "read,randread", "--threads", "2"];
    for (placement, near, far) in [("best", "local", "remote"), ("worst", "remote", "local")] {
        let more = [&scan[..], &["--path", "fast", "--placement", placement]].concat();
        let records = bench("scan", &volume.mnt(), &more);
        assert_eq!(records.len(), 2);
        for record in records {
            assert_eq!(record["path"], "fast");
            assert_eq!(record["confirmed"], true, "{record}");
            let pages = |side: &str| record["inline_pages"][side].as_f64().unwrap();
            let hits = pages(near);
            assert!(hits > 0.9 * operations(&record), "{placement}: {record}");
            assert!(pages(far) <= 0.01 * hits, "{placement}: {record}");
        }
    }
    // The same files through the kernel: none is inline.
    for record in bench("scan", &volume.mnt(), &scan) {
        assert_eq!(record["path"], "mount");
        assert_eq!(record["inline_pages"]["local"], 0, "{record}");
        assert_eq!(record["inline_pages"]["remote"], 0, "{record}");
    }
}

#[test]
fn under_jericho_run_the_fast_path_is_the_default_and_the_mount_can_be_had() {
    let volume = small_volume();
    volume.mount();
    for (more, path) in [(&[][..], "fast"), (&["--path", "mount"][..], "mount")] {
        let out = volume.beside("results");
        let bench = command("scan", &volume.mnt(), more);
        let mut run = jericho(["run", "--"]);
        run.arg(bench.get_program()).args(bench.get_args());
        run.args(["--variant", "read", "--threads", "1", "--out"]);
        succeed(run.arg(&out));
        let record: Value = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
        assert_eq!(record["path"], path);
        std::fs::remove_file(out).unwrap();
    }
}

#[test]
fn the_nodes_are_those_of_the_mount_and_others_are_refused() {
    let volume = small_volume();
    volume.mount();
    let bench = |more: &[&str]| {
        let mut command = jericho(["bench", "scan", "--seconds", "0.3", "--variant", "read"]);
        command
            .args(["--threads", "2"])
            .arg(volume.mnt())
            .args(more);
        command
    };
    let out = volume.beside("results");
    for (placement, share) in [("best", 1.0), ("worst", 0.0)] {
        succeed(bench(&["--placement", placement, "--out"]).arg(&out));
        let record: Value = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
        assert_eq!(record["machine"]["topology"], "virtual:2");
        assert_eq!(record["local_share"], share, "{placement}: {record}");
        std::fs::remove_file(&out).unwrap();
    }
    for other in ["auto", "virtual:1", "virtual:4"] {
        let refused = fail(
            &mut bench(&["--placement", "worst", "--topology", other]),
            1,
        );
        assert!(refused.contains(other), "{refused}");
        assert!(refused.contains("--topology virtual:2"), "{refused}");
    }
}

#[test]
fn the_fast_path_is_refused_where_nothing_can_be_inline_and_left_out_of_all() {
    let volume = small_volume();
    volume.mount();
    let other = tempfile::tempdir().unwrap();
    let fast = ["--path", "fast", "--threads", "2"];
    let refused = fail(&mut command("scan", other.path(), &fast), 1);
    assert!(
        refused.contains("not on a mounted Jericho volume"),
        "{refused}"
    );
    let refused = fail(&mut command("zmio", &volume.mnt(), &fast), 1);
    assert!(refused.contains("direct I/O"), "{refused}");
    let (records, shown) = run("all", &volume.mnt(), &fast);
    assert!(shown.contains("Left out: zmio"), "{shown}");
    assert!(records.iter().all(|record| record["workload"] != "zmio"));
    assert!(records.iter().any(|record| record["workload"] == "fsmark"));
}

#[test]
fn every_workload_runs_on_a_volume_in_the_process_and_leaves_it_sound_and_empty() {
    let volume = small_volume();
    // Without the reads of 1 MiB, whose bytes a debug build adds up for long.
    let variants = "read-64k,files,write-256k,read-4k,records-64k,read-2k,read,randwrite,read-512k";
    let process = ["--path", "process", "--threads", "2", "--variant", variants];
    let records = bench("all", &volume.file(), &process);
    let mut names: Vec<&str> = records
        .iter()
        .map(|record| record["workload"].as_str().unwrap())
        .collect();
    names.dedup();
    let all = [
        "zmio",
        "fsmark",
        "checkpoint",
        "stream",
        "search",
        "scan",
        "dd",
    ];
    assert_eq!(names, all);
    for record in &records {
        assert_eq!(record["path"], "process");
        assert!(record["iops"].as_f64().unwrap() > 0.0, "{record}");
        assert_eq!(record["inline_pages"], Value::Null);
    }
    for (placement, share) in [("best", 1.0), ("worst", 0.0)] {
        let more = [
            "--path",
            "process",
            "--threads",
            "2",
            "--placement",
            placement,
        ];
        for record in bench("scan", &volume.file(), &more) {
            assert_eq!(record["local_share"], share, "{record}");
        }
    }
    volume.check();
    volume.mount();
    assert!(std::fs::read_dir(volume.mnt()).unwrap().next().is_none());
}

#[test]
fn a_mounted_volume_is_not_opened_in_the_process() {
    let volume = small_volume();
    volume.mount();
    let process = ["--path", "process", "--threads", "2"];
    let refused = fail(&mut command("scan", &volume.file(), &process), 1);
    assert!(refused.contains("in use"), "{refused}");
    std::fs::write(volume.at("file"), "still here").unwrap();
    let directory = fail(&mut command("scan", &volume.mnt(), &process), 1);
    assert!(
        directory.contains(volume.mnt().to_str().unwrap()),
        "{directory}"
    );
}

#[test]
fn jericho_moves_no_thread_of_a_run() {
    let volume = small_volume();
    volume.mount();
    let mut run = jericho(["bench", "scan", "--seconds", "1000", "--threads", "1"]);
    let mut run = run.arg(volume.mnt()).spawn().unwrap();
    let first = || std::fs::read_dir(volume.mnt()).unwrap().next();
    // The first directory is of the test of speed.
    let dir = loop {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        match first() {
            Some(Ok(dir)) if dir.path().join("file.0").exists() => break dir.path(),
            _ => std::thread::yield_now(),
        }
    };
    let place = succeed(jericho(["place", "--json"]).arg(dir));
    let place: Value = serde_json::from_str(&place).unwrap();
    assert_eq!(place["threads"], "never", "{place}");
    assert_eq!(place["threads_from"], "set here", "{place}");
    let pid = Pid::from_child(&run);
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(1));
}

#[test]
fn under_native_jericho_moves_threads_to_their_data_if_the_user_wants_it() {
    let volume = small_volume();
    volume.mount();
    let scan = ["--variant", "read", "--threads", "2"];
    for (path, policy) in [
        ("fast", "always"),
        ("mount", "adaptive"),
        ("mount", "never"),
    ] {
        let more = [&scan[..], &["--path", path, "--migration", policy]].concat();
        let records = bench("scan", &volume.mnt(), &more);
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record["migration"], policy);
        assert_eq!(record["placement"], "native");
        for seat in record["seats"].as_array().unwrap() {
            assert_eq!(seat["thread"], Value::Null, "{record}");
        }
        // A thread is held on the node of its data after its first access to it.
        if policy == "always" {
            assert!(record["local_share"].as_f64().unwrap() > 0.9, "{record}");
        }
    }
    let refused = |target: &Path, more: &[&str]| {
        let more = [&scan[..], &["--migration", "always"], more].concat();
        fail(&mut command("scan", target, &more), 1)
    };
    let bound = refused(&volume.mnt(), &["--placement", "best"]);
    assert!(bound.contains("--placement native"), "{bound}");
    let elsewhere = tempfile::tempdir().unwrap();
    let elsewhere = refused(elsewhere.path(), &[]);
    assert!(
        elsewhere.contains("no directory on a Jericho mount"),
        "{elsewhere}"
    );
    // The library would follow its own policy.
    let bench = command("scan", &volume.mnt(), &scan);
    let mut run = jericho(["run", "--threads", "always", "--"]);
    run.arg(bench.get_program()).args(bench.get_args());
    let refused = fail(&mut run, 1);
    assert!(refused.contains("--migration is never"), "{refused}");
    volume.umount();
    let process = ["--path", "process", "--migration", "adaptive"];
    let process = fail(&mut command("scan", &volume.file(), &process), 1);
    assert!(process.contains("mount the volume"), "{process}");
}

#[test]
fn the_model_predicts_from_the_trace_that_a_run_has_written() {
    let volume = small_volume();
    volume.mount();
    let trace = volume.beside("trace");
    let file = trace.to_str().unwrap();
    let mut rates = Vec::new();
    for placement in ["best", "worst"] {
        let more = [
            "--variant",
            "randread",
            "--threads",
            "2",
            "--placement",
            placement,
        ];
        bench(
            "scan",
            &volume.mnt(),
            &[&more[..], &["--placement-trace", file]].concat(),
        );
        let text = std::fs::read_to_string(&trace).unwrap();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let is_local = line["cpu"] == line["frame"];
            assert_eq!(is_local, placement == "best", "{line}");
            assert_eq!(
                (&line["device"], &line["op"]),
                (&Value::Null, &"read".into())
            );
        }
        let predict = ["bench", "--model", "opteron", "--json", "--trace", file];
        let predicted: Value = serde_json::from_str(&succeed(&mut jericho(predict))).unwrap();
        let predictions = predicted["curves"][0]["predictions"].as_array().unwrap();
        assert_eq!(predictions.last().unwrap()["threads"], 2);
        rates.push(predictions.last().unwrap()["bytes_per_s"].as_f64().unwrap());
    }
    assert!(rates[0] > rates[1], "local accesses are faster: {rates:?}");

    let several = ["--threads", "2", "--placement-trace", file];
    let refused = fail(&mut command("scan", &volume.mnt(), &several), 1);
    assert!(refused.contains("--variant"), "{refused}");
    let unknown = [
        "--variant",
        "read-64k",
        "--threads",
        "1",
        "--placement-trace",
        file,
    ];
    let refused = fail(&mut command("zmio", &volume.beside(""), &unknown), 1);
    assert!(refused.contains("no trace"), "{refused}");
}

#[test]
fn all_leaves_out_what_does_not_fit_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (records, shown) = run(
        "all",
        dir.path(),
        &["--threads", "1", "--variant", "files,read"],
    );
    assert!(shown.contains("Left out: stream has pairs"), "{shown}");
    let ran: Vec<&str> = records
        .iter()
        .map(|record| record["workload"].as_str().unwrap())
        .collect();
    assert_eq!(ran, ["fsmark", "scan"]);
    let device = dir.path().join("device");
    std::fs::write(&device, vec![7u8; 8 << 20]).unwrap();
    let (records, shown) = run("all", &device, &["--threads", "1", "--placement", "native"]);
    assert!(shown.contains("Left out: fsmark makes files"), "{shown}");
    let mut ran: Vec<&str> = records
        .iter()
        .map(|record| record["workload"].as_str().unwrap())
        .collect();
    ran.dedup();
    assert_eq!(ran, ["zmio", "dd"]);
}

#[test]
fn targets_are_named_once_and_of_one_kind() {
    let volume = small_volume();
    volume.mount();
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    std::fs::write(&device, vec![7u8; 8 << 20]).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&device, &link).unwrap();
    let refused = |workload: &str, targets: [&Path; 2]| {
        let mut command = jericho(["bench", workload]);
        fail(command.args(targets).args(SHORT), 1)
    };
    assert!(refused("zmio", [&device, &link]).contains("named twice"));
    assert!(refused("zmio", [&device, dir.path()]).contains("not both"));
    assert!(refused("scan", [dir.path(), &volume.mnt()]).contains("Jericho volumes or others"));
}

#[test]
fn the_kernel_confirms_placements_after_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--threads", "2", "--variant", "read", "--placement"];
    let confirmed = |placement: &str| {
        let records = bench("scan", dir.path(), &[&more[..], &[placement]].concat());
        records[0]["confirmed"].clone()
    };
    assert_eq!(confirmed("best"), true);
    assert_eq!(confirmed("native"), Value::Null);
}
