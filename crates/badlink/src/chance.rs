//! How often a fault happens.

use std::str::FromStr;

use crate::random::Random;

/// The probability of a fault, in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chance {
    millionths: u32,
}

/// A text is not a probability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChanceError(String);

impl Chance {
    /// The fault never happens.
    pub const NEVER: Chance = Chance { millionths: 0 };

    /// Returns a probability; more than a million counts as a million.
    pub fn of_millionths(millionths: u64) -> Chance {
        Chance {
            millionths: millionths.min(1_000_000) as u32,
        }
    }

    /// Decides whether the fault happens. Takes no random number if it never happens.
    pub fn happens(self, random: &mut Random) -> bool {
        self.millionths > 0 && random.below(1_000_000) < u64::from(self.millionths)
    }
}

impl FromStr for Chance {
    type Err = ChanceError;

    /// Parses a percentage such as `1%` or `0.1%`, or `0`. Refuses other numbers without the sign: 0.5 could mean a half or 0.5 %.
    fn from_str(text: &str) -> Result<Chance, ChanceError> {
        const EXAMPLE: &str = "for example 1% or 0.1%";
        let refused = |why: &str| Err(ChanceError(format!("{text:?} {why}: write {EXAMPLE}")));
        let text = text.trim();
        let Some(number) = text.strip_suffix('%') else {
            return match text {
                "0" => Ok(Chance::NEVER),
                _ => refused("has no sign %"),
            };
        };
        let is_digit = |c: char| c.is_ascii_digit() || c == '.';
        let number = number.trim_end();
        // `parse` alone would take "inf" and "1e1".
        let percent = match number.chars().all(is_digit) {
            true => number.parse::<f64>().ok(),
            false => None,
        };
        let Some(percent) = percent else {
            return refused("is not a percentage");
        };
        if percent > 100.0 {
            return refused("is more than 100%");
        }
        let millionths = (percent * 1e4).round() as u64;
        if millionths == 0 && percent > 0.0 {
            return refused("is less than 0.0001%, the smallest percentage");
        }
        Ok(Chance::of_millionths(millionths))
    }
}

impl std::fmt::Display for ChanceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ChanceError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_read() {
        for (text, millionths) in [
            ("0", 0),
            ("0%", 0),
            ("1%", 10_000),
            ("0.1 %", 1_000),
            (".5%", 5_000),
            ("12.5%", 125_000),
            ("100%", 1_000_000),
            ("0.0001%", 1),
        ] {
            let expected = Chance::of_millionths(millionths);
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_bad_percentage_is_named_in_the_message_with_an_example() {
        for bad in [
            "", "%", "1", "0.5", "-1%", "1e1%", "inf%", "1.2.3%", "101%", "0.00001%", "one%",
        ] {
            let message = bad.parse::<Chance>().expect_err(bad).to_string();
            assert!(message.contains(&format!("{bad:?}")), "{message}");
            assert!(message.contains("1% or 0.1%"), "{message}");
        }
    }
}
