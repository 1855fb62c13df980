//! The parts of the documents that are written from the results of a run, so that no number is copied by hand.

use std::fmt::Write as _;

use crate::Result;
use crate::compare::Comparison;
use crate::report::{Report, cell};
use crate::stats::Summary;

/// The rows of the README's table: the name of a comparison, its baseline or "" for any, and its name in the README.
const README_ROWS: [(&str, &str, &str); 13] = [
    (
        "inline randread 4k 1",
        "page cache",
        "4 KiB random reads under `jericho run`",
    ),
    (
        "inline read 4k 1",
        "page cache",
        "4 KiB sequential reads under `jericho run`",
    ),
    (
        "inline randwrite 4k 1",
        "page cache",
        "4 KiB random writes under `jericho run`",
    ),
    (
        "inline write 4k 1",
        "page cache",
        "4 KiB sequential writes under `jericho run`",
    ),
    (
        "inline append",
        "page cache",
        "4 KiB appends under `jericho run`",
    ),
    (
        "ring hit randread 1",
        "",
        "4 KiB random reads that hit, through the mount, FUSE ring",
    ),
    ("hit randread 1", "", "the same by `/dev/fuse`"),
    (
        "ring hit randwrite 1",
        "",
        "4 KiB random writes, through the mount, FUSE ring",
    ),
    ("hit randwrite 1", "", "the same by `/dev/fuse`"),
    (
        "ring small files",
        "",
        "4 KiB files created, through the mount, FUSE ring",
    ),
    (
        "ring cold sequential mount",
        "",
        "sequential reads that miss, through the mount, FUSE ring",
    ),
    (
        "ring cold random mount",
        "",
        "4 KiB random reads that miss, through the mount, FUSE ring",
    ),
    ("write-back", "", "write-back of sequential data"),
];

/// Returns the README's part: one table, the comparison of inline accesses with FUSE mounts, and the conditions. Fails if the run
/// lacks a row.
pub fn readme(report: &Report) -> Result<String> {
    let mut text =
        String::from("| what | baseline | ratio | target | ceiling |\n|---|---|---|---|---|\n");
    for (name, baseline, what) in README_ROWS {
        let row = find(report, name, baseline)?;
        let ceilings = row.ceilings.iter().map(|ceiling| {
            let ratio = row.to_baseline(&ceiling.values);
            ratio.map_or("-".into(), |ratio| format!("{:.2}", ratio.median))
        });
        let mut ceilings: Vec<String> = ceilings.collect();
        if ceilings.is_empty() {
            ceilings.push("-".into());
        }
        let target = row
            .target_ratio
            .map_or("-".into(), |target| target.to_string());
        let _ = writeln!(
            text,
            "| {what} | {} | **{}** | {target} | {} |",
            row.baseline,
            cell(row.ratio()),
            ceilings.join("; ")
        );
    }
    let times = times_of_mounts(report)?;
    let missed = report
        .comparisons
        .iter()
        .filter(|row| misses_its_target(row))
        .count();
    let targets = report
        .comparisons
        .iter()
        .filter(|row| row.target_ratio.is_some())
        .count();
    let _ = write!(
        text,
        "\nRatio: Jericho's throughput to that of the baseline, median (quartiles). Ceiling: what a simpler program reaches \
         that does less of the same work. Jericho can be faster, for example over the FUSE ring: the ceiling of its hits uses `/dev/fuse`. Reads that \
         miss have two ceilings: a FUSE filesystem that answers from memory; one that only reads the device.\n\
         A cached 4 KiB read or write of a program under `jericho run` is at least {times:.0} times as fast as through any FUSE mount measured here; \
         {missed} of {targets} targets are not met.\n\nConditions: {}. [All results](docs/performance/results.md), \
         [the method](docs/performance/method.md).\n",
        report.conditions.join("; ")
    );
    Ok(text)
}

fn misses_its_target(row: &Comparison) -> bool {
    let ratio = row.ratio().zip(row.target_ratio);
    ratio.is_some_and(|(ratio, target)| ratio.median < target)
}

fn find<'a>(report: &'a Report, name: &str, baseline: &str) -> Result<&'a Comparison> {
    let mut rows = report.comparisons.iter();
    let row = rows.find(|row| row.name == name && row.baseline.starts_with(baseline));
    row.ok_or_else(|| {
        format!("the run has no comparison \"{name}\": run `make bench` as root, without --only")
            .into()
    })
}

/// Returns how many times as fast an inline access is as the same access through the fastest FUSE mount, the smaller of the values
/// for reads and for writes, rounded down.
fn times_of_mounts(report: &Report) -> Result<f64> {
    let mut least = f64::INFINITY;
    for access in ["randread", "randwrite"] {
        let inline = find(report, &format!("inline {access} 4k 1"), "")?;
        let mut mounts = vec![];
        for transport in ["", "ring "] {
            let row = find(report, &format!("{transport}hit {access} 1"), "")?;
            mounts.extend([&row.our_values, &row.baseline_values]);
        }
        let median = |values: &Vec<f64>| Summary::of(values).map_or(f64::NAN, |s| s.median);
        let fastest = mounts.into_iter().map(median).fold(0.0, f64::max);
        least = least.min(median(&inline.our_values) / fastest);
    }
    Ok(least.floor())
}

/// Replaces the text between two markers, which are whole lines. Fails if a marker is missing.
pub fn replace(document: &str, begin: &str, end: &str, part: &str) -> Result<String> {
    let missing = |marker: &str| format!("the document has no line \"{marker}\"");
    let (before, rest) = document.split_once(begin).ok_or_else(|| missing(begin))?;
    let (_, after) = rest.split_once(end).ok_or_else(|| missing(end))?;
    Ok(format!("{before}{begin}\n{part}{end}{after}"))
}

/// The documents with parts from a run: path in the repository, first and last marker, and the part.
#[allow(clippy::type_complexity)] // a table
pub const PARTS: [(&str, &str, &str, fn(&Report) -> Result<String>); 2] = [
    (
        "README.md",
        "<!-- numbers: written by `make results` -->",
        "<!-- end of numbers -->",
        readme,
    ),
    (
        "docs/performance/results.md",
        "<!-- results: written by `make results` -->",
        "<!-- end of results -->",
        |report| Ok(report.markdown()),
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    #[test]
    fn numbers_in_the_documents_are_those_of_the_committed_run() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let read = |path: &str| fs::read_to_string(root.join(path)).expect("a document");
        let report = serde_json::from_str(&read("docs/performance/bench.json")).expect("results");
        for (path, begin, end, part) in PARTS {
            let expected = replace(&read(path), begin, end, &part(&report).unwrap()).unwrap();
            assert_eq!(read(path), expected, "{path}: run `make results`");
        }
    }

    #[test]
    fn only_the_part_between_the_markers_changes() {
        let replaced = replace("a\n<b>\nold\n<e>\nz\n", "<b>", "<e>", "new\n").unwrap();
        assert_eq!(replaced, "a\n<b>\nnew\n<e>\nz\n");
        assert!(replace("a\n<b>\nold\n", "<b>", "<e>", "").is_err());
    }
}
