//! The runs of some files, read line by line.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::line::{LineError, Run, parse};
use crate::text;

/// Most runs of a page.
const RUNS_MAX: usize = 200_000;
/// Most lines that are left out because they end too early.
const TORN_MAX: usize = 40;

/// Why a file of results cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ReadError {
    message: String,
}

/// The runs of some files.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// Names of the files.
    pub files: Vec<String>,
    /// The runs, in the order of the files and lines.
    pub runs: Vec<Run>,
    /// What a reader of the page must know about the files.
    pub notes: Vec<String>,
    /// Hashes of the lines of all runs.
    pub(crate) lines: HashSet<u64>,
    /// Number of lines of the file that was begun last that came before, in it or in another file.
    pub(crate) repeated: usize,
    /// Number of runs before the file that was begun last.
    pub(crate) runs_before: usize,
    /// Number of lines that are left out because they end too early.
    pub(crate) torn: usize,
}

/// Returns a hash of a line. Two runs never have the same line: it has their seconds and counters.
fn hash(line: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    line.trim_ascii().hash(&mut hasher);
    hasher.finish()
}

impl Results {
    /// Begins a file.
    pub fn begin_file(&mut self, name: &str) {
        (self.repeated, self.runs_before) = (0, self.runs.len());
        self.files.push(name.to_owned());
    }

    /// Reads a line of the file that was begun last. `number` counts from 1. A line that ends too early is what an interrupted write leaves. It
    /// is left out, with a note. A line that came before is left out, too: the same run given twice is not two independent runs.
    pub fn add_line(&mut self, number: usize, line: &[u8]) -> Result<(), ReadError> {
        let file = self.files.last().map_or("", String::as_str);
        let refused = |reason: String| ReadError {
            message: format!("{file}: line {number}: {reason}"),
        };
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        if self.runs.len() >= RUNS_MAX {
            return Err(refused(format!(
                "a page has at most {RUNS_MAX} runs; give fewer files"
            )));
        }
        match parse(line) {
            Ok(_) if !self.lines.insert(hash(line)) => self.repeated += 1,
            Ok(run) => self.runs.push(run),
            Err(LineError::Torn) if self.torn < TORN_MAX => {
                self.torn += 1;
                self.notes.push(format!(
                    "{file}: line {number} is left out: it ends too early, so its write was interrupted."
                ));
            }
            Err(LineError::Torn) => {
                return Err(refused(format!(
                    "ends too early, as {TORN_MAX} lines before it do, so the file is damaged; give another one"
                )));
            }
            Err(LineError::Other(reason)) => return Err(refused(reason)),
        }
        Ok(())
    }

    /// Ends the file. Fails if it has no run.
    pub fn end_file(&mut self) -> Result<(), ReadError> {
        let file = self.files.last().map_or("", String::as_str);
        if self.repeated > 0 {
            let lines = text::count(self.repeated, "line");
            self.notes.push(format!(
                "{file}: {lines} left out that came before: each run counts once."
            ));
        } else if self.runs.len() == self.runs_before {
            return Err(ReadError {
                message: format!("{file}: has no result; jericho bench --out {file} adds some"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    fn results() -> Results {
        let mut results = Results::default();
        results.begin_file("a.jsonl");
        results
    }

    #[test]
    fn a_torn_line_is_left_out_with_a_note() {
        let (line, mut results) = (example::line(), results());
        results.add_line(1, line.as_bytes()).unwrap();
        results.add_line(2, b"  ").unwrap();
        results.add_line(3, &line.as_bytes()[..99]).unwrap();
        assert_eq!(results.runs.len(), 1);
        assert!(
            results.notes[0].starts_with("a.jsonl: line 3 is left out"),
            "{:?}",
            results.notes
        );
        let glued = format!("{}{line}", &line[..99]);
        assert!(results.add_line(5, glued.as_bytes()).is_err());
        results.end_file().unwrap();
        let torn = &line.as_bytes()[..99];
        let error = (6..).find_map(|number| results.add_line(number, torn).err());
        let error = error.unwrap().to_string();
        assert!(error.contains("the file is damaged"), "{error}");
        assert_eq!(results.notes.len(), TORN_MAX);
    }

    #[test]
    fn the_same_run_given_twice_counts_once() {
        let (line, mut results) = (example::line(), results());
        results.add_line(1, line.as_bytes()).unwrap();
        results.end_file().unwrap();
        results.begin_file("b.jsonl");
        let padded = format!("{line} \n");
        results.add_line(1, padded.as_bytes()).unwrap();
        results.end_file().unwrap();
        assert_eq!(results.runs.len(), 1);
        assert_eq!(results.notes.len(), 1);
        assert!(results.notes[0].starts_with("b.jsonl: 1 line left out"));
        let other = line.replace("\"seconds\":1.0", "\"seconds\":1.1");
        results.add_line(2, other.as_bytes()).unwrap();
        assert_eq!(results.runs.len(), 2);
    }

    #[test]
    fn repeated_lines_do_not_count_as_torn_ones() {
        let (line, mut results) = (example::line(), results());
        for _ in 0..=TORN_MAX {
            results.begin_file("a.jsonl");
            results.add_line(1, line.as_bytes()).unwrap();
            results.end_file().unwrap();
        }
        assert_eq!(results.notes.len(), TORN_MAX);
        results.add_line(2, &line.as_bytes()[..99]).unwrap();
    }

    #[test]
    fn a_file_without_results_is_named() {
        let error = results().end_file().unwrap_err().to_string();
        assert!(error.contains("a.jsonl: has no result"), "{error}");
    }

    #[test]
    fn there_is_a_most_of_runs() {
        let mut results = results();
        let line = example::line();
        results.add_line(1, line.as_bytes()).unwrap();
        results.runs = vec![results.runs[0].clone(); RUNS_MAX];
        let error = results.add_line(2, line.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("fewer files"), "{error}");
    }
}
