//! Where the threads that serve requests run.
//!
//! On a machine with several nodes each worker is bound to the CPUs of one node, by its number, so that every node has threads
//! that read requests. The topology holds only CPUs that the process may use, so a worker's affinity never grows.

use jericho_topology::Topology;
use rustix::thread::CpuSet;

/// The CPUs of every node that has some.
pub(crate) struct WorkerNodes {
    nodes: Vec<Vec<u32>>,
}

impl WorkerNodes {
    pub(crate) fn new(topology: &Topology) -> WorkerNodes {
        let nodes = topology
            .nodes
            .iter()
            .map(|n| n.cpus.clone())
            .filter(|c| !c.is_empty())
            .collect();
        WorkerNodes { nodes }
    }

    /// Binds no thread.
    pub(crate) fn anywhere() -> WorkerNodes {
        WorkerNodes { nodes: vec![] }
    }

    /// Returns the default number of workers: one per CPU, at least 8 and at most 32, then rounded up to equally many for each
    /// node. There are at least 8 because a request that waits for a device holds its worker, and syncs that wait at the same time
    /// share a flush.
    pub(crate) fn default_workers(&self) -> usize {
        let mut cpus: Vec<u32> = self.nodes.iter().flatten().copied().collect();
        cpus.sort_unstable();
        cpus.dedup();
        let nodes = self.nodes.len().clamp(1, 32);
        cpus.len().clamp(8, 32).next_multiple_of(nodes)
    }

    /// Binds the calling thread to the CPUs of a node. The nodes are assigned to the numbers of threads in turn.
    pub(crate) fn bind_this_thread(&self, number: usize) {
        if self.nodes.len() < 2 {
            return;
        }
        let cpus = &self.nodes[number % self.nodes.len()];
        let mut set = CpuSet::new();
        for cpu in cpus
            .iter()
            .map(|c| *c as usize)
            .filter(|c| *c < CpuSet::MAX_CPU)
        {
            set.set(cpu);
        }
        if set.count() == 0 {
            return;
        }
        if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
            // The worker then runs on any CPU, which is slower but correct.
            tracing::warn!(%error, ?cpus, "cannot bind a worker to its node");
        }
    }
}
