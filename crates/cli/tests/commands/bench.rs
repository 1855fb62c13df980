//! `jericho bench`: each workload runs in each way of placement, and bad requests get a message and change nothing.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, succeed};

/// Short runs.
const BRIEF: [&str; 4] = ["--seconds", "0.2", "--threads", "2"];

/// Short runs on two virtual nodes.
const SHORT: [&str; 6] = [
    "--seconds",
    "0.2",
    "--threads",
    "2",
    "--topology",
    "virtual:2",
];

/// A directory on a disk, because /tmp may be without direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs the workload on two virtual nodes and returns the records.
fn bench(workload: &str, target: &Path, more: &[&str]) -> Vec<Value> {
    bench_with(workload, target, &[&SHORT[4..], more].concat())
}

/// Runs the workload and returns the records.
fn bench_with(workload: &str, target: &Path, more: &[&str]) -> Vec<Value> {
    let out = directory();
    let lines = out.path().join("results.jsonl");
    let mut command = jericho(["bench", workload]);
    command
        .arg(target)
        .args(BRIEF)
        .args(more)
        .arg("--out")
        .arg(&lines);
    succeed(&mut command);
    let text = std::fs::read_to_string(&lines).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn every_workload_of_the_papers_runs_and_leaves_nothing_behind() {
    let dir = directory();
    let records = bench("all", dir.path(), &[]);
    let names: BTreeSet<&str> = records
        .iter()
        .map(|record| record["workload"].as_str().unwrap())
        .collect();
    let expected = [
        "checkpoint",
        "dd",
        "fsmark",
        "scan",
        "search",
        "stream",
        "zmio",
    ];
    assert!(names.iter().copied().eq(expected), "{names:?}");
    let page = include_str!("../../../../docs/formats/results.md");
    for record in &records {
        let below = [
            &record["machine"],
            &record["targets_on"][0],
            &record["disks"][0],
        ];
        let below = below.into_iter().filter_map(Value::as_object);
        let all = below
            .chain(record.as_object())
            .flat_map(|object| object.keys());
        for field in all {
            assert!(
                page.contains(&format!("`{field}`")),
                "the page lacks {field}"
            );
        }
        assert!(record["iops"].as_f64().unwrap() > 0.0, "{record}");
        assert!(
            record["throughput_bytes_per_s"].as_f64().unwrap() > 0.0,
            "{record}"
        );
        let latency = |key: &str| record["latency_ns"][key].as_u64().unwrap();
        assert!(
            latency("min") <= latency("p50") && latency("p50") <= latency("p99"),
            "{record}"
        );
        assert!(latency("p99") <= latency("max"), "{record}");
        // The kernel samples the kinds, so any one may be 0 in a short run, and a very short one has none.
        if let Some(cycles) = record["cycles_per_moved_sector"].as_object() {
            let sum: f64 = cycles.values().map(|value| value.as_f64().unwrap()).sum();
            assert!(sum > 0.0, "{record}");
        }
        let machine = &record["machine"];
        for field in ["cpu_model", "build", "topology_digest"] {
            assert!(machine[field].is_string(), "{field}: {record}");
        }
        assert!(machine["memory_bytes"].as_u64() > Some(0), "{record}");
        assert_eq!(machine["fake_nodes"], false, "{record}");
        let on = &record["targets_on"][0];
        assert!(on["filesystem"].is_string(), "{record}");
        assert!(
            on["transport"].is_null() && on["cache_bytes"].is_null(),
            "{record}"
        );
        let is_direct = ["zmio", "dd"].contains(&record["workload"].as_str().unwrap());
        assert_eq!(record["engine"][0] == "direct I/O", is_direct, "{record}");
    }
    assert!(is_empty(dir.path()));
}

#[test]
fn threads_are_local_or_remote_as_the_placement_says() {
    let dir = directory();
    for (workload, placement, share) in [
        ("scan", "best", 1.0),
        ("scan", "worst", 0.0),
        ("zmio", "proper", 1.0),
        ("zmio", "worst", 0.0),
        ("checkpoint", "worst", 0.0),
    ] {
        for record in bench(workload, dir.path(), &["--placement", placement]) {
            assert_eq!(
                record["local_share"], share,
                "{workload} {placement}: {record}"
            );
            let nodes: Vec<u64> = record["seats"]
                .as_array()
                .unwrap()
                .iter()
                .map(|seat| seat["frame"].as_u64().unwrap())
                .collect();
            assert_eq!(nodes, [0, 1], "the nodes in turn");
            // The node of the device is unknown, so these are the nodes of the threads.
            assert_eq!(shares_by_node(&record).len(), 2, "{record}");
        }
    }
}

/// Returns the nodes of `throughput_bytes_per_s_by_node`, after a check that their sum is the throughput.
fn shares_by_node(record: &Value) -> Vec<String> {
    let by_node = record["throughput_bytes_per_s_by_node"]
        .as_object()
        .unwrap();
    let sum: f64 = by_node.values().map(|rate| rate.as_f64().unwrap()).sum();
    let all = record["throughput_bytes_per_s"].as_f64().unwrap();
    assert!((sum - all).abs() <= all * 1e-6, "{record}");
    by_node.keys().cloned().collect()
}

/// Writes a topology file with the CPUs of two virtual nodes, and `data` on a device of node 1.
fn topology_with_device(file: &Path, data: &Path) {
    let json = succeed(&mut jericho([
        "topology",
        "--topology",
        "virtual:2",
        "--json",
    ]));
    let found: Value = serde_json::from_str(&json).unwrap();
    let node = |id: usize| {
        let cpus = found["nodes"][id]["cpus"].as_array().unwrap();
        let cpus: Vec<String> = cpus.iter().map(Value::to_string).collect();
        format!("node {id} cpus={} memory=1G\n", cpus.join(","))
    };
    let device = format!("device {} node=1\n", data.display());
    std::fs::write(file, node(0) + &node(1) + &device).unwrap();
}

#[test]
fn the_papers_transfers_of_cached_pages_run_with_pages_and_threads_where_their_names_say() {
    let dir = directory();
    let (topology, data) = (dir.path().join("topology"), dir.path().join("data"));
    std::fs::create_dir(&data).unwrap();
    topology_with_device(&topology, &data);
    // A machine with one CPU has it on both nodes, so no thread is remote.
    let has_several_cpus = std::thread::available_parallelism().unwrap().get() > 1;
    for (placement, frame, thread) in [
        ("TRLCPL", 1, 1),
        ("TRLCPR", 1, 0),
        ("TRRCPL", 0, 0),
        ("TRRCPR", 0, 1),
    ] {
        let options = ["--variant", "read", "--placement", placement, "--topology"];
        let topology = [topology.to_str().unwrap()];
        let records = bench_with("scan", &data, &[&options[..], &topology].concat());
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record["placement"], placement);
        let seat = serde_json::json!({"device": 1, "frame": frame, "thread": thread});
        assert_eq!(record["seats"], serde_json::json!([seat, seat]));
        assert_eq!(record["confirmed"], true, "{record}");
        assert_eq!(shares_by_node(record), ["1"], "{record}");
        if has_several_cpus {
            let share = f64::from(u8::from(frame == thread));
            assert_eq!(record["local_share"], share, "{record}");
        }
    }
}

