//! Decides between two evils: a thread waits for a CPU of its data's node, or it works on another node and reads remote memory.
//!
//! Both have a cost in time, for what the thread did since its last check (a [`Lap`]): the time that it waited for a CPU, and its
//! bytes times what a remote byte costs more. Pure functions: the caller measures, throws the dice, and moves the thread.
//!
//! Invariants:
//! - A thread leaves a node only if the node has more threads than CPUs, and if another node has idle CPUs.
//! - A move to a node on which the thread would have to wait, and each move away from waiting, must gain a tenth of the thread's time. So a thread for
//!   which both nodes are about equal stays where it is.
//! - When many threads see the same idle CPUs, each goes with a probability such that, within one reading of the CPUs' times, about as many go as
//!   fit. No memory is shared, so that holds for threads of many processes, too.

use jericho_sys::load::ThreadTimes;

/// Share of its time (running and waiting) that a thread must gain by a move away from waiting.
const MARGIN: f32 = 0.1;
/// Share of a lap below which waiting is not worth a move.
const WAIT_MIN: f32 = 0.1;
/// Laps between two readings of the CPUs' times. Threads decide once a lap, with what the last reading said.
pub(super) const LAPS_PER_READING: f32 = 4.0;
/// Difference of CPUs that is no difference: the kernel counts ticks.
const TICKS: f32 = 0.1;
/// Share of idle CPUs below which a node is full.
const FULL: f32 = 0.05;
/// Where both nodes are full: fewest threads on the thread's node with which one more on the other node makes little difference, and the most by which that
/// node may be more crowded.
const MANY: f32 = 4.0;
const SAME: f32 = 1.15;
/// Where both nodes are full: the probability with which a thread moves to its data. Others may want to move the other way.
const SWAP_CHANCE: f32 = 0.125;
/// The same if the data's node has guests, which leave for their own data.
const GUEST_CHANCE: f32 = 0.25;
/// Smallest demand of a thread, in CPUs.
const DEMAND_MIN: f32 = 0.01;

/// What a thread did between two checks. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lap {
    /// Length of the lap.
    pub elapsed: f32,
    /// Time on a CPU.
    pub ran: f32,
    /// Time in which the thread was ready to run and had no CPU.
    pub waited: f32,
    /// Bytes of Jericho's data that it used.
    pub bytes: f32,
}

impl Lap {
    /// Returns the lap of a thread with these times at its begin and at its end. `elapsed`: its length in nanoseconds.
    pub fn between(before: ThreadTimes, after: ThreadTimes, elapsed: u64, bytes: f32) -> Lap {
        let times = ThreadTimes {
            ran_ns: after.ran_ns.saturating_sub(before.ran_ns),
            waited_ns: after.waited_ns.saturating_sub(before.waited_ns),
        };
        Lap::new(times, elapsed, bytes)
    }

    /// Returns the lap of a thread with these times in it. `elapsed`: its length in nanoseconds.
    pub fn new(times: ThreadTimes, elapsed: u64, bytes: f32) -> Lap {
        Lap {
            elapsed: elapsed as f32,
            ran: times.ran_ns.min(elapsed) as f32,
            waited: times.waited_ns.min(elapsed) as f32,
            bytes,
        }
    }

    /// Returns the CPUs that the thread would use if it never waited: 0.01 to 1.
    pub fn demand(&self) -> f32 {
        let share = self.ran / (self.elapsed - self.waited).max(1.0);
        share.clamp(DEMAND_MIN, 1.0)
    }

    /// Returns how many threads that always run there are for each CPU of the thread's node, as far as this thread's waiting shows.
    pub fn crowd(&self) -> f32 {
        ((self.ran + self.waited) / self.ran.max(1.0)).max(1.0)
    }

    /// Returns the share of the lap in which the thread waited for a CPU.
    pub fn wait_share(&self) -> f32 {
        (self.waited / self.elapsed.max(1.0)).clamp(0.0, 1.0)
    }

    /// Returns how long the thread would wait in such a lap on a node.
    fn wait_on(&self, room: Room) -> f32 {
        let missing = self.demand() - room.spare;
        match missing > TICKS {
            true => missing * self.elapsed,
            false => 0.0,
        }
    }

