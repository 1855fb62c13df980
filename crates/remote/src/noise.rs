//! The Noise handshake of a channel: NNpsk0 with the client's key (The Noise Protocol Framework, revision 34, sections 7.5 and 9). Section
//! *Keys* of `docs/formats/wire.md`.
//!
//! Each channel has keys of its own, so a frame number is used once with a key. Both sides make a new key pair for each channel. So an attacker
//! that gets the shared key later cannot decrypt earlier frames.

use std::sync::OnceLock;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use jericho_format::wire::{
    Accept, Handshake, KEY_BYTES, Mac, NAME_BYTES, NOISE_ACCEPT_BYTES, NOISE_BYTES, TAG_BYTES,
};
use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, Error, HandshakeState};
use zerocopy::{FromBytes, IntoBytes};
use zeroize::Zeroizing;

use crate::frame::Entropy;
use crate::key::Key;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
/// Start of what both sides hash before the messages.
const PROLOGUE: &[u8] = b"jericho wire 1";

/// The two ends of a channel. The Noise messages prove them, so that a stranger cannot lead a client to another target that has the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    /// Name of the target's host.
    pub host: [u8; NAME_BYTES],
    /// Instance of the target.
    pub target: [u8; 16],
    pub target_mac: Mac,
    pub initiator_mac: Mac,
}

/// What the keys of a channel's frames follow from.
pub(crate) struct Secrets {
    pub to_target: Zeroizing<[u8; KEY_BYTES]>,
    pub to_initiator: Zeroizing<[u8; KEY_BYTES]>,
}

/// An initiator's side of a handshake.
pub(crate) struct Question {
    state: HandshakeState,
    ends: Ends,
    /// The HANDSHAKE, with the Noise message.
    pub handshake: Handshake,
}

impl Question {
    /// Begins a handshake: adds the fingerprint and the Noise message to a HANDSHAKE. Returns `None` if the library fails.
    pub fn new(
        key: &Key,
        mut handshake: Handshake,
        ends: Ends,
        entropy: &mut Entropy,
    ) -> Option<Question> {
        handshake.key = key.fingerprint();
        let prologue = prologue(&handshake, &ends);
        let seed = Some(seed(entropy));
        let mut state = builder(key, &prologue, seed)?.build_initiator().ok()?;
        let mut noise = [0; NOISE_BYTES];
        state.write_message(&[], &mut noise).ok()?;
        handshake.noise = noise;
        Some(Question {
            state,
            ends,
            handshake,
        })
    }

    /// Returns whether a target with the key has refused this HANDSHAKE.
    pub fn is_refused(&self, key: &Key, refused: &[u8], tag: &[u8]) -> bool {
        let expected = refusal_tag(key, &self.handshake, &self.ends, refused);
        verify_slices_are_equal(&expected, tag.get(..TAG_BYTES).unwrap_or(&[])).is_ok()
    }

    /// Takes the Noise message of an ACCEPT. Returns `None` if another one than a holder of the key has made it, or it answers another
    /// HANDSHAKE. Another message may be taken then.
    pub fn answered(&mut self, message: &[u8]) -> Option<(Accept, Secrets)> {
        let message = message.get(..NOISE_ACCEPT_BYTES)?;
        let mut record = [0; size_of::<Accept>()];
        self.state.read_message(message, &mut record).ok()?;
        let accept = Accept::read_from_bytes(&record).ok()?;
        Some((accept, secrets(&mut self.state)))
    }
}

impl std::fmt::Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Question").finish_non_exhaustive()
    }
}

/// Returns whether a holder of the key has made a HANDSHAKE for these ends.
pub(crate) fn is_genuine(key: &Key, handshake: &Handshake, ends: &Ends) -> bool {
    heard(key, handshake, ends, None).is_some()
}

