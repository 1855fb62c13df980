//! `jericho topology`.

use std::process::ExitCode;

use jericho_topology::{Topology, format_human};

use crate::args::TopologyArgs;
use crate::failure::{Failure, Outcome, print, print_json};

pub fn run(args: &TopologyArgs) -> Outcome {
    let topology = Topology::from_spec(&args.topology).map_err(|e| Failure::new(e.to_string()))?;
    if args.json {
        print_json(&topology)?;
    } else {
        let mut text = format_human(&topology);
        if !text.ends_with('\n') {
            text.push('\n');
        }
        print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
