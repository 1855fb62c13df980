//! NUMA nodes, CPUs, distances and device locality: from sysfs, or virtual
