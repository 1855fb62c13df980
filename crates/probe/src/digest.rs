//! A short name for a topology, which tells whether a report is about the present one.

use std::hash::Hasher;

use jericho_topology::Topology;
use siphasher::sip::SipHasher13;

/// Returns 16 hexadecimal digits that depend on the nodes of a topology: their CPUs, distances and memory nodes. They do not depend on the
/// size of memory, which differs a little from one kernel to the next, nor on where the topology comes from.
pub fn digest(topology: &Topology) -> String {
    let mut hasher = SipHasher13::new();
    for node in &topology.nodes {
        let line = format!(
            "node {} cpus {:?} distances {:?} memory {} {:?} threads {}\n",
            node.id,
            node.cpus,
            node.distances,
            node.memory_bytes > 0,
            node.kernel_node,
            node.nearest_cpu_node
        );
        hasher.write(line.as_bytes());
    }
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_depends_on_the_nodes_and_on_nothing_else() {
        let two = Topology::from_spec("virtual:2").unwrap();
        let of_two = digest(&two);
        assert_eq!(of_two.len(), 16);
        let mut same = two.clone();
        same.source = "file:/elsewhere".into();
        same.nodes[0].memory_bytes += 4096;
        assert_eq!(digest(&same), of_two);
        let change = |change: &dyn Fn(&mut Topology)| {
            let mut other = two.clone();
            change(&mut other);
            digest(&other)
        };
        assert_ne!(change(&|t| t.nodes[0].cpus.push(900)), of_two);
        assert_ne!(change(&|t| t.nodes[0].distances[1] += 1), of_two);
        assert_ne!(change(&|t| t.nodes[1].memory_bytes = 0), of_two);
        assert_ne!(change(&|t| t.nodes[1].kernel_node = Some(7)), of_two);
        assert_ne!(change(&|t| drop(t.nodes.pop())), of_two);
    }
}
