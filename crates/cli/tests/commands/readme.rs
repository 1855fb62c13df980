//! The commands in README.md work one after the other.

use std::path::Path;
use std::process::Command;

use super::support::succeed;

/// Parts of the lines that other tests run: they take long, wait for keys, or need a second host or a device that can discard.
const ELSEWHERE: [&str; 6] = ["my-program", "top", "probe", "bench", "report", "trim"];

/// Returns the lines from the first format of a volume to its check.
fn lines() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let page = std::fs::read_to_string(page).unwrap();
    let begin = page.find("    jericho format my.volume").unwrap();
    let end = page.find("jericho check my.volume").unwrap();
    let lines = page[begin..end].lines().map(str::trim);
    let mut lines: Vec<String> = lines.map(str::to_owned).collect();
    let last = lines.last_mut().unwrap();
    last.push_str("jericho check my.volume");
    lines
}

#[test]
fn the_commands_of_the_readme_work_one_after_the_other() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let script = lines().into_iter().filter_map(|line| {
        let command = line.split('#').next().unwrap_or_default();
        if command.contains("my-program") {
            return Some("mkdir ~/mnt/db; echo kept > ~/mnt/db/file".to_owned());
        }
        let verb = command.split_whitespace().nth(1);
        let is_elsewhere = verb.is_some_and(|verb| ELSEWHERE.contains(&verb));
        (!is_elsewhere)
            .then(|| line.replace("jericho mount ", "jericho mount --cache 32M --log ~/log "))
    });
    let script: Vec<String> = script.collect();
    let program = Path::new(env!("CARGO_BIN_EXE_jericho"));
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("sh");
    command.arg("-euxc").arg(format!(
        "trap 'mountpoint -q ~/mnt && jericho umount ~/mnt' EXIT
        {}
        echo all done",
        script.join("\n")
    ));
    command
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .env("JERICHO_PROBE", "")
        .env(
            "PATH",
            format!("{}:{path}", program.parent().unwrap().display()),
        );
    let said = succeed(&mut command);
    assert!(said.contains("all done"), "{said}");
}

#[test]
fn the_results_that_the_readme_reports_are_written_before() {
    let lines = lines();
    let reported = lines
        .iter()
        .position(|line| line.contains("jericho report results.jsonl"));
    let before = &lines[..reported.unwrap()];
    assert!(
        before
            .iter()
            .any(|line| line.contains("--out results.jsonl"))
    );
}
