//! One line of results (`docs/formats/results.md`), checked: a value outside of its bounds refuses the line.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::text;

/// Version of the lines that this build reads.
pub const FORMAT: u64 = 1;
/// Longest line. A run of 4096 threads, each with its seat, takes a quarter of it.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// Longest text in a line.
const TEXT_BYTES_MAX: usize = 4096;
/// Most texts in a list of a line.
const TEXTS_MAX: usize = 1000;
/// Percentiles that the page shows, by their names in `latency_ns`.
pub const PERCENTILES: [&str; 5] = ["p50", "p90", "p99", "p99.9", "p99.99"];
/// Names of the kinds of CPU time, in the order of [`Cycles::kinds`].
pub const KINDS: [&str; 7] = [
    "user", "system", "idle", "io_wait", "irq", "soft_irq", "steal",
];

/// One run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Run {
    /// Version of the line.
    pub format: u64,
    /// The way to the data. Empty: unknown.
    #[serde(default)]
    pub path: String,
    /// What made the operations. Empty: `jericho bench`.
    #[serde(default)]
    pub generator: String,
    /// For direct workloads, what made the transfers. Empty: unknown.
    #[serde(default)]
    pub engine: Vec<String>,
    /// Whether the kernel confirmed after the run that all of `confirmed_for` was where the placement says. `None`: unknown.
    #[serde(default)]
    pub confirmed: Option<bool>,
    /// What the kernel was asked about. Empty: unknown.
    #[serde(default)]
    pub confirmed_for: Vec<String>,
    /// Name of the workload.
    pub workload: String,
    /// Its form.
    pub variant: String,
    /// Directories or devices.
    pub targets: Vec<String>,
    /// What each target is on. `None`: unknown.
    #[serde(default)]
    pub targets_on: Option<Vec<TargetOn>>,
    /// The disks below the targets. `None`: unknown.
    #[serde(default)]
    pub disks: Option<Vec<Disk>>,
    /// Name of the placement.
    pub placement: String,
    /// Number of threads.
    pub threads: u32,
    /// Whether threads of mstress copied memory beside the workload.
    #[serde(default)]
    pub with_mstress: bool,
    /// Length of the measurement.
    pub seconds: f64,
    /// Bytes of the run's files, at most.
    pub data_bytes: u64,
    /// Whether the sizes are the papers'.
    #[serde(default)]
    pub as_paper: bool,
    /// Seed of offsets and contents.
    pub seed: u64,
    /// Bytes moved per second.
    pub throughput_bytes_per_s: f64,
    /// Operations per second.
    pub iops: f64,
    /// Bytes moved per second, by node.
    #[serde(default)]
    pub throughput_bytes_per_s_by_node: BTreeMap<u16, f64>,
    /// Latencies by name.
    #[serde(default)]
    pub latency_ns: BTreeMap<String, u64>,
    /// Share of local accesses. `None`: unknown.
    pub local_share: Option<f64>,
    /// Sectors of 512 bytes that the devices moved. `None`: unknown.
    #[serde(default)]
    pub device_sectors: Option<u64>,
    /// Cycles of the whole machine for each sector that the devices moved. `None`: unknown, or the data was cached.
    pub cpio: Option<Cycles>,
    /// Cycles of the whole machine for each 512 bytes that the programs moved.
    pub cycles_per_moved_sector: Option<Cycles>,
    /// Pages that the threads accessed inline. `None`: unknown.
    #[serde(default)]
    pub inline_pages: Option<InlinePages>,
    /// When Jericho moved threads to their data. `None`: unknown, or the targets are on no Jericho volume.
    #[serde(default)]
    pub migration: Option<String>,
    /// The kinds of CPU time that the kernel samples.
    #[serde(default)]
    pub sampled: Vec<String>,
    /// The machine.
    pub machine: Machine,
    /// What a reader must know.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// What a target is on. Older lines do not tell it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub struct TargetOn {
    /// Type of the filesystem. `None`: a device, or unknown.
    pub filesystem: Option<String>,
    /// How the kernel sends requests to the daemon of a Jericho mount. `None`: no mount, or unknown.
    pub transport: Option<String>,
    /// Size of the cache of a Jericho volume. `None`: no volume, or unknown.
    pub cache_bytes: Option<u64>,
    /// Build of the daemon of a Jericho volume. `None`: no volume, or unknown.
    pub build: Option<String>,
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// The kernel's name.
    pub name: String,
    /// Its model. `None`: unknown.
    pub model: Option<String>,
    /// Its size. `None`: unknown.
    pub size_bytes: Option<u64>,
    /// Whether it is a rotating one. `None`: unknown.
    pub rotational: Option<bool>,
}

