//! Compares docs/guarantees.md with the tests: each promise names tests that exist.

use std::collections::HashSet;
use std::path::Path;

/// Adds the names of all functions in the Rust sources below a directory.
fn functions_below(dir: &Path, names: &mut HashSet<String>) {
    for entry in std::fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            functions_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            let after_fn = text.split("fn ").skip(1);
            names.extend(
                after_fn.filter_map(|rest| rest.split(['(', '<']).next().map(str::to_owned)),
            );
        }
    }
}

#[test]
fn each_promise_names_tests_that_exist() {
    let page = include_str!("../../../docs/guarantees.md");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut functions = HashSet::new();
    functions_below(&crates, &mut functions);
    let rows = page.lines().filter(|line| line.starts_with('|')).skip(2);
    let mut promises = 0;
    for row in rows {
        let tests = row.trim_matches('|').rsplit('|').next().expect("a cell");
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test for: {row}");
        for name in names {
            assert!(functions.contains(name), "there is no test {name}");
        }
        promises += 1;
    }
    assert!(promises >= 10, "only {promises} promises found in the page");
}
