//! The thread `placer`: migrates threads of other processes.
//!
//! It reads on which CPU a thread ran last, narrows the thread's mask, and restores the mask when the thread has run on its new CPUs. The thread sleeps
//! when its mask is narrowed, because it waits for the daemon's answer, and the kernel moves it when it wakes up. So the `placer` cannot restore the
//! mask at once.
//!
//! Invariants:
//! - A narrowed mask is a subset of the mask that the `placer` has read just before. If the `placer` finds another mask when it is about to restore one, the
//!   program has set that mask. The `placer` then never changes that thread's mask again.
//! - The `placer` restores a narrowed mask after [`NARROW_MAX`], or later if it has much to do. It also restores the masks of threads and processes
//!   that inherited it, as far as it finds them. It cannot tell an inherited mask from an equal mask that such a thread has set itself in that time.
//! - If the daemon is killed meanwhile, the keeper restores them (`narrow_masks`).
//!
//! docs/internals/migration.md (*Guarantees*) has the exceptions.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use jericho_client::migration::crowding::{self, Candidate, Dice, Lap, Room};
use jericho_client::migration::migrator::NODES;
use jericho_client::migration::nodes::Nodes;
use jericho_client::migration::rooms::Rooms;
use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};
use parking_lot::Mutex;

use super::companions::{Companions, NARROW_COMPANIONS_MAX};
use super::laps::Laps;
use crate::counters::MountCounts;
use crate::move_costs::MoveCosts;
use crate::narrow_masks::{Found, MaskNotes, NarrowMask, NoteIndex};
use crate::tasks::Task;

/// Time after which the `placer` restores a mask in any case. A read that waits for a device takes less.
pub(super) const NARROW_MAX: Duration = Duration::from_millis(20);
/// Time between two checks whether a thread has moved.
const POLL: Duration = Duration::from_millis(1);
/// Time before a thread is migrated again. Doubles, up to sixteen times, with each migration to the same node, and with each one for want of a CPU.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
/// Time for which the `placer` remembers a thread after the thread's pause.
const REMEMBERED: Duration = Duration::from_secs(4);
/// Most threads that the `placer` remembers. It does not migrate further threads.
const MIGRATED_MAX: usize = 1024;
/// Time between two sweeps of what the `placer` remembers.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Time for which a thread counts as working away after an order has found it so.
const AWAY_FOR: Duration = Duration::from_secs(2);

/// An order to migrate a thread that uses data.
pub(super) struct Order {
    pub tid: u32,
    /// A moment before the order, in the ticks of [`Task::start`]. A thread that has started since is not the one that is meant, but a later one with the same id.
    pub at_ticks: u64,
    /// The node of the data.
    pub node: u16,
    pub policy: ThreadPolicy,
    /// The thread uses its data inline, on the node of the data: only its companions migrate.
    pub inline: bool,
    /// Bytes that the thread has used since the last order.
    pub bytes: u64,
}

/// Tells whether the threads of a process migrate themselves.
pub(crate) type LeftOut = Box<dyn Fn(u32) -> bool + Send + Sync>;

/// What workers and the `placer` share.
pub(super) struct PlacerContext {
    nodes: Nodes,
    costs: MoveCosts,
    rooms: Rooms,
    with_parent: bool,
    masks: Arc<MaskNotes>,
    /// Tells which processes migrate their own threads.
    is_left_out: OnceLock<LeftOut>,
    counts: Arc<MountCounts>,
    start: Instant,
    /// Threads that work on other nodes than their data for want of CPUs there, and when an order found them so.
    away: Mutex<HashMap<u32, Instant>>,
}

impl PlacerContext {
    pub fn new(
        nodes: Nodes,
        costs: &MoveCosts,
        counts: Arc<MountCounts>,
        masks: Arc<MaskNotes>,
        with_parent: bool,
    ) -> PlacerContext {
        PlacerContext {
            nodes,
            costs: costs.clone(),
            rooms: Rooms::new(),
            with_parent,
            masks,
            is_left_out: OnceLock::new(),
            counts,
            start: Instant::now(),
            away: Mutex::default(),
        }
    }

    pub fn leave_out(&self, is_left_out: LeftOut) {
        // Fails if there is a function already.
        let _ = self.is_left_out.set(is_left_out);
    }

    pub fn count_away(&self, now: Instant) -> u64 {
        let away = self.away.lock();
        away.values().filter(|at| now < **at + AWAY_FOR).count() as u64
    }

    #[cfg(test)]
    pub fn counts(&self) -> crate::counters::MountCounters {
        self.counts.values()
    }

