//! Decides where a thread should run. A state machine without a clock and without system calls: time, masks and load come from
//! its [`World`], so that a test can make them up.
//!
//! A window keeps what the thread uses, and decays by half each [`HALF_LIFE`]. Under *adaptive*:
//!
//! 1. When one node dominates the window, and the remote bytes there outweigh the cost of a move, the migrator *nudges* the
//!    thread. It narrows the mask to that node's CPUs, which makes the kernel move the thread, and then restores the mask. The
//!    scheduler prefers to leave a thread where its caches are, so usually that is enough. No narrow mask stays that could do
//!    harm when the thread computes, forks or starts threads.
//! 2. When the scheduler has brought the thread back [`NUDGES`] times in short order, the migrator *holds* it: the mask stays
//!    narrow. The migrator releases the thread when it uses other data, when it uses nothing for [`IDLE`], or when it waits for a
//!    CPU while CPUs of other nodes are idle.
//!
//! Under *always* (as in the Jericho paper), the migrator holds the thread at the first access that finds it on another node,
//! until the thread uses another node's data.
//!
//! Invariants:
//! - Each mask that the migrator sets is the mask that it found or a part of it.
//! - A mask that differs from the one that the migrator set shows that the program has chosen the thread's CPUs. The migrator
//!   then leaves the thread alone for good.

use jericho_sys::affinity::CpuMask;

/// Threads are moved to nodes below this number. Data on higher nodes attracts no thread.
pub const NODES: usize = 32;
/// Cell for use that attracts no thread: data under *never*, and data on higher nodes.
pub const NOWHERE: usize = NODES;

const MS: u64 = 1_000_000;

/// The window decays by half in this time (nanoseconds). Threads that alternate between nodes faster than that count as using
/// both.
pub const HALF_LIFE: u64 = 200 * MS;
/// Remote bytes that make a move worth its cost, if nobody has measured them ([`World::move_cost`]). A move costs 100 to 200 microseconds: the switch, and filling the caches again.
/// A remote byte costs about 0.05 nanoseconds more than a local one (the papers: 8 to 40 % of throughput). That is 2 to 4 MiB.
pub const MOVE_COST: f32 = (4 << 20) as f32;
/// Share of the window that one node must have for a move there.
const DOMINANT: f32 = 0.75;
/// Share of the window below which a node no longer holds a thread. The distance between the two shares keeps a thread with mixed
/// use from moving back and forth.
const LOST: f32 = 0.25;
/// Shortest delay before the next move. It doubles each time that the thread is moved again soon after.
pub const HOLD_MIN: u64 = 250 * MS;
/// Longest delay before the next move.
pub const HOLD_MAX: u64 = 16_000 * MS;
/// Nudges to one node, each within `NUDGED_SOON` of the one before, after which the next move holds the thread.
pub const NUDGES: u32 = 3;
/// See [`NUDGES`].
const NUDGED_SOON: u64 = 4_000 * MS;
/// A held thread that has used nothing for this long is released.
pub const IDLE: u64 = 1_000 * MS;
/// Time between two checks of a held thread's mask and waiting.
const CHECK_EVERY: u64 = 250 * MS;
/// A node whose CPUs were idle for less than this share of their time is full: no thread is moved there.
const FULL: f32 = 0.05;
/// A node whose CPUs were idle for more than this share of their time has room.
const ROOM: f32 = 0.25;
/// Share of its time that a held thread may wait for a CPU while there is room elsewhere.
const WAIT_MAX: f32 = 0.25;
/// Time without moves after a node was full, or after a held thread waited too long.
pub const BACK_OFF: u64 = 5_000 * MS;

/// The world that a decision sees and changes, for one thread.
pub trait World {
    /// Returns the CPUs that the thread may use now. Returns `None` when they are unknown or the thread is gone.
    fn mask(&mut self) -> Option<CpuMask>;
    /// Sets those CPUs. Returns false when the kernel refuses.
    fn set_mask(&mut self, mask: &CpuMask) -> bool;
    /// Returns the CPUs of a node.
    fn cpus_of(&self, node: usize) -> CpuMask;
    /// Returns the share (0 to 1) of recent time in which a node's CPUs were idle. Returns `None` when it is unknown.
    fn idle_share(&mut self, now: u64, node: usize) -> Option<f32>;
    /// Returns the remote bytes in the window that make a move to a node worth its cost, from where the thread runs now. Infinite if a move
    /// never pays.
    fn move_cost(&mut self, _node: usize) -> f32 {
        MOVE_COST
    }
    /// Returns the nanoseconds that the thread has waited for a CPU in its life. Returns `None` when they are unknown.
    fn waited_ns(&mut self) -> Option<u64>;
}

