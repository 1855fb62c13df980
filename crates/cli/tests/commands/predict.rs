//! `jericho bench --model`: predictions for the papers' machines, for machine files and for traces.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::support::{fail, jericho, succeed};

const MACHINE: &str = "name = \"small\"\n[[node]]\ncount = 2\ncpus = 2\nread_bytes_per_s = 10e9\n[[link]]\nnodes = [0, 1]\nbytes_per_s = 4e9\n";
const LOCAL: &str =
    r#"{"thread":1,"cpu":0,"buffer":0,"frame":0,"device":null,"bytes":4096,"op":"read"}"#;
const REMOTE: &str =
    r#"{"thread":2,"cpu":0,"buffer":0,"frame":1,"device":null,"bytes":4096,"op":"read"}"#;

fn bench(args: &[&str]) -> std::process::Command {
    jericho(["bench", "--model"].iter().chain(args))
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&succeed(bench(args).arg("--json"))).expect("JSON")
}

fn file(directory: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path: PathBuf = directory.path().join(name);
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn the_machines_of_the_papers_are_listed_and_predicted() {
    let names = json(&["list"]);
    for name in names.as_array().expect("a list") {
        let name = name.as_str().expect("a name");
        assert!(succeed(&mut bench(&["list"])).contains(name));
        let text = succeed(&mut bench(&[name, "--threads", "1,4"]));
        assert!(
            text.contains("GB/s") && text.contains("\n      4 "),
            "{text}"
        );
    }
    let judged = json(&["judged"]);
    assert!(
        judged["rows"]
            .as_array()
            .is_some_and(|rows| rows.len() > 10)
    );
    // The paper's values of what the model does not predict.
    let text = succeed(&mut bench(&["judged"]));
    assert!(
        text.contains("figure 13: Proper is up to 60 % better"),
        "{text}"
    );
    let not_predicted = judged["not_predicted"].as_array().expect("a list");
    assert!(
        not_predicted
            .iter()
            .all(|result| result["reason"].is_string())
    );
    assert!(!not_predicted.is_empty());
}

#[test]
fn an_unknown_machine_or_placement_is_answered_with_those_that_exist() {
    let message = fail(&mut bench(&["pdp-11"]), 1);
    assert!(
        message.contains("pdp-11") && message.contains("opteron, tylersburg, tyche"),
        "{message}"
    );
    let message = fail(&mut bench(&["opteron", "--placement", "lucky"]), 1);
    assert!(
        message.contains("lucky") && message.contains("proper, native"),
        "{message}"
    );
    let message = fail(&mut bench(&["opteron", "--threads", "0"]), 1);
    assert!(message.contains("0 threads: expected 1"), "{message}");
    fail(&mut jericho(["bench"]), 2);
}

#[test]
fn a_bad_machine_file_is_named_with_the_field() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = file(&directory, "bad.toml", &MACHINE.replace("10e9", "-10e9"));
    let message = fail(&mut bench(&[&path]), 1);
    assert!(
        message.contains(&path) && message.contains("node[0].read_bytes_per_s"),
        "{message}"
    );
    let binary = directory.path().join("binary");
    std::fs::write(&binary, [0xff; 100]).expect("written");
    fail(&mut bench(&[binary.to_str().expect("UTF-8")]), 1);
}

#[test]
fn a_trace_of_many_lines_is_predicted() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = file(&directory, "m.toml", MACHINE);
    let mut lines = String::new();
    for _ in 0..20_000 {
        writeln!(lines, "{LOCAL}\n\n{REMOTE}").expect("text");
    }
    // The last line has no newline.
    let trace = file(&directory, "t.jsonl", lines.trim_end());
    let output = json(&[&machine, "--trace", &trace]);
    let predictions = &output["curves"][0]["predictions"];
    // One thread reads and writes local memory of 10 GB/s. The other one shares it, and writes there what it reads over the link.
    assert_eq!(predictions[1]["threads"], 2);
    for (prediction, expected) in [(0, 5e9), (1, 20e9 / 3.0)] {
        let rate = predictions[prediction]["bytes_per_s"].as_f64();
        let rate = rate.expect("a number");
        assert!((rate - expected).abs() < 1.0, "{rate}");
    }
    fail(
        bench(&[&machine, "--trace", &trace]).args(["--placement", "worst"]),
        2,
    );
}

#[test]
fn a_bad_trace_is_named_with_the_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = file(&directory, "m.toml", MACHINE);
    for (text, part) in [
        (format!("{LOCAL}\n{{"), "line 2"),
        (
            format!("{LOCAL}\n{}", LOCAL.replace("\"cpu\":0", "\"cpu\":5")),
            "cpu: the machine has no node 5",
        ),
        (
            format!("\n\n{LOCAL}{}", " ".repeat(10_000)),
            "line 3: more than 4096 bytes",
        ),
        (String::new(), "no accesses"),
    ] {
        let trace = file(&directory, "t.jsonl", &text);
        let message = fail(&mut bench(&[&machine, "--trace", &trace]), 1);
        assert!(
            message.contains(&trace) && message.contains(part),
            "{part:?} is not in: {message}"
        );
    }
}
