//! `jericho completions` and `jericho man`. Both are generated from the definition of the command line, so they never differ from
//! it.

use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::{Context, Failure, Outcome, print};

pub fn completions(args: &CompletionsArgs) -> Outcome {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "jericho", &mut out);
    print(&String::from_utf8_lossy(&out))?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(args: &ManArgs) -> Outcome {
    let Some(dir) = &args.dir else {
        let mut out = Vec::new();
        clap_mangen::Man::new(Cli::command())
            .render(&mut out)
            .context("cannot write the page")?;
        print(&String::from_utf8_lossy(&out))?;
        return Ok(ExitCode::SUCCESS);
    };
    if !dir.is_dir() {
        return Err(Failure::new(format!(
            "{0} is not a directory; make it with: mkdir -p {0}",
            dir.display()
        )));
    }
    clap_mangen::generate_to(Cli::command(), dir).context(format_args!(
        "cannot write the manual pages to {}",
        dir.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