/// Bytes used in a node, in a decaying window.
#[derive(Clone, Copy, Debug)]
struct Use {
    all: f32,
    remote: f32,
}

/// A narrowed mask that has not been restored.
#[derive(Clone, Copy, Debug)]
struct HeldThread {
    node: usize,
    found: CpuMask,
    set: CpuMask,
    /// Held by policy *always*: waiting for a CPU does not release the thread.
    always: bool,
    /// Time at which the thread was last known to use something.
    used: u64,
    /// Time of the last check of mask and waiting, and the thread's waiting time then.
    checked: u64,
    waited: Option<u64>,
}

/// The migrator's knowledge of one thread, and what it has done to it.
#[derive(Debug)]
pub struct Migrator {
    window: [Use; NODES + 1],
    /// Time of the window's last update; 0: never.
    updated: u64,
    held: Option<HeldThread>,
    /// The program has chosen the thread's CPUs.
    is_hands_off: bool,
    /// No move before this time.
    not_before: u64,
    hold: u64,
    last_move: u64,
    /// A node on which the thread could not be held, and the time of the next attempt.
    refused: (usize, u64),
    /// The node of the last nudge, and the number of nudges to it in a row.
    nudged: (usize, u32),
}

impl Default for Migrator {
    fn default() -> Migrator {
        Migrator::new()
    }
}

impl Migrator {
    /// Returns the state of an unknown thread.
    pub const fn new() -> Migrator {
        const NOTHING: Use = Use {
            all: 0.0,
            remote: 0.0,
        };
        Migrator {
            window: [NOTHING; NODES + 1],
            updated: 0,
            held: None,
            is_hands_off: false,
            not_before: 0,
            hold: HOLD_MIN,
            last_move: 0,
            refused: (NOWHERE, 0),
            nudged: (NOWHERE, 0),
        }
    }

    /// Returns the node on which the thread is held.
    pub fn held_on(&self) -> Option<usize> {
        self.held.map(|held| held.node)
    }

    /// Returns whether the program was seen to choose the thread's CPUs.
    pub fn is_hands_off(&self) -> bool {
        self.is_hands_off
    }

    /// Brings the window to `now` (nanoseconds of a monotonic clock). A decision calls this first, then [`Migrator::used`], then
    /// [`Migrator::decide`].
    pub fn advance(&mut self, now: u64, world: &mut impl World) {
        let passed = now.saturating_sub(self.updated);
        self.updated = now;
        let factor = (-(passed as f32) / HALF_LIFE as f32).exp2();
        for used in &mut self.window {
            used.all *= factor;
            used.remote *= factor;
        }
        self.release_if_idle(now, world);
        if let Some(held) = &mut self.held {
            held.used = now;
        }
    }

    /// Releases a held thread that has used nothing for [`IDLE`].
    pub fn release_if_idle(&mut self, now: u64, world: &mut impl World) {
        if self
            .held
            .is_some_and(|held| now.saturating_sub(held.used) > IDLE)
        {
            self.release(world);
        }
    }

    /// Adds bytes at `node` to the window: those used while the thread ran on that node (`local`), and elsewhere (`remote`).
    /// `NOWHERE` stands for data that attracts no thread.
    pub fn used(&mut self, node: usize, local: u64, remote: u64) {
        let used = &mut self.window[node.min(NOWHERE)];
        used.all += (local + remote) as f32;
        used.remote += remote as f32;
    }

    /// Decides from the window, for policy *adaptive*.
    pub fn decide(&mut self, now: u64, world: &mut impl World) {
        if self.is_hands_off {
            return;
        }
        let total: f32 = self.window.iter().map(|used| used.all).sum();
        match self.held {
            None => self.maybe_move(now, total, world),
            Some(held) => self.maybe_release(now, total, held, world),
        }
    }

    fn maybe_move(&mut self, now: u64, total: f32, world: &mut impl World) {
        if now < self.not_before {
            return;
        }
        let Some(node) = self.dominant(total) else {
            return;
        };
        if self.window[node].remote < world.move_cost(node) {
            return;
        }
        // Whether this move succeeds or not, the next attempt waits.
        self.not_before = now + HOLD_MIN;
        if world.idle_share(now, node).is_some_and(|idle| idle < FULL) {
            self.not_before = now + BACK_OFF;
            return;
        }
        let again = self.nudged.0 == node && now - self.last_move < NUDGED_SOON;
        let nudges = if again { self.nudged.1 } else { 0 };
        if !self.narrow(now, node, false, world) {
            return;
        }
        self.nudged = (node, nudges + 1);
        if nudges < NUDGES {
            self.release(world);
        }
        self.moved(now, again);
    }

