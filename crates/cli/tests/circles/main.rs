//! No circle of files: inside a crate, files use each other in one direction only.
//!
//! A file uses another one when its code, without unit tests, names an item that the other file defines. A name is followed
//! through `use` lines and re-exports to the file with the definition. A `mod` line or a re-export alone is no use: it is a
//! table of contents. Methods are not followed, because their names do not say their type.
#![forbid(unsafe_code)]

mod long_functions;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, Macro, UseTree, Visibility};

/// The modules of a crate. The first one is its root.
struct Tree {
    modules: Vec<Module>,
}

struct Module {
    parent: usize,
    file: PathBuf,
    children: HashMap<String, usize>,
    /// Names of the items that the module defines.
    items: HashSet<String>,
    /// Names from `use` lines, with the imported paths.
    imports: HashMap<String, Vec<String>>,
    /// Paths that end in `*`.
    globs: Vec<Vec<String>>,
    /// Imported names of `use` lines that are no re-exports.
    private: Vec<String>,
    code: Vec<Item>,
}

/// The definition that a path leads to.
#[derive(Clone, Copy)]
enum Found {
    Module(usize),
    /// An item of this module.
    Item(usize),
}

/// Returns whether an item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        let condition = list.tokens.to_string().replace(' ', "");
        list.path.is_ident("cfg")
            && condition.contains("test")
            && !condition.contains("not(test)")
            && !condition.starts_with("any(")
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl Tree {
    /// Reads the crate with this root file.
    fn read(root: &Path) -> Tree {
        let mut tree = Tree { modules: vec![] };
        let directory = root.parent().expect("a directory").to_path_buf();
        let items = parse(root);
        tree.add(0, root, &directory, items);
        tree
    }

    /// Adds a module and the modules in it. `directory` has the files of its child modules. Returns its index.
    fn add(&mut self, parent: usize, file: &Path, directory: &Path, items: Vec<Item>) -> usize {
        let index = self.modules.len();
        self.modules.push(Module {
            parent,
            file: file.to_path_buf(),
            children: HashMap::new(),
            items: HashSet::new(),
            imports: HashMap::new(),
            globs: vec![],
            private: vec![],
            code: vec![],
        });
        for item in items {
            if is_test(attributes(&item)) {
                continue;
            }
            let item = match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let below = directory.join(&name);
                    let (file, items) = match module.content {
                        Some((_, items)) => (file.to_path_buf(), items),
                        None => {
                            let flat = directory.join(format!("{name}.rs"));
                            let file = if flat.exists() {
                                flat
                            } else {
                                below.join("mod.rs")
                            };
                            let items = parse(&file);
                            (file, items)
                        }
                    };
                    let child = self.add(index, &file, &below, items);
                    self.modules[index].children.insert(name, child);
                    continue;
                }
                item => item,
            };
            self.modules[index].enter(item);
        }
        index
    }

    /// Follows a path from a module.
    fn follow(&self, from: usize, path: &[String], depth: u32) -> Option<Found> {
        let (first, rest) = path.split_first()?;
        let module = &self.modules[from];
        match first.as_str() {
            "crate" => self.descend(Found::Module(0), rest, depth),
            "self" => self.descend(Found::Module(from), rest, depth),
            "super" => self.descend(Found::Module(module.parent), rest, depth),
            _ => self.descend(Found::Module(from), path, depth),
        }
    }

    fn descend(&self, from: Found, path: &[String], depth: u32) -> Option<Found> {
        let (Found::Module(index), Some((name, rest))) = (from, path.split_first()) else {
            return Some(from);
        };
        // Two modules may import everything from each other.
        if depth > 16 {
            return None;
        }
        let module = &self.modules[index];
        if name == "super" {
            return self.descend(Found::Module(module.parent), rest, depth);
        }
        let is_type_or_module = !rest.is_empty() || !module.items.contains(name);
        if let Some(child) = module.children.get(name).filter(|_| is_type_or_module) {
            return self.descend(Found::Module(*child), rest, depth);
        }
        if module.items.contains(name) {
            return Some(Found::Item(index));
        }
        if let Some(import) = module.imports.get(name) {
            // The line `use name;` for another crate would lead to itself.
            let is_of_itself = import.len() == 1 && import[0] == *name;
            let found = (!is_of_itself).then(|| self.follow(index, import, depth + 1))?;
            return self.descend(found?, rest, depth + 1);
        }
        module.globs.iter().find_map(|glob| {
            let found = self.follow(index, glob, depth + 1)?;
            matches!(found, Found::Module(other) if other != index)
                .then(|| self.descend(found, path, depth + 1))?
        })
    }

    /// Returns the arrows of the crate: file -> the files that it uses, with the names.
    fn arrows(&self) -> BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>> {
        let mut arrows = BTreeMap::<_, BTreeMap<PathBuf, BTreeSet<String>>>::new();
        for (index, module) in self.modules.iter().enumerate() {
            let mut names = Names::default();
            for item in &module.code {
                names.visit_item(item);
            }
            let mut used: Vec<&Vec<String>> = names.paths.iter().collect();
            for name in &module.private {
                let import = &module.imports[name];
                let is_module = matches!(self.follow(index, import, 0), Some(Found::Module(_)));
                // No arrow leads to an imported module if the code names items of it: their paths give the arrows.
                let is_named = |path: &Vec<String>| path.len() > 1 && path[0] == *name;
                if !(is_module && names.paths.iter().any(is_named)) {
                    used.push(import);
                }
            }
            used.extend(&module.globs);
            let uses = arrows.entry(module.file.clone()).or_default();
            for path in used {
                let target = match self.follow(index, path, 0) {
                    Some(Found::Item(target)) => target,
                    Some(Found::Module(target)) if path.len() > 1 => target,
                    _ => continue,
                };
                let file = &self.modules[target].file;
                if *file != module.file {
                    uses.entry(file.clone())
                        .or_default()
                        .insert(path.join("::"));
                }
            }
        }
        arrows
    }
}

