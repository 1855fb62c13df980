//! Records of what goes wrong: write-backs that fail, clients that keep latches, tables that clients have corrupted.

use std::time::{Duration, Instant};

use foldhash::HashMap;
use jericho_shm::{Key, PageState as Word};

use crate::object::Error;

/// Owner of the latches that the daemon itself takes.
pub const OWNER_DAEMON: u16 = 1;

/// Time between a suspicion and the repair. A correct writer reports a dirty page in less time.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same, if frames are still missing after a repair that found nothing. A failing device, too, can cause this.
const PATIENCE_NOTHING_FOUND: Duration = Duration::from_secs(30);

/// A period in which pages cannot be written back.
pub(crate) struct Outage {
    /// Cause of the latest failed write-back.
    pub error: Error,
    pub failed_at: Instant,
    /// Time of the last successful write-back, or of the beginning of the outage.
    pub written_at: Instant,
    pub probe_at: Instant,
}

/// Latches that clients hold for a long time.
#[derive(Default)]
pub(crate) struct Latches {
    /// The latched state that was seen, and since when, by entry.
    pub seen: HashMap<u32, (Word, Instant)>,
    /// The last sweep over `seen`.
    pub swept: Option<Instant>,
    /// Frames into which a client whose latch was taken away may still copy, each with the client's owner id.
    pub quarantine: Vec<(u16, u32)>,
    /// Frames that a page left while the device reads from them, by the entry of the page.
    pub in_transfer: HashMap<u32, u32>,
    /// Dirty pages that no client will report: their latch was taken away, or their client died.
    pub unreported: Vec<Key>,
}

impl Latches {
    /// Returns the frames that clients may still copy into.
    pub fn quarantined(&self) -> impl Iterator<Item = u32> {
        self.quarantine.iter().map(|(_, frame)| *frame)
    }

    /// Ends the quarantine of frames whose latch was, or claimed to be, the daemon's.
    pub fn end_own_quarantine(&mut self) {
        self.quarantine.retain(|(owner, _)| *owner != OWNER_DAEMON);
    }
}

/// Evidence of a corrupted table.
#[derive(Default)]
pub(crate) struct Damage {
    pub since: Option<Instant>,
    /// An impossible state was seen; it is not only a lack of frames.
    pub certain: bool,
    /// The last repair found nothing.
    pub found_nothing: bool,
    /// Pages that were dirty at the last repair and not in the index.
    pub unknown: HashMap<u32, Word>,
}

impl Damage {
    pub fn is_suspected(&self) -> bool {
        self.since.is_some()
    }

    pub fn is_due(&self) -> bool {
        let patience = match self.found_nothing && !self.certain {
            true => PATIENCE_NOTHING_FOUND,
            false => PATIENCE,
        };
        self.since.is_some_and(|since| since.elapsed() >= patience)
    }

    pub fn suspect(&mut self, certain: bool) {
        self.since.get_or_insert_with(Instant::now);
        self.certain |= certain;
    }
}
