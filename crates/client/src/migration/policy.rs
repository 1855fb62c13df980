//! The thread policy of this run.

use std::sync::OnceLock;

use jericho_format::threads::ThreadPolicy;

/// Environment variable with the policy of a run.
pub const VARIABLE: &str = "JERICHO_THREADS";
/// Environment variable that is set if a thread's companions move with it in this run: the other threads of its process, and its parent process.
pub const WITH_PARENT_VARIABLE: &str = "JERICHO_WITH_PARENT";

/// Returns the policy of this run, which it reads once. Ignores an unknown word: `jericho run` has checked the variable.
pub fn policy_of_run() -> Option<ThreadPolicy> {
    static OF_RUN: OnceLock<Option<ThreadPolicy>> = OnceLock::new();
    *OF_RUN.get_or_init(|| std::env::var(VARIABLE).ok()?.parse().ok())
}

/// Returns whether companions move with threads in this run. Reads the environment once.
pub fn is_with_parent() -> bool {
    static WITH_PARENT: OnceLock<bool> = OnceLock::new();
    *WITH_PARENT.get_or_init(|| std::env::var_os(WITH_PARENT_VARIABLE).is_some())
}
