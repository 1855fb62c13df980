//! No function over 80 lines, unless it gives a reason: `#[expect(clippy::too_many_lines, reason = "...")]`.
//!
//! Lines are counted between the braces of the body, without blank lines and lines of comments only. Clippy counts the same in
//! formatted code without block comments, but skips code for other configurations, and accepts a missing reason. Functions that
//! macros make are not counted.

use std::collections::BTreeSet;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Block, ImplItemFn, Item, ItemFn, Signature, TraitItemFn};

use super::{Tree, attributes, crates, is_test};

/// The same number as in clippy.toml.
const LINES_MAX: usize = 80;

/// The functions of a file that are too long and give no reason.
struct LongFunctions<'a> {
    lines: Vec<&'a str>,
    found: Vec<String>,
}

impl LongFunctions<'_> {
    fn check(&mut self, attributes: &[Attribute], signature: &Signature, body: &Block) {
        let braces = body.brace_token.span;
        let (first, last) = (braces.open().start().line, braces.close().end().line);
        // Spans count lines from 1. The lines of the braces have no statement in formatted code.
        let inside = self.lines.get(first..last - 1).unwrap_or_default();
        let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let lines = inside.iter().filter(is_code).count();
        if lines > LINES_MAX && !attributes.iter().any(is_reason) {
            let name = &signature.ident;
            let line = name.span().start().line;
            self.found.push(format!("{line}: {name}: {lines} lines"));
        }
    }
}

impl<'a> Visit<'a> for LongFunctions<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, function: &'a ItemFn) {
        self.check(&function.attrs, &function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'a ImplItemFn) {
        if !is_test(&function.attrs) {
            self.check(&function.attrs, &function.sig, &function.block);
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'a TraitItemFn) {
        if let Some(body) = &function.default {
            self.check(&function.attrs, &function.sig, body);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

/// Returns whether an attribute permits a long function and says why.
fn is_reason(attribute: &Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else {
        return false;
    };
    let tokens = list.tokens.to_string().replace(' ', "");
    list.path.is_ident("expect")
        && tokens.contains("clippy::too_many_lines")
        && tokens.contains("reason=\"")
}

/// Returns a line for each function of a file that is too long and gives no reason.
fn long_functions(text: &str) -> Vec<String> {
    let file = syn::parse_file(text).expect("Rust");
    let mut functions = LongFunctions {
        lines: text.lines().collect(),
        found: vec![],
    };
    functions.visit_file(&file);
    functions.found
}

#[test]
fn functions_have_80_lines_or_give_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let settings = std::fs::read_to_string(root.join("clippy.toml")).expect("clippy.toml");
    let threshold = format!("too-many-lines-threshold = {LINES_MAX}\n");
    assert!(settings.contains(&threshold), "{settings}");
    let mut files = BTreeSet::new();
    for (_, roots) in crates() {
        for root in roots {
            files.extend(Tree::read(&root).modules.into_iter().map(|m| m.file));
        }
    }
    assert!(files.len() > 100, "{} files", files.len());
    let mut faults = vec![];
    for file in &files {
        let text = std::fs::read_to_string(file).expect("the file");
        let lines = long_functions(&text).into_iter();
        faults.extend(lines.map(|line| format!("{}:{line}", file.display())));
    }
    assert!(faults.is_empty(), "long functions:\n{}", faults.join("\n"));
}

#[test]
fn a_function_of_81_lines_is_found_unless_it_gives_a_reason() {
    let function = |before: &str, lines: usize| {
        let body = "    // A comment.\n\n    call();\n".repeat(lines);
        format!("{before}fn long() {{\n{body}}}\n")
    };
    let found = |before: &str| long_functions(&function(before, 81));
    assert_eq!(long_functions(&function("", 80)), [""; 0]);
    assert_eq!(found(""), ["1: long: 81 lines"]);
    assert_eq!(
        found("#[expect(clippy::too_many_lines)]\n"),
        ["2: long: 81 lines"]
    );
    assert_eq!(
        found("#[expect(clippy::too_many_lines, reason = \"a table\")]\n"),
        [""; 0]
    );
    assert_eq!(found("#[cfg(test)]\n"), [""; 0]);
    assert_eq!(found("#[cfg(loom)]\n"), ["2: long: 81 lines"]);
    for block in ["impl Type", "trait Trait", "mod inner", "fn outer()"] {
        let text = format!("{block} {{\n{}}}\n", function("", 81));
        let lines = long_functions(&text);
        assert!(
            lines.contains(&"2: long: 81 lines".into()),
            "{block}: {lines:?}"
        );
        let text = format!("#[cfg(test)]\n{text}");
        assert_eq!(long_functions(&text), [""; 0], "{block}");
    }
}
