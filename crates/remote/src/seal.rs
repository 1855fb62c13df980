//! What protects the frames of a channel: a checksum with a salt, or tags with keys. Section *Keys* of `docs/formats/wire.md`.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use jericho_format::wire::{ETHERNET_BYTES, FrameHeader, HEADER_BYTES, KEY_BYTES, TAG_BYTES};
use zeroize::Zeroizing;

use crate::key::{Security, derive};

/// Protects a frame to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seal {
    /// A checksum that begins with a salt.
    Checksum(u32),
    /// A tag.
    Key(FrameKey),
}

/// The key of the frames of one direction of a channel, for a part of their numbers.
#[derive(Clone)]
pub struct FrameKey(Arc<Inner>);

struct Inner {
    aead: LessSafeKey,
    is_encrypting: bool,
}

impl FrameKey {
    fn new(secret: &[u8; KEY_BYTES], security: Security) -> FrameKey {
        let key = Zeroizing::new(derive(secret, b"jericho frames", &[]));
        let key = UnboundKey::new(&AES_256_GCM, &*key).expect("the length is right");
        FrameKey(Arc::new(Inner {
            aead: LessSafeKey::new(key),
            is_encrypting: security == Security::Encrypt,
        }))
    }

    /// Protects a frame in place: a header, then a payload. Appends the tag.
    pub(crate) fn seal(&self, number: u64, frame: &mut Vec<u8>) {
        let Inner {
            aead,
            is_encrypting,
        } = &*self.0;
        let (clear, secret) = match is_encrypting {
            true => frame.split_at_mut(HEADER_BYTES),
            false => (&mut frame[..], &mut [][..]),
        };
        let clear = Aad::from(&clear[ETHERNET_BYTES..]);
        let tag = aead
            .seal_in_place_separate_tag(nonce(number), clear, secret)
            .expect("a frame is not too long");
        frame.extend_from_slice(tag.as_ref());
    }

    /// Checks a frame with a payload of some bytes, and decrypts it in place. Returns whether its tag is right.
    fn open(&self, number: u64, payload_bytes: usize, frame: &mut [u8]) -> bool {
        let Inner {
            aead,
            is_encrypting,
        } = &*self.0;
        let end = HEADER_BYTES + payload_bytes;
        let Some(frame) = frame.get_mut(..end + TAG_BYTES) else {
            return false;
        };
        match is_encrypting {
            true => {
                let (clear, secret) = frame.split_at_mut(HEADER_BYTES);
                let clear = Aad::from(&clear[ETHERNET_BYTES..]);
                aead.open_in_place(nonce(number), clear, secret).is_ok()
            }
            false => {
                let (clear, tag) = frame.split_at(end);
                let clear = Aad::from(&clear[ETHERNET_BYTES..]);
                aead.open_separate_gather(nonce(number), clear, &[], tag, &mut [])
                    .is_ok()
            }
        }
    }
}

/// Returns the nonce of a frame. Each number is used once with a key.
fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl PartialEq for FrameKey {
    fn eq(&self, other: &FrameKey) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FrameKey {}

impl fmt::Debug for FrameKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FrameKey")
    }
}

/// The keys of one direction. Frame numbers `phase * frames_per_key` and above have the key of the phase.
pub(crate) struct Keys {
    phase: u64,
    secret: Zeroizing<[u8; KEY_BYTES]>,
    key: FrameKey,
    security: Security,
    frames_per_key: u64,
}

impl Keys {
    fn new(secret: &[u8; KEY_BYTES], security: Security, frames_per_key: u64) -> Keys {
        Keys {
            phase: 0,
            secret: Zeroizing::new(*secret),
            key: FrameKey::new(secret, security),
            security,
            frames_per_key,
        }
    }

    fn phase_of(&self, number: u64) -> u64 {
        number / self.frames_per_key
    }

    /// Returns the keys of the next phase.
    fn next(&self) -> Keys {
        let secret = Zeroizing::new(derive(&*self.secret, b"jericho next key", &[]));
        Keys {
            phase: self.phase + 1,
            key: FrameKey::new(&secret, self.security),
            secret,
            ..*self
        }
    }
}

/// What protects the frames of a channel, both those that are sent and those that arrive.
pub(crate) enum Seals {
    Checksum(u32),
    Keys {
        send: Box<Keys>,
        receive: Box<Receiving>,
    },
}

/// The keys of the frames that arrive, and the former one: frames may arrive late.
pub(crate) struct Receiving {
    keys: Keys,
    former: Option<FrameKey>,
}

impl Receiving {
    fn advance(&mut self, next: Keys) {
        let keys = std::mem::replace(&mut self.keys, next);
        self.former = Some(keys.key);
    }
}

impl Seals {
    /// Returns the keys that follow from the secrets of the frames that are sent and received.
    pub fn keys(
        (send, receive): (&[u8; KEY_BYTES], &[u8; KEY_BYTES]),
        security: Security,
        frames_per_key: u64,
    ) -> Seals {
        let keys = |secret| Keys::new(secret, security, frames_per_key);
        Seals::Keys {
            send: Box::new(keys(send)),
            receive: Box::new(Receiving {
                keys: keys(receive),
                former: None,
            }),
        }
    }