    fn is_worth(&self, gain: f32) -> bool {
        gain > MARGIN * (self.ran + self.waited)
    }
}

/// The CPUs of a node, as the last reading and the moves since then tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Room {
    /// CPUs of the node.
    pub cpus: f32,
    /// CPUs without work: their idle time in the last reading's second, less what threads of this process need that moved there since.
    pub spare: f32,
    /// The same with the idle time of the second before that, if it is less. A shorter time without work is a pause of the threads that run there.
    pub lasting_spare: f32,
    /// Idle share of its CPUs in the last reading's second.
    pub idle: f32,
    /// CPUs that threads of this process used that left since the last reading.
    pub left: f32,
    /// How many threads that always run there are for each CPU, as threads of this process have seen it lately; `None`: none was there.
    pub crowd: Option<f32>,
    /// Threads of this process have run there lately whose data is elsewhere.
    pub has_guests: bool,
    /// The last reading's second: begin and end in nanoseconds.
    pub read: (u64, u64),
    /// How many more CPUs the threads that moved there need than are idle. If it is above 0, `spare` is 0.
    pub lacking: f32,
    /// CPUs of `spare` that the asking thread itself has left.
    pub own: f32,
}

/// What a thread has used of a node that it has left.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnUse {
    /// Begin and end of its time there, in nanoseconds.
    pub stay: (u64, u64),
    /// Share of this time in which it ran.
    pub ran: f32,
    /// When the migrator last moved it there, and the CPUs that it was said to need.
    pub came: (u64, f32),
}

impl Room {
    /// Returns the room that has lasted for two readings, for a thread that waits on a node with this idle share. A node on which threads wait has idle time only if all of them paused, for example
    /// between two passes. In a pause the CPUs of all nodes are idle, so they have no room for threads that wait afterwards.
    fn beside(self, idle: f32) -> Room {
        Room {
            spare: (self.lasting_spare - idle * self.cpus).max(0.0),
            ..self
        }
    }

    /// Returns the room for a thread that has itself used this of the node. The scheduler may have moved the thread away from a node that is not crowded. The last reading
    /// still counts the thread, which would stay away until the next one.
    pub fn without(self, used: OwnUse) -> Room {
        let (begin, end) = self.read;
        let length = end.saturating_sub(begin).max(1) as f32;
        let (from, to) = used.stay;
        let ran = used.ran * to.min(end).saturating_sub(from.max(begin)) as f32 / length;
        // A thread that came before the end of the reading counts only for the part of the time that the reading does not have.
        let (at, cpus) = used.came;
        let late = at.saturating_sub(begin).min(end.saturating_sub(begin)) as f32 / length;
        let own = (ran + cpus * late).min(1.0);
        Room {
            spare: (self.spare - self.lacking + own).clamp(0.0, self.cpus),
            own,
            ..self
        }
    }

    fn is_full(&self) -> bool {
        self.spare < (FULL * self.cpus).max(TICKS)
    }

    /// Returns the crowd of a full node. The scheduler evens queues out, so a node that no thread of this process has seen is assumed to be as crowded as that
    /// of the thread with this lap.
    fn crowd_beside(&self, lap: &Lap) -> f32 {
        self.crowd.unwrap_or(lap.crowd())
    }
}

/// A node to which a thread might move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The node.
    pub node: usize,
    /// Its CPUs.
    pub room: Room,
    /// Nanoseconds that a byte of the thread's data costs more there than where the thread is now. Negative: less.
    pub more_ns: f32,
}

/// Where to go, and with which probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advice {
    /// The node.
    pub node: usize,
    /// 0 to 1.
    pub chance: f32,
}

/// Returns whether a thread waits so much for a CPU that it may be worth a move.
pub fn waits(lap: &Lap) -> bool {
    lap.waited >= WAIT_MIN * lap.elapsed
}

