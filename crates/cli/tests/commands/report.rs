//! `jericho report`: pages from results that `jericho bench` has just measured, comparisons, and what bad files get.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::{fail, jericho, succeed};

/// A directory on a disk, because /tmp may be without direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Measures one short run and appends it to a file.
fn bench(dir: &Path, placement: &str, out: &Path) {
    let target = dir.join("data");
    std::fs::create_dir_all(&target).unwrap();
    let short = [
        "--seconds",
        "0.1",
        "--threads",
        "2",
        "--topology",
        "virtual:2",
        "--variant",
        "files",
        "--placement",
        placement,
    ];
    succeed(
        jericho(["bench", "fsmark"])
            .arg(target)
            .args(short)
            .arg("--out")
            .arg(out),
    );
}

/// Asks for a page, without the probe of this machine.
fn report(files: &[&Path], out: &Path) -> Command {
    let mut command = jericho(["report"]);
    command
        .args(files)
        .arg("--out")
        .arg(out)
        .env("JERICHO_PROBE", "");
    command
}

fn compare(a: &Path, b: &Path, out: &Path) -> Command {
    let mut command = jericho(["report", "--compare"]);
    command.arg(a).arg(b).arg("--out").arg(out);
    command
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn file(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn runs_that_were_just_measured_become_a_page_and_a_comparison() {
    let dir = directory();
    let (a, b, page) = (
        dir.path().join("a.jsonl"),
        dir.path().join("b.jsonl"),
        dir.path().join("page.html"),
    );
    bench(dir.path(), "best", &a);
    bench(dir.path(), "worst", &a);
    bench(dir.path(), "best", &b);
    let said = succeed(&mut report(&[&a, &b], &page));
    assert!(said.contains("made from 3 results"), "{said}");
    let html = read(&page);
    for part in [
        "fsmark files",
        "2 (virtual:2)",
        "an effect of placement on speed cannot appear",
        "Throughput of files over threads",
        "The papers' ratios",
        "no value: ",
    ] {
        assert!(html.contains(part), "{part}");
    }
    // The names of the predictions are those of the crate `model`.
    assert_eq!(html.matches("cost model: ").count(), 11);
    // The same file twice is the same run.
    let page_of_one = dir.path().join("twice.html");
    let said = succeed(&mut report(&[&b, &b], &page_of_one));
    assert!(said.contains("made from 1 results"), "{said}");
    let said = succeed(&mut compare(&a, &b, &page));
    assert!(
        said.contains("1 comparison: 0 faster, 0 slower, 1 no difference (1 with too few runs"),
        "{said}"
    );
    let html = read(&page);
    assert!(
        html.contains("worst, 2 threads: only in the first file"),
        "{html}"
    );
    // An interrupted write leaves half of a line. The rest of the file is used.
    let whole = read(&b);
    let torn = file(
        dir.path(),
        "torn.jsonl",
        format!("{whole}{}", &whole[..whole.len() / 2]),
    );
    let mut command = report(&[&torn], &page);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && said.contains("torn.jsonl: line 2 is left out"),
        "{said}"
    );
    // A number that JSON does not have.
    let absurd = file(
        dir.path(),
        "absurd.jsonl",
        whole.replacen("\"iops\":", "\"iops\":NaN,\"x\":", 1),
    );
    let refused = fail(&mut report(&[&absurd], &page), 1);
    assert!(refused.contains("absurd.jsonl: line 1: "), "{refused}");
    let newer = file(
        dir.path(),
        "newer.jsonl",
        format!(
            "{whole}{}",
            whole.replacen("\"format\":1", "\"format\":2", 1)
        ),
    );
    let refused = fail(&mut report(&[&newer], &page), 1);
    assert!(
        refused.contains("newer.jsonl: line 2: has format 2"),
        "{refused}"
    );
}

#[test]
fn bad_files_are_named_and_leave_no_page() {
    let dir = directory();
    let page = dir.path().join("page.html");
    let missing = dir.path().join("missing.jsonl");
    let refused = fail(&mut report(&[&missing], &page), 1);
    assert!(
        refused.contains("missing.jsonl: ") && refused.contains("bench --out"),
        "{refused}"
    );
    let empty = file(dir.path(), "empty.jsonl", "\n\n");
    let refused = fail(&mut report(&[&empty], &page), 1);
    assert!(refused.contains("empty.jsonl: has no result"), "{refused}");
    let binary = file(dir.path(), "binary", [0xff; 100]);
    assert!(fail(&mut report(&[&binary], &page), 1).contains("binary: line 1: "));
    let long = file(dir.path(), "long.jsonl", "x".repeat(3 << 20));
    let refused = fail(&mut report(&[&long], &page), 1);
    assert!(
        refused.contains("long.jsonl: line 1: has more than 1048576 bytes"),
        "{refused}"
    );
    let own = file(dir.path(), "own.jsonl", "{}");
    let refused = fail(&mut report(&[&own], &own), 1);
    assert!(
        refused.contains("own.jsonl: is an input") && read(&own) == "{}",
        "{refused}"
    );
    let linked = dir.path().join("linked.jsonl");
    std::fs::hard_link(&own, &linked).unwrap();
    let refused = fail(&mut report(&[&own], &linked), 1);
    assert!(refused.contains("linked.jsonl: is an input"), "{refused}");
    assert!(fail(&mut compare(&missing, &empty, &page), 1).contains("missing.jsonl"));
    assert!(!page.exists());
    // The command line.
    fail(jericho(["report", "--out"]).arg(&page), 2);
    fail(
        report(&[&own], &page).arg("--compare").args([&own, &own]),
        2,
    );
}

#[test]
fn the_probe_that_the_user_names_is_shown_and_a_kept_one_that_is_broken_is_left_out() {
    let dir = directory();
    let (results, page) = (dir.path().join("a.jsonl"), dir.path().join("page.html"));
    bench(dir.path(), "best", &results);
    let probe = dir.path().join("probe.json");
    succeed(jericho(["probe", "--quick", "--topology", "virtual:2"]).env("JERICHO_PROBE", &probe));
    succeed(report(&[&results], &page).arg("--probe").arg(&probe));
    let html = read(&page);
    assert!(
        html.contains("Bandwidth and latency between its nodes")
            && html.contains("Reads, all CPUs, GB/s")
            && html.contains(&format!("The probe is that of {}.", probe.display())),
        "{html}"
    );
    // The results name their nodes, and a probe of as many other nodes is not this machine's.
    let text = read(&probe);
    let report_of_probe: serde_json::Value = serde_json::from_str(&text).unwrap();
    let digest = report_of_probe["topology"]["digest"].as_str().unwrap();
    let other = text.replace(digest, "0123456789abcdef");
    let other = file(dir.path(), "other.json", other);
    succeed(report(&[&results], &page).env("JERICHO_PROBE", &other));
    let html = read(&page);
    assert!(
        html.contains("The probe is of another machine")
            && html.contains("the report that this user or machine has kept")
            && !html.contains("latency between its nodes"),
        "{html}"
    );
    succeed(report(&[&results], &page).env("JERICHO_PROBE", &probe));
    assert!(read(&page).contains("Bandwidth and latency between its nodes"));
    let broken = file(dir.path(), "broken.json", "{\"format\":1}");
    let refused = fail(report(&[&results], &page).arg("--probe").arg(&broken), 1);
    assert!(refused.contains("broken.json"), "{refused}");
    let missing = dir.path().join("missing.json");
    assert!(
        fail(report(&[&results], &page).arg("--probe").arg(&missing), 1).contains("missing.json")
    );
    let output = report(&[&results], &page)
        .env("JERICHO_PROBE", &broken)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && said.contains("the page has no heat map"),
        "{said}"
    );
    assert!(!read(&page).contains("latency between"), "no heat map");
}

#[test]
fn pages_for_the_browser_leave_the_other_files_of_the_directory() {
    let dir = directory();
    let kept = file(dir.path(), "notes", "mine");
    // No page is made, so no browser is started.
    let programs = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/bin/false", programs.path().join("chromium")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let script = "../../scripts/report-pages";
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script));
    let command = command.arg("false").arg(dir.path());
    let command = command.env("PATH", format!("{}:{path}", programs.path().display()));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("CalledProcessError"), "{said}");
    assert_eq!(read(&kept), "mine");
}
