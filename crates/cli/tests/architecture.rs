//! Checks ARCHITECTURE.md: its table has the dependencies of the manifests (the arrows), and its claims under *What is absent*
//! hold.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Crate -> the crates of this workspace that it is built with; names without `jericho-`.
type Arrows = BTreeMap<String, BTreeSet<String>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the packages of this workspace, as cargo describes them.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").expect("cargo runs the tests");
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    let metadata: Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

/// Returns the dependencies of a package, of all kinds.
fn dependencies(package: &Value) -> &[Value] {
    let dependencies = package["dependencies"].as_array();
    dependencies.expect("dependencies")
}

/// Returns the name of a crate of this workspace without `jericho-`.
fn short(name: &Value) -> Option<String> {
    let name = name.as_str()?.strip_prefix("jericho-")?;
    Some(name.to_owned())
}

/// Returns the arrows of the manifests, without dev-dependencies.
fn arrows_of_manifests() -> Arrows {
    packages()
        .iter()
        .map(|package| {
            let uses = dependencies(package)
                .iter()
                .filter(|d| d["kind"].is_null())
                .filter_map(|d| short(&d["name"]))
                .collect();
            (
                short(&package["name"]).expect("crates are called jericho-..."),
                uses,
            )
        })
        .collect()
}

/// Returns the arrows of the table in ARCHITECTURE.md.
fn arrows_of_document() -> Arrows {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| crate |"))
        .skip(2);
    let names = |cell: &str| -> BTreeSet<String> {
        cell.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    };
    rows.take_while(|line| line.starts_with('|'))
        .map(|row| {
            let mut cells = row.split('|').skip(1);
            let mut cell = || names(cells.next().expect("three cells in a row"));
            (cell().pop_first().expect("a crate"), cell())
        })
        .collect()
}