/// Answers a HANDSHAKE. Returns the Noise message of the ACCEPT and the secrets, or `None` if no holder of the key has made the HANDSHAKE.
pub(crate) fn answer(
    key: &Key,
    handshake: &Handshake,
    ends: &Ends,
    accept: &Accept,
    entropy: &mut Entropy,
) -> Option<([u8; NOISE_ACCEPT_BYTES], Secrets)> {
    let mut state = heard(key, handshake, ends, Some(seed(entropy)))?;
    let mut message = [0; NOISE_ACCEPT_BYTES];
    state.write_message(accept.as_bytes(), &mut message).ok()?;
    Some((message, secrets(&mut state)))
}

/// Returns the tag of a refusal of a HANDSHAKE that a holder of the key has made.
pub(crate) fn refusal_tag(
    key: &Key,
    handshake: &Handshake,
    ends: &Ends,
    refused: &[u8],
) -> [u8; TAG_BYTES] {
    let asked = prologue(handshake, ends);
    key.refusal_tag(&[&asked[..], &handshake.noise, refused].concat())
}

/// Returns the state of a target that has taken the Noise message of a HANDSHAKE. Without a seed it cannot answer.
fn heard(
    key: &Key,
    handshake: &Handshake,
    ends: &Ends,
    seed: Option<Seed>,
) -> Option<HandshakeState> {
    let prologue = prologue(handshake, ends);
    let mut state = builder(key, &prologue, seed)?.build_responder().ok()?;
    state.read_message(&handshake.noise, &mut []).ok()?;
    Some(state)
}

/// Returns what the Noise message proves besides the key: all of the HANDSHAKE, and the two ends.
fn prologue(handshake: &Handshake, ends: &Ends) -> Vec<u8> {
    let mut handshake = *handshake;
    handshake.noise = [0; NOISE_BYTES];
    let parts: [&[u8]; 6] = [
        PROLOGUE,
        handshake.as_bytes(),
        &ends.host,
        &ends.target,
        &ends.target_mac,
        &ends.initiator_mac,
    ];
    parts.concat()
}

fn builder<'b>(key: &'b Key, prologue: &'b [u8], seed: Option<Seed>) -> Option<Builder<'b>> {
    static PARAMETERS: OnceLock<Option<NoiseParams>> = OnceLock::new();
    let parameters = PARAMETERS.get_or_init(|| PATTERN.parse().ok()).clone()?;
    let builder = Builder::with_resolver(parameters, Box::new(Resolver(seed)));
    builder.psk(0, key.bytes()).ok()?.prologue(prologue).ok()
}

/// Returns random bytes for a key pair.
fn seed(entropy: &mut Entropy) -> Seed {
    Zeroizing::new(std::array::from_fn(|_| entropy()))
}

fn secrets(state: &mut HandshakeState) -> Secrets {
    let (to_target, to_initiator) = state.dangerously_get_raw_split();
    Secrets {
        to_target: Zeroizing::new(to_target),
        to_initiator: Zeroizing::new(to_initiator),
    }
}

/// Random bytes for one key pair.
type Seed = Zeroizing<[u64; KEY_BYTES / 8]>;

/// The library's algorithms with the random numbers of this crate's caller.
struct Resolver(Option<Seed>);

/// Gives the seed once.
struct Once(Option<Seed>);