#[test]
fn a_result_of_a_machine_with_one_node_says_so() {
    let dir = directory();
    let device = dir.path().join("device");
    std::fs::write(&device, vec![7u8; 8 << 20]).unwrap();
    let one = ["--topology", "virtual:1", "--placement", "worst"];
    let records = bench_with("dd", &device, &one);
    let notes = records[0]["notes"].to_string();
    assert!(notes.contains("The machine has one node"), "{notes}");
    let two = bench("dd", &device, &[]);
    let notes = two[0]["notes"].to_string();
    assert!(!notes.contains("The machine has one node"), "{notes}");
}

#[test]
fn the_user_learns_the_number_of_runs_and_their_length_before_the_first_one_ends() {
    let dir = directory();
    let mut command = jericho(["bench", "scan", "--seconds", "1000", "--variant"]);
    command
        .args(["read,write", "--threads", "1"])
        .arg(dir.path());
    let mut run = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut shown = BufReader::new(run.stdout.take().unwrap());
    shown.read_line(&mut line).unwrap();
    assert!(line.starts_with("2 runs, about 20"), "{line}");
    assert!(line.ends_with(" s together\n"), "{line}");
    assert!(run.try_wait().unwrap().is_none(), "the run has ended");
    rustix::process::kill_process(Pid::from_child(&run), Signal::INT).unwrap();
    run.wait().unwrap();
    // The heading is there, and no result.
    let rest: Vec<String> = shown.lines().map(Result::unwrap).collect();
    assert!(rest.last().unwrap().starts_with("workload"), "{rest:?}");
    assert!(is_empty(dir.path()));
}

