//! Spill-over: a slice whose node is short of memory takes frames on other nodes, and gives them back when those nodes need them.
//!
//! One thread per volume decides (`policy`), from the memory of the nodes (`room`) and the wishes of the slices, and has the slices take and give
//! back spill ranges. The thread makes a round when a slice needs frames, but at most one in 250 ms.
//! It also makes one each 250 ms while ranges have memory, and each 10 s otherwise.
//! `docs/internals/spill-over.md` has the whole.

mod policy;
mod room;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_cache::{FRAMES_MIN, Slice};
use jericho_format::PAGE_BYTES;
use jericho_shm::{SPILL_FRAMES, bookkeeping_bytes};
use jericho_sys::service;
use jericho_topology::{NodeId, Topology};
use parking_lot::{Condvar, Mutex};

use policy::{AT_ONCE, Held, Place, SliceView, View};
use room::Room;

/// Time between two looks at the nodes, while ranges have memory.
const PERIOD: Duration = Duration::from_millis(250);
/// Time between two looks otherwise, for memory that programs have allocated in ranges.
const IDLE_PERIOD: Duration = Duration::from_secs(10);
/// Longest wait for the pages of all slices that leave their ranges. The next round goes on.
const LEAVE_MAX: Duration = Duration::from_millis(100);
/// Time after which a round takes no further range. The next round goes on. An unmount waits for the end of the round.
const TAKE_MAX: Duration = Duration::from_millis(100);
/// Time for which a node is left out after the kernel has taken memory of another node instead.
const REFUSED: Duration = Duration::from_secs(5);
/// Shortest pause in which no slice comes home to a node that has refused memory to its own slices. It doubles with each refusal.
const PAUSE_MIN: Duration = REFUSED;
const PAUSE_MAX: Duration = Duration::from_secs(640);

/// The frames of slices at a mount.
pub(crate) struct Plan {
    room: Room,
    /// Most bytes that each slice has in spill ranges; 0: no spill-over.
    spill_bytes: u64,
    /// What the planned slices use of each node.
    used_bytes: Vec<u64>,
    /// For each node, how many slices at home there are not planned yet.
    unplanned: Vec<u64>,
}

impl Plan {
    /// Returns the plan for slices with these homes.
    pub fn new(topology: &Topology, spill_bytes: u64, homes: &[NodeId]) -> Plan {
        let room = Room::new(topology);
        let mut unplanned = vec![0; topology.nodes.len()];
        for home in homes {
            unplanned[room.giver(*home)] += 1;
        }
        Plan {
            room,
            spill_bytes,
            used_bytes: vec![0; topology.nodes.len()],
            unplanned,
        }
    }

    /// Returns how many of `promised` frames a slice gets at home, and how many in spill ranges. The sum may be less than `promised`. The caller starts
    /// each slice before the next call, because the call reads the available memory.
    pub fn divide(&mut self, promised: u32, home: NodeId) -> (u32, u32) {
        if self.spill_bytes == 0 {
            return (promised, 0);
        }
        let home = self.room.giver(home);
        let look = self.room.look(&self.used_bytes);
        let node = &look.nodes[home];
        let node_room_bytes = node.available_bytes.saturating_sub(node.low_bytes());
        let room_bytes = share_of_room(
            node_room_bytes,
            look.group_room_bytes,
            self.unplanned[home],
            self.unplanned.iter().sum(),
        );
        self.unplanned[home] = self.unplanned[home].saturating_sub(1);
        // The tables of all frames are at home, also those of frames elsewhere.
        let tables_bytes = bookkeeping_bytes(promised);
        let room_bytes = room_bytes.saturating_sub(tables_bytes);
        let divided = divided(promised, room_bytes, self.spill_bytes);
        self.used_bytes[home] += u64::from(divided.0) * PAGE_BYTES + tables_bytes;
        divided
    }
}

/// Returns the room for the next slice. The slices at home on its node that are not planned yet (`at_home`, with it) share the room of the node, and all
/// such slices (`everywhere`) share what a control group leaves.
fn share_of_room(node_bytes: u64, group_bytes: Option<u64>, at_home: u64, everywhere: u64) -> u64 {
    let of_node = node_bytes / at_home.max(1);
    let of_group = group_bytes.map(|bytes| bytes / everywhere.max(1));
    of_group.map_or(of_node, |of_group| of_node.min(of_group))
}

