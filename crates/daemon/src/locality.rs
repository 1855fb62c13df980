//! Counts local and remote accesses: whether the thread that copied ran on the node of the data.
//!
//! For requests that come through the mount, that thread is the worker. Each thread adds to cache lines of its own, so cores
//! share no counters.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use jericho_format::PAGE_BYTES;
use jericho_fs::Layout;
use jericho_storage::Appended;
use jericho_sys::affinity::CpuMask;
use jericho_topology::{Node, NodeId, Topology};
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

/// Pages in spill ranges that a read has found, by slice and by the node whose CPUs are local to them.
#[derive(Default)]
pub(crate) struct SpilledPages(RefCell<Vec<(u16, u16)>>);

impl SpilledPages {
    /// Adds a page of a slice.
    pub fn add(&self, slice: u16, node: u16) {
        self.0.borrow_mut().push((slice, node));
    }

    /// Adds the pages of a part of the read.
    pub fn append(&self, part: &SpilledPages) {
        self.0.borrow_mut().extend_from_slice(&part.0.borrow());
    }

    /// Forgets all pages, because the read begins again.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

static NEXT_LINE: AtomicUsize = AtomicUsize::new(0);
thread_local!(static LINE: usize = NEXT_LINE.fetch_add(1, Relaxed) % LINES);

struct SliceCounters {
    /// CPUs that are local to the slice: those of its home, or the nearest ones if the home has no CPUs.
    cpus: CpuMask,
    lines: [Line; LINES],
}

/// The counters of all slices.
pub(crate) struct LocalityCounters {
    slices: Appended<SliceCounters>,
    /// The CPUs of each node.
    cpus_of_nodes: Vec<CpuMask>,
}

impl LocalityCounters {
    pub fn new(homes: impl IntoIterator<Item = NodeId>, topology: &Topology) -> LocalityCounters {
        let cpus_of = |node: &Node| node.cpus.iter().copied().collect();
        let counters = LocalityCounters {
            slices: Appended::default(),
            cpus_of_nodes: topology.nodes.iter().map(cpus_of).collect(),
        };
        for home in homes {
            counters.append(home, topology);
        }
        counters
    }

    /// Appends the counters of a further slice with this home.
    pub fn append(&self, home: NodeId, topology: &Topology) {
        self.slices.append([SliceCounters {
            cpus: topology.cpus_of(home).iter().copied().collect(),
            lines: Default::default(),
        }]);
    }

    /// Counts an access of the calling thread to `pages` pages of a slice.
    #[inline]
    pub fn count(&self, slice: u16, pages: u64) {
        let Some(slice) = self.slices.get(usize::from(slice)) else {
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

    /// Corrects the count of a page that the calling thread has accessed in a spill range: `count` takes the page to be on the home node. `node`
    /// is the node whose CPUs are local to the page.
    #[cold]
    pub fn spilled(&self, slice: u16, node: u16) {
        let Some(slice) = self.slices.get(usize::from(slice)) else {
            return;
        };
        let cpu = jericho_sys::rseq::current_cpu();
        // Clients may write any node there.
        let cpus = self.cpus_of_nodes.get(usize::from(node));
        let is_near = cpus.is_some_and(|cpus| cpus.contains(cpu));
        LINE.with(|at| {
            let line = &slice.lines[*at];
            let [from, to] = match (slice.cpus.contains(cpu), is_near) {
                (true, false) => [&line.local, &line.remote],
                (false, true) => [&line.remote, &line.local],
                _ => return,
            };
            // A number below zero wraps around, and so does its sum with the others.
            from.fetch_sub(1, Relaxed);
            to.fetch_add(1, Relaxed);
        });
    }

    /// Corrects the counts of pages in spill ranges.
    #[inline]
    pub fn all_spilled(&self, pages: &SpilledPages) {
        for (slice, node) in pages.0.borrow().iter() {
            self.spilled(*slice, *node);
        }
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
        let Some(slice) = self.slices.get(usize::from(slice)) else {
            return (0, 0);
        };
        let sums = slice
            .lines
            .iter()
            .fold((0u64, 0u64), |(local, remote), line| {
                (
                    local.wrapping_add(line.local.load(Relaxed)),
                    remote.wrapping_add(line.remote.load(Relaxed)),
                )
            });
        // A correction may be seen before the count that it corrects.
        let at_least_none = |sum: u64| sum.cast_signed().max(0).cast_unsigned();
        (at_least_none(sums.0), at_least_none(sums.1))
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
    fn a_page_in_a_spill_range_is_local_on_the_cpus_of_its_own_node() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        if topology.cpus_of(NodeId(0)) == topology.cpus_of(NodeId(1)) {
            eprintln!("SKIPPED: this machine has one CPU");
            return;
        }
        let counters = LocalityCounters::new([NodeId(0)], &topology);
        let cpus = topology.cpus_of(NodeId(1)).to_vec();
        std::thread::spawn(move || {
            affinity::set(None, &cpus).unwrap();
            counters.count(0, 5);
            assert_eq!(counters.of(0), (0, 5));
            let pages = SpilledPages::default();
            pages.add(0, 0);
            pages.clear();
            pages.add(0, 1);
            let part = SpilledPages::default();
            part.add(0, 1);
            pages.append(&part);
            counters.all_spilled(&pages);
            assert_eq!(counters.of(0), (2, 3));
            // Pages on the home node, and of nodes and slices that there are not.
            for (slice, node) in [(0, 0), (0, 9), (7, 1)] {
                counters.spilled(slice, node);
            }
            assert_eq!(counters.of(0), (2, 3));
            affinity::set(None, topology.cpus_of(NodeId(0))).unwrap();
            counters.spilled(0, 1);
            assert_eq!(counters.of(0), (1, 4));
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
