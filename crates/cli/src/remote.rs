//! How the commands open devices of other hosts.

use std::path::Path;
use std::time::Duration;

use jericho_ether::{EtherRemotes, Remote, RemoteOptions, interfaces};
use jericho_storage::{is_remote, set_remotes};

use crate::args::{Command, RemoteArgs};
use crate::failure::{Context, Failure};

/// How long a command looks for the host.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a command that ends by itself waits for a host that does not answer.
const DEAD_AFTER: Duration = Duration::from_secs(180);

/// Prepares the process for devices of other hosts, as the command's options say.
pub fn prepare(command: &Command) {
    let (args, dead_after) = match command {
        Command::Format(args) => (Some(&args.remote), Some(DEAD_AFTER)),
        Command::Grow(args) => (Some(&args.remote), Some(DEAD_AFTER)),
        Command::Add(args) => (Some(&args.remote), Some(DEAD_AFTER)),
        Command::Check(args) => (Some(&args.remote), Some(DEAD_AFTER)),
        // What a mount has acknowledged must not be lost because a host is away for long.
        Command::Mount(args) => (Some(&args.options.remote), None),
        Command::Run(args) => (Some(&args.options.remote), None),
        Command::Nbd(args) => {
            let after = Some(args.dead_after).filter(|seconds| *seconds > 0);
            (Some(&args.remote), after.map(Duration::from_secs))
        }
        _ => (None, Some(DEAD_AFTER)),
    };
    let default = RemoteArgs::default();
    let args = args.unwrap_or(&default);
    set_remotes(Box::new(EtherRemotes::new(RemoteOptions {
        interfaces: nics(&args.nic),
        ethertype: args.ethertype,
        take_over: args.take_over,
        replay: !args.no_replay,
        patience: PATIENCE,
        dead_after,
    })));
}

/// Refuses a path that is meant to be the name of a remote device and is none. Returns whether it is one.
pub fn is_name(path: &Path) -> Result<bool, Failure> {
    if !is_remote(path) {
        return Ok(false);
    }
    let text = path.to_string_lossy();
    let parsed: Result<Remote, _> = text.parse();
    parsed.map(|_| true).context("cannot use this name")
}

/// Returns the interfaces: those of the option or of the environment, or all that are up.
pub fn nics_or_all(given: &[String]) -> Result<Vec<String>, Failure> {
    match nics(given) {
        named if !named.is_empty() => Ok(named),
        _ => interfaces().context("cannot list the network interfaces; name some with --nic"),
    }
}

/// Returns the interfaces: those of the option or of the environment. Returns none for all.
fn nics(given: &[String]) -> Vec<String> {
    if !given.is_empty() {
        return given.to_vec();
    }
    let named = std::env::var("JERICHO_NIC").unwrap_or_default();
    let names = named.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}