/// Returns how many of `promised` frames are at home, and how many in spill ranges. Those at home fit into `room_bytes`, but are at least `FRAMES_MIN`. If
/// there are others, those at home are whole ranges, and the others have at most `spill_bytes`.
fn divided(promised: u32, room_bytes: u64, spill_bytes: u64) -> (u32, u32) {
    let fit = (room_bytes / PAGE_BYTES).min(promised.into()) as u32;
    if fit == promised {
        return (promised, 0);
    }
    let home = (fit / SPILL_FRAMES * SPILL_FRAMES).max(FRAMES_MIN);
    let spill = (spill_bytes / PAGE_BYTES).min(promised.saturating_sub(home).into());
    match spill {
        0 => (home.min(promised), 0),
        spill => (home, spill as u32),
    }
}

/// A slice with spill ranges.
struct Spilling {
    slice: Arc<Slice>,
    /// The node that gives the slice memory at home.
    home: usize,
    ranges: Vec<Option<Held>>,
    /// Its range that leaves so that the slice can take memory at home for it. A page in use may keep the range for some rounds.
    comes_home: Option<usize>,
    /// Ranges that it may still take because it needed frames: the last round ended before.
    rest: usize,
}

/// A pause in which no slice comes home to a node. The node has refused memory: all that it has available is in
/// cached files. Each attempt to come home costs the clean pages of a range.
struct Pause {
    until: Instant,
    length: Duration,
}

impl Pause {
    /// Returns the pause after a refusal. `before`: the pause after the one before.
    fn after(before: Option<&Pause>, now: Instant) -> Pause {
        let length = before.map_or(PAUSE_MIN, |before| (2 * before.length).min(PAUSE_MAX));
        Pause {
            until: now + length,
            length,
        }
    }
}

/// What the rounds of the thread share.
#[derive(Default)]
struct Rounds {
    slices: Vec<Spilling>,
    /// For each node that has refused memory lately, when it did.
    refused: BTreeMap<usize, Instant>,
    /// For each node that has refused its own slices memory since it last gave any, the pause of coming home.
    pauses: BTreeMap<usize, Pause>,
    /// Nodes whose memory could not be taken, with an error, since it last could. The log tells only the first error in a row of each node.
    failing: BTreeSet<usize>,
}

impl Spilling {
    fn bytes_of(&self, range: usize) -> u64 {
        let geometry = self.slice.memory().geometry();
        geometry.spill_range(range as u32).len() as u64 * PAGE_BYTES
    }

    /// Gives back the ranges that leave, as far as their pages can leave within this time.
    fn give_back(&mut self, time_max: Duration) {
        let ranges = self.ranges.iter().enumerate();
        let leaving = ranges.filter(|(_, held)| held.is_some_and(|held| held.is_leaving));
        let leaving: Vec<u32> = leaving.map(|(range, _)| range as u32).collect();
        for range in self.slice.give_back(&leaving, time_max) {
            self.ranges[range as usize] = None;
        }
        for range in leaving {
            if let Some(held) = &mut self.ranges[range as usize] {
                held.bytes = u64::from(self.slice.frames_left(range)) * PAGE_BYTES;
            }
        }
    }

    /// Forgets the range that comes home once it has left. If no node has given memory for it by then, it waits until the slice needs frames.
    fn end_coming_home(&mut self) {
        let (held, comes_home) = (&self.ranges, self.comes_home);
        self.comes_home =
            comes_home.filter(|range| held[*range].is_some_and(|held| held.is_leaving));
    }

    /// Returns how many frames are in ranges on each node.
    fn frames_by_node(&self) -> Vec<(u16, u64)> {
        let mut by_node = BTreeMap::new();
        for held in self.ranges.iter().flatten() {
            *by_node.entry(held.node as u16).or_default() += held.bytes / PAGE_BYTES;
        }
        by_node.into_iter().collect()
    }
}

#[derive(Default)]
struct Signals {
    is_wanted: bool,
    is_closing: bool,
}

#[derive(Default)]
struct Bell {
    signals: Mutex<Signals>,
    rung: Condvar,
}

impl Bell {
    fn ring(&self, change: impl FnOnce(&mut Signals)) {
        change(&mut self.signals.lock());
        self.rung.notify_all();
    }

    fn is_closing(&self) -> bool {
        self.signals.lock().is_closing
    }

