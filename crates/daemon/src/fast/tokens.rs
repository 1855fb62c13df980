//! Tokens: with a token, a process shows at the socket that it has a writable descriptor and may write inline.
//!
//! The ioctl on a *writable* descriptor returns a token. The daemon hands writable segments only to a process that presents
//! a token, so a process that can open no file of the volume for writing gets none. A token is valid once, for a process of
//! the uid it was given to, for one minute, and only for this daemon instance.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lifetime of a token. A program presents a token at once, but may be stopped in between.
const LIFETIME: Duration = Duration::from_secs(60);
/// Most unused tokens of one uid: as many as there may be clients. A new token replaces the oldest.
const PER_UID_MAX: usize = 1024;

struct Token {
    word: u64,
    uid: u32,
    until: Instant,
}

/// Tokens that were given and not presented yet, oldest first.
#[derive(Default)]
pub(super) struct Tokens(Mutex<Vec<Token>>);

impl Tokens {
    /// Creates a token for a process of `uid`. Returns `None` when the kernel has no random number.
    pub fn give(&self, uid: u32) -> Option<u64> {
        self.give_at(uid, Instant::now())
    }

    /// Consumes `word` if it is a valid token of `uid`. Returns whether it was.
    pub fn take(&self, word: u64, uid: u32) -> bool {
        self.take_at(word, uid, Instant::now())
    }

    fn give_at(&self, uid: u32, now: Instant) -> Option<u64> {
        // 0 means "no token" in a request.
        let word = jericho_sys::process::random_u64()
            .ok()
            .filter(|w| *w != 0)?;
        let mut tokens = self.0.lock();
        tokens.retain(|token| token.until > now);
        if tokens.iter().filter(|token| token.uid == uid).count() >= PER_UID_MAX
            && let Some(oldest) = tokens.iter().position(|token| token.uid == uid)
        {
            tokens.remove(oldest);
        }
        let until = now + LIFETIME;
        tokens.push(Token { word, uid, until });
        Some(word)
    }

    fn take_at(&self, word: u64, uid: u32, now: Instant) -> bool {
        let mut tokens = self.0.lock();
        tokens.retain(|token| token.until > now);
        let found = tokens
            .iter()
            .position(|token| token.word == word && token.uid == uid);
        found.map(|at| tokens.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_valid_once_for_its_uid_and_for_a_minute() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = tokens.give_at(1000, now).unwrap();
        assert!(!tokens.take_at(token, 1001, now), "another uid's");
        assert!(!tokens.take_at(0, 1000, now));
        assert!(!tokens.take_at(token ^ 1, 1000, now));
        assert!(tokens.take_at(token, 1000, now));
        assert!(!tokens.take_at(token, 1000, now), "presented before");
        let token = tokens.give_at(1000, now).unwrap();
        assert!(!tokens.take_at(token, 1000, now + LIFETIME), "too old");
    }

    #[test]
    fn a_user_that_hoards_tokens_loses_only_its_own() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let other = tokens.give_at(7, now).unwrap();
        let first = tokens.give_at(8, now).unwrap();
        let mut last = 0;
        for _ in 0..PER_UID_MAX {
            last = tokens.give_at(8, now).unwrap();
        }
        assert!(!tokens.take_at(first, 8, now));
        assert!(tokens.take_at(last, 8, now));
        assert!(tokens.take_at(other, 7, now));
    }
}
