//! How much room the nodes' CPUs have for further threads: their idle time, and the threads of this process that have moved since it was read.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use jericho_sys::affinity::CpuMask;
use jericho_sys::load::{self, CpuTime};

use super::crowding::{LAPS_PER_READING, Room};
use super::migrator::{CHECK_EVERY, NODES};
use super::nodes::Nodes;

/// Shortest time between two readings of /proc/stat in a process, in nanoseconds.
const READ_EVERY: u64 = LAPS_PER_READING as u64 * CHECK_EVERY;
/// Age at which a reading is of no use.
const STALE: u64 = 5 * READ_EVERY;

/// Thousandths of CPUs.
type Milli = AtomicU32;

/// The room on each node. Moves of this process's threads count at once, so that not all of its threads take the same idle CPU.
pub struct Rooms {
    /// When the times were read; 0: never.
    read_at: AtomicU64,
    /// When they were read before.
    read_before: AtomicU64,
    nodes: [NodeRoom; NODES],
    /// The last reading.
    times: Mutex<[NodeTime; NODES]>,
    /// The CPUs that count: those on which a thread that has read the times may run.
    allowed: Mutex<CpuMask>,
}

struct NodeRoom {
    /// Idle share between the last two readings, in thousandths plus one; 0: unknown.
    idle: AtomicU32,
    /// The idle share before that, in the same form.
    idle_before: AtomicU32,
    /// Number of the node's CPUs.
    cpus: AtomicU32,
    /// What threads need that have come, as far as the idle share does not have it.
    came: Milli,
    /// The part of it that the next idle share will not have either: a thread that comes late in the time between two readings.
    came_late: Milli,
    /// What threads needed that have left since the last reading.
    left: Milli,
    /// The crowd that a thread saw last, since the last reading and before it, in thousandths; 0: none did.
    crowd: AtomicU32,
    crowd_before: AtomicU32,
    /// Whether a thread whose data is elsewhere ran there, since the last reading and before it.
    guests: AtomicBool,
    guests_before: AtomicBool,
}

/// The time of a node's CPUs since the start of the machine, in any unit.
#[derive(Clone, Copy)]
pub(super) struct NodeTime {
    /// The sum over all CPUs.
    pub time: CpuTime,
    /// Number of CPUs.
    pub cpus: u32,
}

const NO_TIME: NodeTime = NodeTime {
    time: CpuTime { busy: 0, idle: 0 },
    cpus: 0,
};

impl Default for Rooms {
    fn default() -> Rooms {
        Rooms::new()
    }
}

impl Rooms {
    /// Returns a table in which nothing is known.
    pub const fn new() -> Rooms {
        Rooms {
            read_at: AtomicU64::new(0),
            read_before: AtomicU64::new(0),
            nodes: [const {
                NodeRoom {
                    idle: AtomicU32::new(0),
                    idle_before: AtomicU32::new(0),
                    cpus: AtomicU32::new(0),
                    came: AtomicU32::new(0),
                    came_late: AtomicU32::new(0),
                    left: AtomicU32::new(0),
                    crowd: AtomicU32::new(0),
                    crowd_before: AtomicU32::new(0),
                    guests: AtomicBool::new(false),
                    guests_before: AtomicBool::new(false),
                }
            }; NODES],
            times: Mutex::new([NO_TIME; NODES]),
            allowed: Mutex::new(CpuMask::EMPTY),
        }
    }

    /// Returns the room on a node. Reads the CPUs' times again when the last reading is a second old. Returns `None` before the second reading, when
    /// the last two readings were too far apart, and for a node without CPUs.
    ///
    /// `mask` returns the CPUs on which the calling thread may run. The CPUs of all threads that have read the times so far count. So a process that may use a part of the
    /// machine only does not see the idle CPUs of the rest.
    pub fn room(
        &self,
        now: u64,
        nodes: &Nodes,
        node: usize,
        mask: impl FnOnce() -> Option<CpuMask>,
    ) -> Option<Room> {
        self.room_by(now, node, |times| {
            let (Some(mask), Ok(mut allowed)) = (mask(), self.allowed.try_lock()) else {
                return false;
            };
            *allowed = allowed.or(&mask);
            read_times(nodes, &allowed, times)
        })
    }

    /// Does the same with times from `read`, which returns false if it fails.
    pub(super) fn room_by(
        &self,
        now: u64,
        node: usize,
        read: impl FnOnce(&mut [NodeTime; NODES]) -> bool,
    ) -> Option<Room> {
        let at = self.read_at.load(Relaxed);
        let age = now.saturating_sub(at);
        if at == 0 || age >= READ_EVERY {
            // One thread reads; the others use the stored values.
            let won = self
                .read_at
                .compare_exchange(at, now.max(1), Relaxed, Relaxed);
            if won.is_ok() {
                self.read_before.store(at, Relaxed);
                self.update(read, at != 0 && age < STALE);
            }
        }
        let read = [&self.read_before, &self.read_at].map(|at| at.load(Relaxed));
        Some(Room {
            read: read.into(),
            ..self.nodes.get(node)?.room()?
        })
    }

