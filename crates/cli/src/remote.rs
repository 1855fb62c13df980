//! Opens a device of another host for a command.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jericho_ether::{AttachConfig, Remote, RemoteDevice, interfaces};
use jericho_storage::Device;

use crate::args::RemoteArgs;
use crate::failure::{Context, Failure};

/// How long a command looks for the host.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the name of a device of another host. Returns `None` if the path is one of this host.
pub fn named(path: &Path) -> Result<Option<Remote>, Failure> {
    match path.to_str().filter(|text| Remote::is_remote(text)) {
        Some(text) => text.parse().map(Some).context("cannot use this name"),
        None => Ok(None),
    }
}

/// Attaches a device of another host.
pub fn attach(remote: Remote, args: &RemoteArgs) -> Result<Arc<dyn Device>, Failure> {
    let config = AttachConfig {
        interfaces: nics(args)?,
        remote,
        ethertype: args.ethertype,
        take_over: args.take_over,
        replay: !args.no_replay,
        patience: PATIENCE,
        dead_after: match args.dead_after {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        },
    };
    let device = RemoteDevice::attach(&config).map_err(|e| Failure::new(e.to_string()))?;
    Ok(device)
}

/// Returns the interfaces: those of the option, of the environment, or all.
fn nics(args: &RemoteArgs) -> Result<Vec<String>, Failure> {
    if !args.nic.is_empty() {
        return Ok(args.nic.clone());
    }
    match std::env::var("JERICHO_NIC") {
        Ok(text) if !text.is_empty() => Ok(text.split(',').map(str::to_owned).collect()),
        _ => interfaces().context("cannot list the network interfaces; name some with --nic"),
    }
}
