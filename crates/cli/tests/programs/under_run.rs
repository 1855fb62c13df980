//! Runs every test of this program again under `jericho run`, where the library answers reads and writes in the program's own
//! threads.

use crate::again;

#[test]
fn every_program_has_the_same_result_under_run() {
    // The list names the tests that do not run again. `idle` tests the daemon alone. `threads` and
    // `companions` test migration by the daemon, which does not happen under `jericho run`. `coherent`, `overlapping` and one test of `halves` need programs without the library
    // beside programs with it. One test of `syncs` counts the requests of writes. The others use `jericho run` themselves.
    again::cases_again(&[
        "under_run::",
        "idle::",
        "threads::",
        "companions::",
        "same::",
        "killed::",
        "hostile::",
        "instructions::",
        "calls::",
        "coherent::",
        "overlapping::",
        "appends::",
        "spill::",
        "halves::an_inline_write",
        "syncs::stat_counts",
    ]);
}