    #[cfg(test)]
    pub fn note(&self, mask: &NarrowMask) -> NoteIndex {
        self.masks.note(mask)
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Returns the room for threads on a node, if it is known.
    pub fn room(&self, node: usize) -> Option<Room> {
        let all = || Some(CpuMask::ALL);
        self.rooms.room(self.now_ns(), &self.nodes, node, all)
    }
}

/// A thread that was migrated.
pub(super) struct Migrated {
    pub mask: NarrowMask,
    /// The note of the narrow mask; `None`: the mask is restored.
    pub note: Option<NoteIndex>,
    pub is_companion: bool,
    pub node: usize,
    pub begun: Instant,
    /// The `placer` does not migrate the thread again before this time.
    pub not_before: Instant,
    /// Number of times that the thread was migrated to this node and left it again, or migrated for want of a CPU.
    pub repeats: u32,
    /// The program has set another mask, so the `placer` leaves the thread alone.
    pub left_alone: bool,
}

/// Why a thread is migrated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// To its data.
    Data,
    /// Away from its data, because it waits for CPUs.
    Crowd,
    /// To the data of another thread.
    Companion,
}

/// The state of the `placer`.
pub(super) struct Placer {
    pub context: Arc<PlacerContext>,
    pub threads: Vec<Migrated>,
    laps: Laps,
    companions: Companions,
    dice: Dice,
    /// When `forget` last ran.
    swept: Instant,
}

impl Placer {
    pub fn new(context: Arc<PlacerContext>) -> Placer {
        Placer {
            context,
            threads: Vec::new(),
            laps: Laps::default(),
            companions: Companions::default(),
            dice: Dice::new(std::process::id()),
            swept: Instant::now(),
        }
    }

    pub fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let order = match self.threads.iter().any(|p| p.note.is_some()) {
                false => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
                true => orders.recv_timeout(POLL),
            };
            let now = Instant::now();
            self.restore_masks(|thread| thread.has_moved() || now >= thread.begun + NARROW_MAX);
            match order {
                Ok(order) => self.serve(&order, now),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.restore_masks(|_| true);
    }

    pub fn serve(&mut self, order: &Order, now: Instant) {
        self.forget(now);
        let node = usize::from(order.node);
        let Some((task, cpu)) = Task::find(order.tid) else {
            return;
        };
        if task.start >= order.at_ticks {
            return;
        }
        if !order.inline {
            let is_left_out = self.context.is_left_out.get();
            if task.pid == std::process::id() || is_left_out.is_some_and(|is| is(task.pid)) {
                return;
            }
            let here = self.context.nodes.node_of(cpu);
            if let Some((target, why)) = self.choose(&task, order, here, now) {
                self.migrate(&task, here, target, why, now);
            }
        }
        let brings = order.inline || self.context.with_parent;
        if brings && self.companions.uses(&task, node, now) {
            self.bring(self.companions.of(&task, now), node, order.policy, now);
        }
    }

    /// Returns where a thread on node `here` should run.
    fn choose(
        &mut self,
        task: &Task,
        order: &Order,
        here: Option<usize>,
        now: Instant,
    ) -> Option<(usize, Why)> {
        let node = usize::from(order.node);
        let (is_new, lap) = self.laps.used(task, order.bytes, now);
        if let (Some(lap), Some(here)) = (lap, here) {
            self.context.rooms.saw(here, lap.crowd(), here != node);
        }
        let is_there = here == Some(node);
        let (target, is_away) = if order.policy == ThreadPolicy::Always {
            ((!is_there).then_some((node, Why::Data)), false)
        } else if is_there {
            let target = lap
                .filter(|_| is_new)
                .and_then(|lap| self.leave(task, &lap, node));
            (target.map(|target| (target, Why::Crowd)), target.is_some())
        } else {
            let costs = &self.context.costs;
            let more_ns = here.map_or(0.0, |here| -costs.remote_ns(here, node));
            let arrives = self.may_arrive(lap, is_new, here, node, more_ns);
            (arrives.then_some((node, Why::Data)), !arrives)
        };
        let mut away = self.context.away.lock();
        match is_away {
            true => drop(away.insert(task.tid, now)),
            false => drop(away.remove(&task.tid)),
        }
        target
    }

    /// Returns the node to which a thread on the node of its data should leave, because it waits for CPUs.
    fn leave(&mut self, task: &Task, lap: &Lap, node: usize) -> Option<usize> {
        if !crowding::waits(lap) {
            return None;
        }
        let context = &self.context;
        let mask = affinity::mask(Some(task.tid)).ok()?;
        let may_run = |node: usize| !context.nodes.cpus_of(node).and(&mask).is_empty();
        let candidates = (0..NODES).filter(|to| *to != node && may_run(*to));
        let candidates = candidates.filter_map(|to| {
            Some(Candidate {
                node: to,
                room: context.room(to)?,
                more_ns: context.costs.remote_ns(to, node),
            })
        });
        let advice = crowding::leave(lap, context.room(node), candidates)?;
        (self.dice.throw() < advice.chance).then_some(advice.node)
    }