impl Random for Once {
    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        let seed = self.0.take().ok_or(Error::Rng)?;
        if bytes.len() > KEY_BYTES {
            return Err(Error::Rng);
        }
        bytes.copy_from_slice(&seed.as_bytes()[..bytes.len()]);
        Ok(())
    }
}

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Once(self.0.clone())))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        DefaultResolver.resolve_dh(choice)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn entropy(mut state: u64) -> Entropy {
        Box::new(move || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(99);
            state
        })
    }

    const FINGERPRINT: &str = "1eeeaf56478358c77f95c55d4f661af4";
    const CLIENT: &str = "ab7ae9a8eebdcc582df62b80b9834226";
    const REFUSAL: &str = "30e1c8746e6980ec56118d92f80d1fbb";
    const NEXT_KEY: &str = "a5412ed0388cabea5caf7cc71ceda3efa094db5ce78e5563e0a38582e897a9fe";
    const ENDS: Ends = Ends {
        host: [b'h'; NAME_BYTES],
        target: [3; 16],
        target_mac: [2, 0, 0, 0, 0, 1],
        initiator_mac: [2, 0, 0, 0, 0, 2],
    };

    #[test]
    fn both_sides_get_the_same_secrets_and_the_record() {
        let (mut one, mut other) = (entropy(1), entropy(2));
        let key = Key::new([7; 32]);
        let mut handshake = Handshake::new_zeroed();
        handshake.index = 5.into();
        let mut question = Question::new(&key, handshake, ENDS, &mut one).unwrap();
        let asked = question.handshake;
        assert!(is_genuine(&key, &asked, &ENDS));
        let mut accept = Accept::new_zeroed();
        accept.index = 9.into();
        let (message, secrets) = answer(&key, &asked, &ENDS, &accept, &mut other).unwrap();
        // Forged answers do not spoil the question.
        for at in 0..message.len() {
            let mut forged = message;
            forged[at] ^= 1;
            assert!(question.answered(&forged).is_none(), "{at}");
        }
        let (record, own) = question.answered(&message).unwrap();
        assert_eq!(record, accept);
        assert_eq!(own.to_target, secrets.to_target);
        assert_eq!(own.to_initiator, secrets.to_initiator);
        assert_ne!(own.to_target, own.to_initiator);
        // Other random numbers give other keys.
        let again = answer(&key, &asked, &ENDS, &accept, &mut other).unwrap();
        assert_ne!(again.1.to_target, secrets.to_target);
        let next = Question::new(&key, handshake, ENDS, &mut one).unwrap();
        assert_ne!(next.handshake.noise, asked.noise);
    }

    #[test]
    fn another_key_another_end_or_a_changed_byte_is_noticed() {
        let mut random = entropy(3);
        let key = Key::new([7; 32]);
        let handshake = Handshake::new_zeroed();
        let question = Question::new(&key, handshake, ENDS, &mut random).unwrap();
        let asked = question.handshake;
        assert!(!is_genuine(&Key::new([8; 32]), &asked, &ENDS));
        let (mut host, mut target) = (ENDS, ENDS);
        let (mut target_mac, mut initiator_mac) = (ENDS, ENDS);
        host.host[5] ^= 1;
        target.target[5] ^= 1;
        target_mac.target_mac[5] ^= 1;
        initiator_mac.initiator_mac[5] ^= 1;
        let tag = refusal_tag(&key, &asked, &ENDS, b"refused");
        assert!(question.is_refused(&key, b"refused", &tag));
        assert!(!question.is_refused(&key, b"Refused", &tag));
        assert!(!question.is_refused(&key, b"refused", &tag[1..]));
        for ends in [host, target, target_mac, initiator_mac] {
            assert!(!is_genuine(&key, &asked, &ends), "{ends:?}");
            let tag = refusal_tag(&key, &asked, &ends, b"refused");
            assert!(!question.is_refused(&key, b"refused", &tag));
        }
        for at in 0..asked.as_bytes().len() {
            let mut bytes = asked.as_bytes().to_vec();
            bytes[at] ^= 1;
            let changed = Handshake::read_from_bytes(&bytes).unwrap();
            assert!(!is_genuine(&key, &changed, &ENDS), "{at}");
            let tag = refusal_tag(&key, &changed, &ENDS, b"refused");
            assert!(!question.is_refused(&key, b"refused", &tag), "{at}");
        }
    }

    /// The numbers come from an implementation of its own in Python (hmac, and the package cryptography), so that a change of the format shows.
    #[test]
    fn what_follows_from_a_key_is_what_the_format_says() {
        use crate::key::{derive, hexadecimal};
        let key = Key::new(std::array::from_fn(|at| at as u8));
        assert_eq!(hexadecimal(&key.fingerprint()), FINGERPRINT);
        assert_eq!(hexadecimal(&key.client(&[5; 16])), CLIENT);
        assert_eq!(hexadecimal(&key.refusal_tag(b"text")), REFUSAL);
        let next = derive(&[1; 32], b"jericho next key", &[]);
        assert_eq!(hexadecimal(&next), NEXT_KEY);
    }
}
