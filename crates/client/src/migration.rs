//! Which CPUs a thread runs on: near the data that it uses, where that helps, and never against its program.
//!
//! [`account`] is called with each inline access and adds to a few cells of the thread. [`migrate_if_due`] is called when the
//! thread holds nothing that others wait for; once for each [`DECIDE_BYTES`] it looks at the clock and asks the [`migrator`]
//! what to do. Nothing here allocates.
//!
//! What programs do must not go wrong by it: whoever forks, executes, starts a thread or asks for its own affinity calls
//! [`release`] first, as the new thread inherits the mask. Whoever is called for other reasons calls [`tick`], so that a
//! thread that went on to other things is let go.

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

/// A decision is made each time that a thread has used this much.
const DECIDE_BYTES: u32 = 2 << 20;
/// What an access costs beside its bytes: the lines of the page table are remote too.
const ACCESS_BYTES: u32 = 256;
/// One access counts as this much at most, so that sums do not overflow.
const ACCESS_BYTES_MAX: usize = 16 << 20;

/// Environment variable with the policy of a run.
pub const VARIABLE: &str = "JERICHO_THREADS";

/// The policy of this run, read once. A word that is none counts as not there: `jericho run` has checked it.
pub fn policy_of_run() -> Option<ThreadPolicy> {
    static OF_RUN: OnceLock<Option<ThreadPolicy>> = OnceLock::new();
    *OF_RUN.get_or_init(|| std::env::var(VARIABLE).ok()?.parse().ok())
}

/// Of `Thread::due`; homes are 16 bits.
const NOTHING: u32 = u32::MAX;
const LOOK: u32 = u32::MAX - 1;

const CELLS: usize = 2 * (NODES + 1);

/// What a thread has used since its last decision, and how it is placed.
pub(crate) struct Thread {
    /// For each node, and `NOWHERE`: local bytes, remote bytes.
    used: [Cell<u32>; CELLS],
    sum: Cell<u32>,
    /// What `migrate_if_due` has to do: `NOTHING`, `LOOK`, or the home of an access under *always* that was remote.
    due: Cell<u32>,
    is_held: Cell<bool>,
    migrator: RefCell<Migrator>,
}

/// Accounts an access of the calling thread to `bytes` bytes whose home is node `home`, made on a CPU of node
/// `cpu_node`, under `policy`. Only for volumes whose nodes are this process's ([`learn`]).
pub fn account(policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
    reentrancy::thread(|thread| thread.migration.account(policy, home, cpu_node, bytes));
}

/// Does what accesses have made due; may move the thread. Not while it holds anything that others wait for: a move takes
/// as long as the scheduler likes.
pub fn migrate_if_due() {
    reentrancy::thread(|thread| thread.migration.migrate_if_due());
}

/// Puts back the calling thread's own mask. Before a fork, an exec, a spawn, a new thread, and before the program
/// asks for its affinity.
#[inline]
pub fn release() {
    reentrancy::thread(|thread| {
        if thread.migration.is_held.get() {
            thread.migration.release();
        }
    });
}

/// Lets the calling thread go if it was held and has used nothing of ours for a while. For calls that are about
/// something else; costs one load for a thread that is not held.
#[inline]
pub fn tick() {
    reentrancy::thread(|thread| {
        if thread.migration.is_held.get() {
            thread.migration.tick();
        }
    });
}

/// The node that the calling thread is held on.
pub fn held_on() -> Option<u16> {
    let held =
        reentrancy::thread(|thread| Some(thread.migration.migrator.try_borrow().ok()?.held_on()));
    held.flatten().map(|node| node as u16)
}

impl Thread {
    /// Of a thread that has used nothing yet.
    pub(crate) const fn new() -> Thread {
        Thread {
            used: [const { Cell::new(0) }; CELLS],
            sum: Cell::new(0),
            due: Cell::new(NOTHING),
            is_held: Cell::new(false),
            migrator: RefCell::new(Migrator::new()),
        }
    }

    /// See [`account`].
    pub(crate) fn account(&self, policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
        if let Some(cell) = self.cell(policy, home, cpu_node) {
            self.add(cell, 1, bytes);
        }
    }

    /// The cell that an access adds to: see [`account`]; `None`: it counts nowhere.
    pub(crate) fn cell(&self, policy: ThreadPolicy, home: u16, cpu_node: u16) -> Option<u8> {
        // What is never followed matters only to a thread that is held: it may be what that goes on with.
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

    /// Adds accesses to so many bytes together.
    pub(crate) fn add(&self, cell: u8, accesses: u32, bytes: usize) {
        let weight = bytes.min(ACCESS_BYTES_MAX) as u32 + accesses * ACCESS_BYTES;
        if let Some(cell) = self.used.get(usize::from(cell)) {
            cell.set(cell.get().saturating_add(weight));
        }
        let sum = self.sum.get().saturating_add(weight);
        self.sum.set(sum);
        if sum >= DECIDE_BYTES && !self.is_due() {
            self.due.set(LOOK);
        }
    }

    /// Whether there is something for `migrate_if_due` to do.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.get() != NOTHING
    }

    /// See [`migrate_if_due`].
    #[inline]
    pub(crate) fn migrate_if_due(&self) {
        if self.is_due() {
            self.decide(self.due.replace(NOTHING));
        }
    }

    #[cold]
    fn decide(&self, due: u32) {
        // Borrowed: a signal handler that came into the middle of a decision.
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
            // Held by an access under *always* it stays, until its use says otherwise.
            migrator.decide(now, &mut world);
        }
        if due != LOOK {
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
            migrator.let_go_if_idle(now(), &mut Myself { nodes });
            self.is_held.set(migrator.held_on().is_some());
        }
    }
}

/// Nanoseconds of a monotonic clock, from the first call on; never 0.
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
