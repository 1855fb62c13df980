//! Every program here once more under `jericho run`, its reads and writes answered in its own threads.

use crate::again;

#[test]
fn every_program_has_the_same_result_under_run() {
    // `idle` waits for the daemon, not for programs; `threads` is about those that the daemon moves, which it
    // does to none under `jericho run`; `coherent`, `overlapping` and one of `halves` need programs without the library beside those
    // with it; the others are there anyway.
    again::cases_again(&[
        "under_run::",
        "idle::",
        "threads::",
        "same::",
        "killed::",
        "hostile::",
        "instructions::",
        "calls::",
        "coherent::",
        "overlapping::",
        "appends::",
        "halves::an_inline_write",
    ]);
}
