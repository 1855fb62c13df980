//! Compares docs/guarantees.md with the tests: each promise names tests that exist and that `make test` runs.

use std::collections::HashSet;
use std::path::Path;

/// Returns the name of the function that a line declares.
fn declared(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("fn ")?;
    let is_declaration = before
        .split_whitespace()
        .all(|word| ["pub", "async", "unsafe"].contains(&word) || word.starts_with("pub("));
    let name = rest.split(['(', '<']).next()?;
    (is_declaration && !name.is_empty()).then_some(name)
}

/// Adds the names of the tests in a source that are not ignored: functions with the attribute `#[test]` and without `#[ignore]`.
fn tests_in(text: &str, names: &mut HashSet<String>) {
    let (mut is_test, mut is_ignored, mut is_in_attribute) = (false, false, false);
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with("//") {
            continue;
        }
        if is_in_attribute || line.starts_with("#[") {
            is_test |= line == "#[test]";
            is_ignored |= line.starts_with("#[ignore");
            is_in_attribute = !line.ends_with(']');
            continue;
        }
        let name = declared(line).filter(|_| is_test && !is_ignored);
        names.extend(name.map(str::to_owned));
        (is_test, is_ignored) = (false, false);
    }
}

/// Adds the names of the tests in the Rust sources below a directory.
fn tests_below(dir: &Path, names: &mut HashSet<String>) {
    for entry in std::fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            tests_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            tests_in(&std::fs::read_to_string(&path).expect("a source"), names);
        }
    }
}

/// Returns the words of a text that are marked as code.
fn code_in(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns whether a word is a sentence, as the names of tests are.
fn is_sentence(word: &str) -> bool {
    let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    word.chars().all(is_of_name) && word.matches('_').count() >= 3
}

#[test]
fn each_promise_names_tests_that_exist_and_run() {
    let page = include_str!("../../../docs/guarantees.md");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tests = HashSet::new();
    tests_below(&crates, &mut tests);
    let rows = page.lines().filter(|line| line.starts_with('|')).skip(2);
    let mut promises = 0;
    for row in rows {
        let cell = row.trim_matches('|').rsplit('|').next().expect("a cell");
        assert!(code_in(cell).next().is_some(), "no test for: {row}");
        for name in code_in(cell) {
            assert!(tests.contains(name), "there is no test {name} that runs");
        }
        promises += 1;
    }
    assert!(promises >= 10, "only {promises} promises found in the page");
    for name in code_in(page).filter(|word| is_sentence(word)) {
        assert!(tests.contains(name), "there is no test {name} that runs");
    }
}

#[test]
fn a_helper_and_an_ignored_test_are_no_tests() {
    let source = "\
        #[test]\nfn one() {}\n\
        fn helper() {}\n\
        #[test]\n#[ignore = \"slow\"]\nfn ignored() {}\n\
        #[ignore]\n#[test]\nfn ignored_first() {}\n\
        // #[test]\nfn commented() {}\n\
        #[test]\n#[allow(\n    dead_code\n)]\n/// Text.\npub(crate) fn two() {\n    let x = \"fn three()\";\n}\n\
        #[test]\nstruct Other;\nfn after() {}\n";
    let mut names = HashSet::new();
    tests_in(source, &mut names);
    let expected = ["one", "two"].map(str::to_owned);
    assert_eq!(names, HashSet::from(expected));
}
