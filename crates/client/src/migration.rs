//! Moves threads near the data that they use, where that helps, and never against their program's own choice of CPUs.
//!
//! [`account`] is called with each inline access and adds to a few cells of the thread. [`migrate_if_due`] is called when the
//! thread holds nothing that others wait for. Once for each `DECIDE_BYTES` it reads the clock and asks the `migrator` for a
//! decision. Nothing here allocates.
//!
//! Migration must not disturb the program. A caller that forks, executes, starts a thread or asks for the thread's affinity calls
//! [`release`] first, because the new thread inherits the mask. Other calls call [`tick`], which releases a thread that no longer
//! uses Jericho's data.

pub mod migrator;
pub mod nodes;

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::time::Instant;

use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};
use jericho_sys::load;

use crate::reentrancy;
use migrator::{Migrator, NODES, NOWHERE, World};
use nodes::{Idle, Nodes};

pub use nodes::learn;

/// Bytes of use after which a thread's migration is decided again.
const DECIDE_BYTES: u32 = 2 << 20;
/// Cost of an access beside its bytes: the lines of the page table are remote too.
const ACCESS_BYTES: u32 = 256;
/// The most that one access counts, so that sums do not overflow.
const ACCESS_BYTES_MAX: usize = 16 << 20;

/// Environment variable with the policy of a run.
pub const VARIABLE: &str = "JERICHO_THREADS";

/// Returns the policy of this run, which it reads once. Ignores an unknown word: `jericho run` has checked the variable.
pub fn policy_of_run() -> Option<ThreadPolicy> {
    static OF_RUN: OnceLock<Option<ThreadPolicy>> = OnceLock::new();
    *OF_RUN.get_or_init(|| std::env::var(VARIABLE).ok()?.parse().ok())
}

/// Values of `Thread::due`. Homes have 16 bits, so they differ from both.
const NOTHING: u32 = u32::MAX;
const DECISION: u32 = u32::MAX - 1;

const CELLS: usize = 2 * (NODES + 1);

/// A thread's use of data since its last decision, and its migration.
pub(crate) struct Thread {
    /// For each node and for `NOWHERE`: local bytes, then remote bytes.
    used: [Cell<u32>; CELLS],
    sum: Cell<u32>,
    /// The work of `migrate_if_due`: `NOTHING`, `DECISION`, or the home of a remote access under *always*.
    due: Cell<u32>,
    is_held: Cell<bool>,
    migrator: RefCell<Migrator>,
}

/// Accounts an access of the calling thread under `policy` to `bytes` bytes whose home is node `home`. The thread ran on a CPU of
/// node `cpu_node`. Only for volumes whose nodes are this process's ([`learn`]).
pub fn account(policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
    reentrancy::thread(|thread| thread.migration.account(policy, home, cpu_node, bytes));
}

/// Does the migration work that accesses have made due. May move the thread, which takes as long as the scheduler likes, so the
/// thread must hold nothing that others wait for.
pub fn migrate_if_due() {
    reentrancy::thread(|thread| thread.migration.migrate_if_due());
}

/// Restores the calling thread's own mask. Called before a fork, an exec, a spawn or a new thread, and before the program reads
/// or sets its affinity.
#[inline]
pub fn release() {
    reentrancy::thread(|thread| {
        if thread.migration.is_held.get() {
            thread.migration.release();
        }
    });
}

/// Releases the calling thread if it is held and has not used Jericho's data for a while. For calls on other things. Costs one
/// load when the thread is not held.
#[inline]
pub fn tick() {
    reentrancy::thread(|thread| {
        if thread.migration.is_held.get() {
            thread.migration.tick();
        }
    });
}

/// Returns the node on which the calling thread is held.
pub fn held_on() -> Option<u16> {
    let held =
        reentrancy::thread(|thread| Some(thread.migration.migrator.try_borrow().ok()?.held_on()));
    held.flatten().map(|node| node as u16)
}

impl Thread {
    /// Returns the state of a thread that has used nothing yet.
    pub(crate) const fn new() -> Thread {
        Thread {
            used: [const { Cell::new(0) }; CELLS],
            sum: Cell::new(0),
            due: Cell::new(NOTHING),
            is_held: Cell::new(false),
            migrator: RefCell::new(Migrator::new()),
        }
    }

