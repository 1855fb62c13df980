//! Numbers as text for people.

/// Formats with three digits, and without an exponent between 0.001 and a million.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".to_owned(),
        _ if !(0.001..1e6).contains(&size) => format!("{value:.2e}"),
        _ if size < 0.1 => format!("{value:.3}"),
        _ if size < 9.995 => format!("{value:.2}"),
        _ if size < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Formats without zeros at the end, for axes.
pub fn tick(value: f64) -> String {
    without_zeros(&number(value))
}

fn without_zeros(text: &str) -> String {
    match text.contains('.') && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    }
}

/// Formats a time without zeros at the end, for axes.
pub fn time_tick(ns: f64) -> String {
    let text = time(ns);
    match text.split_once(' ') {
        Some((number, unit)) => format!("{} {unit}", without_zeros(number)),
        None => text,
    }
}

/// The unit for rates up to `most`, and its size in bytes per second.
pub fn rate_unit(most: f64) -> (&'static str, f64) {
    match most {
        _ if most >= 1e9 => ("GB/s", 1e9),
        _ if most >= 1e6 => ("MB/s", 1e6),
        _ => ("kB/s", 1e3),
    }
}

/// Formats bytes per second with a unit.
pub fn rate(bytes_per_s: f64) -> String {
    let (unit, size) = rate_unit(bytes_per_s);
    format!("{} {unit}", number(bytes_per_s / size))
}

/// Formats bytes with a binary unit.
pub fn bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.iter().find(|(bits, _)| bytes >> bits > 0);
    match unit {
        Some((bits, unit)) => format!("{} {unit}", number(bytes as f64 / (1_u64 << bits) as f64)),
        None => format!("{bytes} B"),
    }
}

/// Formats a time.
pub fn time(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "\u{b5}s")];
    match units.iter().find(|(size, _)| ns >= *size) {
        Some((size, unit)) => format!("{} {unit}", number(ns / size)),
        None => format!("{ns:.0} ns"),
    }
}

/// Formats a share as a percentage. A share below 1 is never shown as 100 %.
pub fn share(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        _ if percent > 99.9 && percent < 100.0 => "> 99.9 %".to_owned(),
        _ if (percent - percent.round()).abs() < 0.05 => format!("{percent:.0} %"),
        _ => format!("{percent:.1} %"),
    }
}

/// Formats a change in percent, with its sign.
pub fn change(percent: f64) -> String {
    let digits = usize::from(percent.abs() < 99.95);
    let text = format!("{:.digits$}", percent.abs());
    let sign = match percent {
        _ if text.trim_matches(['0', '.']).is_empty() => "\u{b1}",
        _ if percent < 0.0 => "\u{2212}",
        _ => "+",
    };
    format!("{sign}{text} %")
}

/// Joins words as in a sentence.
pub fn list<T: AsRef<str>>(words: &[T]) -> String {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.as_slice() {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Returns a count with its noun.
pub fn count(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// Shortens a build id so that people can compare it.
pub fn short(build: &str) -> String {
    build.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts = [
            0.0,
            0.0123,
            1.0 / 3.0,
            9.996,
            12.34,
            99.96,
            123_456.0,
            1.5e7,
            2e-5,
        ]
        .map(number);
        assert_eq!(
            texts,
            [
                "0", "0.012", "0.33", "10.0", "12.3", "100", "123456", "1.50e7", "2.00e-5"
            ]
        );
        assert_eq!(rate(2.5e9), "2.50 GB/s");
        assert_eq!(rate(1500.0), "1.50 kB/s");
        assert_eq!([40.0, 0.5, 100.0, 0.0].map(tick), ["40", "0.5", "100", "0"]);
        assert_eq!(
            (time_tick(1e6), time_tick(100.0)),
            ("1 ms".into(), "100 ns".into())
        );
        assert_eq!(bytes(256 << 20), "256 MiB");
        assert_eq!(
            (time(950.0), time(12_340.0)),
            ("950 ns".into(), "12.3 \u{b5}s".into())
        );
    }

    #[test]
    fn shares_and_changes_are_not_rounded_to_what_they_are_not() {
        assert_eq!(
            (share(1.0), share(0.0), share(0.165)),
            ("100 %".into(), "0 %".into(), "16.5 %".into())
        );
        assert_eq!(share(0.9999), "> 99.9 %");
        assert_eq!(
            (change(-19.04), change(218.0), change(0.01)),
            (
                "\u{2212}19.0 %".into(),
                "+218 %".into(),
                "\u{b1}0.0 %".into()
            )
        );
        assert_eq!(list(&["a", "b", "c"]), "a, b and c");
        assert_eq!(
            (count(1, "run"), count(2, "run")),
            ("1 run".into(), "2 runs".into())
        );
    }
}