    /// Waits until a slice needs frames, but not before `earliest`, or until `latest`. Returns false when the volume closes.
    fn wait(&self, earliest: Instant, latest: Instant) -> bool {
        let mut signals = self.signals.lock();
        loop {
            if signals.is_closing {
                return false;
            }
            let due = if signals.is_wanted { earliest } else { latest };
            if Instant::now() >= due {
                signals.is_wanted = false;
                return true;
            }
            self.rung.wait_until(&mut signals, due);
        }
    }
}

/// What a slice has in spill ranges.
#[derive(Default)]
struct Shown {
    /// Frames on each node, as (node, frames), by node.
    frames: Vec<(u16, u64)>,
    /// The node that gives the slice memory at home.
    home: u16,
}

/// The slices with spill ranges of a volume, and their thread.
pub(crate) struct Spiller {
    rounds: Mutex<Rounds>,
    /// What each slice has in spill ranges, at the end of the last round.
    shown: Mutex<BTreeMap<u16, Shown>>,
    topology: Topology,
    room: Room,
    /// Bytes of each node for frames at home and tables.
    home_bytes: Mutex<Vec<u64>>,
    bell: Arc<Bell>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// [`LEAVE_MAX`] and [`TAKE_MAX`], except in tests.
    leave_max: Duration,
    take_max: Duration,
}

impl Spiller {
    /// Starts the thread, if a slice has spill ranges. `slices`: all slices of the volume with their homes.
    pub fn start(
        slices: impl IntoIterator<Item = (Arc<Slice>, NodeId)>,
        topology: &Topology,
    ) -> io::Result<Arc<Spiller>> {
        let spiller = Arc::new(Spiller::new(slices, topology));
        if !spiller.rounds.lock().slices.is_empty() {
            let (this, bell) = (Arc::downgrade(&spiller), spiller.bell.clone());
            let thread = service::spawn("spill", move || run(&this, &bell))?;
            *spiller.thread.lock() = Some(thread);
        }
        Ok(spiller)
    }

    /// Does the same as `start`, without the thread.
    fn new(slices: impl IntoIterator<Item = (Arc<Slice>, NodeId)>, topology: &Topology) -> Spiller {
        let (bell, room) = (Arc::new(Bell::default()), Room::new(topology));
        let mut home_bytes = vec![0; topology.nodes.len()];
        let mut spilling = vec![];
        for (slice, home) in slices {
            let geometry = slice.memory().geometry();
            let home = room.giver(home);
            home_bytes[home] += bytes_at_home(&slice);
            if geometry.spill_ranges() == 0 {
                continue;
            }
            let bell = bell.clone();
            let on_shortage = move || bell.ring(|signals| signals.is_wanted = true);
            slice.set_on_shortage(Box::new(on_shortage));
            spilling.push(Spilling {
                ranges: vec![None; geometry.spill_ranges() as usize],
                slice,
                home,
                comes_home: None,
                rest: 0,
            });
        }
        Spiller {
            rounds: Mutex::new(Rounds {
                slices: spilling,
                ..Rounds::default()
            }),
            shown: Mutex::default(),
            topology: topology.clone(),
            room,
            home_bytes: Mutex::new(home_bytes),
            bell,
            thread: Mutex::default(),
            leave_max: LEAVE_MAX,
            take_max: TAKE_MAX,
        }
    }

    /// Ends the thread. The ranges keep their memory until the slices end.
    pub fn close(&self) {
        self.bell.ring(|signals| signals.is_closing = true);
        if let Some(thread) = self.thread.lock().take() {
            // A panic in it has ended the process.
            let _ = thread.join();
        }
    }

    /// Notes the memory of a slice that was added to the mounted volume. It has no spill ranges.
    pub fn added(&self, slice: &Slice, home: NodeId) {
        self.home_bytes.lock()[self.room.giver(home)] += bytes_at_home(slice);
    }

