//! Opens devices of other hosts for all functions that take the path of a device.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use jericho_remote::Scheduler;
use jericho_storage::{Device, OpenError, OpenOptions, Remotes};
use jericho_topology::Topology;

use crate::device::{AttachConfig, AttachError, RemoteDevice, holder};
use crate::key_file::read_key;
use crate::links::interfaces;
use crate::lock::unpoisoned;
use crate::outbox::Mode;
use crate::socket::LinkChoice;
use crate::url::Remote;

/// What the devices of a process have in common.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Names of network interfaces. If empty: all that are up.
    pub interfaces: Vec<String>,
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Which sockets carry frames.
    pub link: LinkChoice,
    /// Take devices from other clients.
    pub take_over: bool,
    /// Send changes again that a restarted target may have lost.
    pub replay: bool,
    /// How long to look for a target.
    pub patience: Duration,
    /// How long requests wait for a target that does not answer. `None`: for ever.
    pub dead_after: Option<Duration>,
    /// File with the key that the targets know. `None`: use devices that are served without keys.
    pub key: Option<PathBuf>,
    /// How requests are distributed over channels.
    pub scheduler: Scheduler,
    /// Channels on each interface, at least 1.
    pub channels: u16,
    /// Who sends frames.
    pub mode: Mode,
    /// The machine's NUMA nodes: `auto`, `virtual:N`, or the path of a topology file.
    pub topology: String,
}

/// Opens devices of other hosts over raw Ethernet.
pub struct EtherRemotes {
    options: RemoteOptions,
    /// The devices that this process has open, by name.
    open: Mutex<HashMap<String, Weak<RemoteDevice>>>,
}

impl EtherRemotes {
    /// Opens nothing yet.
    pub fn new(options: RemoteOptions) -> EtherRemotes {
        EtherRemotes {
            options,
            open: Mutex::default(),
        }
    }

    fn attach(&self, remote: Remote, read_only: bool) -> Result<Arc<RemoteDevice>, OpenError> {
        let options = self.options.clone();
        let interfaces = match options.interfaces {
            named if !named.is_empty() => named,
            _ => interfaces().map_err(|source| OpenError::Io {
                path: remote.to_string().into(),
                action: "list the network interfaces; name some with --nic",
                source,
            })?,
        };
        let key = options.key.as_deref().map(read_key).transpose();
        let key = key.map_err(|error| OpenError::Refused {
            why: format!("{remote}: {error}"),
        })?;
        let topology = Topology::from_spec(&options.topology);
        let topology = topology.map_err(|error| OpenError::Refused {
            why: format!("{remote}: {error}"),
        })?;
        let config = AttachConfig {
            key,
            scheduler: options.scheduler,
            channels: options.channels,
            mode: options.mode,
            batches: true,
            topology: Arc::new(topology),
            remote,
            interfaces,
            ethertype: options.ethertype,
            link: options.link,
            take_over: options.take_over,
            replay: options.replay,
            patience: options.patience,
            dead_after: options.dead_after,
            read_only,
        };
        RemoteDevice::attach(&config).map_err(|error| match &error {
            AttachError::Missing { .. } => OpenError::Unreachable {
                why: error.to_string(),
            },
            // The fault is on this host.
            AttachError::Link(_) | AttachError::Io { .. } => OpenError::Io {
                path: config.remote.to_string().into(),
                action: "reach its host",
                source: std::io::Error::other(error.to_string()),
            },
            _ => OpenError::Refused {
                why: error.to_string(),
            },
        })
    }
}

impl Remotes for EtherRemotes {
    fn open(&self, name: &str, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
        let remote: Remote = name.parse().map_err(|error| OpenError::Refused {
            why: format!("{error}"),
        })?;
        // Held while a device is attached: a second session of this process would end the first one.
        let mut open = unpoisoned(&self.open);
        if let Some(device) = open.get(name).and_then(Weak::upgrade)
            && (options.read_only || !device.is_read_only())
        {
            return match device.ended() {
                None => Ok(device),
                Some(why) => Err(OpenError::Refused {
                    why: format!("{name}: {why}"),
                }),
            };
        }
        let device = self.attach(remote, options.read_only)?;
        open.insert(name.to_owned(), Arc::downgrade(&device));
        Ok(device)
    }

    fn holder(&self, name: &str) -> Option<u32> {
        holder(&name.parse().ok()?, self.options.ethertype)
    }
}
