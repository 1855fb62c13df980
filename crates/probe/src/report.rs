//! The results of a probe. The names of the fields are a contract: of the file, and of scripts that read `jericho probe --json`.

use serde::{Deserialize, Serialize};

/// Version of the format. It grows when a field changes its meaning or goes away.
pub const FORMAT: u32 = 1;

/// A value for each pair of nodes: `matrix[from][to]`. *From* is the node of the CPUs, *to* that of the memory. `None`: not measured.
pub type Matrix<T> = Vec<Vec<Option<T>>>;

/// Largest bandwidth that a report may have. It keeps sums and quotients of a broken file in bounds.
const BYTES_PER_S_MAX: u64 = 1 << 50;
/// Bounds of times in a report, in nanoseconds.
const NS: std::ops::RangeInclusive<f64> = 0.01..=1e10;
/// Longest text in a report.
const TEXT_BYTES_MAX: usize = 4096;

/// The results of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the format.
    pub format: u32,
    /// When the probe began, in seconds since the epoch.
    pub time_s: u64,
    /// The same for people, in UTC.
    pub time: String,
    /// The probe was a short one, whose figures scatter more.
    pub quick: bool,
    /// The nodes.
    pub topology: TopologyReport,
    /// The machine.
    pub machine: Machine,
    /// How `write_bandwidth_bytes_per_s` was stored: `non-temporal stores` or `ordinary stores`. With ordinary stores, the CPU also reads the
    /// lines that it overwrites. The figure does not count these reads.
    pub write_stores: String,
    /// All CPUs of a node read.
    pub read_bandwidth_bytes_per_s: Matrix<u64>,
    /// All CPUs of a node write.
    pub write_bandwidth_bytes_per_s: Matrix<u64>,
    /// One CPU of a node works alone.
    pub one_cpu: OneCpu,
    /// Time of one dependent read.
    pub latency_ns: Latency,
    /// Cost of moving a thread from a node to another one: `migration_ns[from][to]`, both with CPUs. `None` for a node and itself.
    pub migration_ns: Matrix<f64>,
    /// The devices that the user named.
    pub devices: Vec<DeviceRates>,
    /// What was not measured, and why.
    pub skipped: Vec<Skipped>,
    /// What a reader of the figures should know.
    pub notes: Vec<String>,
}

/// The nodes of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopologyReport {
    /// The digest of the nodes: see [`crate::digest()`].
    pub digest: String,
    /// Where the topology came from, for users.
    pub source: String,
    /// The nodes are virtual.
    pub is_virtual: bool,
    /// All nodes, by id.
    pub nodes: Vec<NodeReport>,
}

/// A node of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// The node's number.
    pub id: u16,
    /// CPUs of the node that this process may use.
    pub cpus: u32,
    /// The node has memory.
    pub has_memory: bool,
    /// The kernel's number of the node that the memory is bound to.
    pub kernel_node: Option<u32>,
    /// Memory that was accessed; 0: none.
    pub buffer_bytes: u64,
    /// The part of it that was on huge pages. Elsewhere, a part of the latency is that of TLB misses.
    pub huge_bytes: u64,
    /// The CPUs that stream during `latency_ns.loaded`: `node` (the others of the node), `others` (the node has one CPU, so those of all other
    /// nodes), or `none` (there is no other CPU, and no figure).
    pub loaded_by: String,
}

/// The machine of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu_model: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Size of the caches of one CPU together, from level 2 on. Buffers must exceed it.
    pub last_level_cache_bytes: u64,
}

/// Bandwidths of one CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneCpu {
    /// It reads.
    pub read_bandwidth_bytes_per_s: Matrix<u64>,
    /// It writes.
    pub write_bandwidth_bytes_per_s: Matrix<u64>,
}

/// Latencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Nothing else accesses memory, as far as the probe can ensure it.
    pub unloaded: Matrix<f64>,
    /// Other CPUs stream reads from the same memory: see [`NodeReport::loaded_by`].
    pub loaded: Matrix<f64>,
}

/// Rates of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceRates {
    /// The device as the user named it.
    pub name: String,
    /// Its kind, and whether I/O was direct.
    pub description: String,
    /// Its size.
    pub size_bytes: u64,
    /// Its home node, if it is known.
    pub home_node: Option<u16>,
    /// Sequential reads: `[node of the thread][node of the buffer]`.
    pub read_bytes_per_s: Matrix<u64>,
}

