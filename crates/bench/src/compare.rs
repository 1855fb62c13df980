//! Sides measured in turn: A B A B ... so that whatever else the machine does meets them all.

use serde::Serialize;

use crate::Result;
use crate::report::number;
use crate::stats::Summary;

/// What can be measured again and again, and its name; a value is better when it is larger.
pub struct Side<'a> {
    name: &'static str,
    measure: Box<dyn FnMut() -> Result<f64> + 'a>,
}

impl<'a> Side<'a> {
    /// A side that `measure` measures once.
    pub fn new(name: &'static str, measure: impl FnMut() -> Result<f64> + 'a) -> Side<'a> {
        Side {
            name,
            measure: Box::new(measure),
        }
    }
}

/// Measures all sides `rounds` times in turn; who begins changes from round to round. The values of each side, round by
/// round, in the order of the sides.
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

/// Something simpler that does the same, and that no way of ours can be faster than.
#[derive(Clone, Debug, Serialize)]
pub struct Bound {
    /// What it is.
    pub name: &'static str,
    /// Its value of each round.
    pub values: Vec<f64>,
}

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
    /// What bounds both sides, where it was measured.
    pub bounds: Vec<Bound>,
}

impl Comparison {
    /// Measures both sides `rounds` times in turn; who begins changes from round to round.
    pub fn run(
        self,
        rounds: u32,
        ours: impl FnMut() -> Result<f64>,
        peer: impl FnMut() -> Result<f64>,
    ) -> Result<Comparison> {
        self.run_with(rounds, ours, peer, Vec::new())
    }

    /// The same with what bounds both.
    pub fn run_with<'a>(
        mut self,
        rounds: u32,
        ours: impl FnMut() -> Result<f64> + 'a,
        peer: impl FnMut() -> Result<f64> + 'a,
        bounds: Vec<Side<'a>>,
    ) -> Result<Comparison> {
        let names: Vec<_> = bounds.iter().map(|side| side.name).collect();
        let mut sides = vec![Side::new(self.ours, ours), Side::new(self.peer, peer)];
        sides.extend(bounds);
        let mut values = in_turn(&self.name, rounds, &mut sides)?.into_iter();
        self.our_values = values.next().unwrap_or_default();
        self.peer_values = values.next().unwrap_or_default();
        let bounds = names.into_iter().zip(values);
        self.bounds = bounds
            .map(|(name, values)| Bound { name, values })
            .collect();
        Ok(self)
    }

    /// Ratios of the pairs, ours to the peer's.
    pub fn ratio(&self) -> Option<Summary> {
        self.to_peer(&self.our_values)
    }

    /// The same of a bound or of ours.
    pub fn to_peer(&self, values: &[f64]) -> Option<Summary> {
        let pairs = values.iter().zip(&self.peer_values);
        let ratios: Vec<f64> = pairs.map(|(a, b)| a / b).collect();
        Summary::of(&ratios)
    }
}
