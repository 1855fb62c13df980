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
//!    narrow. The migrator releases the thread when it uses other data, when it uses nothing for [`IDLE`], or when step 3 moves it.
//! 3. Once each [`CHECK_EVERY`], the migrator compares what the thread's waiting for a CPU has cost with what remote access would cost
//!    (`crowding`). It may nudge a thread from a node with too few CPUs to a node with idle ones, and it leaves a thread whose data is on a node with too
//!    few CPUs where it is. Such a thread *works away*. Step 1 brings it back when there is room.
//!
//! Under *always* (as in the Jericho paper), the migrator holds the thread at the first access that finds it on another node,
//! until the thread uses another node's data.
//!
//! Invariants:
//! - Each mask that the migrator sets is the mask that it found or a part of it.
//! - A mask that differs from the one that the migrator set shows that the program has chosen the thread's CPUs. The migrator
//!   then leaves the thread alone for good.

use jericho_sys::affinity::CpuMask;
use jericho_sys::load::ThreadTimes;

use super::crowding::{self, Candidate, Lap, OwnUse, Room};

/// Threads are moved to nodes below this number. Data on higher nodes attracts no thread.
pub const NODES: usize = 32;
/// Cell for use that attracts no thread: data under *never*, and data on higher nodes.
pub const NOWHERE: usize = NODES;

const MS: u64 = 1_000_000;

/// The window decays by half in this time (nanoseconds), in which the thread does not wait for a CPU. Threads that alternate between nodes faster than
/// that count as using both.
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
/// Number of nudges to one node, after each of which the kernel has moved the thread away too soon (`STAY`). After these, the next move holds the thread.
pub const NUDGES: u32 = 3;
/// A thread did not stay after a nudge if it used fewer than this many times the bytes near its data as away from it. Where all CPUs are busy, a thread may
/// have to wait for seconds until it may come back.
const STAY: f32 = 16.0;
/// A thread did not stay after a nudge either if it had to be moved again within this time (nanoseconds).
pub const STAY_MIN: u64 = 16 * HOLD_MIN;
/// A held thread that has not used data for this long is released. The time in which it waits for a CPU does not count. If the thread uses data again
/// without another call in between, the time in which it slept does not count either: it did not need other CPUs then.
pub const IDLE: u64 = 1_000 * MS;
/// Time between two checks of a held thread's mask, and the shortest lap.
pub const CHECK_EVERY: u64 = 250 * MS;
/// A lap that is longer, without the time in which the thread waited for a CPU, tells nothing: the thread did something else for a while.
const LAP_MAX: u64 = 4 * CHECK_EVERY;

/// The world that a decision sees and changes, for one thread.
pub trait World {
    /// Returns the CPUs that the thread may use now. Returns `None` when they are unknown or the thread is gone.
    fn mask(&mut self) -> Option<CpuMask>;
    /// Sets those CPUs. Returns false when the kernel refuses.
    fn set_mask(&mut self, mask: &CpuMask) -> bool;
    /// Returns the CPUs of a node.
    fn cpus_of(&self, node: usize) -> CpuMask;
    /// Returns the node on which the thread runs now.
    fn here(&mut self) -> Option<usize>;
    /// Returns the room for threads on a node. Returns `None` when it is unknown.
    fn room(&mut self, now: u64, node: usize) -> Option<Room>;
    /// Records that the thread, which needs `cpus` CPUs, has been moved.
    fn moves(&mut self, now: u64, from: Option<usize>, to: usize, cpus: f32);
    /// Records how crowded the node is on which the thread runs, as its last lap shows, and whether the thread is a guest there: its data is elsewhere.
    fn saw(&mut self, node: usize, crowd: f32, is_guest: bool);
    /// Returns the remote bytes in the window that make a move to a node worth its cost, from where the thread runs now. Infinite if a move
    /// never pays.
    fn move_cost(&mut self, _node: usize) -> f32 {
        MOVE_COST
    }
    /// Returns the nanoseconds that a byte on node `data` costs more for a thread on node `at` than for one on `data`.
    fn remote_ns(&mut self, at: usize, data: usize) -> f32;
    /// Returns what the thread has done in its life. Returns `None` when that is unknown.
    fn times(&mut self) -> Option<ThreadTimes>;
    /// Returns a random number from 0 to below 1.
    fn random(&mut self) -> f32;
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
    /// Held by policy *always*: no check of waiting releases the thread.
    always: bool,
    /// Time at which the thread was last known to use something.
    used: u64,
    /// Time of the last check of the mask.
    checked: u64,
}

/// The begin of a lap.
#[derive(Clone, Copy, Debug)]
struct LapBegin {
    at: u64,
    times: Option<ThreadTimes>,
    /// Bytes used since then.
    bytes: f32,
}

