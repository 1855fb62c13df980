//! What the papers measured, with the place of each figure, and the rule by which results of `jericho bench` are divided to compare.
//!
//! A value is from the text of the paper; `place` names the figure or section. Values are ratios and percentages, because only these can be
//! compared between machines.

/// A paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paper {
    /// *Jericho: Achieving Scalability Through Optimal Data Placement on Multicore Systems*, MSST 2014.
    Jericho,
    /// *NUMA Implications for Storage I/O Throughput in Modern Servers*, 2012.
    Implications,
    /// *Mitigation of NUMA and synchronization effects in high-speed network storage over raw Ethernet*, 2016.
    Tyche,
}

/// All papers.
pub const PAPERS: [Paper; 3] = [Paper::Jericho, Paper::Implications, Paper::Tyche];

impl Paper {
    /// Returns title and authors.
    pub fn title(self) -> &'static str {
        match self {
            Paper::Jericho => {
                "Jericho: Achieving Scalability Through Optimal Data Placement on Multicore Systems (Mavridis and others, MSST 2014)"
            }
            Paper::Implications => {
                "NUMA Implications for Storage I/O Throughput in Modern Servers (Akram, Marazakis, Bilas, 2012)"
            }
            Paper::Tyche => {
                "Mitigation of NUMA and synchronization effects in high-speed network storage over raw Ethernet (Tyche; Gonz\u{e1}lez-F\u{e9}rez, Bilas, 2016)"
            }
        }
    }

    /// Returns the conditions of all its figures.
    pub fn conditions(self) -> &'static str {
        match self {
            Paper::Jericho => {
                "4 sockets of AMD Opteron 6272, 64 cores in 8 nodes, 256 GB of memory; Linux 2.6.32 and 3.13. FIO: 64 files of 2 GB, requests of 4 KiB, all data in memory, iterations of 30 s, the first one discarded. IOR (figures 11 and 12): requests of 4 KiB, all data in memory. dd (figure 13): files of 1 GB, direct I/O, requests of 512 KiB, 16 SSDs in RAID 0 behind 2 controllers."
            }
            Paper::Implications => {
                "2 quad-core Intel Xeon, 2 Tylersburg 5520 chipsets with 2 storage controllers each, 24 SSDs (Intel X25, 6 in RAID 0 for each of 4 instances); CentOS 5.5, Linux 2.6.18. Data sets that exceed the memory; by section V.D, IOR's reads can complete in memory."
            }
            Paper::Tyche => {
                "2 hosts, each with 2 quad-core Intel Xeon E5520 and 6 Ethernet interfaces of 10 Gbit/s, back to back; CentOS 6.3, Linux 2.6.32; direct I/O, random. The target has a RAM disk of 36 GB. In section 4 (figures 2 and 7) it completes requests without I/O, and in section 9 (figures 17 and 18) it has an emulated NVM of 12 GB."
            }
        }
    }
}

/// What a paper reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// This many times as much.
    Times(f64),
    /// A change in percent.
    Percent(f64),
    /// Changes in percent between these.
    Between(f64, f64),
    /// No noticeable difference.
    Same,
}

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Bytes per second.
    Throughput,
    /// Bytes per second of the devices of each node.
    ThroughputOfNode,
    /// Cycles of the kernel for each sector of the devices.
    CpioSystem,
    /// Cycles of waiting for devices for each sector of the devices.
    CpioIoWait,
}

/// Which numbers of threads count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// This one. Without it, the largest one that both sides have.
    Threads(u32),
    /// The one with the largest quotient, from this one on.
    Largest(u32),
    /// The one with the smallest quotient, from this one on.
    Smallest(u32),
    /// The largest one that both sides have.
    Most,
    /// The mean of all.
    Mean,
}

/// What of the results is divided by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotient {
    /// The workload and its form.
    pub form: (&'static str, &'static str),
    /// What is divided.
    pub measure: Measure,
    /// Placements of the dividend: the first one that is there.
    pub over: &'static [&'static str],
    /// Placements of the divisor: the first one that is there.
    pub under: &'static [&'static str],
    /// Which numbers of threads.
    pub at: At,
}

/// How a figure is measured here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// One placement by another one, under the same conditions.
    Placements(Quotient),
    /// A Jericho volume with the placement `best`, by another filesystem of the same machine with the placement `native`.
    Stacks {
        /// The workload and its form.
        form: (&'static str, &'static str),
        /// The number of threads. Without it, the largest one that both sides have.
        threads: u32,
    },
    /// The run beside threads that stream through memory by the run without them.
    BesideMstress {
        /// The workload and its form.
        form: (&'static str, &'static str),
        /// The placement: the first one that is there.
        placements: &'static [&'static str],
        /// The number of threads.
        threads: u32,
    },
    /// It cannot be measured, for this reason.
    Cannot(&'static str),
}

