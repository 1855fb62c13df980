//! The result of a run as a line of JSON, with the conditions under which it was measured.

use std::collections::BTreeMap;
use std::fs;

use jericho_sys::build_id::build_id;
use jericho_sys::hypervisor;
use jericho_sys::limits::Memory;
use jericho_sys::process::{cpu_model, kernel_release};
use jericho_topology::Topology;
use serde::{Deserialize, Serialize};

use crate::disks::Disk;
use crate::machine::{Cpio, CpuSeconds};
use crate::meter::Meter;
use crate::reach::InlinePages;
use crate::seats::Seat;

/// Version of the lines.
pub const FORMAT: u32 = 1;

/// Percentiles that a record has.
const PERCENTILES: [(&str, f64); 5] = [
    ("p50", 50.0),
    ("p90", 90.0),
    ("p99", 99.0),
    ("p99.9", 99.9),
    ("p99.99", 99.99),
];

/// Kinds of CPU time that the kernel may count at ticks of the clock, depending on its configuration. A thread that always sleeps at the tick is not seen
/// then. The I/O wait is, besides, that of CPUs with nothing else to run (proc(5)).
pub const SAMPLED: [&str; 6] = ["user", "system", "idle", "io_wait", "irq", "soft_irq"];

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the line.
    pub format: u32,
    /// The way to the data: `directory`, `device`, or of a Jericho volume `mount`, `fast` or `process`. Empty in lines of older programs.
    #[serde(default)]
    pub path: String,
    /// What made the operations: `jericho`, or another program with its version. Empty in lines of older programs.
    #[serde(default)]
    pub generator: String,
    /// Name of the workload.
    pub workload: String,
    /// Its form, for example the size and direction of requests.
    pub variant: String,
    /// Directories or devices.
    pub targets: Vec<String>,
    /// What each target is on, in the order of `targets`. `None` in lines of older programs.
    #[serde(default)]
    pub targets_on: Option<Vec<TargetRecord>>,
    /// The disks below the targets. `None`: some are unknown.
    #[serde(default)]
    pub disks: Option<Vec<Disk>>,
    /// The paper's name of the placement.
    pub placement: String,
    /// Number of threads.
    pub threads: usize,
    /// The place of each thread.
    pub seats: Vec<SeatRecord>,
    /// Whether threads of mstress copied memory beside the workload.
    pub with_mstress: bool,
    /// What these threads did. `None`: there were none.
    #[serde(default)]
    pub mstress: Option<MstressRecord>,
    /// Length of the measurement.
    pub seconds: f64,
    /// Bytes of all files of the run together, at most. 0 on devices.
    pub data_bytes: u64,
    /// Whether the sizes are the papers'.
    pub as_paper: bool,
    /// Seed of offsets and contents.
    pub seed: u64,
    /// How direct transfers were made. Empty for workloads whose files are cached.
    pub engine: Vec<String>,
    /// Bytes moved per second.
    pub throughput_bytes_per_s: f64,
    /// Bytes read per second.
    pub read_bytes_per_s: f64,
    /// Bytes written per second.
    pub written_bytes_per_s: f64,
    /// Operations per second.
    pub iops: f64,
    /// Bytes per second of the devices or threads of each node.
    pub throughput_bytes_per_s_by_node: BTreeMap<u16, f64>,
    /// Latencies.
    pub latency_ns: BTreeMap<String, u64>,
    /// Share of the accesses whose thread was on the node of the cached page, or with direct I/O of the buffer. `None`: unknown.
    pub local_share: Option<f64>,
    /// Whether the kernel confirmed after the run that all of `confirmed_for` was where the seats say. `None`: the seats name no node, or fio made the operations.
    #[serde(default)]
    pub confirmed: Option<bool>,
    /// What the kernel was asked about after the run: `threads`, `buffers`, `cached pages`. Empty in lines of older programs.
    #[serde(default)]
    pub confirmed_for: Vec<String>,
    /// When Jericho moved threads of the run to their data. `None`: the targets are on no Jericho volume.
    #[serde(default)]
    pub migration: Option<String>,
    /// Pages that the threads accessed inline, as Jericho counts them. `None`: no volume is mounted, or another program made the operations.
    #[serde(default)]
    pub inline_pages: Option<InlinePages>,
    /// CPU time of the whole machine.
    pub cpu_seconds: CpuSeconds,
    /// Sectors that the devices moved. `None`: there is no block device, or it is on another host.
    pub device_sectors: Option<u64>,
    /// Cycles of the whole machine for each sector of 512 bytes that the devices moved.
    pub cpio: Option<Cpio>,
    /// Cycles of the whole machine for each 512 bytes that the programs moved.
    pub cycles_per_moved_sector: Option<Cpio>,
    /// The kinds of CPU time that the kernel may sample.
    pub sampled: Vec<String>,
    /// The machine.
    pub machine: MachineRecord,
    /// What a reader must know about the run.
    pub notes: Vec<String>,
}

