//! Two sides measured in turn: A B A B ... so that whatever else the machine does meets both.

use serde::Serialize;

use crate::Result;
use crate::stats::Summary;

/// What a workload measured, round by round.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Name for `--only` and the table.
    pub name: String,
    /// The conditions, in words.
    pub conditions: String,
    /// Of the values: more is better.
    pub unit: &'static str,
    /// The side that is compared.
    pub ours: &'static str,
    /// What it is compared with.
    pub peer: &'static str,
    /// The ratio that is promised, where one is.
    pub target_ratio: Option<f64>,
    /// Our value of each round.
    pub our_values: Vec<f64>,
    /// The peer's value of each round.
    pub peer_values: Vec<f64>,
}

impl Comparison {
    /// Measures both sides `rounds` times in turn; who begins changes from round to round.
    pub fn run(
        mut self,
        rounds: u32,
        mut ours: impl FnMut() -> Result<f64>,
        mut peer: impl FnMut() -> Result<f64>,
    ) -> Result<Comparison> {
        for round in 0..rounds {
            if round % 2 == 0 {
                self.our_values.push(ours()?);
                self.peer_values.push(peer()?);
            } else {
                self.peer_values.push(peer()?);
                self.our_values.push(ours()?);
            }
            eprintln!(
                "{}: round {} of {rounds}: {:.0} against {:.0} {}",
                self.name,
                round + 1,
                self.our_values[round as usize],
                self.peer_values[round as usize],
                self.unit
            );
        }
        Ok(self)
    }

    /// Ratios of the pairs, ours to the peer's.
    pub fn ratio(&self) -> Option<Summary> {
        let ratios: Vec<f64> = self
            .our_values
            .iter()
            .zip(&self.peer_values)
            .map(|(a, b)| a / b)
            .collect();
        Summary::of(&ratios)
    }
}
