//! Every program here once more under `jericho run`, its reads and writes answered in its own threads.

use crate::again;

#[test]
fn every_program_has_the_same_result_under_run() {
    // `idle` waits for the daemon, not for programs; the others here are under `jericho run` anyway.
    again::cases_again(&[
        "under_run::",
        "idle::",
        "same::",
        "killed::",
        "instructions::",
        "calls::",
    ]);
}