/// Threads of mstress that copied memory beside a workload.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MstressRecord {
    /// Number of the threads.
    pub threads: usize,
    /// Bytes that they read and wrote per second.
    pub bytes_per_s: f64,
}

/// The place of a thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeatRecord {
    /// Home node of the device.
    pub device: Option<u16>,
    /// Node of the cached pages, with direct I/O of the buffer.
    pub frame: Option<u16>,
    /// Node of the thread.
    pub thread: Option<u16>,
}

impl From<&Seat> for SeatRecord {
    fn from(seat: &Seat) -> SeatRecord {
        SeatRecord {
            device: seat.device.map(|id| id.0),
            frame: seat.frame.map(|id| id.0),
            thread: seat.thread.map(|id| id.0),
        }
    }
}

/// What a target is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// Type of the filesystem, as the kernel names it. `None`: a device, or unknown.
    pub filesystem: Option<String>,
    /// How the kernel sends the requests of a Jericho mount: `device` or `ring`. `None`: no Jericho mount, or unknown.
    pub transport: Option<String>,
    /// Size of the cache of a Jericho volume. `None`: no such volume, or unknown.
    pub cache_bytes: Option<u64>,
    /// Build of the daemon of a Jericho volume. `None`: no such volume, or unknown.
    pub build: Option<String>,
}

/// The machine and the programs of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Model of the CPU, from /proc/cpuinfo.
    pub cpu_model: String,
    /// CPUs that the run could use.
    pub cpus: usize,
    /// Number of nodes.
    pub nodes: usize,
    /// Where the topology comes from.
    pub topology: String,
    /// Version of the kernel.
    pub kernel: String,
    /// Rate of the time stamp counter. `None`: the processor has none.
    pub tsc_hz: Option<f64>,
    /// Version of Jericho.
    pub jericho: String,
    /// Build of the program that measured: its build id. `None`: it has none.
    #[serde(default)]
    pub build: Option<String>,
    /// Memory of the machine.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Vendor of the hypervisor below the machine, or `none`. `None`: unknown.
    #[serde(default)]
    pub hypervisor: Option<String>,
    /// Whether the kernel was told to make nodes of the memory of one: `numa=fake`. `None`: unknown.
    #[serde(default)]
    pub fake_nodes: Option<bool>,
    /// Digest of the nodes, as in the report of `jericho probe`. `None`: unknown.
    #[serde(default)]
    pub topology_digest: Option<String>,
}

impl MachineRecord {
    /// Describes this machine.
    pub fn of(topology: &Topology, tsc_hz: Option<f64>) -> MachineRecord {
        MachineRecord {
            cpu_model: cpu_model(),
            cpus: topology.nodes.iter().map(|node| node.cpus.len()).sum(),
            nodes: topology.nodes.len(),
            topology: topology.source.clone(),
            kernel: kernel_release(),
            tsc_hz,
            jericho: env!("CARGO_PKG_VERSION").to_owned(),
            build: build_id(),
            memory_bytes: Memory::read().ok().map(|memory| memory.total_bytes),
            hypervisor: hypervisor::vendor(),
            fake_nodes: fs::read_to_string("/proc/cmdline")
                .ok()
                .map(|line| has_fake_nodes(&line)),
            topology_digest: None,
        }
    }

