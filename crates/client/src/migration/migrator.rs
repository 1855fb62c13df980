//! The decision: where should this thread run? A state machine without a clock and without system calls: time,
//! masks and load come from its [`World`], so that a test can make them up.
//!
//! What a thread uses is kept in a window that decays by half each [`HALF_LIFE`]. *Adaptive*:
//!
//! 1. One node dominates the window, and what was remote there outweighs what a move costs: the thread is
//!    *nudged*. Its mask is narrowed to that node's CPUs, which makes the kernel move it, and then put back.
//!    The scheduler prefers to leave a thread where its caches are, so mostly that is all, and nothing stays
//!    behind that could do harm once the thread computes, forks or starts threads.
//! 2. The scheduler has brought it back [`NUDGES`] times in short order: it is *held*, its mask stays narrowed, until
//!    it uses something else, uses nothing for [`IDLE`], or was measured to wait for a CPU while there were
//!    idle ones elsewhere.
//!
//! *Always* (what the Jericho paper does): at the first access that finds it elsewhere it is held, and stays so
//! until it uses another node's data.
//!
//! Invariants:
//! - A mask that is set is a part of the one that was found, or the one that was found.
//! - A thread whose mask is not the one that was left there was placed by its program, and is left alone for
//!   good.

use jericho_sys::affinity::CpuMask;

/// Nodes that threads are moved to: 0 to this number, exclusive. Data on higher ones attracts nobody.
pub const NODES: usize = 32;
/// Where use counts that attracts nobody: data whose policy is *never*, and that on higher nodes.
pub const NOWHERE: usize = NODES;

const MS: u64 = 1_000_000;

/// The window decays by half in this time (nanoseconds): long enough that threads which go back and forth
/// between nodes faster than that are seen as using both.
pub const HALF_LIFE: u64 = 200 * MS;
/// What must have been remote, in bytes, for a move to be worth it. A move costs 100 to 200 microseconds: the switch
/// and the filling of the caches anew. A remote byte costs about 0.05 nanoseconds more than a local one (the papers:
/// 8 to 40 % of throughput). That is 2 to 4 MiB.
pub const MOVE_COST: f32 = (4 << 20) as f32;
/// Share of the window that one node must have for a move there.
const DOMINANT: f32 = 0.75;
/// Share of the window below which a node does not hold a thread any longer. The distance between the two is
/// what keeps a mixture from moving it to and fro.
const LOST: f32 = 0.25;
/// A moved thread stays at least this long; twice as long each time that it was moved again soon after.
pub const HOLD_MIN: u64 = 250 * MS;
/// The longest that it stays for that reason.
pub const HOLD_MAX: u64 = 16_000 * MS;
/// Nudges to one node within [`NUDGED_SOON`] of each other that did not last: then it is held.
pub const NUDGES: u32 = 3;
/// See [`NUDGES`].
const NUDGED_SOON: u64 = 4_000 * MS;
/// A held thread that has used nothing for this long is let go.
pub const IDLE: u64 = 1_000 * MS;
/// How often a held thread's mask and waiting are looked at.
const LOOK: u64 = 250 * MS;
/// A node of whose CPUs' time less than this was idle is full: nobody is moved there.
const FULL: f32 = 0.05;
/// A node of whose CPUs' time more than this was idle has room.
const ROOM: f32 = 0.25;
/// Share of its time that a held thread may wait for a CPU while there is room elsewhere.
const WAIT_MAX: f32 = 0.25;
/// After a node was full, or a held thread waited too long: no move for this long.
pub const BACK_OFF: u64 = 5_000 * MS;

/// What a decision can see and do. Everything is about one thread.
pub trait World {
    /// The CPUs it may use now; `None`: cannot be told, or it is gone.
    fn mask(&mut self) -> Option<CpuMask>;
    /// Sets them. False: refused.
    fn set_mask(&mut self, mask: &CpuMask) -> bool;
    /// The CPUs of a node.
    fn cpus_of(&self, node: usize) -> CpuMask;
    /// Share (0 to 1) of the time of a node's CPUs that was idle lately; `None`: not known.
    fn idle_share(&mut self, now: u64, node: usize) -> Option<f32>;
    /// Nanoseconds that it has waited for a CPU in its life; `None`: not known.
    fn waited_ns(&mut self) -> Option<u64>;
}

