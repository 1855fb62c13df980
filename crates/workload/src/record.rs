//! The result of a run as a line of JSON, with the conditions under which it was measured.

use std::collections::BTreeMap;

use jericho_sys::process::{cpu_model, kernel_release};
use jericho_topology::Topology;
use serde::{Deserialize, Serialize};

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
    /// The paper's name of the placement.
    pub placement: String,
    /// Number of threads.
    pub threads: usize,
    /// The place of each thread.
    pub seats: Vec<SeatRecord>,
    /// Whether threads streamed through memory beside the workload.
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
    /// Whether the kernel confirmed after the run that threads and memory were where the seats say. `None`: they say nothing, or fio made the operations.
    #[serde(default)]
    pub confirmed: Option<bool>,
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

/// Threads that streamed through memory beside a workload.
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
        }
    }
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