impl Module {
    fn enter(&mut self, item: Item) {
        let name = match &item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            Item::Use(item) => {
                self.import(item);
                return;
            }
            _ => None,
        };
        self.items.extend(name.map(ToString::to_string));
        self.code.push(item);
    }

    fn import(&mut self, item: &ItemUse) {
        let mut leaves = vec![];
        flatten(&item.tree, vec![], &mut leaves);
        let is_private = matches!(item.vis, Visibility::Inherited);
        for (name, path) in leaves {
            match name {
                None => self.globs.push(path),
                // `use Trait as _` uses the trait all the same.
                Some(name) => {
                    let name = if name == "_" {
                        format!("_{}", path.join("_"))
                    } else {
                        name
                    };
                    if is_private {
                        self.private.push(name.clone());
                    }
                    self.imports.insert(name, path);
                }
            }
        }
    }
}

/// Collects the imported names of a `use` line with their paths. An import of everything has no name.
fn flatten(tree: &UseTree, mut path: Vec<String>, leaves: &mut Vec<(Option<String>, Vec<String>)>) {
    match tree {
        UseTree::Path(part) => {
            path.push(part.ident.to_string());
            flatten(&part.tree, path, leaves);
        }
        UseTree::Name(part) if part.ident == "self" => {
            leaves.push((path.last().cloned(), path));
        }
        UseTree::Name(part) => {
            path.push(part.ident.to_string());
            leaves.push((path.last().cloned(), path));
        }
        UseTree::Rename(part) => {
            if part.ident != "self" {
                path.push(part.ident.to_string());
            }
            leaves.push((Some(part.rename.to_string()), path));
        }
        UseTree::Glob(_) => leaves.push((None, path)),
        UseTree::Group(group) => {
            for part in &group.items {
                flatten(part, path.clone(), leaves);
            }
        }
    }
}

/// The paths that code names.
#[derive(Default)]
struct Names {
    paths: BTreeSet<Vec<String>>,
}

impl Names {
    /// Adds the paths in the arguments of a macro, which are not parsed.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = vec![];
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.paths.insert(std::mem::take(&mut path));
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.paths.insert(std::mem::take(&mut path));
                    self.add_tokens(group.stream());
                }
                _ => {
                    self.paths.insert(std::mem::take(&mut path));
                    colons = 0;
                }
            }
        }
        self.paths.insert(path);
    }
}

