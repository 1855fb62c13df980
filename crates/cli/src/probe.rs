//! `jericho probe`.

use std::io::IsTerminal;
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use jericho_daemon::MoveCosts;
use jericho_probe::{
    Options, Plan, Progress, Report, heat_map, load, move_costs, move_ns, save, table,
};
use jericho_topology::Topology;

use crate::args::ProbeArgs;
use crate::failure::{Context, Failure, Outcome, print, print_json};
use crate::state;

pub fn run(args: &ProbeArgs) -> Outcome {
    let topology = Topology::from_spec(&args.topology).map_err(|e| Failure::new(e.to_string()))?;
    let options = Options {
        quick: args.quick,
        devices: args.device.clone(),
    };
    let report = measure(&topology, &options)?;
    // A failure to keep the figures is a message: they are shown all the same.
    if let Err(failure) = keep(&report) {
        eprintln!("jericho: {failure}");
    }
    match args.json {
        true => print_json(&report)?,
        false => print(&table(&report))?,
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, heat_map(&report)).context(format_args!(
            "cannot write the heat map to {}",
            file.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures. Says on a terminal how long it takes and how far it is.
fn measure(topology: &Topology, options: &Options) -> Result<Report, Failure> {
    let bar = std::io::stderr().is_terminal().then(|| {
        let seconds = Plan::new(topology, options).duration().as_secs().max(1);
        eprintln!(
            "This takes about {seconds} seconds. Other load on the machine spoils the figures."
        );
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}");
        let bar = ProgressBar::no_length();
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar
    });
    let show = |progress: &Progress| {
        if let Some(bar) = &bar {
            bar.set_length(progress.all.into());
            bar.set_position(progress.done.into());
            bar.set_message(progress.what.clone());
        }
    };
    let report = jericho_probe::run(topology, options, show);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    report.map_err(|error| Failure::new(error.to_string()))
}

/// Keeps the report for mounts.
fn keep(report: &Report) -> Result<(), Failure> {
    match state::probe_file()? {
        Some(file) => {
            save(report, &file).context("the report is not kept, so mounts do not use it")
        }
        None => Ok(()),
    }
}

/// Returns the costs of moves that a mount with these nodes uses: those of the report, or the defaults.
pub fn costs(topology: &Topology) -> MoveCosts {
    // Without a directory there is no report.
    let Ok(Some(file)) = state::probe_file() else {
        return MoveCosts::default();
    };
    match load(&file, topology) {
        Ok(Some(report)) => MoveCosts {
            table: move_costs(&report, topology),
            move_ns: move_ns(&report),
            origin: format!("probe of {}", report.time),
        },
        Ok(None) => MoveCosts::default(),
        Err(error) => {
            tracing::warn!("threads migrate by the default costs: {error}");
            MoveCosts {
                origin: format!("defaults ({error})"),
                ..MoveCosts::default()
            }
        }
    }
}
