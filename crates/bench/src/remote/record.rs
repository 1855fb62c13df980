//! Rows as JSON lines, and cells of tables.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::Result;
use crate::remote::load::Reached;
use crate::stats::number;

/// A file of JSON lines.
pub struct Record {
    file: File,
}

/// What a side reached in a round of a row.
#[derive(Serialize)]
pub struct Line<'a> {
    /// Name of the table.
    pub table: &'a str,
    /// Name of the row.
    pub row: &'a str,
    /// Name of the side.
    pub side: &'a str,
    /// From 0 on.
    pub round: u32,
    /// Transfers in a second.
    pub rate_per_s: f64,
    /// Bytes in a second.
    pub rate_bytes_per_s: f64,
    /// CPU time of the initiator for each transfer.
    pub initiator_us: f64,
    /// CPU time of the target for each transfer.
    pub target_us: f64,
    /// CPU time of the machine for each transfer.
    pub machine_us: f64,
}

impl Record {
    /// Creates the file.
    pub fn create(path: &Path) -> Result<Record> {
        let file =
            File::create(path).map_err(|e| format!("cannot create {}: {e}", path.display()))?;
        Ok(Record { file })
    }

    /// Writes a line.
    pub fn write(&mut self, line: &impl Serialize) -> Result<()> {
        serde_json::to_writer(&self.file, line)?;
        Ok(self.file.write_all(b"\n")?)
    }

    /// Writes what a side reached.
    pub fn reached(
        &mut self,
        (table, row, side): (&str, &str, &str),
        round: u32,
        reached: &Reached,
        block_bytes: usize,
    ) -> Result<()> {
        self.write(&Line {
            table,
            row,
            side,
            round,
            rate_per_s: reached.rate_per_s,
            rate_bytes_per_s: reached.rate_per_s * block_bytes as f64,
            initiator_us: reached.used.initiator_us,
            target_us: reached.used.target_us,
            machine_us: reached.used.machine_us,
        })
    }
}

/// Returns the median of some values, 0 if there are none.
pub fn median(values: &[f64]) -> f64 {
    crate::stats::Summary::of(values).map_or(0.0, |summary| summary.median)
}

/// Formats the median with the least and the greatest value, or "-" without values.
pub fn spread(values: &[f64]) -> String {
    let least = values.iter().copied().reduce(f64::min);
    let greatest = values.iter().copied().reduce(f64::max);
    match (least, greatest) {
        (Some(least), Some(greatest)) => format!(
            "{} ({}..{})",
            number(median(values)),
            number(least),
            number(greatest)
        ),
        _ => "-".into(),
    }
}

/// Returns the ratio of each round.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(theirs)
        .map(|(ours, theirs)| ours / theirs)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_median_and_both_ends() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), "2.00 (1.00..3.00)");
        assert_eq!(spread(&[]), "-");
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        assert_eq!(ratios(&[2.0, 9.0], &[1.0, 3.0]), [2.0, 3.0]);
    }
}