/// Returns all crates that a crate reaches, directly or through others.
fn reach(arrows: &Arrows, from: &str) -> BTreeSet<String> {
    let (mut reached, mut ahead) = (BTreeSet::new(), vec![from.to_owned()]);
    while let Some(name) = ahead.pop() {
        for used in arrows
            .get(&name)
            .unwrap_or_else(|| panic!("no crate {name}"))
        {
            if reached.insert(used.clone()) {
                ahead.push(used.clone());
            }
        }
    }
    reached
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn sources(name: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    rust_files(&root().join("crates").join(name).join("src"), &mut found);
    found
        .into_iter()
        .map(|path| (path.clone(), fs::read_to_string(path).expect("source")))
        .collect()
}

fn documents(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.expect("entry").path();
        let is_ours = path != root().join("target") && !path.ends_with(".git");
        if path.is_dir() && is_ours {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn links_in_documents_lead_somewhere() {
    let mut found = Vec::new();
    documents(&root(), &mut found);
    assert!(found.len() > 10, "{found:?}");
    let mut dead = Vec::new();
    for path in &found {
        let text = fs::read_to_string(path).expect("document");
        for (_, rest) in text
            .match_indices("](")
            .map(|(at, _)| text.split_at(at + 2))
        {
            let target = rest.split([')', '#']).next().unwrap_or_default();
            let elsewhere = target.is_empty() || target.contains("://");
            if !elsewhere && !path.parent().expect("parent").join(target).exists() {
                dead.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn the_arrows_in_the_document_are_those_of_the_manifests() {
    let (document, manifests) = (arrows_of_document(), arrows_of_manifests());
    for name in document.keys().chain(manifests.keys()) {
        assert_eq!(
            document.get(name),
            manifests.get(name),
            "`{name}`: ARCHITECTURE.md (left), Cargo.toml (right)"
        );
    }
}

#[test]
fn a_crate_does_not_reach_what_it_must_not_know() {
    let arrows = arrows_of_manifests();
    for (name, unknown) in [
        (
            "format",
            ["sys", "storage", "shm", "volume", "cache", "fs", "topology"].as_slice(),
        ),
        (
            "sys",
            &[
                "format", "storage", "shm", "volume", "cache", "fs", "client",
            ],
        ),
        (
            "storage",
            &["format", "shm", "volume", "cache", "fs", "client", "daemon"],
        ),
        (
            "journal",
            &["shm", "volume", "cache", "fs", "client", "daemon"],
        ),
        (
            "shm",
            &["storage", "volume", "cache", "fs", "client", "daemon"],
        ),
        (
            "volume",
            &["topology", "shm", "cache", "fs", "client", "daemon"],
        ),
        ("cache", &["volume", "fs", "client", "daemon", "fuse"]),
        (
            "export",
            &["format", "volume", "metadata", "cache", "fs", "daemon"],
        ),
        ("fs", &["client", "daemon", "fuse"]),
        (
            "client",
            &["storage", "volume", "cache", "fs", "daemon", "fuse"],
        ),
        (
            "preload",
            &["storage", "volume", "cache", "fs", "daemon", "fuse"],
        ),
        ("packet", &["format", "storage", "remote", "ether", "fs"]),
        ("daemon", &["fuse", "cli"]),
        (
            "report",
            &["sys", "storage", "topology", "probe", "model", "workload"],
        ),
    ] {
        let reached = reach(&arrows, name);
        for other in unknown {
            assert!(!reached.contains(*other), "`{name}` reaches `{other}`");
        }
    }
}

#[test]
fn only_metadata_uses_redb() {
    let packages = packages();
    let uses_redb = |package: &&Value| dependencies(package).iter().any(|d| d["name"] == "redb");
    let users: Vec<_> = packages.iter().filter(uses_redb).collect();
    let names: Vec<_> = users.iter().filter_map(|p| short(&p["name"])).collect();
    assert_eq!(names, ["metadata"]);
}

#[test]
fn unsafe_code_lives_in_sys_shm_and_preload_only() {
    for name in arrows_of_manifests()
        .keys()
        .filter(|name| !["sys", "shm", "preload"].contains(&name.as_str()))
    {
        let roots = ["lib.rs", "main.rs", "bin/jericho-packet.rs"]
            .map(|file| root().join("crates").join(name).join("src").join(file));
        for file in roots.iter().filter(|file| file.exists()) {
            let text = fs::read_to_string(file).expect("source");
            assert!(
                text.contains("#![forbid(unsafe_code)]"),
                "{} does not forbid unsafe code",
                file.display()
            );
        }
    }
}

#[test]
fn format_and_report_do_no_io() {
    for (path, text) in ["format", "report"].into_iter().flat_map(sources) {
        for module in [
            "std::fs",
            "std::io",
            "std::net",
            "std::os",
            "std::env",
            "std::process",
            "std::thread",
        ] {
            assert!(!text.contains(module), "{} uses {module}", path.display());
        }
    }
}

#[test]
fn cache_has_no_inode() {
    for (path, text) in sources("cache") {
        let code = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            let words = line.split(|c: char| !c.is_alphanumeric());
            let inode = words
                .map(str::to_lowercase)
                .find(|word| word == "ino" || word == "inode");
            assert!(inode.is_none(), "{}: {line}", path.display());
        }
    }
}

#[test]
fn every_page_is_listed_in_the_index_of_its_directory() {
    for dir in ["docs/decisions", "docs/internals"] {
        let dir = root().join(dir);
        let index = fs::read_to_string(dir.join("README.md")).expect("an index");
        for entry in fs::read_dir(&dir).expect("the directory") {
            let name = entry
                .expect("entry")
                .file_name()
                .into_string()
                .expect("names are UTF-8");
            let listed = name == "README.md" || index.contains(&format!("({name})"));
            assert!(
                listed,
                "{name} is not listed in {}",
                dir.join("README.md").display()
            );
        }
    }
}

/// Returns the code of a source without its comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next();
    let lines = code.unwrap_or_default().lines();
    lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Returns the names that a crate's threads are given: literals, without a number at the end.
fn names_of_threads(name: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (path, text) in sources(name) {
        if path.ends_with("tests.rs") {
            continue;
        }
        let code = code(&text);
        for call in [".name(", "spawn(", "Worker::new(", "start("] {
            for (at, _) in code.match_indices(call) {
                let rest = code[at + call.len()..].trim_start();
                let rest = rest.strip_prefix("format!(").unwrap_or(rest);
                if let Some(literal) = rest.strip_prefix('"') {
                    let end = literal.find(['"', '{']).expect("a literal ends");
                    names.insert(literal[..end].trim_end_matches('-').to_owned());
                }
            }
        }
    }
    names
}

#[test]
fn the_table_of_threads_has_the_names_that_threads_are_given() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| thread |"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let documented: BTreeSet<String> = rows
        .flat_map(|row| row.split('|').nth(1).expect("a cell").split(','))
        .map(|name| name.trim().to_owned())
        .collect();
    let mut given: BTreeSet<String> = ["storage", "cache", "fs", "daemon", "fuse", "export", "cli"]
        .into_iter()
        .flat_map(names_of_threads)
        .collect();
    // `cache` makes its threads' names from a role.
    given.remove("");
    assert_eq!(documented, given, "ARCHITECTURE.md (left), sources (right)");
}