/// Returns the node to which a thread should leave because it waits too much. `here`: the room on its node, if it is known. Returns `None` if it should
/// stay.
pub fn leave(
    lap: &Lap,
    here: Option<Room>,
    candidates: impl Iterator<Item = Candidate>,
) -> Option<Advice> {
    if !waits(lap) {
        return None;
    }
    let gain = |c: &Candidate| lap.waited - lap.bytes * c.more_ns;
    let idle = here.map_or(0.0, |room| room.idle);
    let candidates = candidates.map(|c| Candidate {
        room: c.room.beside(idle),
        ..c
    });
    // Elsewhere the thread would take CPU time, and more of it than at home, from threads that have their data there.
    let candidates = candidates.filter(|c| lap.wait_on(c.room) == 0.0);
    let best = candidates.max_by(|a, b| gain(a).total_cmp(&gain(b)))?;
    if !lap.is_worth(gain(&best)) {
        return None;
    }
    let (cpus, left) = here.map_or((1.0, 0.0), |room| (room.cpus, room.left));
    // Threads that would run all the time, on the thread's node: those that have a CPU, and those that wait.
    let crowd = cpus * lap.crowd();
    let surplus = crowd - cpus - left;
    let fits = (best.room.spare / lap.demand()).min(surplus);
    Some(Advice {
        node: best.node,
        chance: (fits / crowd / LAPS_PER_READING).clamp(0.0, 1.0),
    })
}

/// Returns the probability with which a thread should move to its data, 0 if it should stay. `lap`: its last lap, if it is known. `here`: the room
/// on the thread's node. `there`: the data's node; no lack of room is known without a `room`.
pub fn arrive(lap: Option<&Lap>, here: Option<Room>, there: Option<Candidate>) -> f32 {
    let Some(there) = there else { return 1.0 };
    // Of a thread without a lap nothing is known. It may use a whole CPU.
    let unknown = Lap {
        elapsed: 1.0,
        ran: 1.0,
        ..Lap::default()
    };
    let known = lap.unwrap_or(&unknown);
    let wait = known.wait_on(there.room);
    if wait > 0.0
        && let Some(here) = here.filter(|here| here.is_full() && there.room.is_full())
    {
        return match is_worth_in_crowd(lap, &there) || is_swap(lap, here, there.room) {
            true if there.room.has_guests => GUEST_CHANCE,
            true => SWAP_CHANCE,
            false => 0.0,
        };
    }
    let gain = known.waited - wait - known.bytes * there.more_ns;
    if wait > 0.0 && !known.is_worth(gain) {
        return 0.0;
    }
    // The thread takes its own place again. No other thread takes it for idle.
    if there.room.own + TICKS >= known.demand() && wait == 0.0 {
        return 1.0;
    }
    // As many threads at most may want to go.
    let others = here.map_or(1.0, |room| room.cpus - room.spare);
    let others = others.max(1.0) * known.crowd();
    let fits = there.room.spare.max(TICKS) / known.demand();
    match fits + TICKS >= others {
        true => 1.0,
        false => fits / others / LAPS_PER_READING,
    }
}

/// Returns whether a thread gains by a move to its data where both nodes are full.
fn is_worth_in_crowd(lap: Option<&Lap>, there: &Candidate) -> bool {
    let Some(lap) = lap else { return false };
    let more = lap.bytes * there.more_ns;
    // The time on a CPU that the same work takes there, which is less, and the threads that share each CPU, with this one.
    let runs = (lap.ran + more).max(lap.ran / 10.0);
    let crowd = there.room.crowd_beside(lap) + 1.0 / there.room.cpus.max(1.0);
    lap.is_worth(lap.waited - runs * (crowd - 1.0) - more)
}

/// Returns whether a thread waits on the data's node about as long as here, because both nodes are full and equally crowded. On a node with few CPUs, one
/// thread more makes a difference, so the thread goes there only if another thread may go in return: a guest.
fn is_swap(lap: Option<&Lap>, here: Room, there: Room) -> bool {
    let Some(lap) = lap else { return true };
    let may_go = there.has_guests || lap.crowd() * here.cpus >= MANY;
    // A guest is one thread less there when it has gone.
    let guest = if there.has_guests {
        1.0 / there.cpus.max(1.0)
    } else {
        0.0
    };
    may_go && there.crowd_beside(lap) - guest <= SAME * lap.crowd()
}

/// Random numbers of one thread.
#[derive(Clone, Copy, Debug)]
pub struct Dice(u32);

