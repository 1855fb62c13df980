//! The earlier files of each fd number. A program that opens one file after the other, such as a database with its journals,
//! gets the same fd for each of them, and uses them alike. So an fd whose last two files were worth a slot (see `fd::early`) is
//! *promising*: its next files get theirs at their first call. After `TRUSTED` files another one has to prove it again.
//!
//! The numbers are hints. A wrong one costs a slot for a file of few calls, or some ordinary calls.

use std::sync::atomic::{AtomicU8, Ordering};

use super::word::FDS;

/// The last file was not worth a slot, or there was none.
const COLD: u8 = 0;
/// The last file was worth a slot.
const WARM: u8 = 1;
/// The last file was worth a slot, and the present one has not proved it yet.
const TRIED: u8 = 2;
/// The number of files that are trusted after two that were worth a slot. `TRIED + n`: n files are still trusted.
const TRUSTED: u8 = 16;

static PASTS: [AtomicU8; FDS] = [const { AtomicU8::new(COLD) }; FDS];

fn change(fd: i32, by: impl Fn(u8) -> u8) -> u8 {
    let past = usize::try_from(fd).ok().and_then(|fd| PASTS.get(fd));
    past.map_or(COLD, |past| {
        past.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| Some(by(now)))
            .unwrap_or(COLD)
    })
}

/// Notes that the fd refers to another file of a mount. Returns whether that file is promising.
pub(super) fn begins(fd: i32) -> bool {
    let before = change(fd, |past| match past {
        COLD | TRIED => COLD,
        WARM => TRIED,
        // The last trusted one.
        3 => WARM,
        trusted => trusted - 1,
    });
    before > TRIED
}

/// Notes that the fd's file has made enough calls to be worth a slot. Calls for the same file after the first one have no effect.
pub fn proved(fd: i32) {
    change(fd, |past| match past {
        COLD => WARM,
        TRIED => TRIED + TRUSTED,
        known => known,
    });
}

/// Forgets the earlier files of the fd.
#[cfg(test)]
pub fn forget_past(fd: i32) {
    change(fd, |_| COLD);
}