    /// Does the work of the function [`account`].
    pub(crate) fn account(&self, policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
        if let Some(cell) = self.cell(policy, home, cpu_node) {
            self.add(cell, 1, bytes);
        }
    }

    /// Returns the cell to which an access adds (see [`account`]). Returns `None` when the access does not count.
    pub(crate) fn cell(&self, policy: ThreadPolicy, home: u16, cpu_node: u16) -> Option<u8> {
        // Data under *never* counts only for a held thread: it shows that the thread has gone on to other data.
        if policy == ThreadPolicy::Never && !self.is_held.get() {
            return None;
        }
        let remote = home != cpu_node;
        if remote && policy == ThreadPolicy::Always {
            self.due.set(u32::from(home));
        }
        let node = match policy {
            ThreadPolicy::Never => NOWHERE,
            _ => usize::from(home).min(NOWHERE),
        };
        Some((2 * node) as u8 + u8::from(remote))
    }

    /// Adds `accesses` accesses to `bytes` bytes in all.
    pub(crate) fn add(&self, cell: u8, accesses: u32, bytes: usize) {
        let weight = bytes.min(ACCESS_BYTES_MAX) as u32 + accesses * ACCESS_BYTES;
        if let Some(cell) = self.used.get(usize::from(cell)) {
            cell.set(cell.get().saturating_add(weight));
        }
        let sum = self.sum.get().saturating_add(weight);
        self.sum.set(sum);
        if sum >= DECIDE_BYTES && !self.is_due() {
            self.due.set(DECISION);
        }
    }

    /// Returns whether `migrate_if_due` has work to do.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.get() != NOTHING
    }

    /// Does the work of the function [`migrate_if_due`].
    #[inline]
    pub(crate) fn migrate_if_due(&self) {
        if self.is_due() {
            self.decide(self.due.replace(NOTHING));
        }
    }

    #[cold]
    fn decide(&self, due: u32) {
        // The borrow fails in a signal handler that has interrupted a decision.
        let (Some(nodes), Ok(mut migrator)) = (nodes::of_process(), self.migrator.try_borrow_mut())
        else {
            return self.sum.set(0);
        };
        let (now, mut world) = (now(), Myself { nodes });
        if self.sum.get() >= DECIDE_BYTES {
            self.sum.set(0);
            migrator.advance(now, &mut world);
            let (nodes, _) = self.used.as_chunks();
            for (node, [local, remote]) in nodes.iter().enumerate() {
                migrator.used(node, local.take().into(), remote.take().into());
            }
            // A thread that an access under *always* holds stays held until its use changes.
            migrator.decide(now, &mut world);
        }
        if due != DECISION {
            migrator.hold_on(now, due as usize, &mut world);
        }
        self.is_held.set(migrator.held_on().is_some());
    }

    #[cold]
    fn release(&self) {
        if let (Some(nodes), Ok(mut migrator)) =
            (nodes::of_process(), self.migrator.try_borrow_mut())
        {
            migrator.release(&mut Myself { nodes });
            self.is_held.set(false);
        }
    }

    #[cold]
    fn tick(&self) {
        if let (Some(nodes), Ok(mut migrator)) =
            (nodes::of_process(), self.migrator.try_borrow_mut())
        {
            migrator.release_if_idle(now(), &mut Myself { nodes });
            self.is_held.set(migrator.held_on().is_some());
        }
    }
}

/// Returns nanoseconds of a monotonic clock since the first call. Never 0.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

static IDLE: Idle = Idle::new();

/// The calling thread.
struct Myself {
    nodes: &'static Nodes,
}

impl World for Myself {
    fn mask(&mut self) -> Option<CpuMask> {
        affinity::mask(None).ok()
    }

    fn set_mask(&mut self, mask: &CpuMask) -> bool {
        affinity::set_mask(None, mask).is_ok()
    }

    fn cpus_of(&self, node: usize) -> CpuMask {
        self.nodes.cpus_of(node)
    }

    fn idle_share(&mut self, now: u64, node: usize) -> Option<f32> {
        IDLE.share(now, self.nodes, node)
    }

    fn waited_ns(&mut self) -> Option<u64> {
        load::waited_ns()
    }
}

#[cfg(test)]
mod tests;
