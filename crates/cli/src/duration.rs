//! Durations in users' notation: 200us, 5ms, 1.5s.

use std::time::Duration;

/// Parses a duration such as `200us`, `5ms`, `1.5s` or `0`, of an hour at most.
pub fn parse(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str = "write a number with us, ms or s, for example 200us, 5ms or 1s";
    let text = text.trim();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit_seconds = match unit.trim() {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "" => return Err(format!("{text:?} has no unit: {EXPECTED}")),
        _ => return Err(format!("{text:?} is not a duration: {EXPECTED}")),
    };
    match number.parse::<f64>() {
        Ok(number) if number * unit_seconds <= 3600.0 => {
            Ok(Duration::from_secs_f64(number * unit_seconds))
        }
        Ok(_) => Err(format!("{text:?} is more than an hour: {EXPECTED}")),
        Err(_) => Err(format!("{text:?} is not a duration: {EXPECTED}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, us) in [
            ("0", 0),
            ("0s", 0),
            ("200us", 200),
            ("5ms", 5_000),
            ("1.5s", 1_500_000),
            ("3600 s", 3_600_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_micros(us)), "{text}");
        }
    }

    #[test]
    fn a_bad_duration_is_named_in_the_message_with_an_example() {
        for bad in [
            "",
            "5",
            "ms",
            "5 minutes",
            "-5ms",
            "1.2.3s",
            "1e3s",
            "3601s",
        ] {
            let message = parse(bad).expect_err(bad);
            assert!(message.contains(&format!("{bad:?}")), "{message}");
            assert!(message.contains("5ms"), "{message}");
        }
    }
}