impl Run {
    /// Returns the builds of the daemons, each once, short enough for people.
    pub fn daemon_builds(&self) -> Vec<String> {
        let mut builds: Vec<String> = Vec::new();
        for on in self.targets_on.iter().flatten() {
            let build = on.build.as_deref().map(text::short);
            builds.extend(build.filter(|build| !builds.contains(build)));
        }
        builds
    }

    /// Returns whether the devices moved less than half of the bytes that the programs moved.
    fn was_cached(&self) -> bool {
        let moved_bytes = self.throughput_bytes_per_s * self.seconds;
        let of_devices = self.device_sectors.map(|sectors| sectors as f64 * 512.0);
        of_devices.is_some_and(|bytes| bytes < moved_bytes / 2.0)
    }
}

/// Pages that threads accessed inline, by the place of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct InlinePages {
    /// On the node of the thread.
    pub local: u64,
    /// On other nodes.
    pub remote: u64,
}

/// Cycles by kind of CPU time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Cycles {
    /// Programs.
    pub user: f64,
    /// The kernel, for programs.
    pub system: f64,
    /// Nothing to run.
    pub idle: f64,
    /// Nothing to run, while a thread waited for a device.
    pub io_wait: f64,
    /// Interrupts.
    pub irq: f64,
    /// Deferred work of interrupts.
    pub soft_irq: f64,
    /// Taken by the host of a virtual machine.
    #[serde(default)]
    pub steal: f64,
}

impl Cycles {
    /// Returns all kinds, in the order of [`KINDS`].
    pub fn kinds(&self) -> [f64; 7] {
        [
            self.user,
            self.system,
            self.idle,
            self.io_wait,
            self.irq,
            self.soft_irq,
            self.steal,
        ]
    }
}

/// The machine and the programs of a run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu_model: String,
    /// CPUs that the run could use.
    pub cpus: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Where the topology comes from.
    pub topology: String,
    /// Version of the kernel.
    pub kernel: String,
    /// Rate of the time stamp counter. It is measured, so it differs a little from run to run.
    pub tsc_hz: Option<f64>,
    /// Version of Jericho.
    pub jericho: String,
    /// Build of the program that measured. `None`: unknown.
    #[serde(default)]
    pub build: Option<String>,
    /// Memory of the machine. `None`: unknown.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Vendor of the hypervisor, or `none`. `None`: unknown.
    #[serde(default)]
    pub hypervisor: Option<String>,
    /// Whether the kernel makes several nodes of one (`numa=fake`). `None`: unknown.
    #[serde(default)]
    pub fake_nodes: Option<bool>,
    /// Digest of the nodes, as in the report of a probe. `None`: unknown.
    #[serde(default)]
    pub topology_digest: Option<String>,
}

/// The vendor that QEMU's emulation of CPUs shows, and the one of KVM, under which CPUs are real.
const TCG: &str = "TCGTCGTCGTCG";
const KVM: &str = "KVMKVMKVM";

/// What the speeds of a machine can tell about placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// It has several nodes.
    Real,
    /// It has one node.
    OneNode,
    /// Its nodes are parts of one, for Jericho.
    Virtual,
    /// Its nodes are parts of one, for the kernel.
    Fake,
    /// It is emulated.
    Emulated,
}

impl Machine {
    /// Names the properties in which two machines differ. The version of Jericho is none of them.
    pub fn differences(&self, other: &Machine) -> Vec<&'static str> {
        /// A property that one machine does not tell is no difference.
        fn differ<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
            one.zip(other).is_some_and(|(one, other)| one != other)
        }
        let digest = |machine: &Machine| machine.topology_digest.clone();
        [
            ("model of the CPU", self.cpu_model != other.cpu_model),
            ("number of CPUs", self.cpus != other.cpus),
            ("number of nodes", self.nodes != other.nodes),
            (
                "topology",
                self.topology != other.topology || differ(digest(self), digest(other)),
            ),
            ("memory", differ(self.memory_gib(), other.memory_gib())),
            (
                "hypervisor",
                differ(self.hypervisor.as_ref(), other.hypervisor.as_ref()),
            ),
            ("fake nodes", differ(self.fake_nodes, other.fake_nodes)),
            ("kernel", self.kernel != other.kernel),
        ]
        .into_iter()
        .filter_map(|(name, differs)| differs.then_some(name))
        .collect()
    }

    /// Returns the size of the memory in whole GiB. The kernel's own part of the memory, which it does not count, differs a little from start to start.
    pub fn memory_gib(&self) -> Option<u64> {
        let bytes = self.memory_bytes?;
        Some(bytes.saturating_add(1 << 29) >> 30)
    }

    /// Returns the version of Jericho with the build, if it is known.
    pub fn jericho_build(&self) -> String {
        match &self.build {
            Some(build) => format!("{}, build {}", self.jericho, text::short(build)),
            None => self.jericho.clone(),
        }
    }

    /// Returns what its speeds can tell about placement.
    pub fn evidence(&self) -> Evidence {
        let is_emulated = match self.hypervisor.as_deref() {
            Some(TCG) => true,
            Some(KVM) => false,
            // QEMU names its own CPU models so. A guest under KVM usually has the name of the host's CPU.
            _ => self.cpu_model.contains("QEMU"),
        };
        if is_emulated {
            Evidence::Emulated
        } else if self.nodes <= 1 {
            Evidence::OneNode
        } else if self.topology.starts_with("virtual") {
            Evidence::Virtual
        } else if self.fake_nodes == Some(true) {
            Evidence::Fake
        } else {
            Evidence::Real
        }
    }
}