    /// Returns what a reader of the run's speeds must know about the machine.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.hypervisor.as_deref() == Some(hypervisor::EMULATOR) {
            notes.push(
                "The CPUs are emulated (QEMU's TCG): the times say nothing about real machines."
                    .into(),
            );
        }
        if self.fake_nodes == Some(true) {
            notes.push(
                "The nodes are fake (numa=fake): the times say nothing about locality.".into(),
            );
        }
        notes
    }
}

/// Returns whether the kernel's command line asks for nodes that are parts of one. The words behind `--` are for the first program.
fn has_fake_nodes(command_line: &str) -> bool {
    let words = command_line.split_ascii_whitespace();
    let mut words = words.take_while(|word| *word != "--");
    words.any(|word| word.starts_with("numa=fake"))
}

/// Returns the percentiles, the mean, the least and the greatest latency.
pub fn latencies(meter: &Meter) -> BTreeMap<String, u64> {
    let histogram = &meter.latency_ns;
    if histogram.is_empty() {
        return BTreeMap::new();
    }
    let at = |(name, percentile): (&str, f64)| {
        (name.to_owned(), histogram.value_at_percentile(percentile))
    };
    let others = [
        ("min".to_owned(), histogram.min()),
        ("mean".to_owned(), histogram.mean() as u64),
        ("max".to_owned(), histogram.max()),
    ];
    PERCENTILES.map(at).into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulated_cpus_and_fake_nodes_are_told_to_the_reader() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        let mut machine = MachineRecord::of(&topology, None);
        (machine.hypervisor, machine.fake_nodes) = (Some("KVMKVMKVM".into()), Some(false));
        assert!(machine.notes().is_empty());
        machine.hypervisor = Some("TCGTCGTCGTCG".into());
        assert!(machine.notes()[0].contains("nothing about real machines"));
        (machine.hypervisor, machine.fake_nodes) = (None, Some(true));
        assert!(machine.notes()[0].contains("nothing about locality"));
        assert!(machine.memory_bytes.is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn fake_nodes_are_those_that_the_kernel_was_asked_for() {
        assert!(has_fake_nodes("quiet numa=fake=4\n"));
        assert!(has_fake_nodes("numa=fake=2U"));
        assert!(!has_fake_nodes("quiet numa=off"));
        assert!(!has_fake_nodes("quiet -- numa=fake=4"));
        assert!(!has_fake_nodes(""));
    }

    #[test]
    fn a_line_of_an_older_program_is_read_without_the_later_fields() {
        let old = r#"{"format":1,"workload":"scan","variant":"read","targets":["/mnt"],"placement":"best","threads":1,"seats":[],"with_mstress":false,"seconds":1.0,"data_bytes":0,"as_paper":false,"seed":1,"engine":[],"throughput_bytes_per_s":1.0,"read_bytes_per_s":1.0,"written_bytes_per_s":0.0,"iops":1.0,"throughput_bytes_per_s_by_node":{},"latency_ns":{},"local_share":null,"cpu_seconds":{"user":0.0,"system":0.0,"idle":0.0,"io_wait":0.0,"irq":0.0,"soft_irq":0.0,"steal":0.0},"device_sectors":null,"cpio":null,"cycles_per_moved_sector":null,"sampled":[],"machine":{"cpu_model":"Example CPU","cpus":1,"nodes":1,"topology":"sysfs","kernel":"6.18","tsc_hz":null,"jericho":"0.1.0"},"notes":[]}"#;
        let record: Record = serde_json::from_str(old).unwrap();
        assert_eq!((record.targets_on, record.disks), (None, None));
        assert!(record.confirmed_for.is_empty());
        let machine = record.machine;
        assert_eq!((machine.build, machine.hypervisor), (None, None));
        assert_eq!((machine.memory_bytes, machine.fake_nodes), (None, None));
        assert_eq!(machine.topology_digest, None);
    }
}
