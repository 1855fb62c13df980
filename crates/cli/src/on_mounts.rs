//! What the daemons of mounts tell a run of `jericho bench`.

use std::path::{Path, PathBuf};

use jericho_daemon::{Stat, ThreadPolicy};
use jericho_topology::NodeId;
use jericho_workload::reach::{Daemon, InlinePages};

use crate::control;

/// The mounts that contain these directories.
pub struct OnMounts {
    /// One directory for each target on a Jericho mount.
    dirs: Vec<PathBuf>,
}

impl OnMounts {
    /// Asks about these targets. Those that are on no Jericho mount count for nothing.
    pub fn of(targets: &[PathBuf]) -> OnMounts {
        let on_jericho = targets
            .iter()
            .filter(|target| control::where_is(target).is_ok());
        OnMounts {
            dirs: on_jericho.cloned().collect(),
        }
    }
}

impl Daemon for OnMounts {
    fn home_of(&self, path: &Path) -> Option<NodeId> {
        let found = control::where_is(path).ok()?;
        Some(NodeId(found.home_node))
    }

    fn never_migrate(&self, dir: &Path) -> jericho_workload::Result<()> {
        let set = control::set_threads(dir, ThreadPolicy::Never.name());
        set.map_err(|failure| jericho_workload::Error::new(failure.to_string()))
    }

    fn inline_pages(&self) -> Option<InlinePages> {
        let mut mounts: Vec<Stat> = Vec::new();
        for dir in &self.dirs {
            let stat = control::stat(dir).ok()?;
            // Several targets may be on one mount.
            if mounts.iter().all(|seen| seen.uuid != stat.uuid) {
                mounts.push(stat);
            }
        }
        let own = std::process::id();
        let clients = mounts.iter().flat_map(|stat| &stat.clients);
        let mut pages = InlinePages::default();
        for client in clients.filter(|client| client.pid == own) {
            pages.local = pages.local.saturating_add(client.local);
            pages.remote = pages.remote.saturating_add(client.remote);
        }
        (!mounts.is_empty()).then_some(pages)
    }

    fn devices_of(&self, path: &Path) -> Option<Vec<PathBuf>> {
        devices_in(&control::stat(path).ok()?)
    }
}

/// Returns the devices of a volume: the lines of its counters begin with their names. `None` if a line is not understood.
pub fn devices_in(stat: &Stat) -> Option<Vec<PathBuf>> {
    let name = |line: &String| {
        let end = line.find(" (")?;
        Some(PathBuf::from(&line[..end]))
    };
    stat.devices.iter().map(name).collect()
}