    /// Makes a round: has slices give ranges back, and take others. Returns whether a range has memory.
    fn round(&self) -> bool {
        let rounds = &mut *self.rounds.lock();
        for spilling in &rounds.slices {
            if let Err(error) = spilling.slice.release_strays() {
                tracing::debug!(slice = spilling.slice.id(), %error, "cannot free memory without pages");
            }
        }
        rounds.refused.retain(|_, at| at.elapsed() < REFUSED);
        let mut view = self.view(rounds);
        for (slice, spilling) in view.slices.iter_mut().zip(&mut rounds.slices) {
            let rest = std::mem::take(&mut spilling.rest);
            if !slice.wants && rest > 0 {
                slice.wants = true;
                slice.taken = AT_ONCE - rest;
            }
        }
        let wants = view.slices.iter().map(|slice| slice.wants);
        let mut wants: Vec<bool> = wants.collect();
        let taken = view.slices.iter().map(|slice| slice.taken);
        let mut taken: Vec<usize> = taken.collect();
        for (slice, range) in view.to_give_back() {
            if let Some(held) = &mut rounds.slices[slice].ranges[range] {
                held.is_leaving = true;
            }
        }
        for (slice, spilling) in rounds.slices.iter_mut().enumerate() {
            if let Some((_, range)) = view.to_bring_home(slice) {
                spilling.comes_home = Some(range);
            }
        }
        if self.give_back(&mut rounds.slices) {
            view = self.view(rounds);
        }
        let is_cut_short = self.take_ranges(rounds, view, &mut wants, &mut taken);
        if is_cut_short {
            for (at, spilling) in rounds.slices.iter_mut().enumerate() {
                spilling.rest = if wants[at] { AT_ONCE - taken[at] } else { 0 };
            }
            self.bell.ring(|signals| signals.is_wanted = true);
        } else {
            for spilling in &mut rounds.slices {
                spilling.end_coming_home();
            }
        }
        let slices = &rounds.slices;
        let shown = slices.iter().map(|spilling| {
            let shown = Shown {
                frames: spilling.frames_by_node(),
                home: spilling.home as u16,
            };
            (spilling.slice.id(), shown)
        });
        *self.shown.lock() = shown.collect();
        slices
            .iter()
            .any(|slice| slice.ranges.iter().any(Option::is_some))
    }

    /// Has slices take ranges. `wants`: which slices need frames; adds those that have begun to. `taken`: how many of [`AT_ONCE`] ranges each slice has
    /// taken; adds those that it takes. Returns whether it ended before they have taken all that
    /// they can, because the volume closes or `take_max` is over. Takes at least one range, unless the volume closes.
    fn take_ranges(
        &self,
        rounds: &mut Rounds,
        mut view: View,
        wants: &mut [bool],
        taken: &mut [usize],
    ) -> bool {
        let mut has_taken = false;
        let until = Instant::now() + self.take_max;
        // Repeated with fewer nodes, if the kernel refuses memory of one.
        loop {
            for (at, slice) in view.slices.iter_mut().enumerate() {
                wants[at] |= slice.wants;
                slice.wants = wants[at];
                slice.taken = taken[at];
            }
            let refused_before = rounds.refused.len();
            for ((slice, range), node) in in_turn(view.take()) {
                if rounds.refused.contains_key(&node) {
                    continue;
                }
                if self.bell.is_closing() || has_taken && Instant::now() >= until {
                    return true;
                }
                match self.take(&mut rounds.slices[slice], range, node) {
                    Ok(true) => {
                        has_taken = true;
                        taken[slice] += 1;
                        rounds.pauses.remove(&node);
                        rounds.failing.remove(&node);
                        continue;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        if rounds.failing.insert(node) {
                            tracing::warn!(
                                slice = rounds.slices[slice].slice.id(), node, %error,
                                "cannot take memory of a node for --spill; tries again while the slice needs frames"
                            );
                        }
                    }
                }
                let now = Instant::now();
                rounds.refused.insert(node, now);
                if node == rounds.slices[slice].home {
                    let pause = Pause::after(rounds.pauses.get(&node), now);
                    rounds.pauses.insert(node, pause);
                }
            }
            if rounds.refused.len() == refused_before {
                return false;
            }
            view = self.view(rounds);
        }
    }

    /// Has the slices give back the ranges that leave, as far as their pages can leave now. Returns whether there are any.
    fn give_back(&self, slices: &mut [Spilling]) -> bool {
        let is_leaving = |spilling: &Spilling| {
            let mut held = spilling.ranges.iter().flatten();
            held.any(|held| held.is_leaving)
        };
        let mut leaving: Vec<&mut Spilling> = slices
            .iter_mut()
            .filter(|slice| is_leaving(slice))
            .collect();
        let any = !leaving.is_empty();
        // First what goes soon, so that a slice with a page in use delays no other one.
        for time_max in [self.leave_max / 10, self.leave_max] {
            let time_max = time_max / leaving.len().max(1) as u32;
            for spilling in &mut leaving {
                if self.bell.is_closing() {
                    return any;
                }
                spilling.give_back(time_max);
            }
            leaving.retain(|spilling| is_leaving(spilling));
        }
        any
    }

