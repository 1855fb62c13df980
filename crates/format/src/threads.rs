//! When threads are moved to the data that they use: stored in inodes, told to clients through shared memory,
//! written by users.

use std::fmt;
use std::str::FromStr;

/// When threads are moved to the data. The numbers are those of the volume and of the control segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ThreadPolicy {
    /// When it is worth it.
    #[default]
    Adaptive = 0,
    /// Not at all.
    Never = 1,
    /// At the first access that is remote.
    Always = 2,
}

impl ThreadPolicy {
    /// All of them.
    pub const ALL: [ThreadPolicy; 3] = [
        ThreadPolicy::Adaptive,
        ThreadPolicy::Never,
        ThreadPolicy::Always,
    ];

    /// From its number. One that this version does not know is *never*: whatever it means, doing nothing is no
    /// harm.
    #[inline]
    pub fn from_number(number: u32) -> ThreadPolicy {
        match number {
            0 => ThreadPolicy::Adaptive,
            2 => ThreadPolicy::Always,
            _ => ThreadPolicy::Never,
        }
    }

    /// The word that users write.
    pub fn name(self) -> &'static str {
        match self {
            ThreadPolicy::Adaptive => "adaptive",
            ThreadPolicy::Never => "never",
            ThreadPolicy::Always => "always",
        }
    }
}

impl fmt::Display for ThreadPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that is none of the policies.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected never, always or adaptive, found {0:?}")]
pub struct UnknownPolicy(String);

impl FromStr for ThreadPolicy {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<ThreadPolicy, UnknownPolicy> {
        ThreadPolicy::ALL
            .into_iter()
            .find(|policy| policy.name() == word)
            .ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// What an inode has of it, a byte: 0 for *as the volume*, else 1 + the policy, with bit 7 if a user set it on this
/// very inode. Without the bit it was inherited from the directory when the inode was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadsOfInode(u8);

const SET_HERE: u8 = 0x80;

impl ThreadsOfInode {
    /// From the stored byte.
    pub const fn from_byte(byte: u8) -> ThreadsOfInode {
        ThreadsOfInode(byte)
    }

    /// The stored byte.
    pub const fn byte(self) -> u8 {
        self.0
    }

    /// Set by a user.
    pub const fn set_here(policy: ThreadPolicy) -> ThreadsOfInode {
        ThreadsOfInode(SET_HERE | (1 + policy as u8))
    }

    /// Whether a user set it on this very inode.
    pub const fn is_set_here(self) -> bool {
        self.0 & SET_HERE != 0
    }

    /// What something made below gets.
    pub const fn inherited(self) -> ThreadsOfInode {
        ThreadsOfInode(self.0 & !SET_HERE)
    }

    /// The policy; `None`: the volume's. Unknown ones as [`ThreadPolicy::from_number`] has it.
    pub fn policy(self) -> Option<ThreadPolicy> {
        let number = self.inherited().0.checked_sub(1)?;
        Some(ThreadPolicy::from_number(u32::from(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_come_back_from_their_numbers_and_names() {
        for policy in ThreadPolicy::ALL {
            assert_eq!(ThreadPolicy::from_number(policy as u32), policy);
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!(ThreadPolicy::from_number(77), ThreadPolicy::Never);
        let error = "sometimes".parse::<ThreadPolicy>().unwrap_err().to_string();
        assert!(
            error.contains("sometimes") && error.contains("adaptive"),
            "{error}"
        );
    }

    #[test]
    fn an_inode_keeps_policy_and_whether_it_was_set_there() {
        assert_eq!(ThreadsOfInode::default().policy(), None);
        for policy in ThreadPolicy::ALL {
            let set = ThreadsOfInode::set_here(policy);
            let below = ThreadsOfInode::from_byte(set.byte()).inherited();
            assert_eq!((set.policy(), below.policy()), (Some(policy), Some(policy)));
            assert!(set.is_set_here() && !below.is_set_here());
            assert_eq!(below.byte(), 1 + policy as u8);
        }
    }
}
