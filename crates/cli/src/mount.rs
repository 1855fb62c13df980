//! `jericho mount`.

use std::process::ExitCode;

use crate::args::MountArgs;
use crate::failure::Outcome;
use crate::{background, mountable, serve, umount};

pub fn run(args: &MountArgs) -> Outcome {
    if args.report_to_parent {
        return serve::as_daemon(args);
    }
    let checked = mountable::check(&args.volume, &args.dir, &args.options)?;
    umount::wait_for_former(&checked.volume);
    if args.foreground {
        return serve::in_foreground(&checked, &args.options);
    }
    background::start(&checked, &args.options)?;
    Ok(ExitCode::SUCCESS)
}
