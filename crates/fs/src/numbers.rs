//! Inode numbers in use: a bitmap in memory, built from the store when the volume is opened.

use jericho_format::INO_MAX;

use crate::errno::ENOSPC;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::types::Ino;

/// Numbers read from the store at a time.
const CHUNK: usize = 65_536;

/// Gives inode numbers out, the lowest free one first, so that the tables stay dense.
pub struct Numbers {
    words: Vec<u64>,
    /// No word before this one has a free bit.
    first_free: usize,
    used: u64,
}

impl Numbers {
    /// Reads the numbers in use from the store. Number 0 is never given out.
    pub fn load(store: &Store) -> Result<Numbers> {
        let mut numbers = Numbers {
            words: vec![1],
            first_free: 0,
            used: 0,
        };
        let mut from = 1;
        loop {
            let chunk = store.inode_numbers(from, CHUNK)?;
            let Some(last) = chunk.last() else {
                return Ok(numbers);
            };
            from = last.saturating_add(1);
            for ino in chunk {
                if ino > INO_MAX {
                    return Err(Error::Damaged(format!(
                        "there is an inode {ino}, beyond the largest number"
                    )));
                }
                numbers.mark(ino);
            }
        }
    }

    fn mark(&mut self, ino: Ino) {
        let word = (ino / 64) as usize;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (ino % 64);
        self.used += 1;
    }

    /// A free number, in use from now on. ENOSPC when there is none.
    pub fn take(&mut self) -> Result<Ino> {
        let mut word = self.first_free;
        while word < self.words.len() && self.words[word] == u64::MAX {
            word += 1;
        }
        self.first_free = word;
        let bit = self.words.get(word).map_or(0, |w| w.trailing_ones());
        let ino = word as u64 * 64 + u64::from(bit);
        if ino > INO_MAX {
            return Err(ENOSPC);
        }
        self.mark(ino);
        Ok(ino)
    }

    /// The number may be given out again. Only once its removal is durable and nothing of it is cached.
    pub fn give_back(&mut self, ino: Ino) {
        let word = (ino / 64) as usize;
        if let Some(w) = self.words.get_mut(word)
            && *w & (1 << (ino % 64)) != 0
        {
            *w &= !(1 << (ino % 64));
            self.used -= 1;
            self.first_free = self.first_free.min(word);
        }
    }

    /// Numbers in use.
    pub fn used(&self) -> u64 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_given_out_again_only_after_it_came_back() {
        let mut numbers = Numbers {
            words: vec![1],
            first_free: 0,
            used: 0,
        };
        let first: Vec<_> = (0..200).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(first, (1..=200).collect::<Vec<_>>());
        numbers.give_back(77);
        assert_eq!(numbers.used(), 199);
        assert_eq!(numbers.take().unwrap(), 77);
        assert_eq!(numbers.take().unwrap(), 201);
    }
}
