//! Medians and quartiles of a few rounds, and how numbers are shown.

use serde::Serialize;

/// Median and quartiles of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// A quarter of the values are below.
    pub lower_quartile: f64,
    /// Half of the values are below.
    pub median: f64,
    /// A quarter of the values are above.
    pub upper_quartile: f64,
}

impl Summary {
    /// Returns the summary, or `None` without values. Interpolates between neighbours.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |quantile: f64| {
            let position = quantile * last as f64;
            let (below, above) = (
                sorted[position.floor() as usize],
                sorted[position.ceil() as usize],
            );
            below + (above - below) * position.fract()
        };
        Some(Summary {
            lower_quartile: at(0.25),
            median: at(0.5),
            upper_quartile: at(0.75),
        })
    }
}

/// Formats a number with few digits: 12,345 or 1.23.
pub fn number(value: f64) -> String {
    if value < 100.0 {
        return format!("{value:.2}");
    }
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::Summary;

    #[test]
    fn quartiles_lie_between_neighbours() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).expect("four values");
        assert_eq!(
            (
                summary.lower_quartile,
                summary.median,
                summary.upper_quartile
            ),
            (1.75, 2.5, 3.25)
        );
    }

    #[test]
    fn one_value_has_no_spread_and_none_has_no_summary() {
        let summary = Summary::of(&[7.0]).expect("one value");
        assert_eq!(
            (
                summary.lower_quartile,
                summary.median,
                summary.upper_quartile
            ),
            (7.0, 7.0, 7.0)
        );
        assert_eq!(Summary::of(&[]), None);
    }
}
