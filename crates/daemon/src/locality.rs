//! Counts local and remote accesses: whether the thread that copied ran on the node of the data.
//!
//! For requests that come through the mount, that thread is the worker. Each thread adds to cache lines of its own, so cores
//! share no counters.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use jericho_format::PAGE_BYTES;
use jericho_fs::Layout;
use jericho_storage::Appended;
use jericho_sys::affinity::CpuMask;
use jericho_topology::{NodeId, Topology};
use serde::{Deserialize, Serialize};

/// Number of lines. Further threads share lines.
const LINES: usize = 32;

/// Pages that threads accessed on the node of the data (`local`) and elsewhere (`remote`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Locality {
    /// Pages.
    pub local: u64,
    /// Pages.
    pub remote: u64,
    /// Share of `local` in all accesses, 0 to 1. `None` without accesses.
    pub share_local: Option<f64>,
}

impl Locality {
    /// Creates a value from the numbers of local and remote pages.
    pub fn new(local: u64, remote: u64) -> Locality {
        let all = local.saturating_add(remote);
        Locality {
            local,
            remote,
            share_local: (all > 0).then(|| local as f64 / all as f64),
        }
    }

    /// Returns the sum of both. Saturates, because programs write their own counts and may store any number.
    pub fn and(self, other: Locality) -> Locality {
        Locality::new(
            self.local.saturating_add(other.local),
            self.remote.saturating_add(other.remote),
        )
    }
}

#[derive(Default)]
#[repr(align(64))]
struct Line {
    local: AtomicU64,
    remote: AtomicU64,
}

struct SliceCounters {
    /// CPUs that are local to the slice: those of its home, or the nearest ones if the home has no CPUs.
    cpus: CpuMask,
    lines: [Line; LINES],
}

/// The counters of all slices.
pub(crate) struct LocalityCounters(Appended<SliceCounters>);

impl LocalityCounters {
    pub fn new(homes: impl IntoIterator<Item = NodeId>, topology: &Topology) -> LocalityCounters {
        let counters = LocalityCounters(Appended::default());
        for home in homes {
            counters.append(home, topology);
        }
        counters
    }

    /// Appends the counters of a further slice with this home.
    pub fn append(&self, home: NodeId, topology: &Topology) {
        self.0.append([SliceCounters {
            cpus: topology.cpus_of(home).iter().copied().collect(),
            lines: Default::default(),
        }]);
    }

    /// Counts an access of the calling thread to `pages` pages of a slice.
    #[inline]
    pub fn count(&self, slice: u16, pages: u64) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static LINE: usize = NEXT.fetch_add(1, Relaxed) % LINES);
        let Some(slice) = self.0.get(usize::from(slice)) else {
            return;
        };
        LINE.with(|at| {
            let line = &slice.lines[*at];
            match slice.cpus.contains(jericho_sys::rseq::current_cpu()) {
                true => line.local.fetch_add(pages, Relaxed),
                false => line.remote.fetch_add(pages, Relaxed),
            };
        });
    }

    /// Counts an access of the calling thread to a range of a file with this layout.
    #[inline]
    pub fn accessed(&self, layout: Layout, offset: u64, len: usize) {
        let end = offset + len as u64;
        for (slice, pages) in layout.runs(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            self.count(slice, pages.end - pages.start);
        }
    }

    /// Returns the local and remote pages of a slice.
    pub fn of(&self, slice: u16) -> (u64, u64) {
        let lines = self.0.get(usize::from(slice)).map_or(&[][..], |s| &s.lines);
        lines.iter().fold((0, 0), |(local, remote), line| {
            (
                local + line.local.load(Relaxed),
                remote + line.remote.load(Relaxed),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sys::affinity;

    #[test]
    fn a_thread_is_local_on_the_cpus_of_the_home_and_remote_elsewhere() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        let counters = LocalityCounters::new([NodeId(0), NodeId(1)], &topology);
        let cpus = topology.cpus_of(NodeId(1)).to_vec();
        std::thread::spawn(move || {
            affinity::set(None, &cpus).unwrap();
            counters.count(0, 5);
            counters.count(1, 7);
            counters.count(9, 1);
            // On a machine with one CPU, both nodes have it.
            let shared = topology.cpus_of(NodeId(0)) == cpus;
            assert_eq!(counters.of(0), if shared { (5, 0) } else { (0, 5) });
            assert_eq!(counters.of(1), (7, 0));
            assert_eq!(counters.of(9), (0, 0));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn concurrent_threads_lose_no_count() {
        let topology = Topology::from_spec("virtual:1").unwrap();
        let counters = LocalityCounters::new([NodeId(0)], &topology);
        std::thread::scope(|scope| {
            for _ in 0..2 * LINES {
                scope.spawn(|| (0..1000).for_each(|_| counters.count(0, 2)));
            }
        });
        let (local, remote) = counters.of(0);
        assert_eq!(local + remote, 2 * LINES as u64 * 2000);
    }

    #[test]
    fn the_share_is_none_without_accesses() {
        assert_eq!(Locality::new(0, 0).share_local, None);
        assert_eq!(Locality::new(3, 1).share_local, Some(0.75));
        let json = serde_json::to_string(&Locality::new(0, 0)).unwrap();
        assert_eq!(json, r#"{"local":0,"remote":0,"share_local":null}"#);
    }
}
