//! `jericho sync`.

use std::process::ExitCode;

use crate::args::SyncArgs;
use crate::failure::Outcome;
use crate::{control, mounts};

pub fn run(args: &SyncArgs) -> Outcome {
    if let Some(path) = &args.path {
        control::sync(path)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut code = ExitCode::SUCCESS;
    for mount in mounts::list()? {
        if mount.filesystem != mounts::FILESYSTEM {
            continue;
        }
        // Continues with the other volumes.
        if let Err(failure) = control::sync(&mount.dir) {
            eprintln!("jericho: {failure}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
