//! The unit that the project ships, run by systemd: the suite that `make systemd` runs in a container. Elsewhere its cases are
//! ignored.
#![forbid(unsafe_code)]

mod processes;
mod program;
mod service;
mod unit;

use std::time::{Duration, Instant};

/// Only a hang takes this long.
const LONG: Duration = Duration::from_secs(60);

/// Waits until a condition holds; panics when that takes too long.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
