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
