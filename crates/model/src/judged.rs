//! The papers' results about placement beside those of the model.
//!
//! A row with bounds is judged: it is met if the model's value is within them. Rows without bounds are only shown. A row that is missed says
//! why, and stays: no figure of a machine is chosen to meet a row. `tests/judged.rs` asserts which rows are met.

use crate::machine::Machine;
use crate::papers::{JUDGEMENTS, Judgement};
use crate::threads::PlacementError;

/// Whether the model meets a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The model's value is within the bounds.
    Met,
    /// It is not.
    Missed,
    /// There are no bounds.
    Shown,
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// Short name.
    pub id: &'static str,
    /// The paper's measurement, with its figure.
    pub what: &'static str,
    /// The shipped machine.
    pub machine: &'static str,
    /// Values are percent; otherwise they are ratios.
    pub is_percent: bool,
    /// The paper's value.
    pub paper: f64,
    /// Values that meet the row.
    pub bounds: Option<(f64, f64)>,
    /// The model's value.
    pub model: f64,
    /// Whether it is within the bounds.
    pub verdict: Verdict,
    /// Why a row is missed, or is no test.
    pub note: &'static str,
}

/// Returns the table, for the shipped machines. `machine` returns one by name.
pub fn rows(machine: impl Fn(&str) -> Option<Machine>) -> Result<Vec<Row>, PlacementError> {
    let row = |judged: &Judgement| {
        let machine = machine(judged.machine)?;
        Some((judged.value)(&machine).map(|model| Row {
            id: judged.id,
            what: judged.what,
            machine: judged.machine,
            is_percent: judged.is_percent,
            paper: judged.paper,
            bounds: judged.bounds,
            model,
            verdict: match judged.bounds {
                None => Verdict::Shown,
                Some((least, most)) if (least..=most).contains(&model) => Verdict::Met,
                Some(_) => Verdict::Missed,
            },
            note: judged.note,
        }))
    };
    JUDGEMENTS.iter().filter_map(row).collect()
}
