//! What the daemons of mounts tell a run of `jericho bench`.

use std::path::{Path, PathBuf};

use jericho_daemon::Stat;
use jericho_topology::NodeId;
use jericho_workload::options::Migration;
use jericho_workload::reach::{Daemon, InlinePages, MountFacts, Route};

use crate::control;

/// The mounts that contain these directories.
pub struct OnMounts {
    /// One directory for each target on a Jericho mount.
    dirs: Vec<PathBuf>,
    /// How this process reaches them.
    route: Route,
}

impl OnMounts {
    /// Asks about these targets. Those that are on no Jericho mount count for nothing.
    pub fn of(targets: &[PathBuf], route: Route) -> OnMounts {
        let on_jericho = targets
            .iter()
            .filter(|target| control::where_is(target).is_ok());
        OnMounts {
            dirs: on_jericho.cloned().collect(),
            route,
        }
    }
}

impl Daemon for OnMounts {
    fn home_of(&self, path: &Path) -> Option<NodeId> {
        let found = control::where_is(path).ok()?;
        Some(NodeId(found.home_node))
    }

    fn set_migration(&self, dir: &Path, migration: Migration) -> jericho_workload::Result<()> {
        let set = control::set_threads(dir, migration.name());
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
        if mounts.is_empty() {
            return None;
        }
        let clients = mounts.iter().flat_map(|stat| &stat.clients);
        let own = std::process::id();
        let pages = clients
            .filter(|client| client.pid == own)
            .map(|client| (client.local, client.remote));
        inline_pages(pages, self.route)
    }

    fn devices_of(&self, path: &Path) -> Option<Vec<PathBuf>> {
        devices_in(&control::stat(path).ok()?)
    }

    fn mount_of(&self, path: &Path) -> Option<MountFacts> {
        Some(facts_in(&control::stat(path).ok()?))
    }
}

/// Adds up the local and remote pages of this process's clients. Returns `None` if there must be a client and is none: in a container, the daemon
/// may know this process by another id.
fn inline_pages(clients: impl Iterator<Item = (u64, u64)>, route: Route) -> Option<InlinePages> {
    let mut clients = clients.peekable();
    if route == Route::Fast {
        clients.peek()?;
    }
    Some(
        clients.fold(InlinePages::default(), |sum, (local, remote)| InlinePages {
            local: sum.local.saturating_add(local),
            remote: sum.remote.saturating_add(remote),
        }),
    )
}

/// Returns how a volume is mounted.
pub fn facts_in(stat: &Stat) -> MountFacts {
    let known = |text: &String| (!text.is_empty()).then(|| text.clone());
    MountFacts {
        transport: known(&stat.transport),
        cache_bytes: stat.cache_bytes(),
        build: known(&stat.build),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_the_daemon_does_not_know_has_no_count_instead_of_zero() {
        let none = || std::iter::empty();
        assert_eq!(inline_pages(none(), Route::Fast), None);
        let zero = InlinePages::default();
        assert_eq!(inline_pages(none(), Route::Kernel), Some(zero));
        let two = [(1, 10), (2, 20)].into_iter();
        let sum = InlinePages {
            local: 3,
            remote: 30,
        };
        assert_eq!(inline_pages(two, Route::Fast), Some(sum));
    }
}
