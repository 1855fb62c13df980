//! Compares kinds of replacement on traces of page accesses.
//!
//!     replacement pack OUT < EVENTS    converts the kernel's trace events (scripts/traces does this)
//!     replacement TRACE...             prints miss ratios at several sizes of the cache
#![forbid(unsafe_code)]

mod simulator;
mod trace;

use std::fs::File;
use std::io::{BufWriter, stdin};
use std::path::Path;

use jericho_cache::replacement::{AgedSweep, Replacement, S3Fifo};
use simulator::{ModelCounts, ModelTable, entries_for, footprint, optimum, run};
use trace::{Access, Importer};

/// Sizes of the cache, in percent of the trace's footprint.
const SIZES: [usize; 5] = [1, 5, 10, 25, 50];
/// Pages read ahead in the second comparison.
const READ_AHEAD: u64 = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [command, out] if command == "pack" => {
            let accesses = Importer::import(stdin().lock())?;
            trace::write(&accesses, BufWriter::new(File::create(out)?))?;
            eprintln!("{out}: {} accesses", accesses.len());
        }
        [] => eprintln!("usage: replacement pack OUT < EVENTS, or replacement TRACE..."),
        traces => compare_all(traces)?,
    }
    Ok(())
}

fn compare_all(traces: &[String]) -> std::io::Result<()> {
    println!(
        "| trace | cache, pages | aged sweep | S3-FIFO | optimum | reads, aged sweep | reads, S3-FIFO |"
    );
    println!("|---|---|---|---|---|---|---|");
    for path in traces {
        let accesses = trace::parse(&std::fs::read(path)?);
        let name = Path::new(path).file_stem().unwrap_or_default();
        compare(&name.to_string_lossy(), &accesses);
    }
    Ok(())
}

/// Prints a line for each size: the share of accesses that miss, and the pages read from the device when misses read ahead.
fn compare(name: &str, accesses: &[Access]) {
    let pages = footprint(accesses);
    for percent in SIZES {
        let frames = (pages * percent / 100).max(64) as u32;
        let both = |ahead| {
            let kinds: [Box<dyn Replacement<ModelTable>>; 2] = [
                Box::new(AgedSweep::default()),
                Box::new(S3Fifo::new(entries_for(frames), frames)),
            ];
            kinds.map(|kind| run(accesses, frames, ahead, kind))
        };
        let ratio = |counts: ModelCounts| {
            let ratio = 100.0 * counts.misses as f64 / counts.accesses.max(1) as f64;
            format!("{ratio:.1} %")
        };
        let best = ratio(optimum(accesses, frames));
        let [sweep, s3] = both(0).map(ratio);
        let [sweep_reads, s3_reads] = both(READ_AHEAD).map(|counts| counts.reads);
        println!(
            "| {name} | {percent} % = {frames} | {sweep} | {s3} | {best} | {sweep_reads} | {s3_reads} |"
        );
    }
}