    /// Returns whether a thread that would have more cost of `more_ns` for each byte there may move to a node now. `is_new`: its lap has just ended.
    fn may_arrive(
        &mut self,
        lap: Option<Lap>,
        is_new: bool,
        here: Option<usize>,
        node: usize,
        more_ns: f32,
    ) -> bool {
        let there = self.context.room(node).map(|room| Candidate {
            node,
            room,
            more_ns,
        });
        let room = here.and_then(|here| self.context.room(here));
        let chance = crowding::arrive(lap.as_ref(), room, there);
        // Orders of one thread come faster than laps, and the chance is that of a lap.
        chance >= 1.0 || is_new && self.dice.throw() < chance
    }

    /// Moves companions, each with the CPU on which it ran last.
    pub fn bring(
        &mut self,
        companions: impl Iterator<Item = (Task, u32)>,
        node: usize,
        policy: ThreadPolicy,
        now: Instant,
    ) {
        for (companion, cpu) in companions {
            let are_narrow = self.threads.iter();
            let are_narrow = are_narrow.filter(|t| t.is_companion && t.note.is_some());
            if are_narrow.count() >= NARROW_COMPANIONS_MAX {
                break;
            }
            let here = self.context.nodes.node_of(cpu);
            let (is_new, lap) = self.laps.used(&companion, 0, now);
            let is_always = policy == ThreadPolicy::Always;
            if here != Some(node) && (is_always || self.may_arrive(lap, is_new, here, node, 0.0)) {
                self.migrate(&companion, here, node, Why::Companion, now);
            }
        }
    }

    /// Narrows the mask of a thread on node `here` to the CPUs of a node, unless it was migrated a short time ago.
    fn migrate(&mut self, task: &Task, here: Option<usize>, node: usize, why: Why, now: Instant) {
        let known = self.threads.iter().position(|p| p.mask.task == *task);
        let mut repeats = 0;
        if let Some(known) = known.and_then(|at| self.threads.get(at)) {
            if known.left_alone || known.note.is_some() || now < known.not_before {
                return;
            }
            if known.node == node || why == Why::Crowd {
                repeats = known.repeats + 1;
            } else if why == Why::Data {
                repeats = known.repeats;
            }
        }
        if known.is_none() && self.threads.len() >= MIGRATED_MAX {
            return;
        }
        let cpus = self.context.nodes.cpus_of(node);
        let Some((mask, note)) = self.context.masks.narrow(task, &cpus) else {
            return;
        };
        let counts = &self.context.counts;
        match why {
            Why::Companion => counts.companions_moved.fetch_add(1, Relaxed),
            Why::Data | Why::Crowd => counts.threads_moved.fetch_add(1, Relaxed),
        };
        tracing::debug!(tid = task.tid, node, "migrated a thread");
        let demand = self.laps.last(task).map_or(1.0, |lap| lap.demand());
        let rooms = &self.context.rooms;
        rooms.moves(self.context.now_ns(), here, node, demand);
        if let Some(at) = known {
            self.threads.swap_remove(at);
        }
        self.threads.push(Migrated {
            mask,
            note: Some(note),
            is_companion: why == Why::Companion,
            node,
            begun: now,
            not_before: now + PAUSE * (1 << repeats.min(4)),
            repeats,
            left_alone: false,
        });
    }

    /// Forgets, at most once a second, threads that were not migrated for a while. Remembers threads that are left alone until
    /// they end.
    fn forget(&mut self, now: Instant) {
        if now - self.swept < SWEEP_EVERY {
            return;
        }
        self.swept = now;
        self.threads.retain(|p| {
            p.note.is_some()
                || now < p.not_before + REMEMBERED
                || p.left_alone && p.mask.task.is_alive()
        });
        self.laps.forget(now);
        self.companions.forget(now);
        let mut away = self.context.away.lock();
        away.retain(|_, at| now < *at + AWAY_FOR);
    }

    pub fn restore_masks(&mut self, is_over: impl Fn(&Migrated) -> bool) {
        for thread in &mut self.threads {
            if thread.note.is_some() && is_over(thread) {
                thread.restore_mask(&self.context.masks);
            }
        }
    }
}

impl Migrated {
    /// Returns whether the thread has run on the CPUs of its narrowed mask, or has ended.
    pub fn has_moved(&self) -> bool {
        let cpu = self.mask.task.cpu();
        cpu.is_none_or(|cpu| self.mask.narrowed.contains(cpu))
    }

    fn restore_mask(&mut self, notes: &MaskNotes) {
        self.left_alone = self.mask.restore() == Found::ChangedByProgram;
        if let Some(note) = self.note.take() {
            notes.erase(note);
        }
    }
}
