//! Writes the results of a run into the documents; see docs/performance/method.md.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

use clap::Parser;
use jericho_bench::Result;
use jericho_bench::documents::{PARTS, replace};
use jericho_bench::report::Report;

/// Writes the results of a run into README.md and docs/performance/results.md.
#[derive(Parser)]
struct Arguments {
    /// The run's bench.json.
    run: PathBuf,
    /// The root of the repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let with_path = |path: &PathBuf, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let json = fs::read_to_string(&arguments.run).map_err(|e| with_path(&arguments.run, &e))?;
    let report: Report = serde_json::from_str(&json).map_err(|e| with_path(&arguments.run, &e))?;
    let mut written = vec![(arguments.root.join("docs/performance/bench.json"), json)];
    for (path, begin, end, part) in PARTS {
        let path = arguments.root.join(path);
        let document = fs::read_to_string(&path).map_err(|e| with_path(&path, &e))?;
        let replaced = replace(&document, begin, end, &part(&report)?);
        written.push((path.clone(), replaced.map_err(|e| with_path(&path, &e))?));
    }
    for (path, text) in written {
        fs::write(&path, text).map_err(|e| with_path(&path, &e))?;
        println!("{}", path.display());
    }
    Ok(())
}
