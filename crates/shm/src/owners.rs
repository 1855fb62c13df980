//! The clients that may write a file inline, as a set of owner numbers in the file's slot.
//!
//! ```text
//! client: add itself ─▶ note its intent ─▶ latch ─▶ look for NO_WRITE ─▶ write
//! daemon: set NO_WRITE ─▶ fence ─▶ read the set ─▶ read the intents of these clients
//! ```
//!
//! `Entry::try_latch` is a full barrier on x86-64 and aarch64. So the daemon finds the client in the set, or the client finds the
//! flag.

use crate::entry::PageState;
use crate::reports::{bits, word_and_bit};
use crate::sync::{AtomicU64, Ordering};

const WORDS: usize = 4;
/// Owner numbers that are equal modulo this share a bit.
pub(crate) const BITS: usize = 64 * WORDS;

/// A set of owner numbers. It may contain more owners than were added.
#[derive(Debug)]
#[repr(C)]
pub struct Owners {
    words: [AtomicU64; WORDS],
}

impl Owners {
    #[cfg(test)]
    pub(crate) fn new() -> Owners {
        Owners {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Adds an owner, before the client latches a page of the file.
    #[cold]
    pub fn add(&self, owner: u16) {
        let (word, bit) = word_and_bit::<WORDS>(owner);
        if !self.contains(owner) {
            self.words[word].fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// Returns whether the set contains an owner.
    #[inline]
    pub fn contains(&self, owner: u16) -> bool {
        let (word, bit) = word_and_bit::<WORDS>(owner);
        self.words[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Removes all owners, before the daemon gives the slot to a file.
    pub fn clear(&self) {
        for word in &self.words {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Returns the owners. The caller sets NO_WRITE, then executes a fence, and then calls this.
    pub fn owners(&self) -> impl Iterator<Item = u16> {
        let bits = self.words.iter().enumerate().flat_map(|(at, word)| {
            bits(word.load(Ordering::Relaxed)).map(move |bit| 64 * at as u16 + bit)
        });
        bits.flat_map(|first| (first..=PageState::OWNER_MAX).step_by(BITS))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_owners_that_were_added_and_few_others() {
        let owners = Owners::new();
        assert_eq!(owners.owners().count(), 0);
        for owner in [2, 63, 64, 300, PageState::OWNER_MAX] {
            assert!(!owners.contains(owner));
            owners.add(owner);
            assert!(owners.contains(owner) && owners.owners().any(|it| it == owner));
            let others = owners
                .owners()
                .filter(|it| it % BITS as u16 == owner % BITS as u16);
            assert!(others.count() <= 4);
            owners.clear();
            assert_eq!(owners.owners().count(), 0);
        }
    }
}
