//! The word of an fd: kind (2 bits), then the data of that kind.
//!
//! ```text
//!   unknown, opened by this process or by another ──worth it────▶ description (index, generation)
//!        ▲                │                                           │
//!        └──forget────────┴────────────▶ kernel ◀─────────────────────┘ (to unknown, if unseen calls reused the fd)
//! ```

/// Fds below this number have a word; larger ones take the kernel path.
pub const FDS: usize = 65_536;
pub const KIND_SHIFT: u32 = 62;
pub const UNKNOWN: u64 = 0;
pub const KERNEL: u64 = 1;
pub const DESCRIBED: u64 = 2;
/// In the word of an unknown fd: this process has opened it.
pub const OPENED: u64 = 1 << 32;
/// In the word of an unknown fd: it is a regular file of a mount.
pub const OURS: u64 = 1 << 33;
/// In the word of an unknown fd: the cost of its ordinary calls so far, in units (see `early`).
pub const UNITS_SHIFT: u32 = 34;
pub const UNITS_MAX: u32 = (1 << 12) - 1;
/// In the word of an unknown fd: calls in progress that move the kernel's offset.
pub const IN_USE_SHIFT: u32 = 46;
pub const IN_USE_MAX: u64 = (1 << 12) - 1;
/// In the word of an unknown fd: a wish was left for it (see `wish`).
pub const WISHED: u64 = 1 << 58;
/// In the word of an unknown fd: its file is likely to be worth a slot (see `past`).
pub const PROMISING: u64 = 1 << 59;
/// In the word of an fd that takes the kernel path: the fd is being closed, and its description has other fds. The word names the
/// description as with `DESCRIBED`.
pub const CLOSING: u64 = 1 << 61;

/// Returns whether the word of an unknown fd marks a regular file of a mount.
pub fn is_ours(word: u64) -> bool {
    word & OURS != 0
}

/// Returns whether a wish was left for an unknown fd.
pub fn is_wished(word: u64) -> bool {
    word & WISHED != 0
}

/// Returns whether the file of an unknown fd is likely to be worth a slot.
pub fn is_promising(word: u64) -> bool {
    word & PROMISING != 0
}

/// Returns whether two words of an unknown fd belong to the same open file.
pub fn is_same_unknown(one: u64, other: u64) -> bool {
    one >> KIND_SHIFT == UNKNOWN && other >> KIND_SHIFT == UNKNOWN && one as u32 == other as u32
}

/// Returns the cost of an unknown fd's ordinary calls so far, in units.
pub fn units(word: u64) -> u32 {
    (word >> UNITS_SHIFT) as u32 & UNITS_MAX
}

/// Returns whether calls are in progress that move the kernel's offset.
pub fn is_in_use(word: u64) -> bool {
    word >> IN_USE_SHIFT & IN_USE_MAX != 0
}

/// Returns the word of an unknown fd with `more` units added. Units only grow, so a later call never restores an earlier word.
/// When the units reach their maximum, the fd counts as known to other processes: its offset stays in the kernel.
pub fn with_units(word: u64, more: u32) -> u64 {
    let word = match units(word) {
        UNITS_MAX if more > 0 => word & !OPENED,
        _ => word,
    };
    let units = u64::from(units(word).saturating_add(more).min(UNITS_MAX));
    word & !(u64::from(UNITS_MAX) << UNITS_SHIFT) | units << UNITS_SHIFT
}

/// Returns whether the word refers to a description.
pub fn has_description(word: u64) -> bool {
    match word >> KIND_SHIFT {
        DESCRIBED => true,
        KERNEL => word & CLOSING != 0,
        _ => false,
    }
}