#[test]
fn a_run_says_what_the_kernel_was_asked_about() {
    let dir = directory();
    for (workload, asked) in [
        // Any thread may have written the pages last.
        ("fsmark files", &["threads"][..]),
        ("fsmark create", &["threads", "cached pages"]),
        ("checkpoint", &["threads", "cached pages"]),
        ("dd", &["threads", "buffers"]),
    ] {
        let (workload, variant) = workload.split_once(' ').unwrap_or((workload, ""));
        let chosen = ["--variant", variant];
        let variant = if variant.is_empty() { &[] } else { &chosen[..] };
        for record in bench(
            workload,
            dir.path(),
            &[&["--placement", "best"], variant].concat(),
        ) {
            assert_eq!(
                record["confirmed_for"],
                serde_json::json!(asked),
                "{record}"
            );
            assert!(
                workload != "fsmark" || record["confirmed"] == true,
                "{record}"
            );
        }
        for record in bench(workload, dir.path(), variant) {
            assert!(record["confirmed"].is_null(), "{record}");
            assert_eq!(record["confirmed_for"], serde_json::json!([]), "{record}");
        }
    }
}

#[test]
fn a_mount_is_measured_with_threads_on_its_slices_nodes_and_off_them() {
    let volume = Volume::formatted();
    volume.mount();
    for (placement, share) in [("best", 1.0), ("worst", 0.0)] {
        let records = bench("scan", &volume.mnt(), &["--placement", placement]);
        assert_eq!(records.len(), 4);
        // The two directories are in the two slices.
        let frames = records
            .iter()
            .flat_map(|record| record["seats"].as_array().unwrap());
        let frames: BTreeSet<u64> = frames.map(|seat| seat["frame"].as_u64().unwrap()).collect();
        assert_eq!(frames, BTreeSet::from([0, 1]));
        for record in records {
            assert_eq!(record["local_share"], share, "{placement}: {record}");
        }
    }
    // The threads of fsmark use the files of each other, in both slices.
    for record in bench("fsmark", &volume.mnt(), &["--placement", "best"]) {
        let share = match record["variant"].as_str().unwrap() {
            "files" => 0.5,
            // Its threads create files in their own directories.
            _ => 1.0,
        };
        assert_eq!(record["local_share"], share, "{record}");
        let (on, stat) = (&record["targets_on"][0], volume.stat());
        assert_eq!(on["filesystem"], "fuse.jericho");
        assert_eq!(on["transport"], stat["transport"], "{record}");
        let frames = stat["slices"].as_array().unwrap().iter();
        let frames: u64 = frames.map(|slice| slice["frames"].as_u64().unwrap()).sum();
        assert_eq!(on["cache_bytes"], frames * 4096, "{record}");
        // The daemon is the same program.
        assert_eq!(on["build"], record["machine"]["build"], "{record}");
    }
    // A checkpoint's file is in one slice.
    for record in bench("checkpoint", &volume.mnt(), &["--placement", "best"]) {
        let seats = record["seats"].as_array().unwrap();
        assert!(
            seats.iter().all(|seat| seat["frame"] == seats[0]["frame"]),
            "{record}"
        );
        assert_eq!(record["local_share"], 1.0, "{record}");
    }
    let moved = ["--placement", "TRRCPL", "--topology", "virtual:2"];
    let refused = fail(jericho(["bench", "scan"]).arg(volume.mnt()).args(moved), 1);
    assert!(refused.contains("home node of their slice"), "{refused}");
    assert!(is_empty(&volume.mnt()));
}

#[test]
fn a_device_is_read_and_never_written_without_force() {
    let dir = directory();
    let device = dir.path().join("device");
    let bytes = vec![7u8; 8 << 20];
    std::fs::write(&device, &bytes).unwrap();
    let records = bench("zmio", &device, &[]);
    let variants: Vec<&str> = records
        .iter()
        .map(|record| record["variant"].as_str().unwrap())
        .collect();
    assert_eq!(variants, ["read-64k", "read-1m"]);
    let out = dir.path().join("results.jsonl");
    let mut only_writes = jericho(["bench", "zmio", "--variant", "write-1m", "--out"]);
    only_writes.arg(&out).arg(&device).args(SHORT);
    let refused = fail(&mut only_writes, 1);
    assert!(refused.contains("--force"), "{refused}");
    assert!(!out.exists());
    // The user learns which one of two forms does not run.
    let mixed = bench("zmio", &device, &["--variant", "read-64k,write-1m"]);
    assert_eq!(mixed.len(), 1);
    let notes = mixed[0]["notes"].to_string();
    assert!(notes.contains("--force"), "{notes}");
    assert!(std::fs::read(&device).unwrap() == bytes);
    assert_eq!(bench("zmio", &device, &["--force"]).len(), 3);
    let sizes = ["--force", "--variant", "read-256k,write-64k"];
    for (record, bytes) in bench("zmio", &device, &sizes).iter().zip([256, 64]) {
        let rate = |key: &str| record[key].as_f64().unwrap();
        let each = rate("throughput_bytes_per_s") / rate("iops");
        assert_eq!(each.round() as u64, bytes << 10, "{record}");
    }
    assert!(std::fs::read(&device).unwrap() != bytes);
}

