//! Which results of the papers the model meets, and which it misses.
//!
//! A change of the model or of a figure that moves a row across its bounds fails here. A row that is missed is not repaired by choosing
//! other figures: see docs/internals/model.md.
#![forbid(unsafe_code)]

use jericho_model::{Machine, Row, SHIPPED, Verdict, changes, parse, rows, shipped};

/// All judged rows, and whether the model meets them.
const VERDICTS: &[(&str, Verdict)] = &[
    ("jericho-1", Verdict::Missed),
    ("jericho-10-best-worst", Verdict::Missed),
    ("jericho-10-native-worst", Verdict::Met),
    ("jericho-10-best-native", Verdict::Missed),
    ("tyche-2", Verdict::Met),
    ("tyche-7", Verdict::Met),
    ("tyche-17", Verdict::Missed),
    ("tyche-9-no-opt", Verdict::Missed),
    ("tyche-9-t-numa", Verdict::Missed),
    ("tyche-11-no-opt", Verdict::Missed),
];

fn machine(name: &str) -> Option<Machine> {
    Some(shipped(name)?.expect("shipped machines are right"))
}

fn table() -> Vec<Row> {
    rows(machine).expect("the shipped machines have what the rows need")
}

/// Returns the part of the page on the model between two headings.
fn section(heading: &str) -> String {
    let page = include_str!("../../../docs/internals/model.md");
    let (_, rest) = page.split_once(heading).expect("a heading");
    let end = rest.find("\n## ").unwrap_or(rest.len());
    rest[..end].to_owned()
}

#[test]
fn each_row_is_within_its_bounds_or_known_to_be_outside() {
    let found: Vec<_> = table()
        .into_iter()
        .filter(|row| row.bounds.is_some())
        .map(|row| (row.id, row.verdict))
        .collect();
    assert_eq!(found, VERDICTS);
}

#[test]
fn a_missed_row_gives_a_reason() {
    for row in table() {
        let is_missed = row.verdict == Verdict::Missed;
        assert!(!is_missed || !row.note.is_empty(), "{}", row.id);
    }
}

#[test]
fn the_page_has_the_table() {
    let section = section("## The papers' results");
    for row in table() {
        let unit = if row.is_percent { " %" } else { "" };
        let bounds = row.bounds.map_or("-".to_owned(), |(least, most)| {
            format!("{least:.1} to {most:.1}")
        });
        let verdict = match row.verdict {
            Verdict::Met => "met",
            Verdict::Missed => "**missed**",
            Verdict::Shown => "shown",
        };
        let line = format!(
            "| {} | {:.1}{unit} | {bounds} | {:.1}{unit} | {verdict} |",
            row.what, row.paper, row.model
        );
        assert!(
            section.contains(&line),
            "docs/internals/model.md lacks this line:\n{line}"
        );
    }
}

#[test]
fn the_page_has_the_sensitivity() {
    let section = section("## Sensitivity");
    for change in changes(machine).expect("predictions") {
        if (change.smaller - change.model).abs() > 0.005
            || (change.larger - change.model).abs() > 0.005
        {
            let line = format!(
                "| {} | {} | {:.2} | {:.2} | {:.2} |",
                change.id, change.figure, change.smaller, change.model, change.larger
            );
            assert!(
                section.contains(&line),
                "docs/internals/model.md lacks this line:\n{line}"
            );
        }
    }
}

/// The page has the rows of the Opteron also with nominal rates of its links, and with the remote times of older Opterons.
#[test]
fn the_page_has_the_rows_with_other_figures_for_remote_memory() {
    let section = section("## Sensitivity");
    let opteron = SHIPPED
        .iter()
        .find(|s| s.name == "opteron")
        .expect("shipped");
    let links: &[_] = &[("= 7.70e9", "= 11.1e9"), ("= 4.12e9", "= 5.57e9")];
    let times: &[_] = &[("[1.0, 1.88, 2.51]", "[1.0, 1.085, 1.30]")];
    for (names, replacements) in [
        ("measured | measured", [].as_slice()),
        ("measured | of 2006", &[times]),
        ("nominal | measured", &[links]),
        ("nominal | of 2006", &[links, times]),
    ] {
        let mut text = opteron.text.to_owned();
        for (from, to) in replacements.iter().copied().flatten() {
            assert!(text.contains(from), "opteron.toml lacks {from}");
            text = text.replace(from, to);
        }
        let other = |name: &str| {
            (name == "opteron").then(|| parse("other.toml", &text).expect("a machine"))
        };
        let rows = rows(other).expect("predictions");
        let values: Vec<String> = rows.iter().map(|row| format!("{:.2}", row.model)).collect();
        let line = format!("| {names} | {} |", values.join(" | "));
        assert!(
            section.contains(&line),
            "docs/internals/model.md lacks this line:\n{line}"
        );
    }
}

/// The path between the I/O hubs is one figure, and the rows that are met depend on it: docs/internals/model.md says what a faster one does.
#[test]
fn a_path_that_carries_all_interfaces_loses_nothing() {
    let tyche = SHIPPED.iter().find(|s| s.name == "tyche").expect("shipped");
    assert!(tyche.text.contains("= 2.944e9"));
    let text = tyche.text.replace("= 2.944e9", "= 4.3e9");
    let faster =
        |name: &str| (name == "tyche").then(|| parse("faster.toml", &text).expect("a machine"));
    let rows = rows(faster).expect("predictions");
    for id in ["tyche-2", "tyche-7"] {
        let row = rows.iter().find(|row| row.id == id).expect("a row");
        assert!(row.model.abs() < 1e-6, "{id}: {}", row.model);
    }
}

/// The paper says that one and two interfaces lose nothing (section 4).
#[test]
fn one_or_two_interfaces_lose_nothing_on_the_longer_path() {
    let tyche = SHIPPED.iter().find(|s| s.name == "tyche").expect("shipped");
    for interfaces in [1, 2] {
        let text = tyche
            .text
            .replace("count = 3", &format!("count = {interfaces}"));
        let fewer = |_: &str| Some(parse("fewer.toml", &text).expect("a machine"));
        let rows = rows(fewer).expect("predictions");
        let row = rows.iter().find(|row| row.id == "tyche-2").expect("a row");
        assert!(row.model.abs() < 1e-6, "{interfaces}: {}", row.model);
    }
}