impl Evidence {
    /// Returns what a reader of the speeds must know.
    pub fn warning(self) -> Option<&'static str> {
        match self {
            Evidence::Real => None,
            Evidence::OneNode => Some(
                "This machine has one node: effects of locality cannot appear on it. Its speeds are those of the software alone.",
            ),
            Evidence::Virtual => Some(
                "The nodes of this machine are virtual, parts of one memory. Shares of local accesses show where things are; an effect of placement on speed cannot appear.",
            ),
            Evidence::Fake => Some(
                "The nodes of this machine are fake (numa=fake), parts of one memory: its times say nothing about locality. Shares of local accesses show where things are.",
            ),
            Evidence::Emulated => Some(
                "This machine is emulated, so its times mean nothing: they say nothing about real machines. Throughput is shown only in relation to that of other runs on it; latencies and cycles are left out.",
            ),
        }
    }
}

/// Reads a line. The error is the cause, without file and line.
pub fn parse(line: &[u8]) -> Result<Run, LineError> {
    /// The only field that all formats share.
    #[derive(Deserialize)]
    struct Version {
        format: Option<u64>,
    }
    let line = line.trim_ascii_end();
    let error = match serde_json::from_slice::<Run>(line) {
        Ok(mut run) => {
            check_format(Some(run.format))?;
            check(&run).map_err(LineError::Other)?;
            // Older lines have this value also for the few sectors of a journal beside a cached run. Later lines are right, and know the bytes that were moved.
            if run.targets_on.is_none() && run.was_cached() {
                run.cpio = None;
            }
            return Ok(run);
        }
        Err(error) => LineError::of(error, line),
    };
    // A line of another format may lack fields, and its format says more.
    let version: Version =
        serde_json::from_slice(line).map_err(|error| LineError::of(error, line))?;
    check_format(version.format)?;
    Err(error)
}