#[test]
fn mstress_is_a_workload_and_a_load_beside_others_with_its_bandwidth_in_the_result() {
    let dir = directory();
    for (placement, share) in [("best", 1.0), ("worst", 0.0)] {
        let records = bench("mstress", dir.path(), &["--placement", placement]);
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record["variant"], "copy");
        assert_eq!(record["local_share"], share, "{record}");
        assert_eq!(record["mstress"], Value::Null);
        let rate = |key: &str| record[key].as_f64().unwrap();
        assert!(rate("read_bytes_per_s") > 0.0, "{record}");
        assert_eq!(rate("read_bytes_per_s"), rate("written_bytes_per_s"));
    }
    // A device is not written.
    let device = dir.path().join("device");
    let bytes = vec![7u8; 8 << 20];
    std::fs::write(&device, &bytes).unwrap();
    bench("mstress", &device, &[]);
    assert!(std::fs::read(&device).unwrap() == bytes);

    let out = dir.path().join("results.jsonl");
    let beside = ["--with-mstress", "--variant", "read-64k", "--out"];
    let mut command = jericho(["bench", "zmio"]);
    command.arg(&device).args(SHORT).args(beside).arg(&out);
    let shown = succeed(&mut command);
    assert!(shown.contains("beside: mstress"), "{shown}");
    let record: Value = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(record["with_mstress"], true);
    assert_eq!(record["threads"], 2);
    assert_eq!(record["mstress"]["threads"], 2);
    assert!(record["mstress"]["bytes_per_s"].as_f64().unwrap() > 0.0);
    let twice = fail(
        jericho(["bench", "mstress", "--with-mstress"]).arg(&device),
        1,
    );
    assert!(twice.contains("leave out --with-mstress"), "{twice}");
}

#[test]
fn several_threads_write_to_one_block_device() {
    let dir = directory();
    let file = dir.path().join("device");
    std::fs::write(&file, vec![7u8; 8 << 20]).unwrap();
    let Some(device) = Loop::over(&file) else {
        return;
    };
    let records = bench("zmio", &device.0, &["--force"]);
    let written = records
        .iter()
        .find(|record| record["variant"] == "write-1m");
    assert_eq!(written.unwrap()["threads"], 2);
    assert_eq!(written.unwrap()["engine"][0], "direct I/O");
}

#[test]
fn names_of_reads_make_no_writes() {
    let dir = directory();
    let topology = dir.path().join("topology");
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let text = format!(
        "node 0 cpus=0\nnode 1 cpus=0\ndevice {} node=1\n",
        data.display()
    );
    std::fs::write(&topology, text).unwrap();
    let named = ["--placement", "TLORPLIR", "--topology"];
    let records = bench_with(
        "zmio",
        &data,
        &[&named[..], &[topology.to_str().unwrap()]].concat(),
    );
    let variants: Vec<&str> = records
        .iter()
        .map(|record| record["variant"].as_str().unwrap())
        .collect();
    assert_eq!(variants, ["read-64k", "read-1m"]);
}

#[test]
fn a_device_in_use_is_not_written_even_with_force() {
    let volume = Volume::formatted();
    volume.mount();
    let mut command = jericho(["bench", "zmio", "--force"]);
    let refused = fail(command.arg(volume.file()).args(SHORT), 1);
    assert!(refused.contains("unmount the volume first"), "{refused}");
    volume.umount();
    succeed(jericho(["check"]).arg(volume.file()));
}

