//! `jericho where`.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use jericho_daemon::Where;

use crate::args::WhereArgs;
use crate::failure::{Context, Outcome, print, print_json};
use crate::{control, size};

pub fn run(args: &WhereArgs) -> Outcome {
    let found = control::where_is(&args.path)?;
    if args.json {
        print_json(&found)?;
    } else {
        print(&text(&args.path, &found).context("cannot write the text")?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(path: &Path, w: &Where) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    writeln!(out, "{}", path.display())?;
    writeln!(out, "  slice      {} (home node {})", w.slice, w.home_node)?;
    writeln!(out, "  size       {}", size::human(w.size_bytes))?;
    writeln!(
        out,
        "  in memory  {}, of which {} dirty",
        size::human(w.resident_bytes),
        size::human(w.dirty_bytes)
    )?;
    for (node, bytes) in &w.resident_bytes_by_kernel_node {
        writeln!(
            out,
            "             {} on node {node} as the kernel says",
            size::human(*bytes)
        )?;
    }
    for (index, (slice, bytes)) in w.stored_bytes_by_slice.iter().enumerate() {
        let label = if index == 0 { "stored" } else { "" };
        writeln!(
            out,
            "  {label:<9}  {} in slice {slice}",
            size::human(*bytes)
        )?;
    }
    Ok(out)
}
