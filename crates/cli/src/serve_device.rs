//! `jericho serve`: a device for another host, over raw Ethernet.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use jericho_ether::{Remote, ServeConfig, Server, null_device};
use jericho_storage::{BLOCK_BYTES, Claim, Device};
use jericho_sys::process;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::ServeArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::{logging, notify, served, size, state};

/// Prefix of a device that completes without I/O.
const NULL: &str = "null:";

pub fn run(args: &ServeArgs) -> Outcome {
    if !args.no_auth {
        return Err(Failure::new(
            "there are no keys yet; to let everybody on these networks read and change the device, give --no-auth",
        ));
    }
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
        is_read_only: args.read_only,
        is_hidden: args.hidden,
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
    tracing::warn!("everybody on {nics} can {can} {}", device.name());
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
