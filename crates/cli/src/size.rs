//! Sizes in users' notation: 512M, 1G, 4096. K, M, G and T are powers of 1024.

/// Parses a size that may be 0.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    match text.trim() {
        "0" => Ok(0),
        text => parse(text),
    }
}

/// Parses a size such as `1G`, `512MiB`, `1.5T` or `4096`. Returns bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    const EXPECTED: &str = "expected a number with K, M, G or T, for example 512M or 1G";
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    if number.is_empty() {
        return Err(format!("{text:?} is not a size: {EXPECTED}"));
    }
    let unit_bytes: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        other => return Err(format!("{other:?} is not a unit: {EXPECTED}")),
    };
    let too_large = || format!("{text} is too large: a size is below 16777216T");
    let bytes = if number.contains('.') {
        let value: f64 = number
            .parse()
            .map_err(|_| format!("{number:?} is not a number: {EXPECTED}"))?;
        let bytes = value * unit_bytes as f64;
        if bytes >= u64::MAX as f64 {
            return Err(too_large());
        }
        bytes as u64
    } else {
        let value: u64 = number.parse().map_err(|_| too_large())?;
        value.checked_mul(unit_bytes).ok_or_else(too_large)?
    };
    if bytes == 0 {
        return Err(format!("a size of 0 is of no use: {EXPECTED}"));
    }
    Ok(bytes)
}

/// Formats a size for users, with three significant digits.
pub fn human(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("64K"), Ok(65536));
        assert_eq!(parse("1G"), Ok(1 << 30));
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        assert_eq!(parse("1.5m"), Ok(3 << 19));
        assert_eq!(parse("2t"), Ok(2 << 40));
    }

    #[test]
    fn an_invalid_size_is_refused_with_an_example() {
        for bad in [
            "",
            "G",
            "-1G",
            "1X",
            "1.2.3G",
            "0",
            "0K",
            "99999999999999999999",
            "17000000T",
        ] {
            let message = parse(bad).expect_err(bad);
            assert!(
                message.contains("size") || message.contains("512M"),
                "{bad}: {message}"
            );
        }
    }

    #[test]
    fn sizes_have_a_suitable_unit() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(1 << 30), "1.0 GiB");
        assert_eq!(human(512 << 20), "512 MiB");
    }
}
