//! Sides measured in turn: A B A B and so on, so that other activity of the machine affects all sides.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::stats::{Summary, number};

/// A side of a comparison: a measurement that can be repeated, and its name. Larger values are better.
pub struct Side<'a> {
    name: Cow<'static, str>,
    measure: Box<dyn FnMut() -> Result<f64> + 'a>,
}

impl<'a> Side<'a> {
    /// Creates a side. Each call of `measure` measures it once.
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        measure: impl FnMut() -> Result<f64> + 'a,
    ) -> Side<'a> {
        Side {
            name: name.into(),
            measure: Box::new(measure),
        }
    }
}

/// Measures all sides `rounds` times in turn. The first side changes from round to round. Returns the values of each side, round
/// by round, in the order of the sides.
pub fn in_turn(what: &str, rounds: u32, sides: &mut [Side]) -> Result<Vec<Vec<f64>>> {
    let mut values = vec![Vec::new(); sides.len()];
    for round in 0..rounds as usize {
        for turn in 0..sides.len() {
            let which = (round + turn) % sides.len();
            values[which].push((sides[which].measure)()?);
        }
        let said: Vec<String> = sides
            .iter()
            .zip(&values)
            .map(|(side, values)| format!("{} {}", side.name, number(values[round])))
            .collect();
        let said = said.join(", ");
        eprintln!("{what}: round {} of {rounds}: {said}", round + 1);
    }
    Ok(values)
}

/// What a simpler program reaches that does less of the same work: a reference. Jericho can be faster if it avoids a cost that the program
/// has, for example that of `/dev/fuse`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ceiling {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Its value of each round.
    pub values: Vec<f64>,
}

/// The values of a workload, round by round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// Name for `--only` and the table.
    pub name: String,
    /// The conditions, in words.
    pub conditions: String,
    /// Unit of the values. More is better.
    pub unit: Cow<'static, str>,
    /// Name of Jericho's side.
    pub ours: Cow<'static, str>,
    /// Name of the side that Jericho is compared with.
    #[serde(rename = "peer")]
    pub baseline: Cow<'static, str>,
    /// The target: the ratio that should be reached, if there is one.
    pub target_ratio: Option<f64>,
    /// Jericho's value of each round.
    pub our_values: Vec<f64>,
    /// The baseline's value of each round.
    #[serde(rename = "peer_values")]
    pub baseline_values: Vec<f64>,
    /// The ceilings of both sides, if they were measured.
    #[serde(rename = "bounds")]
    pub ceilings: Vec<Ceiling>,
}

impl Comparison {
    /// Measures both sides `rounds` times in turn. The first side changes from round to round.
    pub fn run(
        self,
        rounds: u32,
        ours: impl FnMut() -> Result<f64>,
        baseline: impl FnMut() -> Result<f64>,
    ) -> Result<Comparison> {
        self.run_with(rounds, ours, baseline, Vec::new())
    }

    /// Does the same as `run`, with ceilings.
    pub fn run_with<'a>(
        mut self,
        rounds: u32,
        ours: impl FnMut() -> Result<f64> + 'a,
        baseline: impl FnMut() -> Result<f64> + 'a,
        ceilings: Vec<Side<'a>>,
    ) -> Result<Comparison> {
        let names: Vec<_> = ceilings.iter().map(|side| side.name.clone()).collect();
        let mut sides = vec![
            Side::new(self.ours.clone(), ours),
            Side::new(self.baseline.clone(), baseline),
        ];
        sides.extend(ceilings);
        let mut values = in_turn(&self.name, rounds, &mut sides)?.into_iter();
        self.our_values = values.next().unwrap_or_default();
        self.baseline_values = values.next().unwrap_or_default();
        let ceilings = names.into_iter().zip(values);
        self.ceilings = ceilings
            .map(|(name, values)| Ceiling { name, values })
            .collect();
        Ok(self)
    }

    /// Returns the ratios of the pairs, Jericho's value to the baseline's.
    pub fn ratio(&self) -> Option<Summary> {
        self.to_baseline(&self.our_values)
    }

    /// Returns the ratios of other values to the baseline's.
    pub fn to_baseline(&self, values: &[f64]) -> Option<Summary> {
        let pairs = values.iter().zip(&self.baseline_values);
        let ratios: Vec<f64> = pairs.map(|(a, b)| a / b).collect();
        Summary::of(&ratios)
    }
}