/// Bytes used in a node, in a decaying window.
#[derive(Clone, Copy, Debug)]
struct Use {
    all: f32,
    remote: f32,
}

/// A mask that was narrowed and not put back.
#[derive(Clone, Copy, Debug)]
struct Held {
    node: usize,
    found: CpuMask,
    set: CpuMask,
    /// By policy *always*: waiting for a CPU does not let it go.
    always: bool,
    /// When it was last known to use something.
    used: u64,
    /// When mask and waiting were last looked at, and how long it had waited by then.
    looked: u64,
    waited: Option<u64>,
}

/// What is known of one thread, and how it was placed.
#[derive(Debug)]
pub struct Migrator {
    window: [Use; NODES + 1],
    /// When the window was last brought up to date; 0: never.
    updated: u64,
    held: Option<Held>,
    /// The program has placed it.
    hands_off: bool,
    /// No move before this.
    not_before: u64,
    hold: u64,
    last_move: u64,
    /// A node where it may not run, as seen when it was to be placed there, and when to look again.
    refused: (usize, u64),
    /// Where it was nudged to last, and how often in a row.
    nudged: (usize, u32),
}

impl Default for Migrator {
    fn default() -> Migrator {
        Migrator::new()
    }
}

impl Migrator {
    /// A thread that nobody has seen.
    pub const fn new() -> Migrator {
        const NOTHING: Use = Use {
            all: 0.0,
            remote: 0.0,
        };
        Migrator {
            window: [NOTHING; NODES + 1],
            updated: 0,
            held: None,
            hands_off: false,
            not_before: 0,
            hold: HOLD_MIN,
            last_move: 0,
            refused: (NOWHERE, 0),
            nudged: (NOWHERE, 0),
        }
    }

    /// The node it is held on.
    pub fn held_on(&self) -> Option<usize> {
        self.held.map(|held| held.node)
    }

    /// Whether its program was seen to place it.
    pub fn is_hands_off(&self) -> bool {
        self.hands_off
    }

    /// Brings the window to `now` (nanoseconds of a monotonic clock). First thing, then [`Migrator::used`] and
    /// [`Migrator::decide`].
    pub fn advance(&mut self, now: u64, world: &mut impl World) {
        let passed = now.saturating_sub(self.updated);
        self.updated = now;
        let factor = (-(passed as f32) / HALF_LIFE as f32).exp2();
        for used in &mut self.window {
            used.all *= factor;
            used.remote *= factor;
        }
        self.let_go_if_idle(now, world);
        if let Some(held) = &mut self.held {
            held.used = now;
        }
    }

    /// Releases a thread that was held and has used nothing for [`IDLE`].
    pub fn let_go_if_idle(&mut self, now: u64, world: &mut impl World) {
        if self
            .held
            .is_some_and(|held| now.saturating_sub(held.used) > IDLE)
        {
            self.release(world);
        }
    }

    /// Adds to the window: bytes at `node` (`NOWHERE`: data that attracts nobody), used while the thread ran there
    /// and while it ran elsewhere.
    pub fn used(&mut self, node: usize, local: u64, remote: u64) {
        let used = &mut self.window[node.min(NOWHERE)];
        used.all += (local + remote) as f32;
        used.remote += remote as f32;
    }

    /// Decides by the window, for policy *adaptive*.
    pub fn decide(&mut self, now: u64, world: &mut impl World) {
        if self.hands_off {
            return;
        }
        let total: f32 = self.window.iter().map(|used| used.all).sum();
        match self.held {
            None => self.maybe_move(now, total, world),
            Some(held) => self.maybe_let_go(now, total, held, world),
        }
    }