/// A figure of a paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// The paper.
    pub paper: Paper,
    /// Where in the paper.
    pub place: &'static str,
    /// The two sides of the comparison.
    pub what: &'static str,
    /// The paper's value.
    pub value: Value,
    /// How it is measured here.
    pub rule: Rule,
    /// The name of its prediction by the cost model, if there is one.
    pub prediction: Option<&'static str>,
}

/// What the cost model says of a paper's machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The name by which a figure refers to it.
    pub id: String,
    /// A ratio, or a gain or loss in percent. A loss is positive.
    pub value: f64,
}

impl Figure {
    const fn predicted(self, id: &'static str) -> Figure {
        Figure {
            prediction: Some(id),
            ..self
        }
    }
}

use At::{Largest, Mean, Most, Smallest, Threads};
use Measure::{CpioIoWait, CpioSystem, Throughput, ThroughputOfNode};
use Paper::{Implications, Jericho, Tyche};
use Value::{Between, Percent, Same, Times};

const LOCAL: &[&str] = &["TRLCPL"];
const ALL_REMOTE: &[&str] = &["TRRCPR"];
const BEST: &[&str] = &["best", "proper"];
const NATIVE: &[&str] = &["native"];
const WORST: &[&str] = &["worst"];

const fn figure(
    paper: Paper,
    place: &'static str,
    what: &'static str,
    value: Value,
    rule: Rule,
) -> Figure {
    Figure {
        paper,
        place,
        what,
        value,
        rule,
        prediction: None,
    }
}

const fn placements(
    form: (&'static str, &'static str),
    measure: Measure,
    over: &'static [&'static str],
    under: &'static [&'static str],
    at: At,
) -> Rule {
    Rule::Placements(Quotient {
        form,
        measure,
        over,
        under,
        at,
    })
}

const fn stacks(form: (&'static str, &'static str)) -> Rule {
    Rule::Stacks { form, threads: 64 }
}

/// Returns the row of a figure of *Jericho* that compares it with a kernel, at 64 threads.
const fn over_kernel(
    place: &'static str,
    what: &'static str,
    value: Value,
    variant: &'static str,
) -> Figure {
    figure(Jericho, place, what, value, stacks(("scan", variant)))
}

const NICS: Rule = Rule::Cannot(
    "Hardware: two hosts with three or six network interfaces, each on a known node. jericho bench places threads by the nodes of devices, and a device of another host has none here. make lab shows where the bytes go on emulated nodes (docs/internals/lab.md), and no speeds.",
);
const MODES: Rule = Rule::Cannot(
    "A line does not tell the sending mode. make compare-remote measures inline and queue mode on virtual links (docs/performance/method.md); two files of jericho bench with --mode inline and --mode queue can be compared with jericho report --compare.",
);

const READ_1M: (&str, &str) = ("zmio", "read-1m");
const FSMARK: (&str, &str) = ("fsmark", "files");
const SEARCH: (&str, &str) = ("search", "read-2k");
const RANDREAD: (&str, &str) = ("scan", "randread");

