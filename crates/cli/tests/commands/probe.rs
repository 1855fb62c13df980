//! `jericho probe`, and what mounts take from its report.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::bad_input::assert_says;
use crate::support::*;

/// Returns a quick probe of two virtual nodes that keeps its report in `file`.
fn probe(file: &Path) -> Command {
    let mut command = jericho(["probe", "--quick", "--topology", "virtual:2"]);
    command.env("JERICHO_PROBE", file);
    command
}

fn numbers(matrix: &Value) -> Vec<f64> {
    let rows = matrix.as_array().expect("rows");
    let values = rows.iter().flat_map(|row| row.as_array().expect("a row"));
    values
        .map(|value| value.as_f64().expect("a number"))
        .collect()
}

/// Two virtual nodes share the CPU of a machine with one, and then have no other CPUs for a load.
fn has_several_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|count| count.get() > 1)
}

#[test]
fn a_probe_of_two_nodes_has_plausible_figures_and_writes_no_device() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (kept, svg, device) = (
        dir.path().join("state/probe.json"),
        dir.path().join("nodes.svg"),
        dir.path().join("device"),
    );
    std::fs::write(&device, vec![9; 4 << 20]).unwrap();
    // A device that must not be written can still be read.
    let mut permissions = std::fs::metadata(&device).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&device, permissions).unwrap();
    let before = std::fs::metadata(&device).unwrap().modified().unwrap();

    let mut command = probe(&kept);
    command
        .arg("--json")
        .arg("--device")
        .arg(&device)
        .arg("--svg")
        .arg(&svg);
    let output = output(&mut command);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "",
        "silent in a pipe"
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    assert_eq!(report["skipped"], serde_json::json!([]));
    for matrix in [
        &report["read_bandwidth_bytes_per_s"],
        &report["write_bandwidth_bytes_per_s"],
        &report["one_cpu"]["read_bandwidth_bytes_per_s"],
        &report["one_cpu"]["write_bandwidth_bytes_per_s"],
        &report["latency_ns"]["unloaded"],
        &report["devices"][0]["read_bytes_per_s"],
    ] {
        let numbers = numbers(matrix);
        assert!(
            numbers.len() == 4 && numbers.iter().all(|n| *n > 0.0),
            "{matrix}"
        );
    }
    if has_several_cpus() {
        let unloaded = numbers(&report["latency_ns"]["unloaded"]);
        let loaded = numbers(&report["latency_ns"]["loaded"]);
        let pairs = || unloaded.iter().zip(&loaded);
        assert!(
            pairs().all(|(u, l)| *l >= 0.5 * u),
            "{unloaded:?} {loaded:?}"
        );
        assert!(report["migration_ns"][0][1].as_f64().unwrap() > 0.0);
    }
    assert_eq!(
        std::fs::metadata(&device).unwrap().modified().unwrap(),
        before
    );
    assert!(
        std::fs::read(&device)
            .unwrap()
            .iter()
            .all(|byte| *byte == 9)
    );
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg "));
    let kept: Value = serde_json::from_slice(&std::fs::read(&kept).unwrap()).unwrap();
    assert_eq!(kept, report);
}

#[test]
fn figures_are_printed_even_if_they_cannot_be_kept() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let in_the_way = dir.path().join("file");
    std::fs::write(&in_the_way, "").unwrap();
    let output = output(&mut probe(&in_the_way.join("probe.json")));
    assert!(output.status.success(), "{output:?}");
    let (shown, message) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    for part in [
        "2 nodes (virtual:2), quick",
        "Latency, ns",
        "memory 1",
        "cannot appear",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
    assert_says(
        &message,
        &["report is not kept", "cannot make", "JERICHO_PROBE"],
    );
}

