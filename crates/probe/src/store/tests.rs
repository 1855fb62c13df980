use std::path::PathBuf;

use serde_json::{Value, json};

use crate::example;

use super::*;

/// Returns a report about this machine.
fn report(topology: &Topology) -> Report {
    let mut report = example::report(topology);
    report.machine.cpu_model = cpu_model();
    report
}

struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
    topology: Topology,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    Place {
        path: dir.path().join("state/jericho").join(FILE_NAME),
        _dir: dir,
        topology: Topology::from_spec("virtual:2").unwrap(),
    }
}

impl Place {
    fn write(&self, text: impl AsRef<[u8]>) {
        fs::create_dir_all(self.path.parent().unwrap()).unwrap();
        fs::write(&self.path, text).unwrap();
    }

    /// Keeps a good report with one change, and returns the message of the refusal.
    fn refusal(&self, change: impl Fn(&mut Value)) -> String {
        let mut value = serde_json::to_value(report(&self.topology)).unwrap();
        change(&mut value);
        self.write(value.to_string());
        let error = load(&self.path, &self.topology).expect_err("a refusal");
        let message = error.to_string();
        assert!(message.contains("probe.json"), "{message}");
        assert!(message.contains("run jericho probe"), "{message}");
        message
    }
}

#[test]
fn a_kept_report_is_read_back() {
    let place = place();
    assert!(load(&place.path, &place.topology).unwrap().is_none());
    let report = report(&place.topology);
    for _ in 0..2 {
        save(&report, &place.path).unwrap();
        let read = load(&place.path, &place.topology).unwrap();
        assert_eq!(read.as_ref(), Some(&report));
    }
    let files = fs::read_dir(place.path.parent().unwrap()).unwrap();
    assert_eq!(files.count(), 1, "no temporary file stays");
}

#[test]
fn a_report_about_other_nodes_is_not_used() {
    let place = place();
    save(&report(&place.topology), &place.path).unwrap();
    let other = Topology::from_spec("virtual:3").unwrap();
    let message = load(&place.path, &other).unwrap_err().to_string();
    for part in ["virtual:2", "virtual:3", "2026-11-26", "jericho probe"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_report_about_another_machine_with_equal_nodes_is_not_used() {
    let place = place();
    let other = example::report(&place.topology);
    save(&other, &place.path).unwrap();
    let message = load(&place.path, &place.topology).unwrap_err().to_string();
    for part in ["another machine", "Example <CPU>", &cpu_model()] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_report_takes_the_place_of_files_only() {
    let place = place();
    fs::create_dir_all(place.path.parent().unwrap()).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(&place.path)
        .status();
    assert!(made.unwrap().success());
    let message = save(&report(&place.topology), &place.path)
        .unwrap_err()
        .to_string();
    assert!(message.contains("not a regular file"), "{message}");
    assert!(!fs::metadata(&place.path).unwrap().is_file());
    let files = fs::read_dir(place.path.parent().unwrap()).unwrap();
    assert_eq!(files.count(), 1, "no temporary file stays");
}

#[test]
fn a_newer_format_is_named_even_if_its_fields_are_unknown() {
    let place = place();
    place.write(r#"{"format": 2, "read_bandwidth_bytes_per_s": "elsewhere"}"#);
    let message = load(&place.path, &place.topology).unwrap_err().to_string();
    assert!(message.contains("format 2"), "{message}");
    assert!(
        place
            .refusal(|v| v["format"] = json!(u64::MAX))
            .contains("18446744073709551615")
    );
    assert!(
        place
            .refusal(|v| v["format"] = json!(0))
            .contains("format 0")
    );
}

#[test]
fn impossible_values_are_refused() {
    let place = place();
    let refusal = |change: &dyn Fn(&mut Value)| place.refusal(change);
    let zero = refusal(&|v| v["latency_ns"]["unloaded"][0][1] = json!(0));
    assert!(zero.contains("latency_ns.unloaded"), "{zero}");
    refusal(&|v| v["latency_ns"]["loaded"][0][1] = json!(-5.5));
    refusal(&|v| v["latency_ns"]["loaded"][0][1] = json!(1e300));
    refusal(&|v| v["latency_ns"]["loaded"][0][1] = json!("fast"));
    refusal(&|v| v["read_bandwidth_bytes_per_s"][1][1] = json!(u64::MAX));
    refusal(&|v| v["one_cpu"]["read_bandwidth_bytes_per_s"] = json!([]));
    refusal(&|v| v["one_cpu"]["write_bandwidth_bytes_per_s"][1] = json!([1, 2, 3]));
    refusal(&|v| v["migration_ns"] = json!([[null], [null]]));
    refusal(&|v| v["devices"] = json!([{}]));
    refusal(&|v| v["topology"]["nodes"] = json!([]));
    refusal(&|v| v["topology"]["nodes"][1]["id"] = json!(7));
    refusal(&|v| v["topology"]["source"] = json!("x\u{1b}[2J"));
    refusal(&|v| v["topology"]["source"] = json!("x".repeat(10_000)));
    refusal(&|v| v["machine"]["cpu_model"] = json!("x\u{1b}[2J"));
    let missing = refusal(&|v| drop(v.as_object_mut().unwrap().remove("migration_ns")));
    assert!(missing.contains("migration_ns"), "{missing}");
}

#[test]
fn what_is_no_json_or_no_file_is_refused_without_a_wait() {
    let place = place();
    let whole = serde_json::to_vec(&report(&place.topology)).unwrap();
    let deep = "[".repeat(1 << 20);
    for text in [
        &b""[..],
        b"\0\xff",
        b"{}",
        b"[1]",
        deep.as_bytes(),
        &whole[..whole.len() - 2],
    ] {
        place.write(text);
        let error = load(&place.path, &place.topology).unwrap_err();
        assert!(matches!(error, LoadError::Malformed { .. }), "{error}");
    }
    place.write(vec![b' '; BYTES_MAX as usize + 1]);
    let message = load(&place.path, &place.topology).unwrap_err().to_string();
    assert!(message.contains("more than 4 MiB"), "{message}");
    fs::remove_file(&place.path).unwrap();
    fs::create_dir(&place.path).unwrap();
    let message = load(&place.path, &place.topology).unwrap_err().to_string();
    assert!(message.contains("not a regular file"), "{message}");
    fs::remove_dir(&place.path).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(&place.path)
        .status();
    assert!(made.unwrap().success());
    let message = load(&place.path, &place.topology).unwrap_err().to_string();
    assert!(message.contains("not a regular file"), "{message}");
}

#[test]
fn a_directory_that_cannot_be_made_is_named_and_the_old_report_stays() {
    let place = place();
    let file_in_the_way = place.path.parent().unwrap().parent().unwrap();
    fs::write(file_in_the_way, "").unwrap();
    let error = save(&report(&place.topology), &place.path).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("state/jericho") && message.contains("JERICHO_PROBE"),
        "{message}"
    );
    fs::remove_file(file_in_the_way).unwrap();
    // A directory at the place of the file cannot be replaced.
    fs::create_dir_all(place.path.join("x")).unwrap();
    save(&report(&place.topology), &place.path).unwrap_err();
    let files = fs::read_dir(place.path.parent().unwrap()).unwrap();
    assert_eq!(files.count(), 1, "no temporary file stays");
}