/// All figures.
pub const FIGURES: &[Figure] = &[
    figure(
        Jericho,
        "figure 1",
        "FIO: proper over native placement, 64 threads",
        Times(3.3),
        placements(
            ("scan", "read"),
            Throughput,
            &["proper", "best"],
            NATIVE,
            Threads(64),
        ),
    )
    .predicted("jericho-1"),
    over_kernel(
        "figure 5",
        "FIO, sequential reads: Jericho over Linux 2.6.32, 64 threads",
        Times(2.9),
        "read",
    ),
    over_kernel(
        "figure 5",
        "FIO, sequential reads: Jericho over Linux 3.13, 64 threads",
        Times(1.8),
        "read",
    ),
    over_kernel(
        "figure 6",
        "FIO, sequential writes: Jericho over Linux 2.6.32, 64 threads",
        Times(3.4),
        "write",
    ),
    over_kernel(
        "figure 6",
        "FIO, sequential writes: Jericho over Linux 3.13, 64 threads",
        Times(2.3),
        "write",
    ),
    over_kernel(
        "figure 8",
        "FIO, random reads: Jericho over Linux 2.6.32, 64 threads",
        Times(2.8),
        "randread",
    ),
    over_kernel(
        "figure 8",
        "FIO, random reads: Jericho over Linux 3.13, 64 threads",
        Times(1.7),
        "randread",
    ),
    over_kernel(
        "figure 9",
        "FIO, random writes: Jericho over Linux 2.6.32, 64 threads",
        Times(3.6),
        "randwrite",
    ),
    over_kernel(
        "figure 9",
        "FIO, random writes: Jericho over Linux 3.13, 64 threads",
        Times(2.0),
        "randwrite",
    ),
    figure(
        Jericho,
        "figure 10",
        "FIO, random reads on Linux 2.6.32: best over worst placement, 64 threads (the text names no number of threads)",
        Times(5.5),
        placements(RANDREAD, Throughput, BEST, WORST, Threads(64)),
    )
    .predicted("jericho-10-best-worst"),
    figure(
        Jericho,
        "figure 10",
        "FIO, random reads on Linux 2.6.32: native over worst placement, 64 threads (the text names no number of threads)",
        Times(2.4),
        placements(RANDREAD, Throughput, NATIVE, WORST, Threads(64)),
    )
    .predicted("jericho-10-native-worst"),
    figure(
        Jericho,
        "figure 11",
        "IOR reads of 4 KiB: Jericho over Linux 2.6.32, 64 threads (the paper has 45 to 20 GB/s)",
        Times(2.25),
        stacks(("checkpoint", "read-4k")),
    ),
    figure(
        Jericho,
        "figure 11",
        "IOR reads of 4 KiB: Jericho over Linux 3.13, 64 threads (the paper has 45 to 17.5 GB/s)",
        Times(2.57),
        stacks(("checkpoint", "read-4k")),
    ),
    figure(
        Jericho,
        "figure 12",
        "IOR writes of 4 KiB: Jericho over Linux 2.6.32, 64 threads; the paper explains it by locks",
        Percent(218.0),
        stacks(("checkpoint", "write-4k")),
    ),
    figure(
        Jericho,
        "figure 12",
        "IOR writes of 4 KiB: Jericho over Linux 3.13, 64 threads; the paper explains it by locks",
        Percent(89.0),
        stacks(("checkpoint", "write-4k")),
    ),
    figure(
        Jericho,
        "figure 13",
        "dd, direct reads of 512 KiB: proper over bad placement, the largest difference of 1 to 64 threads",
        Percent(60.0),
        placements(
            ("dd", "read-512k"),
            Throughput,
            &["proper", "best"],
            &["bad"],
            Largest(1),
        ),
    ),
    figure(
        Jericho,
        "figure 13",
        "dd, direct reads of 512 KiB: proper over bad placement, mean of all numbers of threads",
        Percent(11.0),
        placements(
            ("dd", "read-512k"),
            Throughput,
            &["proper", "best"],
            &["bad"],
            Mean,
        ),
    ),
    figure(
        Implications,
        "figure 4(b); 8 % in section V.A, with a newer kernel",
        "zmIO, direct reads: remote over local transfers, more than two instances, up to",
        Between(-40.0, -8.0),
        placements(
            READ_1M,
            Throughput,
            &["TRORP0I0"],
            &["TLORP0I0"],
            Smallest(3),
        ),
    ),
    figure(
        Implications,
        "figure 4(b)",
        "zmIO that adds up its data: remote over local processor, transfers local, four instances",
        Percent(-5.0),
        placements(
            READ_1M,
            Throughput,
            &["TLORPRIR"],
            &["TLORPLIR"],
            Threads(4),
        ),
    ),
    figure(
        Implications,
        "figure 4(c)",
        "zmIO that adds up its data: beside mstress over alone, all local, eight instances",
        Percent(-23.0),
        Rule::BesideMstress {
            form: READ_1M,
            placements: &["TLORPLIR", "best", "proper"],
            threads: 8,
        },
    )
    .predicted("001-zmio-mstress"),
    figure(
        Implications,
        "figure 5(a)",
        "fsmark, CPIO of the kernel: all remote (TRRCPR) over all local (TRLCPL)",
        Percent(40.0),
        placements(FSMARK, CpioSystem, ALL_REMOTE, LOCAL, Threads(128)),
    ),
    figure(
        Implications,
        "figure 5(a)",
        "fsmark, CPIO of the kernel: remote copies (TRLCPR) over all local (TRLCPL)",
        Percent(15.0),
        placements(FSMARK, CpioSystem, &["TRLCPR"], LOCAL, Threads(128)),
    ),
    figure(
        Implications,
        "figure 5(a)",
        "fsmark, CPIO of I/O wait: remote transfers (TRRCPR) over all local (TRLCPL)",
        Percent(130.0),
        placements(FSMARK, CpioIoWait, ALL_REMOTE, LOCAL, Threads(128)),
    ),
    figure(
        Implications,
        "figure 5(b)",
        "Psearchy, CPIO of the kernel: all remote (TRRCPR) over local transfers. Section V.C names TRRCPL as the divisor, section II local transfers: here TRLCPL",
        Percent(57.0),
        placements(SEARCH, CpioSystem, ALL_REMOTE, LOCAL, Threads(32)),
    ),
    figure(
        Implications,
        "figure 5(b)",
        "Psearchy, CPIO of I/O wait: as the row above",
        Percent(69.0),
        placements(SEARCH, CpioIoWait, ALL_REMOTE, LOCAL, Threads(32)),
    ),
    figure(
        Implications,
        "figure 5(c)",
        "IOR reads: all remote (TRRCPR) over all local (TRLCPL), 32 processes",
        Percent(-16.0),
        placements(
            ("checkpoint", "read-256k"),
            Throughput,
            ALL_REMOTE,
            LOCAL,
            Threads(32),
        ),
    ),
    figure(
        Implications,
        "figure 5(c)",
        "IOR writes: remote transfers (TRRCPR) over all local (TRLCPL), 32 processes",
        Percent(-19.0),
        placements(
            ("checkpoint", "write-256k"),
            Throughput,
            ALL_REMOTE,
            LOCAL,
            Threads(32),
        ),
    ),
    figure(
        Implications,
        "figure 5(d)",
        "Stream: all remote (TRRCPR) over all local (TRLCPL), for each of the two sets of SSDs",
        Between(-27.0, -14.0),
        placements(
            ("stream", "records-64k"),
            ThroughputOfNode,
            ALL_REMOTE,
            LOCAL,
            // Two for each set of SSDs, so the two sets need four.
            Most,
        ),
    ),
    figure(
        Implications,
        "figure 6",
        "Breakdown of Dedup, Ferret, Metis, Borealis, HBase, BDB, TPC-C, TPC-E and Tariff: different placements",
        Same,
        Rule::Cannot(
            "These applications are left out: by section VI.B of the paper they hardly stress storage.",
        ),
    ),
    figure(
        Tyche,
        "figure 2",
        "FIO, 128 kB, three interfaces: Ideal over Worst, up to",
        Percent(23.7),
        NICS,
    )
    .predicted("tyche-2"),
    figure(
        Tyche,
        "figure 7",
        "FIO, 4 to 64 kB, three interfaces, 32 threads: Ideal over Worst, up to",
        Percent(22.1),
        NICS,
    )
    .predicted("tyche-7"),
    figure(
        Tyche,
        "figure 9",
        "zmIO writes, six interfaces: Ideal over No-Opt, up to",
        Percent(85.0),
        NICS,
    )
    .predicted("tyche-9-up-to-no-opt"),
    figure(
        Tyche,
        "figure 9",
        "zmIO writes, six interfaces: Ideal over T-Numa, up to",
        Percent(37.6),
        NICS,
    )
    .predicted("tyche-9-up-to-t-numa"),
    figure(
        Tyche,
        "figure 9",
        "zmIO reads, six interfaces: Ideal over No-Opt, up to",
        Percent(84.8),
        NICS,
    ),
    figure(
        Tyche,
        "figure 11",
        "FIO, buffers even over the nodes, six interfaces: Ideal over No-Opt, up to",
        Percent(76.0),
        NICS,
    )
    .predicted("tyche-11-up-to"),
    figure(
        Tyche,
        "figure 11",
        "FIO, 4 kB, six interfaces: Ideal over No-Opt, up to",
        Percent(66.2),
        NICS,
    )
    .predicted("tyche-11-up-to-4k"),
    figure(
        Tyche,
        "figure 14(a)",
        "FIO writes, three interfaces, FIO without affinity: queue over inline mode, up to",
        Percent(64.9),
        MODES,
    ),
    figure(
        Tyche,
        "figure 14(a)",
        "FIO writes, three interfaces, FIO with affinity, 128 threads: queue over inline mode, up to",
        Percent(9.9),
        MODES,
    ),
    figure(
        Tyche,
        "figure 15(a), (b)",
        "FIO writes, six interfaces, 128 kB up to 64 threads and 512 kB up to 32 threads: inline over queue mode, up to",
        Percent(24.0),
        MODES,
    ),
    figure(
        Tyche,
        "figure 15(b)",
        "FIO writes, six interfaces, FIO with affinity, 512 kB, 128 threads: queue over inline mode, up to",
        Percent(5.0),
        MODES,
    ),
    figure(
        Tyche,
        "figure 15(a), (b)",
        "FIO writes, six interfaces, FIO without affinity, many threads: queue over inline mode, up to",
        Times(2.0),
        MODES,
    ),
    figure(
        Tyche,
        "figure 17",
        "FIO, 128 kB, emulated NVM, three interfaces: Ideal over Worst, up to",
        Percent(21.4),
        NICS,
    )
    .predicted("tyche-17"),
    figure(
        Tyche,
        "figure 18",
        "FIO writes, 128 kB, emulated NVM, three interfaces, FIO without affinity: queue over inline mode, up to",
        Percent(55.4),
        MODES,
    ),
];
