//! Words with their places, and the numbers, sizes and `key=value` pairs that they contain.

/// A place in the file.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl At {
    /// Returns an error at this place.
    pub(super) fn wrong<T>(self, message: impl Into<String>) -> Result<T, Wrong> {
        Err(Wrong {
            at: self,
            message: message.into(),
        })
    }
}

/// An error and its place.
pub(super) struct Wrong {
    pub(super) at: At,
    pub(super) message: String,
}

/// A word with its place.
#[derive(Clone, Copy)]
pub(super) struct Word<'a> {
    pub(super) text: &'a str,
    pub(super) at: At,
}

/// Splits `key=value`. The value has its own place.
pub(super) fn key_value<'a>(word: Word<'a>, expected: &str) -> Result<(&'a str, Word<'a>), Wrong> {
    let Some((key, value)) = word.text.split_once('=') else {
        return word
            .at
            .wrong(format!("expected {expected}, found {:?}", word.text));
    };
    let column = word.at.column + key.chars().count() + 1;
    Ok((
        key,
        Word {
            text: value,
            at: At { column, ..word.at },
        },
    ))
}

/// Parses a number of decimal digits only, from `min` to `max`. `what` is for the message.
pub(super) fn number(word: Word, what: &str, min: u32, max: u32) -> Result<u32, Wrong> {
    let digits_only = !word.text.is_empty() && word.text.bytes().all(|b| b.is_ascii_digit());
    match word.text.parse::<u32>() {
        Ok(number) if digits_only && (min..=max).contains(&number) => Ok(number),
        _ if max == u32::MAX => word
            .at
            .wrong(format!("expected {what}, found {:?}", word.text)),
        _ => word.at.wrong(format!(
            "expected {what} from {min} to {max}, found {:?}",
            word.text
        )),
    }
}

/// Parses a size such as `64G`. Returns bytes.
pub(super) fn size_bytes(word: Word) -> Result<u64, Wrong> {
    let digits = word.text.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match &word.text[digits.len()..] {
        "" => Some(0),
        "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        _ => None,
    };
    let digits_only = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let number = digits.parse::<u64>().ok().filter(|_| digits_only);
    let bytes = number
        .zip(shift)
        .and_then(|(number, shift)| number.checked_mul(1 << shift));
    bytes.map_or_else(
        || {
            word.at.wrong(format!(
                "expected a size in bytes, or with K, M, G or T such as `64G`, found {:?}",
                word.text
            ))
        },
        Ok,
    )
}
