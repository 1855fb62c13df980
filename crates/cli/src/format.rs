//! `jericho format`.

use std::fmt::Write;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use jericho_fs::format::format;
use jericho_topology::Topology;
use jericho_volume::{FormatOptions, Summary};

use crate::args::FormatArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::size;

pub fn run(args: &FormatArgs) -> Outcome {
    let topology = Topology::from_spec(&args.topology).map_err(|e| Failure::new(e.to_string()))?;
    let paths: Vec<PathBuf> = std::iter::once(&args.volume)
        .chain(&args.device)
        .cloned()
        .collect();
    let options = FormatOptions {
        size_bytes: args.size,
        slices: args.slices,
        nodes: topology.nodes.iter().map(|n| u32::from(n.id.0)).collect(),
        device_nodes: paths
            .iter()
            .map(|p| topology.node_of_block_device(p).map(|n| u32::from(n.0)))
            .collect(),
        force: args.force,
        preallocate: !args.sparse,
        has_stores: None,
        checksums: args.checksums,
        progress: std::io::stderr()
            .is_terminal()
            .then_some(show_progress as fn(u64, u64)),
        owner: (
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        ),
    };
    let summary = format(&paths, &options).map_err(|e| Failure::new(e.to_string()))?;
    print(&text(&args.volume, &summary).context("cannot write the text")?)?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the progress of the allocation. A host that cannot allocate without writing takes long.
pub fn show_progress(done: u64, all: u64) {
    let percent = done * 100 / all.max(1);
    let end = if done == all { "\n" } else { "" };
    eprint!(
        "\rallocating space: {percent}% of {}{end}",
        size::human(all)
    );
}

fn text(volume: &std::path::Path, summary: &Summary) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let hex: String = summary.uuid.iter().map(|b| format!("{b:02x}")).collect();
    writeln!(out, "{}: volume {hex}", volume.display())?;
    for (name, bytes) in &summary.devices {
        writeln!(out, "  device {name}: {}", size::human(*bytes))?;
    }
    for (index, (node, device, bytes)) in summary.slices.iter().enumerate() {
        let node = node.map_or(String::from("any node"), |n| format!("node {n}"));
        writeln!(
            out,
            "  slice {index}: {} on device {device}, {node}",
            size::human(*bytes)
        )?;
    }
    Ok(out)
}
