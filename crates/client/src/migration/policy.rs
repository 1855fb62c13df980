//! The thread policy of this run.

use std::sync::OnceLock;

use jericho_format::threads::ThreadPolicy;

/// Environment variable with the policy of a run.
pub const VARIABLE: &str = "JERICHO_THREADS";

/// Returns the policy of this run, which it reads once. Ignores an unknown word: `jericho run` has checked the variable.
pub fn policy_of_run() -> Option<ThreadPolicy> {
    static OF_RUN: OnceLock<Option<ThreadPolicy>> = OnceLock::new();
    *OF_RUN.get_or_init(|| std::env::var(VARIABLE).ok()?.parse().ok())
}
