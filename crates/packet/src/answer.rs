//! The message that the program sends: one byte, then text for people. With the first kind comes the socket.

/// Maximum length of an answer. Longer text is cut off.
pub const ANSWER_BYTES_MAX: usize = 512;

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The socket comes with the message.
    Socket,
    /// The program has not the capability.
    Denied,
    /// No socket can be opened, or not this one.
    Failed(String),
}

impl Answer {
    /// Returns the bytes of the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, text) = match self {
            Answer::Socket => (0, ""),
            Answer::Denied => (1, ""),
            Answer::Failed(text) => (2, &**text),
        };
        let mut bytes = vec![kind];
        bytes.extend_from_slice(text.as_bytes());
        bytes.truncate(ANSWER_BYTES_MAX);
        bytes
    }

    /// Reads a message. Returns `None` for one of another version of the program, and for an empty one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Answer> {
        let (kind, text) = bytes.split_first()?;
        match kind {
            0 => Some(Answer::Socket),
            1 => Some(Answer::Denied),
            2 => Some(Answer::Failed(String::from_utf8_lossy(text).into_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_passes_through_its_bytes_and_long_text_is_cut_off() {
        let failed = |text: &str| Answer::Failed(text.to_owned());
        for answer in [Answer::Socket, Answer::Denied, failed("no"), failed("")] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
        }
        let bytes = failed(&"é".repeat(ANSWER_BYTES_MAX)).to_bytes();
        assert_eq!(bytes.len(), ANSWER_BYTES_MAX);
        assert!(matches!(
            Answer::from_bytes(&bytes),
            Some(Answer::Failed(_))
        ));
        assert_eq!(Answer::from_bytes(&[]), None);
        assert_eq!(Answer::from_bytes(&[9]), None);
    }
}