#[test]
fn a_run_that_a_signal_interrupts_removes_its_directories() {
    for signal in [Signal::INT, Signal::HUP, Signal::QUIT] {
        let dir = directory();
        // The shell that runs the tests may ignore SIGHUP, for example under nohup(1). The command must not inherit that.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP");
        command.arg(jericho(["bench"]).get_program());
        command.args(["bench", "scan", "--seconds", "1000", "--threads", "1"]);
        command.stderr(Stdio::piped());
        let mut run = command.arg(dir.path()).spawn().unwrap();
        while is_empty(dir.path()) {
            assert!(run.try_wait().unwrap().is_none(), "the run has ended");
            std::thread::yield_now();
        }
        let pid = Pid::from_child(&run);
        rustix::process::kill_process(pid, signal).unwrap();
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{signal:?}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("removing the files"), "{message}");
        assert!(is_empty(dir.path()));
    }
}

#[test]
fn a_signal_that_the_parent_ignores_does_not_end_a_run() {
    let dir = directory();
    let ignoring = "trap '' HUP; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", ignoring, "sh"]);
    command.arg(jericho(["bench"]).get_program());
    command.args(["bench", "scan", "--seconds", "1000", "--threads", "1"]);
    let mut run = command.arg(dir.path()).spawn().unwrap();
    while is_empty(dir.path()) {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        std::thread::yield_now();
    }
    let pid = Pid::from_child(&run);
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    assert_eq!(ignored & 1, 1, "SIGHUP is still ignored");
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(1));
}

#[test]
fn lines_of_results_are_whole_whatever_was_there_and_however_full_the_disk() {
    let dir = directory();
    let device = dir.path().join("device");
    std::fs::write(&device, vec![7u8; 1 << 20]).unwrap();
    let out = dir.path().join("results.jsonl");
    let run = |limit: &str| {
        // A write beyond the limit writes the part up to it, as on a full disk.
        let limited = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        let mut command = Command::new("bash");
        command.args(["-c", &limited, "bash"]);
        command.arg(jericho(["bench"]).get_program());
        command.args(["bench", "dd"]).arg(&device).args(SHORT);
        command.arg("--out").arg(&out);
        command
    };
    // A program was killed while it wrote.
    std::fs::write(&out, "{\"format\":1,\"work").unwrap();
    succeed(&mut run("unlimited"));
    let text = std::fs::read_to_string(&out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    let record: Value = serde_json::from_str(lines[1]).unwrap();
    assert_eq!(record["workload"], "dd");

    // The limit is in units of 1024 bytes, and cuts the next line.
    let limit = text.len().div_ceil(1024);
    let refused = fail(&mut run(&limit.to_string()), 1);
    assert!(refused.contains("results.jsonl"), "{refused}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
}

#[test]
fn bad_requests_name_what_is_wrong_and_what_there_is() {
    let dir = directory();
    let refused = |workload: &str, more: &[&str]| {
        fail(jericho(["bench", workload]).arg(dir.path()).args(more), 1)
    };
    assert!(refused("ior", &[]).contains("checkpoint"));
    assert!(refused("scan", &["--placement", "TLORPLIR"]).contains("TRLCPL"));
    assert!(refused("scan", &["--placement", "nowhere"]).contains("native"));
    assert!(refused("scan", &["--threads", "0"]).contains("at least one"));
    assert!(refused("stream", &["--threads", "3"]).contains("even"));
    assert!(refused("scan", &["--seconds", "0"]).contains("--seconds"));
    let transfers = ["--placement", "TRLCPL", "--topology", "virtual:2"];
    assert!(refused("scan", &transfers).contains("topology file"));
    let large = ["--as-paper", "--threads", "4096"];
    assert!(refused("checkpoint", &large).contains("free space"));
    assert!(refused("scan", &["--threads", "5000"]).contains("4096"));
    assert!(refused("scan", &["--out", "/does/not/exist/out"]).contains("/does/not/exist/out"));
    let missing = fail(
        jericho(["bench", "scan"]).arg(dir.path().join("missing")),
        1,
    );
    assert!(missing.contains("missing"));
    let small = dir.path().join("small");
    std::fs::write(&small, vec![0; 64 << 10]).unwrap();
    let short = fail(jericho(["bench", "dd"]).arg(&small).args(SHORT), 1);
    assert!(short.contains("smaller than one request"), "{short}");
    let no_files = fail(jericho(["bench", "scan"]).arg(&small).args(SHORT), 1);
    assert!(no_files.contains("name a directory"), "{no_files}");
    std::fs::remove_file(&small).unwrap();
    assert!(is_empty(dir.path()));
}
