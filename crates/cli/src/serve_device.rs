//! `jericho serve`: a device for another host, over raw Ethernet.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use jericho_ether::{Client, Remote, Security, ServeConfig, Server, null_device, read_key};
use jericho_storage::{BLOCK_BYTES, Claim, Device};
use jericho_sys::process;
use jericho_topology::Topology;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::ServeArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::{logging, notify, remote, served, size, state};

/// Prefix of a device that completes without I/O.
const NULL: &str = "null:";

pub fn run(args: &ServeArgs) -> Outcome {
    let (security, clients) = (security(args)?, clients(args)?);
    let topology = Topology::from_spec(&args.topology).map_err(|e| Failure::new(e.to_string()))?;
    logging::start();
    // Before the device is served: a signal from then on ends the server in order.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
    let (device, _claim) = open(args)?;
    let config = ServeConfig {
        host: match &args.host {
            Some(host) => host.clone(),
            None => process::host_name(),
        },
        name: args.name.clone(),
        interfaces: args.nic.clone(),
        ethertype: args.ethertype,
        link: remote::link(args.link),
        is_read_only: args.read_only,
        is_hidden: args.hidden,
        security,
        clients,
        topology: Arc::new(topology),
        mode: crate::remote::mode(args.mode),
        // Nothing is lost with a device that keeps nothing.
        state: match null_size(args) {
            Some(_) => None,
            None => Some(record_dir(args)?),
        },
    };
    let server =
        Server::start(Arc::clone(&device), &config).map_err(|e| Failure::new(e.to_string()))?;
    let url = Remote {
        host: config.host.clone(),
        name: config.name.clone(),
    };
    let can = match args.read_only {
        true => "read",
        false => "read and change",
    };
    let nics = args.nic.join(", ");
    match security {
        Security::None => tracing::warn!("everybody on {nics} can {can} {}", device.name()),
        _ => {
            let ids: Vec<&str> = args.client.iter().map(|(id, _)| &**id).collect();
            tracing::info!(
                "the clients {} can {can} {}; frames are {security}",
                ids.join(", "),
                device.name()
            );
        }
    }
    print(&format!("serving {} as {url}\n", device.name()))?;
    notify::ready(&format!("serving {} as {url}", device.name()));
    let _ = signals.forever().next();
    notify::stopping();
    drop(server);
    if !device.is_read_only() {
        device.flush().context("cannot flush")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns how frames are protected.
fn security(args: &ServeArgs) -> Result<Security, Failure> {
    match args.no_auth {
        true => Ok(Security::None),
        false if args.client.is_empty() => Err(Failure::new(
            "no client may use the device: name clients with --client ID:KEYFILE (`jericho key new` makes a key), or let everybody on these networks use it with --no-auth",
        )),
        false if args.encrypt => Ok(Security::Encrypt),
        false => Ok(Security::Mac),
    }
}

/// Reads the keys of the clients. Refuses two with one name or one key: they would be one client, and end each other's sessions.
fn clients(args: &ServeArgs) -> Result<Vec<Client>, Failure> {
    let mut clients: Vec<Client> = Vec::new();
    for (id, file) in &args.client {
        let key =
            read_key(file).map_err(|error| Failure::new(format!("--client {id}: {error}")))?;
        if let Some(other) = clients.iter().find(|other| other.id == *id) {
            return Err(Failure::new(format!("two clients are named {}", other.id)));
        }
        let is_same = |other: &&Client| other.key.fingerprint() == key.fingerprint();
        if let Some(other) = clients.iter().find(is_same) {
            return Err(Failure::new(format!(
                "the clients {} and {id} have the same key; make one for each with `jericho key new`",
                other.id
            )));
        }
        let id = id.clone();
        clients.push(Client { id, key });
    }
    Ok(clients)
}

/// Opens the device, and claims it unless it is a null device.
fn open(args: &ServeArgs) -> Result<(Arc<dyn Device>, Option<Claim>), Failure> {
    if let Some(bytes) = null_size(args) {
        let bytes = size::parse(bytes).map_err(Failure::new)?;
        let whole = bytes / BLOCK_BYTES * BLOCK_BYTES;
        return match whole {
            0 => Err(Failure::new(format!(
                "{NULL}{bytes}: a device has {BLOCK_BYTES} bytes at least"
            ))),
            whole => Ok((null_device(whole), None)),
        };
    }
    served::open(&args.device, args.read_only)
}

/// Returns the size in the name of a null device, as the user wrote it.
fn null_size(args: &ServeArgs) -> Option<&str> {
    args.device.to_str()?.strip_prefix(NULL)
}

/// Returns the directory of the record.
fn record_dir(args: &ServeArgs) -> Result<PathBuf, Failure> {
    if let Some(state) = &args.state {
        return Ok(state.clone());
    }
    if process::effective_uid() == 0 {
        return Ok("/var/lib/jericho/serve".into());
    }
    state::directory()
        .map(|state| state.join("serve"))
        .ok_or_else(|| {
            Failure::new(
                "HOME is not set: say with --state where the record of the device's client goes",
            )
        })
}
