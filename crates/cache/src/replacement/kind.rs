//! What a kind of replacement sees, and what it is asked.

use jericho_shm::Key;

/// Entries visited in one call of `Replacement::choose`.
pub(super) const VISITED_AT_ONCE: u32 = 512;
/// Maximum number of victims that one call of `Replacement::choose` names.
pub const VICTIMS_AT_ONCE: usize = 32;

/// What a kind sees of the table.
pub trait Residents {
    /// What the slice needs to know of a victim: its state at the choice.
    type Seen;

    /// Returns the number of entries of the table.
    fn entries(&self) -> u32;

    /// Returns the current epoch. A new epoch begins when a sixteenth of the slice was filled; the number wraps around.
    fn epoch(&self) -> u8;

    /// Returns the state of an entry whose page is clean and in no thread's hands: a possible victim.
    fn idle(&self, entry: u32) -> Option<Self::Seen>;

    /// Returns the epoch in which an entry's page was last used. A page counts as used when it enters.
    fn last_use(&self, entry: u32) -> u8;

    /// Changes the epoch of an entry's last use.
    fn set_last_use(&self, entry: u32, epoch: u8);
}

/// A kind of replacement.
pub trait Replacement<R: Residents>: Send {
    /// Takes note that a page entered the table.
    fn filled(&mut self, residents: &R, entry: u32, key: Key);

    /// Takes note that a page left the table: `evicted` to make room, or dropped because its bytes are no longer valid.
    fn removed(&mut self, entry: u32, key: Key, evicted: bool);

    /// Begins a round of evictions that is to name `wanted` of the slice's `resident` pages.
    fn begin(&mut self, residents: &R, wanted: u32, resident: u32);

    /// Appends victims, until there are `VICTIMS_AT_ONCE` or enough entries were visited for one call. Returns false when the
    /// round has visited all entries and named every page that it could.
    fn choose(&mut self, residents: &R, victims: &mut Vec<(u32, R::Seen)>) -> bool;
}