#[test]
fn a_name_without_a_directory_is_a_file_of_the_current_one_and_figures_that_cannot_be_printed_are_kept()
 {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = probe(Path::new("kept.json"));
    // Each write to this device fails.
    let full = std::fs::File::options().write(true).open("/dev/full");
    command.current_dir(dir.path()).stdout(full.unwrap());
    let ended = command.output().unwrap();
    let message = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success());
    assert!(!message.contains("kept"), "{message}");
    assert_says(&message, &["cannot write to standard output"]);
    let kept = std::fs::read(dir.path().join("kept.json")).unwrap();
    serde_json::from_slice::<Value>(&kept).unwrap();
}

#[test]
fn the_report_of_a_user_who_is_not_root_is_below_the_directory_of_state() {
    // The build directory may be reachable only by root.
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let program = dir.path().join("jericho");
    std::fs::copy(env!("CARGO_BIN_EXE_jericho"), &program).unwrap();
    let home = dir.path().join("home");
    let probe = |state: Option<&Path>| {
        let mut command = match rustix::process::geteuid().is_root() {
            true => Command::new("setpriv"),
            false => Command::new("env"),
        };
        if rustix::process::geteuid().is_root() {
            command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        }
        command
            .arg(&program)
            .args(["probe", "--quick", "--topology", "virtual:1"]);
        command.env_remove("JERICHO_PROBE").env("HOME", &home);
        match state {
            Some(state) => command.env("XDG_STATE_HOME", state),
            None => command.env_remove("XDG_STATE_HOME"),
        };
        let output = output(&mut command);
        assert!(output.status.success(), "{output:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!message.contains("not kept"), "{message}");
    };
    let at_home = home.join(".local/state/jericho/probe.json");
    let state = dir.path().join("state");
    probe(Some(&state));
    assert!(state.join("jericho/probe.json").is_file());
    assert!(!at_home.exists());
    probe(None);
    assert!(at_home.is_file());
}

#[test]
fn a_probe_without_a_device_that_was_named_measures_nothing() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let kept = dir.path().join("probe.json");
    let message = fail(probe(&kept).args(["--device", "/no/such/device"]), 1);
    assert_says(&message, &["/no/such/device"]);
    assert!(!kept.exists());
}

/// Returns where a mount of `volume` on a topology says that its costs of moves come from.
fn costs_of_a_mount(volume: &Volume, kept: &Path, topology: &str) -> String {
    let mut mount = jericho(["mount", "--cache", "32M", "--topology", topology, "--log"]);
    mount.arg(volume.log()).arg(volume.file()).arg(volume.mnt());
    succeed(mount.env("JERICHO_PROBE", kept));
    let stat = volume.stat();
    let shown = succeed(jericho(["stat"]).arg(volume.mnt()));
    volume.umount();
    let costs = stat["move_costs"].as_str().expect("text").to_owned();
    assert!(
        shown.contains(&format!("costs of moves: {costs}")),
        "{shown}"
    );
    costs
}

#[test]
fn a_mount_uses_the_report_about_its_nodes_and_says_why_it_uses_no_other() {
    let volume = Volume::formatted();
    let kept = volume.beside("probe.json");
    let costs = |topology: &str| costs_of_a_mount(&volume, &kept, topology);
    assert_eq!(costs("virtual:2"), "defaults");
    succeed(&mut probe(&kept));
    let report: Value = serde_json::from_slice(&std::fs::read(&kept).unwrap()).unwrap();
    let time = report["time"].as_str().expect("a time").to_owned();
    assert_eq!(costs("virtual:2"), format!("probe of {time}"));
    assert_says(
        &costs("virtual:3"),
        &["defaults (", "other nodes (virtual:2)", "virtual:3"],
    );
    std::fs::write(&kept, "{\"format\": 1, \"latency_ns\": [").unwrap();
    assert_says(
        &costs("virtual:2"),
        &["defaults (", "is not a report of jericho probe"],
    );
    std::fs::write(&kept, "{\"format\": 99}").unwrap();
    assert_says(&costs("virtual:2"), &["defaults (", "format 99"]);
}