    /// Records that a thread of this process, which needs this many CPUs, moves between two nodes.
    pub fn moves(&self, now: u64, from: Option<usize>, to: usize, cpus: f32) {
        let milli = (cpus * 1000.0) as u32;
        let age = now.saturating_sub(self.read_at.load(Relaxed));
        let late = u64::from(milli) * age.min(READ_EVERY) / READ_EVERY;
        if let Some(node) = self.nodes.get(to) {
            node.came.fetch_add(milli, Relaxed);
            node.came_late.fetch_add(late as u32, Relaxed);
        }
        if let Some(node) = from.and_then(|from| self.nodes.get(from)) {
            node.left.fetch_add(milli, Relaxed);
        }
    }

    /// Records how crowded a node is, as a thread on it has seen: how many threads that always run there are for each CPU. `is_guest`: the thread's data is on
    /// another node.
    pub fn saw(&self, node: usize, crowd: f32, is_guest: bool) {
        if let Some(node) = self.nodes.get(node) {
            node.crowd.store((crowd * 1000.0) as u32, Relaxed);
            node.guests.fetch_or(is_guest, Relaxed);
        }
    }

    /// Reads the times. The shares since the last reading are known only if that reading `is_fresh`.
    fn update(&self, read: impl FnOnce(&mut [NodeTime; NODES]) -> bool, is_fresh: bool) {
        let Ok(mut last) = self.times.try_lock() else {
            return;
        };
        let mut times = [NO_TIME; NODES];
        let is_read = read(&mut times);
        for ((node, new), old) in self.nodes.iter().zip(&times).zip(last.iter()) {
            let idle = new.time.idle.saturating_sub(old.time.idle);
            let all = new.time.busy.saturating_sub(old.time.busy) + idle;
            // With other CPUs, the difference of the two sums is no time.
            let known = is_read && is_fresh && all > 0 && new.cpus == old.cpus;
            let thousandths = (idle * 1000).checked_div(all).unwrap_or(0) as u32;
            node.set(known.then_some(thousandths), new.cpus);
        }
        *last = times;
    }
}

fn read_times(nodes: &Nodes, allowed: &CpuMask, times: &mut [NodeTime; NODES]) -> bool {
    let read = load::cpu_times(|cpu, time| {
        if !allowed.contains(cpu) {
            return;
        }
        if let Some(sum) = nodes.node_of(cpu).and_then(|node| times.get_mut(node)) {
            sum.time.busy += time.busy;
            sum.time.idle += time.idle;
            sum.cpus += 1;
        }
    });
    read.is_ok()
}

impl NodeRoom {
    fn room(&self) -> Option<Room> {
        let idle = self.idle.load(Relaxed).checked_sub(1)?;
        let cpus = self.cpus.load(Relaxed) as f32;
        let milli = |count: &Milli| count.load(Relaxed) as f32 / 1000.0;
        let free = |idle: u32| cpus * idle as f32 / 1000.0 - milli(&self.came);
        let spare = |idle: u32| free(idle).max(0.0);
        let before = self.idle_before.load(Relaxed).saturating_sub(1);
        Some(Room {
            cpus,
            spare: spare(idle),
            lasting_spare: spare(idle.min(before)),
            idle: idle as f32 / 1000.0,
            left: milli(&self.left),
            crowd: [&self.crowd, &self.crowd_before]
                .map(milli)
                .into_iter()
                .find(|crowd| *crowd > 0.0),
            has_guests: self.guests.load(Relaxed) || self.guests_before.load(Relaxed),
            lacking: (-free(idle)).max(0.0),
            ..Room::default()
        })
    }

