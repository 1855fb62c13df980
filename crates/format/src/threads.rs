//! The policy of when threads migrate to the data that they use. It is stored in inodes, passed to clients through shared memory,
//! and written by users.

use std::fmt;
use std::str::FromStr;

/// When threads migrate to the data. The numbers are those of the volume and of the control segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ThreadPolicy {
    /// Threads migrate when the gain is worth the cost.
    #[default]
    Adaptive = 0,
    /// Threads never migrate.
    Never = 1,
    /// Threads migrate at the first remote access that their library or the daemon notices.
    Always = 2,
}

impl ThreadPolicy {
    /// All policies.
    pub const ALL: [ThreadPolicy; 3] = [
        ThreadPolicy::Adaptive,
        ThreadPolicy::Never,
        ThreadPolicy::Always,
    ];

    /// Returns the policy with this number. An unknown number is *never*: not migrating threads is always safe.
    #[inline]
    pub fn from_number(number: u32) -> ThreadPolicy {
        match number {
            0 => ThreadPolicy::Adaptive,
            2 => ThreadPolicy::Always,
            _ => ThreadPolicy::Never,
        }
    }

    /// Returns the word that users write.
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

/// How many remote bytes, in the window that is remembered of a thread, justify a move of the thread under *adaptive*.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MoveCost {
    /// Nobody has measured it.
    #[default]
    Default,
    /// This number of bytes.
    Bytes(u64),
    /// A move never pays: remote bytes cost as much as local ones.
    Never,
}

impl MoveCost {
    /// Least number of bytes that justifies a move, so that a bad measurement does not make threads move all the time.
    pub const BYTES_MIN: u64 = 1 << 20;

    /// Returns the number that stands for it in the control segment: 0 for the default, else KiB, at most 2^32 - 2; 2^32 - 1 for never.
    pub fn number(self) -> u32 {
        match self {
            MoveCost::Default => 0,
            MoveCost::Bytes(bytes) => (bytes >> 10).clamp(1, u64::from(u32::MAX) - 1) as u32,
            MoveCost::Never => u32::MAX,
        }
    }

    /// Returns the cost with this number.
    pub fn from_number(number: u32) -> MoveCost {
        match number {
            0 => MoveCost::Default,
            u32::MAX => MoveCost::Never,
            kib => MoveCost::Bytes(u64::from(kib) << 10),
        }
    }
}

/// A word that is not a policy.
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

/// The policy byte of an inode: 0 for the volume's policy, else 1 + the policy. Bit 7 is set if a user set it on this inode.
/// Otherwise the inode inherited it from its directory when it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadsOfInode(u8);

const SET_HERE: u8 = 0x80;

impl ThreadsOfInode {
    /// Creates it from the stored byte.
    pub const fn from_byte(byte: u8) -> ThreadsOfInode {
        ThreadsOfInode(byte)
    }

    /// Returns the stored byte.
    pub const fn byte(self) -> u8 {
        self.0
    }

    /// Creates the value for a policy that a user sets.
    pub const fn set_here(policy: ThreadPolicy) -> ThreadsOfInode {
        ThreadsOfInode(SET_HERE | (1 + policy as u8))
    }

    /// Returns whether a user set the policy on this inode.
    pub const fn is_set_here(self) -> bool {
        self.0 & SET_HERE != 0
    }

    /// Returns the value that new files and directories below this one get.
    pub const fn inherited(self) -> ThreadsOfInode {
        ThreadsOfInode(self.0 & !SET_HERE)
    }

    /// Returns the policy; `None` means the volume's. Treats unknown policies as [`ThreadPolicy::from_number`] does.
    pub fn policy(self) -> Option<ThreadPolicy> {
        let number = self.inherited().0.checked_sub(1)?;
        Some(ThreadPolicy::from_number(u32::from(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_numbers_and_names() {
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
    fn costs_of_moves_have_numbers() {
        for (cost, number) in [
            (MoveCost::Default, 0),
            (MoveCost::Never, u32::MAX),
            (MoveCost::Bytes(4 << 20), 4096),
        ] {
            assert_eq!(cost.number(), number);
            assert_eq!(MoveCost::from_number(number), cost);
        }
        assert_eq!(MoveCost::Bytes(1).number(), 1);
        assert_eq!(MoveCost::Bytes(u64::MAX).number(), u32::MAX - 1);
    }

    #[test]
    fn an_inode_keeps_its_policy_and_whether_a_user_set_it() {
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
