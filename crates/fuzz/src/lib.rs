//! Fuzz targets: functions that pass any bytes to the code that must handle them. A damaged volume, a malicious program or a
//! broken kernel could provide such bytes. A target must not panic, hang or use memory without bound; nothing else is expected.
//!
//! The same functions run under libFuzzer (`make fuzz`) and in this crate's tests over a corpus and seeds.

#![forbid(unsafe_code)]

mod daemon;
mod input;
mod journal;
mod nbd;
mod requests;
mod segments;
mod volume;
mod wire;

pub use daemon::outcomes;

/// A function that accepts any bytes.
pub type Target = fn(&[u8]);

/// All targets by name. `fuzz/fuzz_targets` has a program for each.
pub const TARGETS: [(&str, Target); 13] = [
    ("label", volume::label),
    ("superblock", volume::superblock),
    ("image", volume::image),
    ("rows", volume::rows),
    ("journal", journal::journal),
    ("segments", segments::segments),
    ("handshake", requests::handshake),
    ("calls", daemon::calls),
    ("admission", daemon::admission),
    ("control", daemon::control),
    ("kernel", requests::kernel),
    ("wire", wire::wire),
    ("nbd", nbd::nbd),
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
