//! The key that a client and its targets share.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::hmac;
use jericho_format::wire::{FINGERPRINT_BYTES, KEY_BYTES, TAG_BYTES, security};
use zeroize::Zeroizing;

/// Start of the text of a key, so that a person or a program that finds one knows what it is.
const PREFIX: &str = "jericho-key:";

/// A key that a client and its targets share. A host with the key can act as the client and as a target.
#[derive(Clone)]
pub struct Key(Zeroizing<[u8; KEY_BYTES]>);

/// How the frames of an export are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// Not at all: all hosts on the links must be trusted.
    None,
    /// Each frame has a tag that only a holder of the key can make.
    Mac,
    /// Each frame has a tag, and its payload is encrypted.
    Encrypt,
}

/// A text is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is one line: {PREFIX} and 64 hexadecimal digits, as `jericho key new` prints it")]
pub struct NoKey;

impl Key {
    /// Returns a key of random bytes.
    pub fn new(bytes: [u8; KEY_BYTES]) -> Key {
        Key(Zeroizing::new(bytes))
    }

    /// Returns the key as text, without the end of the line.
    pub fn to_text(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("{PREFIX}{}", hexadecimal(&*self.0)))
    }

    /// Returns what names the key. It does not reveal the key.
    pub fn fingerprint(&self) -> [u8; FINGERPRINT_BYTES] {
        first_half(derive(&*self.0, b"jericho fingerprint", &[]))
    }

    /// Returns who a client is that has this key and calls itself `client`: clients with other keys are others.
    pub(crate) fn client(&self, client: &[u8; 16]) -> [u8; 16] {
        first_half(derive(&*self.0, b"jericho client", client))
    }

    /// Returns the tag of a refusal, for all that it must prove.
    pub(crate) fn refusal_tag(&self, text: &[u8]) -> [u8; TAG_BYTES] {
        first_half(derive(&*self.0, b"jericho refusal", text))
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl FromStr for Key {
    type Err = NoKey;

    fn from_str(text: &str) -> Result<Key, NoKey> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(NoKey)?;
        // `from_str_radix` takes a sign, too.
        let is_key = digits.len() == 2 * KEY_BYTES && digits.bytes().all(|c| c.is_ascii_hexdigit());
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        for (at, byte) in bytes.iter_mut().enumerate() {
            let pair = digits.get(2 * at..2 * at + 2).filter(|_| is_key);
            *byte = pair
                .and_then(|pair| u8::from_str_radix(pair, 16).ok())
                .ok_or(NoKey)?;
        }
        Ok(Key(bytes))
    }
}

impl fmt::Debug for Key {
    /// Shows the fingerprint: a key must not get into a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", hexadecimal(&self.fingerprint()))
    }
}

impl Security {
    /// Returns the number in OFFER and HANDSHAKE.
    pub(crate) fn number(self) -> u8 {
        match self {
            Security::None => security::NONE,
            Security::Mac => security::MAC,
            Security::Encrypt => security::ENCRYPT,
        }
    }

    /// Returns what a number in OFFER means, or `None` if this version does not know it.
    pub(crate) fn of_number(number: u8) -> Option<Security> {
        let all = [Security::None, Security::Mac, Security::Encrypt];
        all.into_iter().find(|one| one.number() == number)
    }
}

impl fmt::Display for Security {
    /// Writes it in words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Security::None => "without keys",
            Security::Mac => "authenticated",
            Security::Encrypt => "encrypted",
        })
    }
}

/// Returns bytes as hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a key that follows from another one: HKDF-Expand of RFC 5869 with HMAC-SHA-256, for 32 bytes.
pub(crate) fn derive(secret: &[u8], label: &[u8], text: &[u8]) -> [u8; KEY_BYTES] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    for part in [label, &[0], text, &[1]] {
        context.update(part);
    }
    let mut derived = [0; KEY_BYTES];
    derived.copy_from_slice(context.sign().as_ref());
    derived
}

fn first_half(bytes: [u8; KEY_BYTES]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&bytes[..16]);
    half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_printed() {
        let key = Key::new(std::array::from_fn(|at| at as u8 * 7));
        let text = key.to_text();
        let read: Key = format!(" {}\n", *text).parse().unwrap();
        assert_eq!(read.bytes(), key.bytes());
        assert_eq!(read.fingerprint(), key.fingerprint());
        for text in [
            "",
            &text[1..],
            &text[..text.len() - 1],
            &format!("{}0", *text),
            &text.replace('0', "g"),
            &text.replacen("07", "+7", 1),
            &text.replacen("07", "é", 1),
        ] {
            assert!(text.parse::<Key>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_follows_from_a_key_differs_by_purpose_and_key() {
        let (one, other) = (Key::new([1; 32]), Key::new([2; 32]));
        let client = [5; 16];
        assert_ne!(one.fingerprint(), other.fingerprint());
        assert_ne!(one.client(&client), other.client(&client));
        assert_ne!(one.client(&client), one.client(&[6; 16]));
        assert_ne!(one.refusal_tag(b"a"), one.refusal_tag(b"b"));
        assert!(!format!("{one:?}").contains("0101"));
    }
}
