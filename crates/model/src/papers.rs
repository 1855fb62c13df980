//! Results of the papers about placement, and how to predict each.

use crate::machine::Machine;
use crate::network::{FIO_ON_FIRST, zmio_on_first};
use crate::placement::Placement;
use crate::threads::PlacementError;
use crate::values::{
    gain_of_peaks, gain_of_table_2, largest_gain, loss_beside_mstress, loss_of_remote_transfers,
    native, ratio,
};

/// A result of a paper, and how to predict it.
pub(crate) struct Judgement {
    pub id: &'static str,
    pub what: &'static str,
    /// A shipped machine.
    pub machine: &'static str,
    pub paper: f64,
    /// A ratio, or percent.
    pub is_percent: bool,
    /// The least and the largest value that meet the row. `None`: it is not judged.
    pub bounds: Option<(f64, f64)>,
    pub value: fn(&Machine) -> Result<f64, PlacementError>,
    /// Why the row is missed, or is no test.
    pub note: &'static str,
}

/// Returns 25 % around a value.
const fn quarter(value: f64) -> Option<(f64, f64)> {
    Some((value * 0.75, value * 1.25))
}

/// A result that the model does not predict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NotPredicted {
    /// The paper's measurement, with its figure.
    pub what: &'static str,
    /// The reason.
    pub reason: &'static str,
}

/// Results about placement that the model does not predict.
pub const NOT_PREDICTED: &[NotPredicted] = &[
    NotPredicted {
        what: "Jericho, figure 13: Proper is up to 60 % better than Bad, and 11 % on average, for direct reads of 512 KiB",
        reason: "the paper does not say to which nodes its storage controllers are attached, or how much they transfer",
    },
    NotPredicted {
        what: "Jericho, figure 12: IOR writes are 218 % faster than with Linux 2.6.32, and 89 % faster than with 3.13",
        reason: "locks decide them, and the model has none",
    },
];

const LINKS_SUFFICE: &str = "The links carry all that 64 threads ask for, so only the longer time of each remote copy is lost. The paper's native run loses more: \
the model has no locks and counters of remote pages, migrations, or queues that delay each access";
const NO_LATENCY_UNDER_LOAD: &str = "The slowest placement of the model fills the links. It has no latency that grows with load, and no shared state of the page cache";
const ONE_PATH: &str = "The storage of figure 17 differs from figure 2 by copies on the target, which are local in both configurations, so the model has the same gain for both";
const NO_CPU_WORK: &str = "The links between I/O hubs have room in the model, because interfaces of both nodes use both directions. In the paper the traffic between the processors \
(QPI-0) grows: protocol structures and threads on the wrong node, which the model does not have";
const ONE_DIRECTION: &str = "In the model only the transfers between buffers on node 0 and interfaces of node 1 are slow. The paper has costs of remote protocol structures and threads, too";