/// A time in which the thread was on the node of its data.
#[derive(Clone, Copy, Debug)]
struct Stay {
    node: usize,
    from: u64,
    to: u64,
    /// The last lap that ended in this time.
    lap: Option<Lap>,
}

impl Stay {
    const NONE: Stay = Stay {
        node: NOWHERE,
        from: 0,
        to: 0,
        lap: None,
    };
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
    /// No further attempt to move to its data before this time.
    retry_at: u64,
    hold: u64,
    last_move: u64,
    /// Bytes used since the last move.
    since_move: Use,
    /// A node on which the thread could not be held, and the time of the next attempt.
    refused: (usize, u64),
    /// The node of the last nudge, and the number of nudges to it in a row.
    nudged: (usize, u32),
    lap: LapBegin,
    /// The last whole lap, and its end.
    last_lap: Option<(u64, Lap)>,
    /// The thread's last time on the node of its data.
    stay: Stay,
    /// The node to which the thread was last moved, the time, and the CPUs that it was said to need.
    came: (usize, u64, f32),
    /// The node of its data, if the thread works elsewhere because that node has too few CPUs.
    away_from: Option<usize>,
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
            retry_at: 0,
            hold: HOLD_MIN,
            last_move: 0,
            since_move: NOTHING,
            refused: (NOWHERE, 0),
            nudged: (NOWHERE, 0),
            lap: LapBegin {
                at: 0,
                times: None,
                bytes: 0.0,
            },
            last_lap: None,
            stay: Stay::NONE,
            came: (NOWHERE, 0, 0.0),
            away_from: None,
        }
    }

    /// Returns the node on which the thread is held.
    pub fn held_on(&self) -> Option<usize> {
        self.held.map(|held| held.node)
    }

    /// Returns whether the thread is held under *always*.
    pub fn is_held_always(&self) -> bool {
        self.held.is_some_and(|held| held.always)
    }

    /// Returns whether the thread works on another node than that of its data because that node has too few CPUs.
    pub fn works_away(&self) -> bool {
        self.away_from.is_some()
    }

    /// Returns the node that has most of the data that the thread uses.
    pub fn data_node(&self) -> Option<usize> {
        self.dominant(self.total())
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
        // A thread that shares its CPU with many others uses few bytes in a second. Its remote bytes cost as much as those of a fast thread.
        let waits = self.wait_share(now, passed, world);
        let factor = (-(passed as f32) * (1.0 - waits) / HALF_LIFE as f32).exp2();
        for used in &mut self.window {
            used.all *= factor;
            used.remote *= factor;
        }
        self.release_if_unused(now, world, |_, times| times.map(|times| times.ran_ns));
        self.uses(now);
    }

    /// Notes that a held thread has used data, of which [`Migrator::used`] does not know yet.
    pub fn uses(&mut self, now: u64) {
        if let Some(held) = &mut self.held {
            held.used = now;
        }
    }

    /// Returns the share of the last `passed` nanoseconds in which the thread waited for a CPU.
    fn wait_share(&self, now: u64, passed: u64, world: &mut impl World) -> f32 {
        if let Some(lap) = self.recent_lap(now) {
            return lap.wait_share();
        }
        if passed <= LAP_MAX {
            return 0.0;
        }
        let waited = self
            .since_lap_begin(world.times())
            .map_or(0, |times| times.waited_ns);
        (waited as f32 / (now - self.lap.at).max(1) as f32).min(1.0)
    }

    /// Releases a held thread that has not used data for [`IDLE`]. A thread that makes another call calls this.
    pub fn release_if_idle(&mut self, now: u64, world: &mut impl World) {
        self.release_if_unused(now, world, |unused, times| {
            Some(unused.saturating_sub(times?.waited_ns))
        });
    }

    /// Releases a held thread if more than [`IDLE`] has passed since it last used data, and if more than that counts. `counted` returns what counts, from
    /// the time without use and the thread's times in the lap. If it returns `None`, all the time without use counts.
    fn release_if_unused(
        &mut self,
        now: u64,
        world: &mut impl World,
        counted: impl FnOnce(u64, Option<ThreadTimes>) -> Option<u64>,
    ) {
        let Some(held) = self.held else { return };
        let unused = now.saturating_sub(held.used);
        if unused <= IDLE {
            return;
        }
        let in_lap = self.since_lap_begin(world.times());
        if counted(unused, in_lap).unwrap_or(unused) > IDLE {
            self.release(world);
        }
    }

    /// Returns how long the thread has run and waited since the begin of the lap. `now`: its times now.
    fn since_lap_begin(&self, now: Option<ThreadTimes>) -> Option<ThreadTimes> {
        let (now, begin) = (now?, self.lap.times?);
        // A child of fork(2) has a copy of its parent's lap, and its own times.
        Some(ThreadTimes {
            ran_ns: now.ran_ns.checked_sub(begin.ran_ns)?,
            waited_ns: now.waited_ns.checked_sub(begin.waited_ns)?,
        })
    }

    /// Adds bytes at `node` to the window: those used while the thread ran on that node (`local`), and elsewhere (`remote`).
    /// `NOWHERE` stands for data that attracts no thread.
    pub fn used(&mut self, node: usize, local: u64, remote: u64) {
        let used = &mut self.window[node.min(NOWHERE)];
        used.all += (local + remote) as f32;
        self.lap.bytes += (local + remote) as f32;
        used.remote += remote as f32;
        self.since_move.all += (local + remote) as f32;
        self.since_move.remote += remote as f32;
    }

    /// Decides from the window, for policy *adaptive*.
    pub fn decide(&mut self, now: u64, world: &mut impl World) {
        if self.is_hands_off {
            return;
        }
        let total = self.total();
        self.note_stay(now, total, world);
        if let Some(lap) = self.end_lap(now, world)
            && self.maybe_leave(now, total, &lap, world)
        {
            return;
        }
        match self.held {
            None => self.maybe_move(now, total, world),
            Some(held) => {
                // The release may have found that the program has chosen the CPUs.
                if self.maybe_release(now, total, held, world) && !self.is_hands_off {
                    self.maybe_move(now, total, world);
                }
            }
        }
    }

    /// Decides from the window, for policy *always*: releases a held thread that uses other data. It looks at no CPUs. [`Migrator::hold_on`] does the rest.
    pub fn decide_always(&mut self, now: u64, world: &mut impl World) {
        self.away_from = None;
        self.end_lap(now, world);
        if let Some(held) = self.held {
            self.maybe_release(now, self.total(), held, world);
        }
    }

    fn maybe_move(&mut self, now: u64, total: f32, world: &mut impl World) {
        if now < self.not_before.max(self.retry_at) {
            return;
        }
        let node = self.dominant(total);
        self.away_from = self.away_from.filter(|from| node == Some(*from));
        let Some(node) = node else {
            return;
        };
        if self.window[node].remote < world.move_cost(node) {
            return;
        }
        // Whether this move succeeds or not, the next attempt waits.
        self.retry_at = now + HOLD_MIN;
        let here = world.here();
        if here == Some(node) {
            // The kernel has brought it back.
            self.window[node].remote = 0.0;
            self.away_from = None;
            return;
        }
        if !self.may_arrive(now, node, here, world) {
            self.away_from = Some(node);
            return;
        }
        let since = self.since_move;
        let stayed = since.all >= (STAY + 1.0) * since.remote && now - self.last_move >= STAY_MIN;
        let again = self.nudged.0 == node && !stayed;
        let nudges = if again { self.nudged.1 } else { 0 };
        if !self.narrow(now, node, false, world) {
            return;
        }
        self.nudged = (node, nudges + 1);
        if nudges < NUDGES {
            self.release(world);
        }
        self.away_from = None;
        let cpus = self.recent_lap(now).map_or(1.0, |lap| lap.demand());
        self.came = (node, now, cpus);
        world.moves(now, here, node, cpus);
        self.moved(now, again);
    }

    /// Notes that the thread is on the node of its data, if it is.
    fn note_stay(&mut self, now: u64, total: f32, world: &mut impl World) {
        let Some(node) = world
            .here()
            .filter(|here| self.dominant(total) == Some(*here))
        else {
            return;
        };
        if self.stay.node != node || now - self.stay.to > CHECK_EVERY {
            self.stay = Stay {
                node,
                from: now,
                ..Stay::NONE
            };
        }
        self.stay.to = now;
    }

    /// Returns what the thread itself has used of `node`. Nothing if it waited there: then other threads have taken its place.
    fn own_use(&self, now: u64, node: usize) -> OwnUse {
        let stay = Some(self.stay).filter(|stay| stay.node == node);
        let (came_to, at, cpus) = self.came;
        let lap = stay
            .and_then(|stay| stay.lap)
            .or_else(|| self.recent_lap(now));
        if lap.is_some_and(|lap| crowding::waits(&lap)) {
            return OwnUse::default();
        }
        OwnUse {
            stay: stay.map_or((0, 0), |stay| (stay.from, stay.to)),
            ran: lap.map_or(0.0, |lap| lap.ran / lap.elapsed.max(1.0)),
            came: if came_to == node {
                (at, cpus)
            } else {
                (0, 0.0)
            },
        }
    }

    /// Returns whether the thread may move to its data on `node` now.
    fn may_arrive(
        &mut self,
        now: u64,
        node: usize,
        here: Option<usize>,
        world: &mut impl World,
    ) -> bool {
        let used = self.own_use(now, node);
        let there = world.room(now, node).map(|room| Candidate {
            node,
            room: room.without(used),
            more_ns: here.map_or(0.0, |here| -world.remote_ns(here, node)),
        });
        let room = here.and_then(|here| world.room(now, here));
        let chance = crowding::arrive(self.recent_lap(now).as_ref(), room, there);
        throw(chance, world)
    }

    /// Ends the lap if it is long enough, and begins the next one. Returns what the thread did in it.
    fn end_lap(&mut self, now: u64, world: &mut impl World) -> Option<Lap> {
        let begin = self.lap;
        let elapsed = now - begin.at;
        if elapsed < CHECK_EVERY {
            return None;
        }
        // Each reading costs three system calls, so the end of a lap and the begin of the next one share it.
        let times = world.times();
        let in_lap = self.since_lap_begin(times);
        self.begin_lap(now, times);
        self.last_lap = None;
        let lap = Lap::new(in_lap?, elapsed, begin.bytes);
        if lap.elapsed - lap.waited > LAP_MAX as f32 {
            return None;
        }
        self.last_lap = Some((now, lap));
        Some(lap)
    }

    fn begin_lap(&mut self, now: u64, times: Option<ThreadTimes>) {
        self.lap = LapBegin {
            at: now,
            times,
            bytes: 0.0,
        };
    }

    fn recent_lap(&self, now: u64) -> Option<Lap> {
        let (ended, lap) = self.last_lap?;
        (now - ended <= LAP_MAX).then_some(lap)
    }

    /// Nudges a thread that waits too much for CPUs to a node with idle ones. Returns whether it did.
    fn maybe_leave(&mut self, now: u64, total: f32, lap: &Lap, world: &mut impl World) -> bool {
        let (Some(here), Some(home)) = (world.here(), self.dominant(total)) else {
            return false;
        };
        if here == home {
            self.away_from = None;
            self.stay.lap = Some(*lap);
        }
        world.saw(here, lap.crowd(), here != home);
        if self.is_held_always() || now < self.not_before || !crowding::waits(lap) {
            return false;
        }
        let Some(mask) = self.held.map(|held| held.found).or_else(|| world.mask()) else {
            return false;
        };
        let mut candidates = [None; NODES];
        for (node, candidate) in candidates.iter_mut().enumerate() {
            if node != here && !world.cpus_of(node).and(&mask).is_empty() {
                let more_ns = world.remote_ns(node, home) - world.remote_ns(here, home);
                *candidate = world.room(now, node).map(|room| Candidate {
                    node,
                    room,
                    more_ns,
                });
            }
        }
        let room = world.room(now, here);
        let Some(advice) = crowding::leave(lap, room, candidates.into_iter().flatten()) else {
            return false;
        };
        if !throw(advice.chance, world) {
            return false;
        }
        self.release(world);
        if self.is_hands_off || !self.narrow(now, advice.node, false, world) {
            return self.is_hands_off;
        }
        self.release(world);
        self.away_from = (advice.node != home).then_some(home);
        self.nudged = (advice.node, 1);
        self.came = (advice.node, now, lap.demand());
        // Other threads take the CPU that it leaves.
        self.stay = Stay::NONE;
        world.moves(now, Some(here), advice.node, lap.demand());
        self.moved(now, false);
        true
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
        self.since_move = Use {
            all: 0.0,
            remote: 0.0,
        };
        self.not_before = now + self.hold;
        // Bytes that were remote before the move are not remote now.
        for used in &mut self.window {
            used.remote = 0.0;
        }
    }

    /// Releases a held thread that uses other data. Returns whether it did.
    fn maybe_release(
        &mut self,
        now: u64,
        total: f32,
        held: HeldThread,
        world: &mut impl World,
    ) -> bool {
        if now - held.checked >= CHECK_EVERY {
            if world.mask() != Some(held.set) {
                self.leave_alone();
                return false;
            }
            self.held = Some(HeldThread {
                checked: now,
                ..held
            });
        }
        let is_lost = self.window[held.node].all < LOST * total;
        if is_lost {
            self.release(world);
        }
        is_lost
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
        self.away_from = None;
        if !self.narrow(now, home, true, world) {
            self.refused = (home, now + CHECK_EVERY);
        }
        // `release_if_idle` compares the time without use with the waiting in the lap. The last lap may have begun long ago.
        let times = world.times();
        self.begin_lap(now, times);
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
        });
        true
    }

    /// Returns the bytes in the window.
    fn total(&self) -> f32 {
        self.window.iter().map(|used| used.all).sum()
    }

    fn dominant(&self, total: f32) -> Option<usize> {
        (0..NODES).find(|node| self.window[*node].all > DOMINANT * total)
    }
}

/// Returns true with this probability.
fn throw(chance: f32, world: &mut impl World) -> bool {
    chance >= 1.0 || chance > 0.0 && world.random() < chance
}
