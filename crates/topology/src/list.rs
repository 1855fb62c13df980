//! Lists of CPUs or nodes in the kernel's notation: `0-3,8-11`.

/// Maximum of a CPU or node number. It limits the expansion of a range such as `0-4294967295`.
pub(crate) const NUMBER_MAX: u32 = 65_535;

/// An error in a list, and its place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListError {
    /// Offset of the wrong part in the text, in characters.
    pub(crate) offset: usize,
    /// The expected and the found text.
    pub(crate) message: String,
}

/// A number of a list with the offset, in characters, of its part of the text.
pub(crate) type Placed = (usize, u32);

/// Parses `text` (`""`, `"5"`, `"0-3,8-11"`) into its numbers in the order written, each with the offset of its part of the text.
/// An empty text is an empty list.
pub(crate) fn parse_list(text: &str) -> Result<Vec<Placed>, ListError> {
    let mut numbers = Vec::new();
    if text.is_empty() {
        return Ok(numbers);
    }
    let mut offset = 0;
    for part in text.split(',') {
        let (first_text, last_text) = part.split_once('-').unwrap_or((part, part));
        let first = parse_number(first_text, offset)?;
        let last_offset = match part.contains('-') {
            true => offset + first_text.chars().count() + 1,
            false => offset,
        };
        let last = parse_number(last_text, last_offset)?;
        if last < first {
            return Err(ListError {
                offset,
                message: format!("expected a range that ascends, found {part:?}"),
            });
        }
        numbers.extend((first..=last).map(|number| (offset, number)));
        if numbers.len() > NUMBER_MAX as usize + 1 {
            let message = format!("expected at most {} numbers in a list", NUMBER_MAX + 1);
            return Err(ListError { offset, message });
        }
        offset += part.chars().count() + 1;
    }
    Ok(numbers)
}

fn parse_number(text: &str, offset: usize) -> Result<u32, ListError> {
    let digits_only = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(number) if digits_only && number <= NUMBER_MAX => Ok(number),
        _ => Err(ListError {
            offset,
            message: format!("expected a number from 0 to {NUMBER_MAX}, found {text:?}"),
        }),
    }
}

/// Formats ascending numbers in the kernel's notation: `[0, 1, 2, 8]` is `0-2,8`. An empty list is `-`.
pub(crate) fn format_list(numbers: &[u32]) -> String {
    if numbers.is_empty() {
        return "-".to_string();
    }
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let parts: Vec<String> = runs
        .iter()
        .map(|&(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &str) -> Vec<u32> {
        let placed = parse_list(text).expect("a good list");
        placed.into_iter().map(|(_, number)| number).collect()
    }

    #[test]
    fn a_list_with_holes_names_exactly_the_numbers_in_it() {
        assert_eq!(numbers("0-3,8-11"), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(numbers("7"), [7]);
        assert_eq!(numbers(""), Vec::<u32>::new());
    }

    #[test]
    fn a_list_that_was_written_reads_back_the_same() {
        for text in ["0", "0-3,8-11", "1,3,5", "65535"] {
            assert_eq!(format_list(&numbers(text)), text);
        }
    }

    #[test]
    fn an_error_has_the_offset_of_the_wrong_part() {
        for (text, offset) in [
            ("0-", 2),
            ("0,x", 2),
            ("3-1", 0),
            ("0,,1", 2),
            ("+1", 0),
            ("0-99999999", 2),
        ] {
            let error = parse_list(text).expect_err(text);
            assert_eq!(error.offset, offset, "{text}: {}", error.message);
        }
    }

    #[test]
    fn many_wide_ranges_are_refused() {
        let text = vec!["0-65535"; 1000].join(",");
        assert!(parse_list(&text).is_err());
    }
}
