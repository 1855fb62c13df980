//! A thread's use of data, and the decisions to migrate the thread that follow from it.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::time::Instant;

use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};
use jericho_sys::load::{self, ThreadTimes};
use jericho_sys::rseq;

use super::crowding::{Dice, Room};
use super::migrator::{Migrator, NODES, NOWHERE, World};
use super::nodes::{self, Nodes};
use super::policy;
use super::rooms::Rooms;

/// Bytes of use after which a thread's migration is decided again.
const DECIDE_BYTES: u32 = 2 << 20;
/// Cost of an access beside its bytes: the lines of the page table are remote too.
const ACCESS_BYTES: u32 = 256;
/// The most that one access counts, so that sums do not overflow.
const ACCESS_BYTES_MAX: usize = 16 << 20;

/// Shortest time between two requests for a thread's companions, in nanoseconds.
const COMPANIONS_EVERY: u64 = 250_000_000;

/// Values of `ThreadUse::due`. Homes have 16 bits, so they differ from both.
const NOTHING: u32 = u32::MAX;
const DECISION: u32 = u32::MAX - 1;

const CELLS: usize = 2 * (NODES + 1);

/// A thread's use of data since its last decision, and its migration.
pub struct ThreadUse {
    /// For each node and for `NOWHERE`: local bytes, then remote bytes.
    used: [Cell<u32>; CELLS],
    sum: Cell<u32>,
    /// `sum` at the last call of `tick` while the thread was held.
    sum_at_tick: Cell<u32>,
    /// The work of `migrate_if_due`: `NOTHING`, `DECISION`, or the home of a remote access under *always*.
    due: Cell<u32>,
    is_held: Cell<bool>,
    is_held_always: Cell<bool>,
    /// The last use was under *always*.
    is_always: Cell<bool>,
    /// The thread works on another node than that of its data, because that node has too few CPUs.
    works_away: Cell<bool>,
    /// The node to which the thread's companions should come (`NOTHING`: none), and when the thread last had one.
    companions_due: Cell<u32>,
    companions_at: Cell<u64>,
    migrator: RefCell<Migrator>,
}

impl ThreadUse {
    /// Returns the state of a thread that has used nothing yet.
    pub const fn new() -> ThreadUse {
        ThreadUse {
            used: [const { Cell::new(0) }; CELLS],
            sum: Cell::new(0),
            sum_at_tick: Cell::new(0),
            due: Cell::new(NOTHING),
            is_held: Cell::new(false),
            is_held_always: Cell::new(false),
            is_always: Cell::new(false),
            works_away: Cell::new(false),
            companions_due: Cell::new(NOTHING),
            companions_at: Cell::new(0),
            migrator: RefCell::new(Migrator::new()),
        }
    }

    /// Does the work of `migration::account`.
    pub fn account(&self, policy: ThreadPolicy, home: u16, cpu_node: u16, bytes: usize) {
        if let Some(cell) = self.cell(policy, home, cpu_node) {
            self.add(cell, 1, bytes);
        }
    }

    /// Returns the cell to which an access adds (see `account`). Returns `None` when the access does not count.
    pub fn cell(&self, policy: ThreadPolicy, home: u16, cpu_node: u16) -> Option<u8> {
        // Data under *never* counts only for a held thread: it shows that the thread has gone on to other data.
        if policy == ThreadPolicy::Never && !self.is_held.get() {
            return None;
        }
        let remote = home != cpu_node;
        if remote && policy == ThreadPolicy::Always {
            self.due.set(u32::from(home));
        }
        if policy != ThreadPolicy::Never {
            self.is_always.set(policy == ThreadPolicy::Always);
        }
        let node = match policy {
            ThreadPolicy::Never => NOWHERE,
            _ => usize::from(home).min(NOWHERE),
        };
        Some((2 * node) as u8 + u8::from(remote))
    }

    /// Adds a number of accesses, of `bytes` bytes in all, to a cell.
    pub fn add(&self, cell: u8, accesses: u32, bytes: usize) {
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
    pub fn is_due(&self) -> bool {
        self.due.get() != NOTHING
    }

    /// Does the work of `migration::migrate_if_due`.
    #[inline]
    pub fn migrate_if_due(&self) {
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
            // A thread that is held under *always* stays held until the window shows that it uses other data.
            match self.is_always.get() {
                true => migrator.decide_always(now, &mut world),
                false => migrator.decide(now, &mut world),
            }
        }
        if due != DECISION {
            migrator.hold_on(now, due as usize, &mut world);
        }
        self.is_held.set(migrator.held_on().is_some());
        self.is_held_always.set(migrator.is_held_always());
        self.works_away.set(migrator.works_away());
        if policy::is_with_parent() {
            self.note_companions(
                now,
                migrator
                    .data_node()
                    .filter(|node| world.here() == Some(*node)),
            );
        }
    }

