//! Programs in C that use the C library's calls in all ways, and check the results.
//!
//! Each program runs as it is, and again with the library preloaded, in another directory. Both runs must succeed with the same
//! output. In the tests of this crate, the second directory is an ordinary one, or lies below JERICHO_PRELOAD_TEST_DIR. In the tests
//! of the crate `cli` it lies on a mount.
#![allow(dead_code)] // each test program uses its own part

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Returns the library that cargo has built for the tests.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own path");
    let path = program.with_file_name("libjericho_preload.so");
    assert!(path.exists(), "cargo has not built {}", path.display());
    path
}

/// Returns the C compiler, which scripts/setup installs.
pub fn compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

/// Runs a command that must succeed.
pub fn succeed(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    assert!(output.status.success(), "{}", said(command, &output));
    output
}

/// Returns a command's output and exit status, for messages.
pub fn said(command: &Command, output: &Output) -> String {
    format!(
        "{command:?} ended with {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Programs, built in a directory that is removed together with this value.
pub struct Programs(TempDir);

impl Programs {
    pub fn new() -> Programs {
        Programs(TempDir::new().expect("a directory for programs"))
    }

    /// Returns the directory of the built programs.
    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Builds `source` (of tests/programs, without .c) with further compiler arguments.
    pub fn build(&self, source: &str, target: &str, arguments: &[&str]) -> PathBuf {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../preload/tests/programs")
            .join(source)
            .with_extension("c");
        let target = self.dir().join(target);
        succeed(
            compiler()
                .args(["-O1", "-Wall", "-Werror", "-Wno-unused-result", "-pthread"])
                // The sources make calls with wrong arguments on purpose.
                .args([
                    "-Wno-nonnull",
                    "-Wno-stringop-overflow",
                    "-Wno-stringop-overread",
                ])
                .arg(sources)
                .args(arguments)
                .arg("-o")
                .arg(&target),
        );
        target
    }

    /// Returns a program by its name, with the arguments that follow its directory.
    pub fn program(&self, name: &str) -> (PathBuf, Vec<PathBuf>) {
        match name {
            "sharing" => {
                let helpers = vec![
                    self.build("read_from", "read_from", &[]),
                    self.build("read_from", "static_read_from", &["-static"]),
                ];
                (self.build(name, name, &["-lutil"]), helpers)
            }
            "early" => {
                self.build("early_library", "libearly.so", &["-shared", "-fPIC"]);
                let dir = self.dir().to_str().expect("a name in UTF-8");
                let arguments = [&format!("-L{dir}"), "-learly", &format!("-Wl,-rpath,{dir}")];
                (self.build(name, name, &arguments), vec![])
            }
            _ => (self.build(name, name, &[]), vec![]),
        }
    }
}

/// The programs that take a directory and must succeed.
pub const NAMES: [&str; 14] = [
    "aliases",
    "allocator",
    "closing",
    "copying",
    "early",
    "flags",
    "forking",
    "limits",
    "pointers",
    "sharing",
    "signals",
    "streams",
    "threads",
    "turns",
];

/// Builds a program and runs it twice: as it is, in a directory of its own, and with the command that `hooked` returns, below
/// `dir`. Compares the outputs of the two runs.
pub fn compare(name: &str, hooked: impl Fn(&Path) -> Command, dir: &Path) {
    let programs = Programs::new();
    let (program, arguments) = programs.program(name);
    let run = |mut command: Command, dir: &Path| {
        command
            .arg(dir)
            .args(&arguments)
            .env("JERICHO_TEST_EARLY", dir);
        let output = succeed(&mut command);
        (output.stdout, output.stderr)
    };
    let plain = TempDir::new().expect("a directory to work in");
    let before = run(Command::new(&program), plain.path());
    fs::create_dir(dir.join(name)).expect("a directory to work in");
    let after = run(hooked(&program), &dir.join(name));
    let text = |(out, err): &(Vec<u8>, Vec<u8>)| {
        format!(
            "{}\n{}",
            String::from_utf8_lossy(out),
            String::from_utf8_lossy(err)
        )
    };
    assert_eq!(
        text(&before),
        text(&after),
        "{name}: without the library, and with it"
    );
}
