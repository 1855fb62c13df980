//! The Noise handshake of a channel: NNpsk0 with the client's key (The Noise Protocol Framework, revision 34, sections 7.5 and 9). Section
//! *Keys* of `docs/formats/wire.md`.
//!
//! Each channel has keys of its own, so a frame number is used once with a key. Both sides draw a new key pair for each channel: who learns
//! the shared key later cannot read what was sent before.

use jericho_format::wire::{Accept, Handshake, KEY_BYTES, NOISE_ACCEPT_BYTES, NOISE_BYTES};
use snow::params::{CipherChoice, DHChoice, HashChoice};
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

/// What the keys of a channel's frames follow from.
pub(crate) struct Secrets {
    pub to_target: Zeroizing<[u8; KEY_BYTES]>,
    pub to_initiator: Zeroizing<[u8; KEY_BYTES]>,
}

/// An initiator's side of a handshake.
pub(crate) struct Question {
    state: HandshakeState,
    /// The HANDSHAKE, with the Noise message.
    pub handshake: Handshake,
}

impl Question {
    /// Begins a handshake: adds the fingerprint and the Noise message to a HANDSHAKE. Returns `None` if the library fails.
    pub fn new(key: &Key, mut handshake: Handshake, entropy: &mut Entropy) -> Option<Question> {
        handshake.key = key.fingerprint();
        let prologue = prologue(&handshake);
        let mut state = builder(key, &prologue, entropy)?.build_initiator().ok()?;
        let mut noise = [0; NOISE_BYTES];
        state.write_message(&[], &mut noise).ok()?;
        handshake.noise = noise;
        Some(Question { state, handshake })
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

/// Returns whether a holder of the key has made a HANDSHAKE.
pub(crate) fn is_genuine(key: &Key, handshake: &Handshake, entropy: &mut Entropy) -> bool {
    heard(key, handshake, entropy).is_some()
}

/// Answers a HANDSHAKE. Returns the Noise message of the ACCEPT and the secrets, or `None` if no holder of the key has made the HANDSHAKE.
pub(crate) fn answer(
    key: &Key,
    handshake: &Handshake,
    accept: &Accept,
    entropy: &mut Entropy,
) -> Option<([u8; NOISE_ACCEPT_BYTES], Secrets)> {
    let mut state = heard(key, handshake, entropy)?;
    let mut message = [0; NOISE_ACCEPT_BYTES];
    state.write_message(accept.as_bytes(), &mut message).ok()?;
    Some((message, secrets(&mut state)))
}

/// Returns the state of a target that has taken the Noise message of a HANDSHAKE.
fn heard(key: &Key, handshake: &Handshake, entropy: &mut Entropy) -> Option<HandshakeState> {
    let prologue = prologue(handshake);
    let mut state = builder(key, &prologue, entropy)?.build_responder().ok()?;
    state.read_message(&handshake.noise, &mut []).ok()?;
    Some(state)
}

/// Returns what the Noise message proves besides the key: all of the HANDSHAKE but the size that its repetitions make smaller.
fn prologue(handshake: &Handshake) -> Vec<u8> {
    let mut handshake = *handshake;
    handshake.noise = [0; NOISE_BYTES];
    handshake.payload_max = 0.into();
    [PROLOGUE, handshake.as_bytes()].concat()
}

fn builder<'b>(key: &'b Key, prologue: &'b [u8], entropy: &mut Entropy) -> Option<Builder<'b>> {
    let resolver = Resolver {
        seed: Zeroizing::new(std::array::from_fn(|_| entropy())),
    };
    let builder = Builder::with_resolver(PATTERN.parse().ok()?, Box::new(resolver));
    builder.psk(0, key.bytes()).ok()?.prologue(prologue).ok()
}

fn secrets(state: &mut HandshakeState) -> Secrets {
    let (to_target, to_initiator) = state.dangerously_get_raw_split();
    Secrets {
        to_target: Zeroizing::new(to_target),
        to_initiator: Zeroizing::new(to_initiator),
    }
}

/// The library's algorithms with the random numbers of this crate's caller.
struct Resolver {
    seed: Zeroizing<[u64; KEY_BYTES / 8]>,
}

/// Random bytes for one key pair.
struct Seed(Option<Zeroizing<[u64; KEY_BYTES / 8]>>);

impl Random for Seed {
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
        Some(Box::new(Seed(Some(self.seed.clone()))))
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

    #[test]
    fn both_sides_get_the_same_secrets_and_the_record() {
        let (mut one, mut other) = (entropy(1), entropy(2));
        let key = Key::new([7; 32]);
        let mut handshake = Handshake::new_zeroed();
        handshake.index = 5.into();
        let mut question = Question::new(&key, handshake, &mut one).unwrap();
        let mut asked = question.handshake;
        // A repetition may propose a smaller size.
        asked.payload_max = 1408.into();
        assert!(is_genuine(&key, &asked, &mut other));
        let mut accept = Accept::new_zeroed();
        accept.index = 9.into();
        let (message, secrets) = answer(&key, &asked, &accept, &mut other).unwrap();
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
    }

    #[test]
    fn another_key_or_a_changed_byte_is_noticed() {
        let mut random = entropy(3);
        let key = Key::new([7; 32]);
        let handshake = Handshake::new_zeroed();
        let question = Question::new(&key, handshake, &mut random).unwrap();
        assert!(!is_genuine(
            &Key::new([8; 32]),
            &question.handshake,
            &mut random
        ));
        let whole = question.handshake.as_bytes();
        for at in 0..whole.len() {
            let mut bytes = whole.to_vec();
            bytes[at] ^= 1;
            let changed = Handshake::read_from_bytes(&bytes).unwrap();
            let is_size = changed.payload_max != question.handshake.payload_max;
            assert_eq!(is_genuine(&key, &changed, &mut random), is_size, "{at}");
        }
    }
}