/// Something that was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// For example `memory of node 2`.
    pub what: String,
    /// The cause, and what to do.
    pub reason: String,
}

/// Returns a matrix of `count` nodes in which nothing was measured.
pub(crate) fn nothing<T: Clone>(count: usize) -> Matrix<T> {
    vec![vec![None; count]; count]
}

impl Report {
    /// Returns the number of nodes.
    pub fn node_count(&self) -> usize {
        self.topology.nodes.len()
    }

    /// Checks what the types do not say: the sizes of matrices, and that values are possible. Returns what is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        let count = self.node_count();
        let ids = self.topology.nodes.iter().map(|node| usize::from(node.id));
        if count == 0 || !ids.eq(0..count) {
            return Err("its nodes are not numbered from 0 on".into());
        }
        let bandwidths = [
            (
                "read_bandwidth_bytes_per_s",
                &self.read_bandwidth_bytes_per_s,
            ),
            (
                "write_bandwidth_bytes_per_s",
                &self.write_bandwidth_bytes_per_s,
            ),
            (
                "one_cpu.read_bandwidth_bytes_per_s",
                &self.one_cpu.read_bandwidth_bytes_per_s,
            ),
            (
                "one_cpu.write_bandwidth_bytes_per_s",
                &self.one_cpu.write_bandwidth_bytes_per_s,
            ),
        ];
        let devices = self.devices.iter();
        let devices = devices.map(|device| ("devices.read_bytes_per_s", &device.read_bytes_per_s));
        for (name, matrix) in bandwidths.into_iter().chain(devices) {
            check_matrix(name, matrix, count, |value| {
                (1..=BYTES_PER_S_MAX).contains(value)
            })?;
        }
        for (name, matrix) in [
            ("latency_ns.unloaded", &self.latency_ns.unloaded),
            ("latency_ns.loaded", &self.latency_ns.loaded),
            ("migration_ns", &self.migration_ns),
        ] {
            check_matrix(name, matrix, count, |value| NS.contains(value))?;
        }
        let texts = [
            &self.time,
            &self.topology.digest,
            &self.topology.source,
            &self.machine.cpu_model,
        ];
        let is_plain =
            |text: &str| text.len() <= TEXT_BYTES_MAX && !text.contains(char::is_control);
        match texts.into_iter().all(|text| is_plain(text)) {
            true => Ok(()),
            false => Err("a text is too long, or has control characters".into()),
        }
    }
}

fn check_matrix<T>(
    name: &str,
    matrix: &Matrix<T>,
    count: usize,
    is_possible: impl Fn(&T) -> bool,
) -> Result<(), String> {
    if matrix.len() != count || matrix.iter().any(|row| row.len() != count) {
        return Err(format!(
            "{name} has not {count} rows of {count} values, one for each node"
        ));
    }
    match matrix.iter().flatten().flatten().all(is_possible) {
        true => Ok(()),
        false => Err(format!("{name} has an impossible value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::report;
    use jericho_topology::Topology;
    use serde_json::Value;

    fn collect_keys(value: &Value, keys: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    keys.push(key.clone());
                    collect_keys(value, keys);
                }
            }
            Value::Array(values) => values.iter().for_each(|value| collect_keys(value, keys)),
            _ => {}
        }
    }

    #[test]
    fn the_page_of_the_format_has_each_field_and_the_number_of_the_format() {
        let page = include_str!("../../../docs/formats/probe.md");
        let mut report = report(&Topology::from_spec("virtual:2").unwrap());
        report.devices.push(DeviceRates {
            name: "/dev/x".into(),
            description: String::new(),
            size_bytes: 1,
            home_node: None,
            read_bytes_per_s: nothing(2),
        });
        report.skipped.push(Skipped {
            what: String::new(),
            reason: String::new(),
        });
        let mut keys = vec![];
        collect_keys(&serde_json::to_value(report).unwrap(), &mut keys);
        assert!(keys.len() > 30, "{keys:?}");
        for key in keys {
            let names = [
                format!("`{key}`"),
                format!("`{key}[]`"),
                format!(".{key}`"),
                format!(".{key}[]`"),
            ];
            assert!(names.iter().any(|name| page.contains(name)), "{key}");
        }
        assert!(page.contains(&format!("describes format {FORMAT}.")));
    }
}
