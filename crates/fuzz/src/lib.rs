//! Fuzz targets: functions that pass any bytes to the code that must handle them. A damaged volume, a malicious program or a
//! broken kernel could provide such bytes. A target must not panic, hang or use memory without bound; nothing else is expected.
//!
//! The same functions run under libFuzzer (`make fuzz`) and in this crate's tests over a corpus and seeds.

#![forbid(unsafe_code)]

mod daemon;
mod requests;
mod segments;
mod volume;

pub use daemon::outcomes;

/// Silences panics within redb, which the store expects on damaged pages and turns into errors. A fuzzer's hook would end the
/// process at each one.
fn expect_panics_of_redb() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic
                .location()
                .is_some_and(|at| at.file().contains("/redb-"))
            {
                others(panic);
            }
        }));
    });
}

/// A function that accepts any bytes.
pub type Target = fn(&[u8]);

/// All targets by name. `fuzz/fuzz_targets` has a program for each.
pub const TARGETS: [(&str, Target); 10] = [
    ("label", volume::label),
    ("superblock", volume::superblock),
    ("image", volume::image),
    ("rows", volume::rows),
    ("segments", segments::segments),
    ("handshake", requests::handshake),
    ("calls", daemon::calls),
    ("admission", daemon::admission),
    ("control", daemon::control),
    ("kernel", requests::kernel),
];

/// Runs one target.
///
/// # Panics
/// Panics when there is no target with that name, and when the target found a defect.
pub fn run(name: &str, data: &[u8]) {
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    let (_, target) = found.unwrap_or_else(|| panic!("there is no target {name}"));
    target(data);
}

/// Takes values from the front of the bytes; returns zeros when the bytes are used up.
struct Input<'d>(&'d [u8]);

impl<'d> Input<'d> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, count: usize) -> &'d [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(bytes.min(8));
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// Returns a number below `limit`; 0 when `limit` is 0.
    fn below(&mut self, limit: usize) -> usize {
        (self.number(4) as usize).checked_rem(limit).unwrap_or(0)
    }
}