fn check_format(format: Option<u64>) -> Result<(), LineError> {
    let reason = match format {
        Some(FORMAT) => return Ok(()),
        Some(found) if found > FORMAT => format!(
            "has format {found}, and this build knows formats up to {FORMAT}; use the build that made it, or a newer one"
        ),
        Some(found) => format!("format {found} does not exist"),
        None => "has no format, so it is no result of jericho bench".into(),
    };
    Err(LineError::Other(reason))
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineError {
    /// It ends too early, so a write may have been interrupted.
    Torn,
    /// Anything else.
    Other(String),
}

impl LineError {
    /// A cut number is no end of the text but a syntax error at its end.
    fn of(error: serde_json::Error, line: &[u8]) -> LineError {
        let is_at_end = error.is_syntax() && error.column() >= line.len();
        match error.is_eof() || is_at_end {
            true => LineError::Torn,
            false => LineError::Other(format!("is no result of jericho bench: {error}")),
        }
    }
}

fn check(run: &Run) -> Result<(), String> {
    let numbers = [
        ("threads", f64::from(run.threads), (1.0, 1e6)),
        ("seconds", run.seconds, (1e-6, 1e8)),
        (
            "throughput_bytes_per_s",
            run.throughput_bytes_per_s,
            (0.0, 1e15),
        ),
        ("iops", run.iops, (0.0, 1e12)),
        (
            "local_share",
            run.local_share.unwrap_or_default(),
            (0.0, 1.0),
        ),
        (
            "machine.tsc_hz",
            run.machine.tsc_hz.unwrap_or(1e9),
            (1e3, 1e12),
        ),
        ("machine.cpus", f64::from(run.machine.cpus), (1.0, 1e6)),
        (
            "machine.nodes",
            f64::from(run.machine.nodes),
            (1.0, 65536.0),
        ),
    ];
    let by_node = run.throughput_bytes_per_s_by_node.values();
    let by_node = by_node.map(|rate| ("throughput_bytes_per_s_by_node", *rate, (0.0, 1e15)));
    let latencies = run.latency_ns.values();
    let latencies = latencies.map(|ns| ("latency_ns", *ns as f64, (0.0, 1e15)));
    let cycles = [
        ("cpio", run.cpio),
        ("cycles_per_moved_sector", run.cycles_per_moved_sector),
    ];
    let cycles = cycles.iter().flat_map(|(name, cycles)| {
        let kinds = cycles.map(|cycles| cycles.kinds());
        let kinds = kinds.into_iter().flatten();
        kinds.map(|value| (*name, value, (0.0, 1e18)))
    });
    for (name, value, (least, most)) in numbers
        .into_iter()
        .chain(by_node)
        .chain(latencies)
        .chain(cycles)
    {
        if !(least..=most).contains(&value) {
            return Err(format!(
                "{name} is {value}: expected {least} to {most}; remove the line"
            ));
        }
    }
    check_texts(run)
}

fn check_texts(run: &Run) -> Result<(), String> {
    let machine = &run.machine;
    let single = [
        &run.path,
        &run.generator,
        &run.workload,
        &run.variant,
        &run.placement,
        &machine.cpu_model,
        &machine.topology,
        &machine.kernel,
        &machine.jericho,
    ];
    let lists = [
        &run.targets,
        &run.engine,
        &run.sampled,
        &run.notes,
        &run.confirmed_for,
    ];
    let (on, disks) = (run.targets_on.as_deref(), run.disks.as_deref());
    let (on, disks) = (on.unwrap_or_default(), disks.unwrap_or_default());
    let mut lengths = lists.iter().map(|list| list.len());
    if lengths.any(|length| length > TEXTS_MAX) || on.len().max(disks.len()) > TEXTS_MAX {
        return Err(format!("a list has more than {TEXTS_MAX} texts"));
    }
    let on = on.iter();
    let on = on.flat_map(|on| [&on.filesystem, &on.transport, &on.build]);
    let of_disks = disks
        .iter()
        .flat_map(|disk| [Some(&disk.name), disk.model.as_ref()]);
    let of_machine = [
        &machine.build,
        &machine.hypervisor,
        &machine.topology_digest,
    ];
    let optional = on.chain(of_machine).map(Option::as_ref).chain(of_disks);
    let mut all = single
        .into_iter()
        .chain(&run.migration)
        .chain(lists.into_iter().flatten())
        .chain(optional.flatten());
    match all.any(|text| text.len() > TEXT_BYTES_MAX) {
        true => Err(format!("a text has more than {TEXT_BYTES_MAX} bytes")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    fn reason(line: &str) -> String {
        match parse(line.as_bytes()).unwrap_err() {
            LineError::Torn => "torn".into(),
            LineError::Other(reason) => reason,
        }
    }

    #[test]
    fn a_line_with_unknown_fields_is_read() {
        let line = example::line().replacen('{', "{\"new\":[1],", 1);
        let run = parse(line.as_bytes()).unwrap();
        assert_eq!((run.workload.as_str(), run.threads), ("scan", 4));
        assert_eq!(run.latency_ns["p99.9"], 30_000);
        assert_eq!(run.throughput_bytes_per_s_by_node[&1], 5e8);
    }

    #[test]
    fn an_older_line_is_read_and_its_later_fields_are_unknown() {
        let run = parse(example::line().as_bytes()).unwrap();
        assert_eq!((run.targets_on, run.disks), (None, None));
        assert!(run.confirmed_for.is_empty() && run.machine.hypervisor.is_none());
        let newer = example::line().replacen(
            '{',
            r#"{"targets_on":[{"filesystem":"fuse.jericho","transport":"ring","cache_bytes":1048576,"build":null}],"disks":[{"name":"vda","model":null,"size_bytes":1,"rotational":true}],"#,
            1,
        );
        let run = parse(newer.as_bytes()).unwrap();
        assert_eq!(
            run.targets_on.unwrap()[0].transport.as_deref(),
            Some("ring")
        );
        assert_eq!(run.disks.unwrap()[0].rotational, Some(true));
        let long = newer.replace("ring", &"r".repeat(5000));
        assert!(reason(&long).contains("4096 bytes"));
    }

    #[test]
    fn a_cached_run_has_no_cycles_for_each_sector_of_a_journal() {
        let run = parse(example::line().as_bytes()).unwrap();
        assert!(run.cpio.is_some());
        // 1000 sectors beside 10^9 bytes that the program moved.
        let line = example::line().replace("\"device_sectors\":2000000", "\"device_sectors\":1000");
        let run = parse(line.as_bytes()).unwrap();
        assert!(run.cpio.is_none() && run.cycles_per_moved_sector.is_some());
        // A later line has it only if the data was not cached. Its rates may be over a part of the time.
        let later = line.replacen('{', r#"{"targets_on":[],"#, 1);
        assert!(parse(later.as_bytes()).unwrap().cpio.is_some());
    }

    #[test]
    fn a_newer_format_and_other_files_are_refused_by_name() {
        let newer = example::line().replace("\"format\":1", "\"format\":7");
        assert!(reason(&newer).contains("format 7, and this build knows formats up to 1"));
        assert!(reason("{\"thread\":1,\"cpu\":0}").contains("no result of jericho bench"));
        assert!(reason("{\"format\":0}").contains("does not exist"));
        assert!(reason("[1]").contains("no result"));
        assert!(reason("{\"format\":1}").contains("missing field"));
    }

    #[test]
    fn a_line_that_was_cut_anywhere_is_torn() {
        let line = example::line();
        for end in 1..line.len() {
            assert_eq!(reason(&line[..end]), "torn", "{}", &line[..end]);
            assert_eq!(reason(&format!("{}\n", &line[..end])), "torn");
        }
    }

    #[test]
    fn impossible_values_are_refused_with_the_field() {
        for (from, to, field) in [
            (
                "\"local_share\":0.75",
                "\"local_share\":1.75",
                "local_share",
            ),
            ("\"threads\":4", "\"threads\":0", "threads"),
            ("\"seconds\":1.0", "\"seconds\":-1.0", "seconds"),
            (
                "\"throughput_bytes_per_s\":1e9",
                "\"throughput_bytes_per_s\":1e300",
                "throughput_bytes_per_s",
            ),
            ("\"user\":50.0", "\"user\":-50.0", "cpio"),
            (
                "\"p50\":10000",
                "\"p50\":18000000000000000000",
                "latency_ns",
            ),
            ("\"iops\":244140.6", "\"iops\":NaN", "no result"),
            ("\"1\":5e8", "\"1\":-5e8", "by_node"),
        ] {
            let line = example::line();
            assert!(line.contains(from), "{from}");
            let found = reason(&line.replace(from, to));
            assert!(found.contains(field), "{field}: {found}");
        }
        let long = example::line().replace("native", &"x".repeat(5000));
        assert!(reason(&long).contains("4096 bytes"));
    }

    #[test]
    fn a_machine_says_what_its_speeds_can_tell() {
        let mut machine = parse(example::line().as_bytes()).unwrap().machine;
        assert_eq!(machine.evidence(), Evidence::Real);
        let real = machine.clone();
        machine.topology = "virtual:2".into();
        assert_eq!(machine.evidence(), Evidence::Virtual);
        assert_eq!(machine.differences(&real), ["topology"]);
        machine.nodes = 1;
        assert_eq!(machine.evidence(), Evidence::OneNode);
        machine.cpu_model = "QEMU TCG CPU version 2.5+".into();
        assert_eq!(machine.evidence(), Evidence::Emulated);
        // Under KVM, QEMU's names of CPUs are of real ones.
        machine.hypervisor = Some("KVMKVMKVM".into());
        assert_eq!(machine.evidence(), Evidence::OneNode);
        // Under emulation, a CPU may have any name.
        let emulated = Machine {
            hypervisor: Some("TCGTCGTCGTCG".into()),
            ..real.clone()
        };
        assert_eq!(emulated.evidence(), Evidence::Emulated);
        // An older line does not tell the hypervisor, which is no difference.
        assert!(emulated.differences(&real).is_empty());
        let guest = Machine {
            hypervisor: Some("KVMKVMKVM".into()),
            ..real.clone()
        };
        assert_eq!(guest.differences(&emulated), ["hypervisor"]);
        let fake = Machine {
            fake_nodes: Some(true),
            ..real.clone()
        };
        assert_eq!(fake.evidence(), Evidence::Fake);
        assert!(
            fake.evidence()
                .warning()
                .unwrap()
                .contains("nothing about locality")
        );
        let other = Machine {
            tsc_hz: Some(2.5e9),
            ..real.clone()
        };
        assert!(real.differences(&other).is_empty() && real.jericho == other.jericho);
    }
}