    /// Returns the nodes and the slices as they are now. Clears the wishes of the slices.
    fn view(&self, rounds: &Rounds) -> View {
        let slices = &rounds.slices;
        let mut used_bytes = self.home_bytes.lock().clone();
        for held in slices
            .iter()
            .flat_map(|slice| slice.ranges.iter().flatten())
        {
            used_bytes[held.node] += held.bytes;
        }
        let view_of = |spilling: &Spilling| SliceView {
            home: spilling.home,
            wants: spilling.slice.take_wish(),
            comes_home: spilling.comes_home,
            taken: 0,
            ranges: spilling.ranges.clone(),
        };
        let nodes = self.topology.nodes.iter();
        let look = self.room.look(&used_bytes);
        let mut view = View {
            nodes: look.nodes,
            shared_available_bytes: look.shared_available_bytes,
            slices: slices.iter().map(view_of).collect(),
            distances: nodes.map(|node| node.distances.clone()).collect(),
        };
        for node in rounds.refused.keys() {
            view.nodes[*node].is_refusing = true;
        }
        for (node, pause) in &rounds.pauses {
            view.nodes[*node].may_call_home = Instant::now() >= pause.until;
        }
        view
    }

    /// Has a slice take memory of a node for a range. Returns whether it got the memory.
    fn take(&self, spilling: &mut Spilling, range: usize, node: usize) -> io::Result<bool> {
        let id = NodeId(node as u16);
        if room::refuses(id) {
            return Ok(false);
        }
        let kernel_node = self.topology.node(id).and_then(|node| node.kernel_node);
        let near = self.topology.thread_node(id).0;
        let is_taken = spilling.slice.take_range(range as u32, kernel_node, near)?;
        if is_taken {
            spilling.ranges[range] = Some(Held {
                node,
                is_leaving: false,
                bytes: spilling.bytes_of(range),
            });
        }
        Ok(is_taken)
    }

    /// Returns how many frames a slice has in spill ranges on each node, as (node, frames), by node.
    pub fn frames_of(&self, slice: u16) -> Vec<(u16, u64)> {
        let shown = self.shown.lock();
        shown
            .get(&slice)
            .map_or(vec![], |shown| shown.frames.clone())
    }

    /// Returns what other nodes lend a slice, as (node, frames), by node. A home without memory has its memory from another node, which does not lend it.
    pub fn lent_to(&self, slice: u16) -> Vec<(u16, u64)> {
        let shown = self.shown.lock();
        let Some(shown) = shown.get(&slice) else {
            return vec![];
        };
        let frames = shown.frames.iter().copied();
        frames.filter(|(node, _)| *node != shown.home).collect()
    }
}

impl Drop for Spiller {
    fn drop(&mut self) {
        self.bell.ring(|signals| signals.is_closing = true);
    }
}

/// Sorts the ranges that slices take: first one of each slice, then the second ones, and so on. So a round that ends early gives each slice about the same.
fn in_turn(ranges: Vec<(Place, usize)>) -> Vec<(Place, usize)> {
    let mut counts = BTreeMap::new();
    let mut in_turn: Vec<(usize, (Place, usize))> = vec![];
    for range in ranges {
        let ((slice, _), _) = range;
        let count = counts.entry(slice).or_insert(0);
        in_turn.push((*count, range));
        *count += 1;
    }
    // Stable: among the nth ranges, the slices keep their order.
    in_turn.sort_by_key(|(nth, _)| *nth);
    in_turn.into_iter().map(|(_, range)| range).collect()
}

/// Makes rounds until the volume closes.
fn run(spiller: &Weak<Spiller>, bell: &Bell) {
    let mut looked = Instant::now();
    let (mut soonest, mut period) = (Duration::ZERO, IDLE_PERIOD);
    while bell.wait(looked + soonest, looked + period) {
        let Some(spiller) = spiller.upgrade() else {
            return;
        };
        let has_memory = spiller.round();
        looked = Instant::now();
        soonest = PERIOD;
        period = if has_memory { PERIOD } else { IDLE_PERIOD };
    }
}

/// Returns what a slice uses of its home node.
fn bytes_at_home(slice: &Slice) -> u64 {
    let geometry = slice.memory().geometry();
    u64::from(geometry.home_frames) * PAGE_BYTES + bookkeeping_bytes(geometry.frames)
}

#[cfg(test)]
mod tests;
