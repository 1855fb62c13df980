//! The systemd unit of the project. `make systemd` runs this suite in a container with systemd. Elsewhere its cases are ignored.
#![forbid(unsafe_code)]

mod processes;
mod program;
mod service;
mod unit;

use std::time::{Duration, Instant};

/// Limit of every wait. A process that reaches it hangs.
const LONG: Duration = Duration::from_secs(60);

/// Waits until a condition holds. Panics after `LONG`.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
