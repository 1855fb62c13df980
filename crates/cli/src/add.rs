//! `jericho add`.

use std::fmt::Write;
use std::io::IsTerminal;
use std::process::ExitCode;

use jericho_fs::add::add;
use jericho_volume::{FormatOptions, OpenMode, Summary, Volume, VolumeError};

use crate::args::AddArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::format::show_progress;
use crate::size;

pub fn run(args: &AddArgs) -> Outcome {
    let shown = args.volume.display();
    let refused = |error: VolumeError| Failure::new(error.to_string());
    let mut lock = Volume::lock(&args.volume, OpenMode::WRITE).map_err(refused)?;
    let volume =
        Volume::open_among(&args.volume, &args.device, OpenMode::WRITE).map_err(refused)?;
    lock.cover(&volume).map_err(refused)?;
    let first = volume.slices().len();
    let options = FormatOptions {
        size_bytes: args.size,
        slices: Some(args.slices),
        force: args.force,
        progress: std::io::stderr()
            .is_terminal()
            .then_some(show_progress as fn(u64, u64)),
        ..FormatOptions::default()
    };
    let summary = add(volume, &args.new, &options)
        .map_err(|e| Failure::new(format!("cannot add {} to {shown}: {e}", args.new.display())))?;
    print(&text(first, &summary).context("cannot write the text")?)?;
    Ok(ExitCode::SUCCESS)
}

fn text(first: usize, summary: &Summary) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for (name, bytes) in &summary.devices {
        writeln!(out, "added device {name}: {}", size::human(*bytes))?;
    }
    for (slice, (node, device, bytes)) in (first..).zip(&summary.slices) {
        let node = node.map_or(String::from("any node"), |n| format!("node {n}"));
        let bytes = size::human(*bytes);
        writeln!(out, "  slice {slice}: {bytes} on device {device}, {node}")?;
    }
    Ok(out)
}