    /// Takes the result of a reading: the idle share in thousandths, if it is known.
    fn set(&self, thousandths: Option<u32>, cpus: u32) {
        let idle = thousandths.map_or(0, |idle| idle + 1);
        self.idle_before
            .store(self.idle.swap(idle, Relaxed), Relaxed);
        self.cpus.store(cpus, Relaxed);
        self.came.store(self.came_late.swap(0, Relaxed), Relaxed);
        self.left.store(0, Relaxed);
        self.crowd_before
            .store(self.crowd.swap(0, Relaxed), Relaxed);
        self.guests_before
            .store(self.guests.swap(false, Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_need_two_readings_and_none_that_is_stale() {
        let nodes = Nodes::new(|_| 0);
        let rooms = Rooms::new();
        let all = || Some(CpuMask::ALL);
        assert_eq!(rooms.room(1, &nodes, 0, all), None);
        assert_eq!(rooms.room(READ_EVERY / 2, &nodes, 0, all), None, "too soon");
        // Kernel ticks are long: repeats until the kernel has counted one.
        let mut now = READ_EVERY + 1;
        let room = loop {
            if let Some(room) = rooms.room(now, &nodes, 0, all) {
                break room;
            }
            now += READ_EVERY;
        };
        let mut cpus = 0;
        load::cpu_times(|_, _| cpus += 1).unwrap();
        assert_eq!(room.cpus, cpus as f32);
        assert!((0.0..=room.cpus).contains(&room.spare), "{room:?}");
        let room = rooms.room(now, &nodes, 1, all);
        assert_eq!(room, None, "a node without CPUs");
        let room = rooms.room(now + STALE, &nodes, 0, all);
        assert_eq!(room, None, "too long ago");
    }

    #[test]
    fn cpus_that_the_program_may_not_use_are_no_room() {
        let nodes = Nodes::new(|_| 0);
        let rooms = Rooms::new();
        let first = || Some([0].into_iter().collect());
        let mut now = 1;
        let mut cpus_by = |mask: &dyn Fn() -> Option<CpuMask>| {
            loop {
                now += READ_EVERY;
                if let Some(room) = rooms.room(now, &nodes, 0, mask) {
                    break room.cpus;
                }
            }
        };
        assert_eq!(cpus_by(&first), 1.0);
        let mut cpus = 0;
        load::cpu_times(|_, _| cpus += 1).unwrap();
        assert_eq!(cpus_by(&|| Some(CpuMask::ALL)), cpus as f32);
        assert_eq!(cpus_by(&first), cpus as f32, "another thread may use them");
    }

    #[test]
    fn no_share_is_known_when_a_node_has_got_cpus() {
        let rooms = Rooms::new();
        let read = |cpus: u32, idle: u64| {
            move |times: &mut [NodeTime; NODES]| {
                times[0] = NodeTime {
                    time: CpuTime { busy: 100, idle },
                    cpus,
                };
                true
            }
        };
        let room = |at: u64, cpus, idle| {
            let room = rooms.room_by(at * READ_EVERY, 0, read(cpus, idle));
            room.map(|room| room.spare)
        };
        assert_eq!(room(1, 1, 100), None);
        assert_eq!(room(2, 1, 200), Some(1.0));
        assert_eq!(room(3, 2, 9000), None);
        assert_eq!(room(4, 2, 9100), Some(2.0));
    }

    #[test]
    fn threads_that_move_take_room_until_the_idle_times_show_them() {
        let rooms = Rooms::new();
        let spare = |node: usize| rooms.nodes[node].room().map(|room| room.spare);
        rooms.read_at.store(READ_EVERY, Relaxed);
        rooms.nodes[1].set(Some(500), 8);
        rooms.nodes[0].set(Some(0), 8);
        assert_eq!(spare(1), Some(4.0));
        // One comes after a quarter of the time, and one at its end.
        rooms.moves(READ_EVERY * 5 / 4, Some(0), 1, 1.0);
        rooms.moves(READ_EVERY * 2, Some(0), 1, 0.5);
        assert_eq!(spare(1), Some(2.5));
        assert_eq!(spare(0), Some(0.0), "a full node may still be full");
        assert_eq!(rooms.nodes[0].room().map(|room| room.left), Some(1.5));
        // The next idle share has three quarters of the first thread.
        rooms.nodes[1].set(Some(400), 8);
        assert_eq!(spare(1), Some(3.2 - 0.75));
        rooms.nodes[1].set(Some(300), 8);
        assert_eq!(spare(1), Some(2.4));
        rooms.moves(READ_EVERY, None, 1, 5.0);
        assert_eq!(spare(1), Some(0.0));
    }

    #[test]
    fn idle_time_lasts_if_two_readings_have_it() {
        let rooms = Rooms::new();
        let lasting = || rooms.nodes[0].room().map(|room| room.lasting_spare);
        rooms.nodes[0].set(Some(500), 8);
        assert_eq!(lasting(), Some(0.0), "nothing is known of the time before");
        rooms.nodes[0].set(Some(750), 8);
        assert_eq!(lasting(), Some(4.0));
        rooms.nodes[0].set(Some(250), 8);
        assert_eq!(lasting(), Some(2.0));
        rooms.moves(0, None, 0, 1.0);
        assert_eq!(lasting(), Some(1.0));
        rooms.nodes[0].set(None, 8);
        assert_eq!(lasting(), None);
    }

    #[test]
    fn what_a_thread_saw_of_a_crowd_is_known_until_the_second_reading_after_it() {
        let rooms = Rooms::new();
        let crowd = || rooms.nodes[0].room().and_then(|room| room.crowd);
        rooms.nodes[0].set(Some(0), 8);
        assert_eq!(crowd(), None);
        rooms.saw(0, 2.5, true);
        assert_eq!(crowd(), Some(2.5));
        rooms.nodes[0].set(Some(0), 8);
        assert_eq!(crowd(), Some(2.5));
        rooms.saw(0, 4.0, false);
        assert_eq!(crowd(), Some(4.0));
        let has_guests = || rooms.nodes[0].room().unwrap().has_guests;
        assert!(has_guests(), "before the last reading");
        rooms.nodes[0].set(Some(0), 8);
        assert!(!has_guests());
        rooms.nodes[0].set(Some(0), 8);
        assert_eq!(crowd(), None);
    }
}
