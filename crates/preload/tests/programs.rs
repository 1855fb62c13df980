//! Programs behave with the library as they do without it, on any filesystem.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::{Programs, compare, library, said};
use tempfile::TempDir;

/// Makes the directory in which the programs with the library work.
fn place() -> TempDir {
    match std::env::var_os("JERICHO_PRELOAD_TEST_DIR") {
        Some(dir) => TempDir::new_in(dir),
        None => TempDir::new(),
    }
    .expect("a directory to work in")
}

fn preloaded(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library());
    command
}

macro_rules! same {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            compare(stringify!($name), preloaded, place().path());
        })*

        #[test]
        fn every_program_is_compared() {
            assert_eq!([$(stringify!($name)),*], support::NAMES);
        }
    };
}

same! { aliases allocator closing copying early flags forking limits pointers sharing signals streams threads turns }

/// Runs `ends`, which closes its standard error and then ends in the way `how`. Returns its output, and the file that its fd 2
/// refers to then.
fn ended(how: &str, report: &str) -> (Output, Vec<u8>) {
    let programs = Programs::new();
    let dir = place();
    let mut command = preloaded(&programs.program("ends").0);
    command
        .arg(dir.path())
        .arg(how)
        .env("JERICHO_REPORT", report);
    let output = command.output().expect("the program starts");
    assert_eq!(output.status.code(), Some(3), "{}", said(&command, &output));
    (output, fs::read(dir.path().join("two")).expect("the file"))
}

#[test]
fn no_report_is_written_to_a_file_that_has_replaced_standard_error() {
    for how in ["exit", "_exit", "return", "exec"] {
        let (output, file) = ended(how, "1");
        assert_eq!(file, b"data", "{how}");
        assert_eq!(output.stderr, b"", "{how}");
    }
}

#[test]
fn a_report_file_that_cannot_be_written_changes_nothing() {
    let missing: PathBuf = Path::new("/nonexistent").join("x".repeat(5000));
    for report in ["/nonexistent/report", missing.to_str().expect("UTF-8")] {
        let (_, file) = ended("exit", report);
        assert_eq!(file, b"data");
    }
}

#[test]
fn a_checked_call_with_a_too_small_buffer_ends_the_program_as_without_the_library() {
    let programs = Programs::new();
    let source = programs.dir().join("overflow.c");
    for call in ["__read_chk(0, b, 11, 10)", "__pread_chk(0, b, 11, 0, 10)"] {
        let text = format!(
            "long __read_chk(int, void *, unsigned long, unsigned long);
             long __pread_chk(int, void *, unsigned long, long, unsigned long);
             int main(void) {{ char b[20]; return {call} > 0; }}"
        );
        fs::write(&source, text).expect("a source");
        let program = programs.dir().join("overflow");
        support::succeed(support::compiler().arg(&source).arg("-o").arg(&program));
        let [plain, hooked] = [Command::new(&program), preloaded(&program)].map(|mut command| {
            let output = command.output().expect("the program starts");
            (output.status, output.stderr)
        });
        assert_eq!(plain, hooked, "{call}");
        assert!(!plain.0.success(), "{call}");
    }
}
