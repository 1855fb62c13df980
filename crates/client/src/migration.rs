//! Moves threads near the data that they use, where that helps, and never against their program's own choice of CPUs.
//!
//! Each inline access adds to a few cells of the thread, as [`account`] does. At the end of an inline call, the thread holds
//! nothing that others wait for. Then it calls [`migrate_if_due`], except after the short calls of `hit`. Once for each
//! `DECIDE_BYTES`, `migrate_if_due` reads the clock and asks the `migrator` for a decision. Nothing here allocates.
//!
//! Migration must not disturb the program. A caller that forks, executes, starts a thread or asks for the thread's affinity calls
//! [`release`] first, because the new thread inherits the mask. Other calls call [`tick`], which releases a thread that no longer
//! uses Jericho's data.

pub mod crowding;
pub mod migrator;
pub mod nodes;
mod policy;
pub mod rooms;
mod thread_use;

use jericho_format::threads::ThreadPolicy;

use crate::thread;

pub use nodes::{learn, learn_costs};
pub use policy::{VARIABLE, WITH_PARENT_VARIABLE, is_with_parent, policy_of_run};
pub(crate) use thread_use::ThreadUse;

/// Accounts an access of the calling thread under `policy` to `bytes` bytes whose home is node `home`. The thread ran on a CPU of
/// node `cpu_node`. Only for volumes whose nodes are this process's ([`learn`]).
pub fn account(policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
    thread::current(|thread| thread.migration.account(policy, home, cpu_node, bytes));
}

/// Does the migration work that accesses have made due. May move the thread, which takes as long as the scheduler likes, so the
/// thread must hold nothing that others wait for.
pub fn migrate_if_due() {
    thread::current(|thread| thread.migration.migrate_if_due());
}

/// Restores the calling thread's own mask. Called before a fork, an exec, a spawn or a new thread, and before the program reads
/// or sets its affinity.
#[inline]
pub fn release() {
    thread::current(|thread| thread.migration.release());
}

/// Releases the calling thread if it is held and has not used Jericho's data for a while. Called by hooks that use no data, such
/// as open and close, and by calls that the kernel makes. Costs one load when the thread is not held.
#[inline]
pub fn tick() {
    thread::current(|thread| thread.migration.tick());
}

/// Returns the node on which the calling thread is held.
pub fn held_on() -> Option<u16> {
    thread::current(|thread| thread.migration.held_on())
}

#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;