impl<'a> Visit<'a> for Names {
    fn visit_path(&mut self, path: &'a syn::Path) {
        let names = path.segments.iter().map(|part| part.ident.to_string());
        self.paths.insert(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, of: &'a Macro) {
        self.visit_path(&of.path);
        if !of.path.is_ident("macro_rules") {
            self.add_tokens(of.tokens.clone());
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        // Inside a function.
        let mut leaves = vec![];
        flatten(&item.tree, vec![], &mut leaves);
        self.paths.extend(leaves.into_iter().map(|(_, path)| path));
    }
}

fn parse(file: &Path) -> Vec<Item> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    parsed.items
}

/// Returns everything that each file reaches, however indirectly.
fn reach(
    arrows: &BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>,
) -> BTreeMap<&PathBuf, BTreeSet<&PathBuf>> {
    let from = |file| {
        let (mut reached, mut ahead) = (BTreeSet::new(), vec![file]);
        while let Some(file) = ahead.pop() {
            let used = arrows[file].keys();
            ahead.extend(used.filter(|used| reached.insert(*used)));
        }
        (file, reached)
    };
    arrows.keys().map(from).collect()
}

/// Returns the lines that describe the circles of a crate.
fn circles(root: &Path) -> Vec<String> {
    let tree = Tree::read(root);
    let arrows = tree.arrows();
    let reached = reach(&arrows);
    let directory = root.parent().expect("a directory");
    let short = |file: &Path| {
        file.strip_prefix(directory)
            .unwrap_or(file)
            .display()
            .to_string()
    };
    let mut lines = vec![];
    for (file, uses) in &arrows {
        let back = uses.iter().filter(|(used, _)| reached[used].contains(file));
        lines.extend(back.map(|(used, names)| {
            let names = names.iter().cloned().collect::<Vec<_>>().join(", ");
            format!("{} uses {}: {names}", short(file), short(used))
        }));
    }
    lines
}

/// Returns the crates, each with the root files of its library and its programs.
fn crates() -> Vec<(String, Vec<PathBuf>)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let entries = |directory: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        entries.map(|entry| entry.expect("entry").path()).collect()
    };
    let with_roots = |directory: PathBuf| {
        let name = directory.file_name().and_then(|name| name.to_str());
        let name = name.expect("a name in UTF-8").to_string();
        let mut roots = vec![directory.join("src/lib.rs"), directory.join("src/main.rs")];
        roots.retain(|root| root.exists());
        roots.extend(entries(&directory.join("src/bin")));
        (name, roots)
    };
    entries(&crates).into_iter().map(with_roots).collect()
}

#[test]
fn files_of_a_crate_do_not_use_each_other_in_a_circle() {
    let crates = crates();
    let mut faults = vec![];
    for (name, roots) in &crates {
        let lines = roots.iter().flat_map(|root| circles(root));
        faults.extend(lines.map(|line| format!("{name}: {line}")));
    }
    let seen: usize = crates.iter().map(|(_, roots)| roots.len()).sum();
    assert!(seen > 10, "{seen} crates");
    faults.sort();
    assert!(
        faults.is_empty(),
        "files in circles:\n{}",
        faults.join("\n")
    );
}

#[test]
fn a_circle_is_found_through_a_re_export_a_module_and_a_macro() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).expect("written");
    };
    write(
        "lib.rs",
        "mod a; mod b; mod c; mod d; pub use a::One; pub use b::Two;",
    );
    write("a.rs", "use crate::Two; pub struct One(Two);");
    write(
        "b.rs",
        "use crate::c; pub struct Two; fn f() { c::three() }",
    );
    write(
        "c.rs",
        "pub fn three() { println!(\"{}\", crate::a::One::NAME) }",
    );
    write(
        "d.rs",
        "use crate::{One, Two}; #[cfg(test)] mod tests { use crate::e; }",
    );
    let lines = circles(&directory.path().join("lib.rs"));
    let expected = [
        "a.rs uses b.rs: Two, crate::Two",
        "b.rs uses c.rs: c::three",
        "c.rs uses a.rs: crate::a::One::NAME",
    ];
    assert_eq!(lines, expected);
}