    fn maybe_move(&mut self, now: u64, total: f32, world: &mut impl World) {
        if now < self.not_before {
            return;
        }
        let Some(node) = self.dominant(total) else {
            return;
        };
        if self.window[node].remote < MOVE_COST {
            return;
        }
        // A move is not tried again at once, whatever comes of it.
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

    /// The next move has to wait: for long when moves come thick and fast. A thread that is nudged to the same
    /// node again is not going to and fro.
    fn moved(&mut self, now: u64, to_the_same: bool) {
        let soon = self.last_move > 0 && now - self.last_move < 4 * self.hold;
        self.hold = match (soon, to_the_same) {
            (true, false) => (self.hold * 2).min(HOLD_MAX),
            (true, true) => self.hold,
            _ => HOLD_MIN,
        };
        self.last_move = now;
        self.not_before = now + self.hold;
        // What was remote before is not any more.
        for used in &mut self.window {
            used.remote = 0.0;
        }
    }

    fn maybe_let_go(&mut self, now: u64, total: f32, held: Held, world: &mut impl World) {
        if now - held.looked >= LOOK {
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
            // It may have turned out that the program has placed it.
            if !self.hands_off {
                self.maybe_move(now, total, world);
            }
        }
    }

    /// Whether a held thread lost much of its time waiting for a CPU while others had nothing to do.
    fn waits_in_vain(&mut self, now: u64, held: Held, world: &mut impl World) -> bool {
        let waited = world.waited_ns();
        self.held = Some(Held {
            looked: now,
            waited,
            ..held
        });
        let (Some(before), Some(waited)) = (held.waited, waited) else {
            return false;
        };
        let share = waited.saturating_sub(before) as f32 / (now - held.looked) as f32;
        let room = |node: usize| {
            node != held.node
                && !world.cpus_of(node).and(&held.found).is_empty()
                && world.idle_share(now, node).is_some_and(|idle| idle > ROOM)
        };
        share > WAIT_MAX && (0..NODES).any(room)
    }

    /// An access to data of `home` whose policy is *always* found the thread on another node.
    pub fn hold_on(&mut self, now: u64, home: usize, world: &mut impl World) {
        // Each access asks for it: one that cannot be had must not cost each a look at the mask.
        let is_refused = self.refused.0 == home && now < self.refused.1;
        if self.hands_off || home >= NODES || is_refused {
            return;
        }
        if let Some(held) = self.held {
            // It is where it was put and runs elsewhere: somebody else moved it.
            if held.node == home {
                return self.leave_alone_if_changed(held, world);
            }
            self.release(world);
            if self.hands_off {
                return;
            }
        }
        if !self.narrow(now, home, true, world) {
            self.refused = (home, now + LOOK);
        }
    }

    /// Puts back the mask that was found, unless the program has set another one since. Before a fork, an exec or
    /// a new thread too: they inherit the mask.
    pub fn release(&mut self, world: &mut impl World) {
        let Some(held) = self.held else { return };
        self.leave_alone_if_changed(held, world);
        if self.held.take().is_some() {
            world.set_mask(&held.found);
        }
    }

    fn leave_alone_if_changed(&mut self, held: Held, world: &mut impl World) {
        if world.mask() != Some(held.set) {
            self.leave_alone();
        }
    }

    fn leave_alone(&mut self) {
        self.hands_off = true;
        self.held = None;
    }

    /// Narrows the mask to a node's CPUs. False when there is nothing to narrow, or it is refused.
    fn narrow(&mut self, now: u64, node: usize, always: bool, world: &mut impl World) -> bool {
        let Some(found) = world.mask() else {
            return false;
        };
        let set = found.and(&world.cpus_of(node));
        // The program (or its cpuset) keeps it away from the node, or has it on the node anyway.
        if set.is_empty() || set == found || !world.set_mask(&set) {
            return false;
        }
        self.held = Some(Held {
            node,
            found,
            set,
            always,
            used: now,
            looked: now,
            // From the first look on: most are not held that long.
            waited: None,
        });
        true
    }

    fn dominant(&self, total: f32) -> Option<usize> {
        (0..NODES).find(|node| self.window[*node].all > DOMINANT * total)
    }
}
