//! Cuts a line of a topology file into words with their columns.

/// A word of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    /// The word, without its quotes if it had any.
    pub(super) text: &'a str,
    /// Start of the word, in characters from 1.
    pub(super) column: usize,
}

/// Returns the words of a line up to a comment. A word in double quotes may contain spaces and `#`. The error is the column of a
/// quote that is not closed.
pub(super) fn tokens(line: &str) -> Result<Vec<Token<'_>>, usize> {
    let mut found = Vec::new();
    let mut rest = line;
    let mut column = 1;
    loop {
        let trimmed = rest.trim_start();
        column += rest.chars().count() - trimmed.chars().count();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            return Ok(found);
        }
        let (text, after) = match trimmed.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').ok_or(column)?,
            None => {
                let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
                trimmed.split_at(end)
            }
        };
        found.push(Token { text, column });
        column += trimmed.chars().count() - after.chars().count();
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<(&str, usize)> {
        let tokens = tokens(line).expect("closed quotes");
        tokens
            .into_iter()
            .map(|token| (token.text, token.column))
            .collect()
    }

    #[test]
    fn words_know_their_columns_in_characters() {
        assert_eq!(
            words("  node 0\tcpus=1 # why"),
            [("node", 3), ("0", 8), ("cpus=1", 10)]
        );
        assert_eq!(words("é x"), [("é", 1), ("x", 3)]);
        assert_eq!(words("# all of it"), []);
        assert_eq!(words(" \r"), []);
    }

    #[test]
    fn quotes_keep_spaces_and_hashes() {
        assert_eq!(
            words("device \"/a b#c\" node=1"),
            [("device", 1), ("/a b#c", 8), ("node=1", 17)]
        );
        assert_eq!(tokens("device \"/a"), Err(8));
    }
}
