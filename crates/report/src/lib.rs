//! Makes one HTML page from results of `jericho bench`, and compares two files of them.
//!
//! The crate does no I/O: lines come in, the text of a page goes out. The same lines make the same page. The page needs nothing from elsewhere,
//! no script, font or image. All text in it is escaped (`maud` does it), because names in results may be anything.
//!
//! Invariants:
//! - Runs of different machines or conditions are never in one curve, and are never divided by each other (`groups`, `measured`).
//! - A value outside of its bounds refuses its line (`line`), so charts get finite numbers.
//! - The size of a page is bounded, whatever the number of runs. A page says what it leaves out.
//!
//! Reading order: `line` and `results` (what comes in), `groups` (what belongs together), `statistics` (how sure a ratio is), `papers` (the
//! papers' figures and the rules to compare with them), `measured` (the rules applied), `compare` (two files); then what is shown: `palette`,
//! `style`, `chart`, `heat`, `workloads`, `ratios`, `page`. The page is `docs/internals/report.md`.

#![forbid(unsafe_code)]

mod chart;
mod compare;
#[cfg(test)]
mod example;
mod groups;
mod heat;
mod line;
mod measured;
mod page;
mod palette;
mod papers;
mod ratios;
mod results;
mod statistics;
mod style;
mod text;
mod workloads;

pub use chart::ChartError;
pub use compare::{Comparison, Key, Pair, Side, Verdict, compare};
pub use heat::{Cell, Grid, Probe};
pub use line::LINE_BYTES_MAX;
pub use page::{comparison, report};
pub use papers::Prediction;
pub use results::{ReadError, Results};
pub use statistics::Ratio;