    /// Notes that the companions should come to `node`, on which the thread and its data are.
    fn note_companions(&self, now: u64, node: Option<usize>) {
        if let Some(node) = node
            && now - self.companions_at.get() >= COMPANIONS_EVERY
        {
            self.companions_at.set(now);
            self.companions_due.set(node as u32);
        }
    }

    /// Returns the node to which the thread's companions should come, if it is time to ask for that, and whether the thread's policy is *always*.
    #[inline]
    pub fn take_companions(&self) -> Option<(u16, bool)> {
        match self.companions_due.get() {
            NOTHING => None,
            node => {
                self.companions_due.set(NOTHING);
                Some((node as u16, self.is_held_always.get()))
            }
        }
    }

    /// Returns whether the thread works on another node than that of its data because that node has too few CPUs.
    #[inline]
    pub fn works_away(&self) -> bool {
        self.works_away.get()
    }

    /// Returns whether the next call must take the long path, which migrates the thread and asks for its companions.
    #[inline]
    pub fn needs_long_path(&self) -> bool {
        self.is_due() || self.companions_due.get() != NOTHING
    }

    /// Does the work of `migration::release`.
    #[inline]
    pub fn release(&self) {
        if self.is_held.get() {
            self.release_held();
        }
    }

    /// Does the work of `migration::tick`.
    #[inline]
    pub fn tick(&self) {
        if self.is_held.get() {
            self.tick_held();
        }
    }

    /// Returns the node on which the thread is held.
    pub fn held_on(&self) -> Option<u16> {
        let node = self.migrator.try_borrow().ok()?.held_on()?;
        Some(node as u16)
    }

    #[cold]
    fn release_held(&self) {
        if let (Some(nodes), Ok(mut migrator)) =
            (nodes::of_process(), self.migrator.try_borrow_mut())
        {
            migrator.release(&mut Myself { nodes });
            self.is_held.set(false);
        }
    }

    #[cold]
    fn tick_held(&self) {
        if let (Some(nodes), Ok(mut migrator)) =
            (nodes::of_process(), self.migrator.try_borrow_mut())
        {
            // A thread that uses few bytes has used some since, and the next decision may be seconds away.
            if self.sum_at_tick.replace(self.sum.get()) != self.sum.get() {
                return migrator.uses(now());
            }
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

static ROOMS: Rooms = Rooms::new();

thread_local!(static DICE: OwnDice = const { OwnDice(Cell::new(None)) });

/// The dice of a thread, and the thread's id. A child of fork(2) has a copy of its parent's, so dice of another thread are not used.
#[derive(Clone)]
struct OwnDice(Cell<Option<(u32, Dice)>>);

impl OwnDice {
    /// Throws the dice of the calling thread, whose id is `tid`.
    fn throw(&self, tid: u32) -> f32 {
        let own = self.0.get().filter(|(owner, _)| *owner == tid);
        let mut dice = own.map_or(Dice::new(tid), |(_, dice)| dice);
        let number = dice.throw();
        self.0.set(Some((tid, dice)));
        number
    }
}

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

    fn here(&mut self) -> Option<usize> {
        self.nodes.node_of(rseq::current_cpu())
    }

    fn room(&mut self, now: u64, node: usize) -> Option<Room> {
        let mask = || affinity::mask(None).ok();
        ROOMS.room(now, self.nodes, node, mask)
    }

    fn moves(&mut self, now: u64, from: Option<usize>, to: usize, cpus: f32) {
        ROOMS.moves(now, from, to, cpus);
    }

    fn saw(&mut self, node: usize, crowd: f32, is_guest: bool) {
        ROOMS.saw(node, crowd, is_guest);
    }

    fn move_cost(&mut self, node: usize) -> f32 {
        nodes::move_bytes(self.here(), node)
    }

    fn remote_ns(&mut self, at: usize, data: usize) -> f32 {
        nodes::remote_ns(at, data)
    }

    fn times(&mut self) -> Option<ThreadTimes> {
        load::own_times()
    }

    fn random(&mut self) -> f32 {
        DICE.with(|dice| dice.throw(affinity::current_tid()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_children_of_a_fork_throw_different_numbers() {
        let parent = OwnDice(Cell::new(None));
        assert_ne!(parent.throw(7), parent.throw(7));
        let children = [8, 9].map(|tid| {
            let dice = parent.clone();
            [dice.throw(tid), dice.throw(tid)]
        });
        assert_ne!(children[0], children[1]);
    }
}