impl Dice {
    /// Returns dice that fall differently for each seed.
    pub const fn new(seed: u32) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9) | 1)
    }

    /// Returns a number from 0 to below 1. By the xorshift generator of G. Marsaglia, because it allocates nothing.
    pub fn throw(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        (self.0 >> 8) as f32 / (1 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: f32 = 1e6;

    /// Returns a lap of 250 ms of a thread that is always ready, which waits for this share of the time.
    fn lap(wait: f32) -> Lap {
        Lap {
            elapsed: 250.0 * MS,
            ran: (1.0 - wait) * 250.0 * MS,
            waited: wait * 250.0 * MS,
            bytes: (100 << 20) as f32,
        }
    }

    fn room(cpus: f32, spare: f32) -> Room {
        Room {
            cpus,
            spare,
            lasting_spare: spare,
            idle: spare / cpus,
            ..Room::default()
        }
    }

    fn to(spare: f32, more_ns: f32) -> Candidate {
        Candidate {
            node: 1,
            room: room(1.0, spare),
            more_ns,
        }
    }

    fn chance(lap: Lap, candidate: Candidate) -> f32 {
        let here = Some(room(1.0, 0.0));
        leave(&lap, here, [candidate].into_iter()).map_or(0.0, |advice| advice.chance)
    }

    #[test]
    fn a_thread_leaves_when_waiting_costs_more_than_remote_access() {
        // Half of two threads, to one idle CPU.
        assert_eq!(chance(lap(0.5), to(1.0, 0.05)), 0.125);
        assert_eq!(chance(lap(0.5), to(0.05, 0.05)), 0.0, "no room there");
        assert_eq!(chance(lap(0.05), to(1.0, 0.0)), 0.0, "it hardly waits");
        // 100 MiB cost 105 ms more, and the thread waits 125 ms.
        assert_eq!(chance(lap(0.5), to(1.0, 1.0)), 0.0);
    }

    #[test]
    fn a_room_counts_what_the_asking_thread_has_used_itself() {
        let read = (1000, 2000);
        let full = Room {
            read,
            ..room(2.0, 0.0)
        };
        let stay = |from, to| OwnUse {
            stay: (from, to),
            ran: 0.8,
            came: (0, 0.0),
        };
        let came = |at| OwnUse {
            came: (at, 1.0),
            ..OwnUse::default()
        };
        for (used, own) in [
            (OwnUse::default(), 0.0),
            (stay(0, 3000), 0.8),
            (stay(1500, 1750), 0.2),
            (stay(2000, 3000), 0.0),
            // It came after the reading, in its second, and before it.
            (came(2100), 1.0),
            (came(1250), 0.25),
            (came(900), 0.0),
        ] {
            let room = full.without(used);
            assert_eq!((room.spare, room.own), (own, own), "{used:?}");
        }
        let taken = Room {
            lacking: 0.5,
            ..full
        };
        assert_eq!(taken.without(came(2100)).spare, 0.5, "others came, too");
        // No crowd on its own node delays a thread that takes its own place again.
        let crowd = Some(room(8.0, 0.0));
        let there = |room: Room| Candidate {
            room,
            ..to(0.0, -0.05)
        };
        let chance = |room: Room| arrive(Some(&lap(0.0)), crowd, Some(there(room)));
        assert_eq!(chance(full.without(came(2100))), 1.0);
        assert!(chance(room(2.0, 1.0)) < 0.1);
    }

    #[test]
    fn the_cheapest_node_with_room_is_chosen() {
        let far = Candidate {
            node: 2,
            ..to(1.0, 0.3)
        };
        let full = Candidate {
            node: 3,
            ..to(0.0, 0.0)
        };
        let advice = leave(&lap(0.5), None, [far, to(1.0, 0.1), full].into_iter());
        assert_eq!(advice.map(|advice| advice.node), Some(1));
        let advice = leave(&lap(0.5), None, [far, full].into_iter());
        assert_eq!(advice.map(|advice| advice.node), Some(2));
    }

    #[test]
    fn about_as_many_leave_in_a_second_as_fit() {
        // 64 threads on one CPU.
        let lap = lap(63.0 / 64.0);
        let in_a_second = |candidate| chance(lap, candidate) * 64.0 * LAPS_PER_READING;
        assert!((in_a_second(to(1.0, 0.0)) - 1.0).abs() < 0.01);
        assert!((in_a_second(to(20.0, 0.0)) - 20.0).abs() < 0.1);
        assert!(in_a_second(to(1000.0, 0.0)) <= 63.1, "one stays");
        let after = Room {
            left: 60.0,
            ..room(1.0, 0.0)
        };
        let advice = leave(&lap, Some(after), [to(20.0, 0.0)].into_iter()).unwrap();
        assert!(advice.chance * 64.0 * LAPS_PER_READING < 3.1, "{advice:?}");
    }

    #[test]
    fn a_thread_comes_to_its_data_if_there_is_room_or_waiting_there_is_cheaper() {
        let here = Some(room(1.0, 0.0));
        let arrive = |lap: Option<Lap>, there| arrive(lap.as_ref(), here, there);
        assert_eq!(arrive(None, None), 1.0, "nothing is known");
        assert_eq!(arrive(None, Some(to(1.0, -0.05))), 1.0);
        assert_eq!(arrive(None, Some(to(0.5, -0.05))), 0.0);
        assert_eq!(arrive(Some(lap(0.0)), Some(to(1.0, -0.05))), 1.0);
        assert_eq!(arrive(Some(lap(0.0)), Some(to(0.0, -0.05))), 0.0);
        // It would wait half of the time there, or read 100 MiB for 210 ms here.
        assert!(arrive(Some(lap(0.0)), Some(to(0.5, -2.0))) > 0.0);
        // A thread that needs little fits between others.
        let light = Lap {
            ran: 25.0 * MS,
            ..lap(0.0)
        };
        assert_eq!(arrive(Some(light), Some(to(0.2, -0.05))), 1.0);
    }

    #[test]
    fn dice_of_threads_with_adjacent_ids_fall_differently_and_evenly() {
        let below_a_quarter = |seed| {
            let mut dice = Dice::new(seed);
            (0..1000).filter(|_| dice.throw() < 0.25).count()
        };
        let counts: Vec<usize> = (4000..4064).map(below_a_quarter).collect();
        assert!(
            counts.iter().all(|count| (150..350).contains(count)),
            "{counts:?}"
        );
        let first: Vec<f32> = (4000..4064).map(|seed| Dice::new(seed).throw()).collect();
        let low = first.iter().filter(|number| **number < 0.5).count();
        assert!((16..48).contains(&low), "{first:?}");
    }

    #[test]
    fn where_both_nodes_are_full_and_equally_crowded_some_threads_come_to_their_data() {
        let arrive = |wait, cpus, crowd| {
            let there = Candidate {
                room: Room {
                    crowd,
                    ..room(cpus, 0.0)
                },
                ..to(0.0, -0.001)
            };
            arrive(Some(&lap(wait)), Some(room(cpus, 0.0)), Some(there))
        };
        assert_eq!(arrive(0.875, 1.0, None), SWAP_CHANCE);
        assert_eq!(arrive(0.875, 1.0, Some(9.0)), SWAP_CHANCE);
        assert_eq!(
            arrive(0.875, 1.0, Some(16.0)),
            0.0,
            "it is more crowded there"
        );
        assert_eq!(arrive(0.5, 1.0, None), 0.0, "one more matters");
        // Three at a CPU instead of two, but local: 100 MiB cost 105 ms less.
        let there = Candidate {
            room: room(1.0, 0.0),
            ..to(0.0, -1.0)
        };
        let half = lap(0.5);
        assert_eq!(
            super::arrive(Some(&half), Some(room(1.0, 0.0)), Some(there)),
            SWAP_CHANCE
        );
        assert_eq!(arrive(0.0, 32.0, None), SWAP_CHANCE, "one more of 32");
    }

    #[test]
    fn no_more_come_back_in_a_second_than_fit() {
        // 64 threads work on a node with 32 CPUs, and their data's node has one idle CPU.
        let chance = arrive(Some(&lap(0.5)), Some(room(32.0, 0.0)), Some(to(1.0, -0.05)));
        assert!(
            (chance * 64.0 * LAPS_PER_READING - 1.0).abs() < 0.01,
            "{chance}"
        );
    }
}