    /// Delays the next move, and for longer when moves follow each other fast. Repeated nudges to one node do not lengthen the
    /// delay.
    fn moved(&mut self, now: u64, to_the_same: bool) {
        let soon = self.last_move > 0 && now - self.last_move < 4 * self.hold;
        self.hold = match (soon, to_the_same) {
            (true, false) => (self.hold * 2).min(HOLD_MAX),
            (true, true) => self.hold,
            _ => HOLD_MIN,
        };
        self.last_move = now;
        self.not_before = now + self.hold;
        // Bytes that were remote before the move are not remote now.
        for used in &mut self.window {
            used.remote = 0.0;
        }
    }

    fn maybe_release(&mut self, now: u64, total: f32, held: HeldThread, world: &mut impl World) {
        if now - held.checked >= CHECK_EVERY {
            if world.mask() != Some(held.set) {
                return self.leave_alone();
            }
            if !held.always && self.waits_in_vain(now, held, world) {
                self.release(world);
                self.not_before = now + BACK_OFF;
                return;
            }
        }
        if self.window[held.node].all < LOST * total {
            self.release(world);
            // The release may have found that the program has chosen the CPUs.
            if !self.is_hands_off {
                self.maybe_move(now, total, world);
            }
        }
    }

    /// Returns whether a held thread lost much of its time waiting for a CPU while CPUs of other nodes were idle.
    fn waits_in_vain(&mut self, now: u64, held: HeldThread, world: &mut impl World) -> bool {
        let waited = world.waited_ns();
        self.held = Some(HeldThread {
            checked: now,
            waited,
            ..held
        });
        let (Some(before), Some(waited)) = (held.waited, waited) else {
            return false;
        };
        let share = waited.saturating_sub(before) as f32 / (now - held.checked) as f32;
        let room = |node: usize| {
            node != held.node
                && !world.cpus_of(node).and(&held.found).is_empty()
                && world.idle_share(now, node).is_some_and(|idle| idle > ROOM)
        };
        share > WAIT_MAX && (0..NODES).any(room)
    }

    /// Holds the thread on `home`, after an access under *always* to data of `home` found the thread on another node.
    pub fn hold_on(&mut self, now: u64, home: usize, world: &mut impl World) {
        // Every remote access calls this. A refused node must not cost each call a read of the mask.
        let is_refused = self.refused.0 == home && now < self.refused.1;
        if self.is_hands_off || home >= NODES || is_refused {
            return;
        }
        if let Some(held) = self.held {
            // The thread is held on `home` and runs elsewhere, so the program has changed the mask.
            if held.node == home {
                return self.leave_alone_if_changed(held, world);
            }
            self.release(world);
            if self.is_hands_off {
                return;
            }
        }
        if !self.narrow(now, home, true, world) {
            self.refused = (home, now + CHECK_EVERY);
        }
    }

    /// Restores the mask that was found, unless the program has set another one since. A fork, an exec or a new thread inherits
    /// the mask, so callers release the thread before it.
    pub fn release(&mut self, world: &mut impl World) {
        let Some(held) = self.held else { return };
        self.leave_alone_if_changed(held, world);
        if self.held.take().is_some() {
            world.set_mask(&held.found);
        }
    }

    fn leave_alone_if_changed(&mut self, held: HeldThread, world: &mut impl World) {
        if world.mask() != Some(held.set) {
            self.leave_alone();
        }
    }

    fn leave_alone(&mut self) {
        self.is_hands_off = true;
        self.held = None;
    }

    /// Narrows the mask to a node's CPUs. Returns false when there is nothing to narrow, or the kernel refuses.
    fn narrow(&mut self, now: u64, node: usize, always: bool, world: &mut impl World) -> bool {
        let Some(found) = world.mask() else {
            return false;
        };
        let set = found.and(&world.cpus_of(node));
        // The program (or its cpuset) keeps the thread off the node, or it is confined to the node already.
        if set.is_empty() || set == found || !world.set_mask(&set) {
            return false;
        }
        self.held = Some(HeldThread {
            node,
            found,
            set,
            always,
            used: now,
            checked: now,
            // Read at the first check: most threads are not held that long.
            waited: None,
        });
        true
    }

    fn dominant(&self, total: f32) -> Option<usize> {
        (0..NODES).find(|node| self.window[*node].all > DOMINANT * total)
    }
}
