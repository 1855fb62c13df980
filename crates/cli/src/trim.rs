//! `jericho trim`.

use std::process::ExitCode;

use serde::Serialize;

use crate::args::TrimArgs;
use crate::failure::{Outcome, print, print_json};
use crate::{control, size};

#[derive(Serialize)]
struct Trimmed {
    bytes: u64,
}

pub fn run(args: &TrimArgs) -> Outcome {
    let bytes = control::trim(&args.path, args.minimum.unwrap_or(0))?;
    if args.json {
        print_json(&Trimmed { bytes })?;
    } else {
        let (path, size) = (args.path.display(), size::human(bytes));
        print(&format!("{path}: {size} ({bytes} bytes) trimmed\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
