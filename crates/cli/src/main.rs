//! The `jericho` command: formats, mounts, inspects and checks volumes.
//!
//! Reading order: `args` (the contract with scripts), then one module per subcommand. `serve` is the daemon of a mount; `mount` and `run`
//! start this program again to run it. `disk` is the server that `attach` starts. A subcommand talks to the daemon of a mount through extended attributes (`control`).
#![forbid(unsafe_code)]

mod add;
mod args;
mod attach;
mod attached;
mod background;
mod bench;
mod bench_nodes;
mod busy;
mod check;
mod control;
mod detach;
mod discover;
mod disk;
mod duration;
mod events;
mod failure;
mod format;
mod forward;
mod generate;
mod grow;
mod helper;
mod in_process;
mod keeper;
mod key;
mod logging;
mod loops;
mod marker;
mod mount;
mod mountable;
mod mounts;
mod nbd;
mod notify;
mod on_mounts;
mod place;
mod predict;
mod preload;
mod probe;
mod remote;
mod report;
mod run;
mod serve;
mod serve_device;
mod served;
mod size;
mod stat;
mod state;
mod sync;
mod top;
mod topology;
mod trim;
mod umount;
mod utab;
mod whereis;
mod wire;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::Outcome;
use helper::Call;

fn main() -> ExitCode {
    let outcome = match helper::call(std::env::args_os()) {
        Ok(Call::Own) => run(Cli::parse().command),
        Ok(Call::Jericho(arguments)) => run(Cli::parse_from(arguments).command),
        Ok(Call::Remount(arguments)) => helper::remount(arguments),
        Ok(Call::Nothing) => Ok(ExitCode::SUCCESS),
        Err(failure) => Err(failure),
    };
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            // An error is ignored: the message cannot be written.
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("jericho: {failure}\n"),
            );
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Outcome {
    remote::prepare(&command);
    match command {
        Command::Format(a) => format::run(&a),
        Command::Mount(a) => mount::run(&a),
        Command::Umount(a) => umount::run(&a),
        Command::Sync(a) => sync::run(&a),
        Command::Trim(a) => trim::run(&a),
        Command::Grow(a) => grow::run(&a),
        Command::Add(a) => add::run(&a),
        Command::Run(a) => crate::run::run(&a),
        Command::Stat(a) => stat::run(&a),
        Command::Top(a) => top::run(&a),
        Command::Where(a) => whereis::run(&a),
        Command::Place(a) => place::run(&a),
        Command::Check(a) => check::run(&a),
        Command::Serve(a) => serve_device::run(&a),
        Command::Key(a) => key::run(&a),
        Command::Discover(a) => discover::run(&a),
        Command::Nbd(a) => nbd::run(&a),
        Command::Attach(a) => attach::run(&a),
        Command::Detach(a) => detach::run(&a),
        Command::Wire(a) => wire::run(&a),
        Command::Topology(a) => topology::run(&a),
        Command::Probe(a) => probe::run(&a),
        Command::Bench(a) => bench::run(&a),
        Command::Report(a) => report::run(&a),
        Command::Completions(a) => generate::completions(&a),
        Command::Keeper => keeper::run(),
        Command::Man(a) => generate::man(&a),
    }
}
