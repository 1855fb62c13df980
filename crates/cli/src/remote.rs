//! How the commands open devices of other hosts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use jericho_ether::{EtherRemotes, LinkChoice, Mode, Remote, RemoteOptions, Scheduler, interfaces};
use jericho_storage::{is_remote, set_remotes};

use crate::args::{Cli, Command, LinkName, ModeName, RemoteArgs, SchedulerName};
use crate::failure::{Context, Failure};

/// The NUMA nodes as the kernel has them.
const AUTO: &str = "auto";
/// How long a command looks for the host.
const PATIENCE: Duration = Duration::from_secs(10);

/// Prepares the process for devices of other hosts, as the command's options say.
pub fn prepare(command: &Command) {
    let (remote, topology) = match command {
        Command::Format(args) => (&without_probe(&args.remote), &*args.topology),
        Command::Mount(args) => (&args.options.remote, &*args.options.topology),
        Command::Run(args) => (&args.options.remote, &*args.options.topology),
        Command::Grow(args) => (&without_probe(&args.remote), AUTO),
        Command::Add(args) => (&without_probe(&args.remote), AUTO),
        Command::Check(args) => (&without_probe(&args.remote), AUTO),
        Command::Nbd(args) => (&args.remote, AUTO),
        Command::Probe(args) => (&without_probe(&args.remote), &*args.topology),
        Command::Bench(args) => (&args.remote, args.topology.as_deref().unwrap_or(AUTO)),
        Command::Attach(args) => (&args.remote, AUTO),
        // Finds the options among those of the daemon.
        Command::Umount(_) => return,
        _ => return set(&without_probe(&RemoteArgs::default()), AUTO),
    };
    set(remote, topology);
}

/// Prepares the process for the devices of a daemon's volume, with the daemon's options except for `--dead-after` and `--link`.
pub fn prepare_as(daemon: &[OsString]) {
    let daemon = Cli::try_parse_from(daemon).map(|cli| cli.command);
    let args = match daemon {
        Ok(Command::Mount(args)) => args.options.remote,
        _ => RemoteArgs::default(),
    };
    let args = RemoteArgs {
        // Another client may have the device since.
        take_over: false,
        // The daemon may wait for ever, and a command does not.
        dead_after: RemoteArgs::default().dead_after,
        // Another process may have XDP on the interface since.
        link: LinkName::Packet,
        ..args
    };
    set(&args, AUTO);
}

/// Returns the options of a command that ends soon: it gains nothing from an XDP program, which may interrupt a link for a moment.
fn without_probe(args: &RemoteArgs) -> RemoteArgs {
    let link = match args.link {
        LinkName::Auto => LinkName::Packet,
        demanded => demanded,
    };
    RemoteArgs {
        link,
        ..args.clone()
    }
}

fn set(args: &RemoteArgs, topology: &str) {
    let dead_after = Some(args.dead_after).filter(|seconds| *seconds > 0);
    set_remotes(Box::new(EtherRemotes::new(RemoteOptions {
        interfaces: nics(&args.nic),
        ethertype: args.ethertype,
        link: link(args.link),
        take_over: args.take_over,
        replay: !args.no_replay,
        patience: PATIENCE,
        dead_after: dead_after.map(Duration::from_secs),
        key: key(args),
        scheduler: scheduler(args.scheduler),
        channels: args.channels,
        mode: mode(args.mode),
        topology: topology.to_owned(),
    })));
}

/// Returns the name of a device of another host. Returns `None` for the path of one of this host.
pub fn named(path: &Path) -> Result<Option<Remote>, Failure> {
    match is_remote(path) {
        true => {
            let parsed = path.to_string_lossy().parse();
            parsed.map(Some).context("cannot use this name")
        }
        false => Ok(None),
    }
}

/// Returns the options of a daemon that uses the same devices.
pub fn options(args: &RemoteArgs) -> Vec<String> {
    let mut options = vec![
        format!("--ethertype={}", args.ethertype),
        format!("--dead-after={}", args.dead_after),
        format!("--channels={}", args.channels),
    ];
    let mode = args.mode.to_possible_value();
    options.extend(mode.map(|name| format!("--mode={}", name.get_name())));
    let link = args.link.to_possible_value();
    options.extend(link.map(|name| format!("--link={}", name.get_name())));
    let scheduler = args.scheduler.to_possible_value();
    options.extend(scheduler.map(|name| format!("--scheduler={}", name.get_name())));
    options.extend(
        args.nic
            .iter()
            .map(|interface| format!("--nic={interface}")),
    );
    options.extend(key(args).map(|file| {
        // The daemon has another working directory.
        let file = std::path::absolute(&file).unwrap_or(file);
        format!("--key={}", file.display())
    }));
    options.extend(args.take_over.then(|| "--take-over".to_owned()));
    options.extend(args.no_replay.then(|| "--no-replay".to_owned()));
    options
}

/// Returns who sends frames.
pub fn mode(name: ModeName) -> Mode {
    match name {
        ModeName::Inline => Mode::Inline,
        ModeName::Queue => Mode::Queue,
        ModeName::Auto => Mode::Auto,
    }
}

/// Returns which sockets carry frames.
pub fn link(name: LinkName) -> LinkChoice {
    match name {
        LinkName::Auto => LinkChoice::Auto,
        LinkName::Packet => LinkChoice::Packet,
        LinkName::Xdp => LinkChoice::Xdp,
    }
}

fn scheduler(name: SchedulerName) -> Scheduler {
    match name {
        SchedulerName::Affinity => Scheduler::Affinity,
        SchedulerName::RoundRobin => Scheduler::RoundRobin,
        SchedulerName::Dynamic => Scheduler::Dynamic,
        SchedulerName::Backlog => Scheduler::Backlog,
    }
}

/// Returns the file of the key: that of the option or of the environment.
fn key(args: &RemoteArgs) -> Option<PathBuf> {
    let named = || std::env::var_os("JERICHO_KEY").filter(|name| !name.is_empty());
    args.key.clone().or_else(|| named().map(PathBuf::from))
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