    /// Returns what protects the frame with a number that is sent now. Numbers grow.
    pub fn seal(&mut self, number: u64) -> Seal {
        match self {
            Seals::Checksum(salt) => Seal::Checksum(*salt),
            Seals::Keys { send, .. } => {
                while send.phase < send.phase_of(number) {
                    **send = send.next();
                }
                Seal::Key(send.key.clone())
            }
        }
    }

    /// Checks a frame that arrived, and decrypts it in place. Returns whether a holder of the keys has made it, or, without keys, whether
    /// its checksum is right.
    pub fn open(&mut self, header: &FrameHeader, frame: &mut [u8]) -> bool {
        let length = usize::from(header.payload_bytes.get());
        let receive = match self {
            Seals::Checksum(salt) => {
                let payload = frame.get(HEADER_BYTES..HEADER_BYTES + length);
                return payload.is_some_and(|payload| header.is_sealed(*salt, payload));
            }
            Seals::Keys { receive, .. } => receive,
        };
        let number = header.number.get();
        let phase = receive.keys.phase_of(number);
        if phase == receive.keys.phase {
            receive.keys.key.open(number, length, frame)
        } else if phase + 1 == receive.keys.phase {
            let former = receive.former.as_ref();
            former.is_some_and(|key| key.open(number, length, frame))
        } else if phase == receive.keys.phase + 1 {
            // Only a genuine frame ends the use of the key.
            let next = receive.keys.next();
            let is_genuine = next.key.open(number, length, frame);
            if is_genuine {
                receive.advance(next);
            }
            is_genuine
        } else {
            false
        }
    }
}

impl fmt::Debug for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Seals::Checksum(_) => "checksums",
            Seals::Keys { .. } => "keys",
        })
    }
}

#[cfg(test)]
mod tests {
    use jericho_format::wire::frame_kind;
    use zerocopy::IntoBytes;
    use zerocopy::byteorder::little_endian::U64;

    use super::*;

    const PER_KEY: u64 = 100;

    fn both(security: Security) -> [Seals; 2] {
        let (one, other) = ([1; 32], [2; 32]);
        [(&one, &other), (&other, &one)].map(|secrets| Seals::keys(secrets, security, PER_KEY))
    }

    fn frame(seals: &mut Seals, number: u64) -> (FrameHeader, Vec<u8>) {
        let payload = [number as u8; 64];
        let mut header = FrameHeader::new(frame_kind::DATA, payload.len());
        header.number = U64::new(number);
        let mut frame = [header.as_bytes(), &payload].concat();
        let Seal::Key(key) = seals.seal(number) else {
            panic!("no key");
        };
        key.seal(number, &mut frame);
        (header, frame)
    }

    #[test]
    fn frames_of_the_key_in_use_and_the_one_before_are_opened() {
        for security in [Security::Mac, Security::Encrypt] {
            let [mut sender, mut receiver] = both(security);
            let numbers = [0, 7, 99, 100, 101, 199, 200, 201, 350];
            let frames = numbers.map(|number| frame(&mut sender, number));
            let mut opens = |at: usize| {
                let (header, mut frame) = frames[at].clone();
                let is_open = receiver.open(&header, &mut frame);
                let payload = [numbers[at] as u8; 64];
                assert!(!is_open || frame[HEADER_BYTES..HEADER_BYTES + 64] == payload);
                is_open
            };
            // Of the first key, then of the second one, then a late one of the first.
            assert!(opens(1) && opens(3) && opens(2) && opens(0) && opens(5));
            // Of the fourth key, which no frame of the third one has announced.
            assert!(!opens(8));
            assert!(opens(6) && opens(5) && !opens(2) && opens(8) && opens(7) && !opens(5));
        }
    }

    #[test]
    fn each_key_has_other_tags() {
        let [mut sender, _] = both(Security::Mac);
        let [mut other, _] = both(Security::Encrypt);
        let tags = [0, 100, 200].map(|number| {
            // The same nonce would show the same key.
            let Seal::Key(key) = sender.seal(number) else {
                panic!("no key");
            };
            let mut frame = vec![0; HEADER_BYTES];
            key.seal(5, &mut frame);
            frame[HEADER_BYTES..].to_vec()
        });
        assert!(tags[0] != tags[1] && tags[1] != tags[2] && tags[0] != tags[2]);
        assert_ne!(
            frame(&mut other, 0).1,
            frame(&mut both(Security::Mac)[0], 0).1
        );
    }

    /// With one nonce for two frames, the difference of their payloads would show.
    #[test]
    fn each_number_encrypts_in_another_way() {
        let [mut sender, _] = both(Security::Encrypt);
        let mut encrypted = |number| {
            let Seal::Key(key) = sender.seal(number) else {
                panic!("no key");
            };
            let mut frame = vec![0; HEADER_BYTES + 64];
            key.seal(number, &mut frame);
            frame[HEADER_BYTES..HEADER_BYTES + 64].to_vec()
        };
        let frames = [0, 1, 99, 100].map(&mut encrypted);
        for (at, one) in frames.iter().enumerate() {
            assert!(!frames[at + 1..].contains(one));
        }
    }

    #[test]
    fn a_frame_that_is_too_short_for_a_tag_is_not_opened() {
        let [mut sender, mut receiver] = both(Security::Encrypt);
        let (header, frame) = frame(&mut sender, 3);
        for length in 0..frame.len() {
            assert!(!receiver.open(&header, &mut frame[..length].to_vec()));
        }
        // Padding.
        assert!(receiver.open(&header, &mut [&frame[..], &[0; 9]].concat()));
    }
}
