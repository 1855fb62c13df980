//! The reading order in docs/internals/README.md names items that exist, and at most 1,500 lines in all.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use syn::spanned::Spanned;
use syn::{ImplItem, Item};

/// Most lines of the reading order.
const LINES_MAX: usize = 1_500;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the number of lines of the source that an item has, with its doc comment.
fn lines_of(spanned: &impl Spanned) -> usize {
    let span = spanned.span();
    span.end().line + 1 - span.start().line
}

/// Returns the name of a type without its parameters.
fn name_of(of: &syn::Type) -> Option<String> {
    match of {
        syn::Type::Path(path) => Some(path.path.segments.last()?.ident.to_string()),
        _ => None,
    }
}

/// Returns the lines of an item: `head` (the file's own doc comment), `Name` of an item, or `Type::method`.
fn count(text: &str, name: &str) -> Option<usize> {
    if name == "head" {
        return Some(
            text.lines()
                .take_while(|line| line.starts_with("//!"))
                .count(),
        );
    }
    let file = syn::parse_file(text).ok()?;
    if let Some((of, method)) = name.split_once("::") {
        let impls = file.items.iter().filter_map(|item| match item {
            Item::Impl(found) if name_of(&found.self_ty).as_deref() == Some(of) => Some(found),
            _ => None,
        });
        return impls
            .flat_map(|found| &found.items)
            .find_map(|item| match item {
                ImplItem::Fn(found) if found.sig.ident == method => Some(lines_of(found)),
                _ => None,
            });
    }
    file.items.iter().find_map(|item| {
        let ident = match item {
            Item::Enum(found) => &found.ident,
            Item::Fn(found) => &found.sig.ident,
            Item::Struct(found) => &found.ident,
            Item::Trait(found) => &found.ident,
            _ => return None,
        };
        (ident == name).then(|| lines_of(item))
    })
}

/// Returns the lines that a row of the table names: whole pages as links, or items of a file.
fn lines_of_row(row: &str, directory: &Path) -> usize {
    let cell = row.split('|').nth(1).expect("a cell");
    if let Some((_, link)) = cell.split_once("](") {
        let page = link.split(')').next().expect("a link ends");
        return read(&directory.join(page)).lines().count();
    }
    let mut names = cell.split('`').skip(1).step_by(2);
    let path = names.next().expect("a file");
    let text = read(&root().join(path));
    let head = cell.contains("head").then_some("head");
    let items = head.into_iter().chain(names);
    let lines =
        items.map(|name| count(&text, name).unwrap_or_else(|| panic!("{path} has no {name}")));
    lines.sum()
}

#[test]
fn the_reading_order_names_existing_items_and_is_short() {
    let page = root().join("docs/internals/README.md");
    let text = read(&page);
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| read |"));
    let rows: Vec<&str> = rows
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert!(rows.len() > 8, "{rows:?}");
    let directory = page.parent().expect("a directory");
    let lines: Vec<usize> = rows
        .iter()
        .map(|row| lines_of_row(row, directory))
        .collect();
    assert!(lines.iter().all(|lines| *lines > 0), "{lines:?}");
    let sum: usize = lines.iter().sum();
    assert!(sum <= LINES_MAX, "{sum} lines: {lines:?}");
}

#[test]
fn items_are_counted_with_their_comments() {
    let text = "//! Head.\n//! More.\n\n/// Doc.\nstruct A;\nimpl A {\n    /// B.\n    fn b() {\n    }\n}\n";
    let counts = ["head", "A", "A::b", "A::c", "B"].map(|name| count(text, name));
    assert_eq!(counts, [Some(2), Some(2), Some(3), None, None]);
}
