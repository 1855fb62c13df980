//! `jericho-bench`: the project's measurements; see docs/performance/method.md.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Parser;
use jericho_bench::report::{self, Report};
use jericho_bench::settings::{Settings, Transport};
use jericho_bench::{
    Result, appends, cold, crowds, footprint, hits, inline, small_files, write_back,
};

/// Compares Jericho with its baselines in alternating runs.
#[derive(Parser)]
struct Arguments {
    /// The jericho command.
    #[arg(long)]
    jericho: PathBuf,
    /// passthrough_hp with direct I/O (scripts/passthrough-hp builds it).
    #[arg(long)]
    passthrough: PathBuf,
    /// Directory for bench.json and bench.md.
    #[arg(long)]
    out: PathBuf,
    /// A directory on the device to be measured, created for the run and removed afterwards.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Rounds of each side of a comparison [default: 7, quick: 3].
    #[arg(long)]
    rounds: Option<u32>,
    /// Minutes instead of an hour; not for quoting.
    #[arg(long)]
    quick: bool,
    /// Only measurements whose name contains one of these.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Measures the passthrough against itself: ratios near 1 show that the harness is fair.
    #[arg(long)]
    self_test: bool,
}

fn measure(settings: &Settings, only: &[String]) -> Result<Report> {
    let selected =
        |name: &str| only.is_empty() || only.iter().any(|part| name.contains(part.as_str()));
    let mut report = Report {
        conditions: report::conditions(settings),
        ..Report::default()
    };
    for transport in &settings.transports {
        let hits = hits::run(settings, selected, *transport)?;
        report.comparisons.extend(hits);
    }
    let inline = inline::run(settings, selected)?;
    report.comparisons.extend(inline.comparisons);
    report.share_local = inline.share_local;
    report
        .comparisons
        .extend(crowds::run_all(settings, selected)?);
    for transport in &settings.transports {
        let small_files = small_files::run(settings, selected, *transport)?;
        report.comparisons.extend(small_files);
        let appends = appends::run(settings, selected, *transport)?;
        report.comparisons.extend(appends);
    }
    report
        .comparisons
        .extend(write_back::run(settings, selected)?);
    report.comparisons.extend(cold::run(settings, selected)?);
    report.footprint = footprint::run(settings, selected)?;
    Ok(report)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let dir = arguments.dir.unwrap_or_else(|| arguments.out.join("work"));
    if dir.exists() {
        return Err(format!(
            "{} exists: remove it or choose another with --dir",
            dir.display()
        )
        .into());
    }
    std::fs::create_dir_all(&dir)?;
    let settings = Settings {
        jericho: std::path::absolute(arguments.jericho)?,
        passthrough: std::path::absolute(arguments.passthrough)?,
        dir: std::fs::canonicalize(&dir)?,
        rounds: arguments
            .rounds
            .unwrap_or(if arguments.quick { 3 } else { 7 })
            .max(1),
        quick: arguments.quick,
        self_test: arguments.self_test,
        transports: Transport::offered(),
    };
    let measured = measure(&settings, &arguments.only);
    // The mounts have ended by now, even after a failure.
    std::fs::remove_dir_all(&settings.dir)?;
    let report = measured?;
    report.write(&arguments.out)?;
    println!("{}", report.markdown());
    println!(
        "Written to {}",
        arguments.out.join("bench.{json,md}").display()
    );
    Ok(())
}