pub(crate) const JUDGEMENTS: &[Judgement] = &[
    Judgement {
        id: "jericho-1",
        what: "Jericho, figure 1: proper over native (5 % local), 64 threads",
        machine: "opteron",
        paper: 3.3,
        is_percent: false,
        bounds: quarter(3.3),
        value: |m| ratio(m, Placement::Proper, native(0.05), 64),
        note: LINKS_SUFFICE,
    },
    Judgement {
        id: "jericho-10-best-worst",
        what: "Jericho, figure 10: best over worst, 64 threads",
        machine: "opteron",
        paper: 5.5,
        is_percent: false,
        bounds: quarter(5.5),
        value: |m| ratio(m, Placement::Proper, Placement::Worst, 64),
        note: NO_LATENCY_UNDER_LOAD,
    },
    Judgement {
        id: "jericho-10-native-worst",
        what: "Jericho, figure 10: native (16.5 % local, figure 8) over worst, 64 threads",
        machine: "opteron",
        paper: 2.4,
        is_percent: false,
        bounds: quarter(2.4),
        value: |m| ratio(m, native(0.165), Placement::Worst, 64),
        note: "",
    },
    Judgement {
        id: "jericho-10-best-native",
        what: "Jericho, figure 10: best over native (16.5 % local), 64 threads; 5.5 over 2.4",
        machine: "opteron",
        paper: 5.5 / 2.4,
        is_percent: false,
        bounds: quarter(5.5 / 2.4),
        value: |m| ratio(m, Placement::Proper, native(0.165), 64),
        note: LINKS_SUFFICE,
    },
    Judgement {
        id: "tyche-2",
        what: "Tyche, figure 2: gain of Ideal over Worst, 3 interfaces, 128 kB",
        machine: "tyche",
        paper: 23.7,
        is_percent: true,
        bounds: quarter(23.7),
        value: |m| gain_of_table_2(m, false),
        note: "",
    },
    Judgement {
        id: "tyche-7",
        what: "Tyche, figure 7: the same, 4 to 64 kB",
        machine: "tyche",
        paper: 22.1,
        is_percent: true,
        bounds: quarter(22.1),
        value: |m| gain_of_table_2(m, false),
        note: "The model has no cost of a request, so all sizes have the same gain",
    },
    Judgement {
        id: "tyche-17",
        what: "Tyche, figure 17: the same, with emulated NVM, 128 kB",
        machine: "tyche",
        paper: 21.4,
        is_percent: true,
        bounds: quarter(21.4),
        value: |m| gain_of_table_2(m, true),
        note: ONE_PATH,
    },
    Judgement {
        id: "tyche-9-no-opt",
        what: "Tyche, figure 9: peak of Ideal over peak of No-Opt, zmIO writes (6.8 over 4.7 GB/s)",
        machine: "tyche",
        paper: 45.0,
        is_percent: true,
        bounds: quarter(45.0),
        value: |m| gain_of_peaks(m, true, zmio_on_first(true), false),
        note: ONE_DIRECTION,
    },
    Judgement {
        id: "tyche-9-t-numa",
        what: "Tyche, figure 9: peak of Ideal over peak of T-Numa, zmIO writes (6.8 over 5.0 GB/s)",
        machine: "tyche",
        paper: 36.0,
        is_percent: true,
        bounds: quarter(36.0),
        value: |m| gain_of_peaks(m, true, zmio_on_first(true), true),
        note: ONE_DIRECTION,
    },
    Judgement {
        id: "tyche-11-no-opt",
        what: "Tyche, figure 11: peak of Ideal over peak of No-Opt, FIO (6.7 over 4.2 GB/s)",
        machine: "tyche",
        paper: 60.0,
        is_percent: true,
        bounds: quarter(60.0),
        value: |m| gain_of_peaks(m, true, FIO_ON_FIRST, false),
        note: NO_CPU_WORK,
    },
    Judgement {
        id: "tyche-9-up-to-no-opt",
        what: "Tyche, figure 9: largest gain of Ideal over No-Opt at any number of threads, writes",
        machine: "tyche",
        paper: 85.0,
        is_percent: true,
        bounds: None,
        value: |m| largest_gain(m, true, zmio_on_first(true), false),
        note: "",
    },
    Judgement {
        id: "tyche-9-up-to-t-numa",
        what: "Tyche, figure 9: largest gain of Ideal over T-Numa, writes",
        machine: "tyche",
        paper: 37.6,
        is_percent: true,
        bounds: None,
        value: |m| largest_gain(m, true, zmio_on_first(true), true),
        note: "",
    },
    Judgement {
        id: "tyche-11-up-to",
        what: "Tyche, figure 11: largest gain of Ideal over No-Opt, large requests",
        machine: "tyche",
        paper: 76.0,
        is_percent: true,
        bounds: None,
        value: |m| largest_gain(m, false, FIO_ON_FIRST, false),
        note: "",
    },
    Judgement {
        id: "tyche-11-up-to-4k",
        what: "Tyche, figure 11: largest gain of Ideal over No-Opt, 4 kB",
        machine: "tyche",
        paper: 66.2,
        is_percent: true,
        bounds: None,
        value: |m| largest_gain(m, true, FIO_ON_FIRST, false),
        note: "The model has no cost of a request",
    },
    Judgement {
        id: "001-zmio-remote",
        what: "001, figure 4(b): loss of zmIO by remote transfers, 8 instances",
        machine: "tylersburg",
        paper: 40.0,
        is_percent: true,
        bounds: None,
        value: loss_of_remote_transfers,
        note: "No test: the rate of the link between the chipsets is derived from this result",
    },
    Judgement {
        id: "001-zmio-mstress",
        what: "001, figure 4(c): loss of zmIO that reads its data, beside mstress, 8 instances each",
        machine: "tylersburg",
        paper: 23.0,
        is_percent: true,
        bounds: None,
        value: loss_beside_mstress,
        note: "The model shares the time of the memory so that all threads have equal rates. Real controllers favour some accesses",
    },
];
