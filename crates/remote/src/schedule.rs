//! Which channels carry a request: those of the node of the thread that asked, or all (Tyche, section 5).
//!
//! Content waits in the lane of its request (`lanes`). Channels take it from the lane of their own node, and from others that are *open*. A lane without a channel
//! that works is open in any case.

use std::time::Duration;

use crate::Time;

/// Threshold of the dynamic scheduler, in percent (section 5: "60 %").
const DIFFERENCE: u64 = 60;
/// Threshold, in percent, below which the backlog scheduler returns to affinity.
const DIFFERENCE_BACKLOG: u64 = 20;
/// How often the dynamic scheduler looks (section 6: "every 5 s").
const DYNAMIC_INTERVAL: Duration = Duration::from_secs(5);
/// How often the scheduler with backlog looks.
const BACKLOG_INTERVAL: Duration = Duration::from_millis(100);
/// Consecutive checks that must agree before the backlog scheduler changes `is_open`.
const AGREEING: u32 = 2;
/// Greatest number of looks for which the lanes stay open after affinity did not suffice.
const HOLD_MAX: u32 = 32;

/// How requests are distributed over channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheduler {
    /// To the channels of the request's node; of these, to the one that has carried the fewest bytes.
    #[default]
    Affinity,
    /// To all channels in turn.
    RoundRobin,
    /// By affinity, or in turn while the nodes' load differs by more than 60 %. Looks every 5 seconds.
    Dynamic,
    /// By affinity, or in turn while a node has more to send than its channels carry and another one's channels are idle. Looks ten
    /// times a second.
    Backlog,
}

/// What the scheduler has seen.
#[derive(Debug)]
pub(crate) struct Schedule {
    scheduler: Scheduler,
    lanes: usize,
    /// Channels may take from all lanes.
    is_open: bool,
    looked: Time,
    /// Bytes of the requests of each lane since then.
    asked_bytes: Vec<u64>,
    /// Looks in a row that wanted to change `is_open`.
    agreeing: u32,
    /// Looks since `is_open` has changed.
    since: u32,
    /// Looks for which the lanes stay open at least. Doubles each time that affinity did not suffice.
    hold: u32,
    /// How often `is_open` has changed.
    changes: u64,
    /// The lane of the next request of no node.
    turn: usize,
}

impl Schedule {
    /// Returns a schedule for at least one lane.
    pub fn new(scheduler: Scheduler, lanes: usize, now: Time) -> Schedule {
        Schedule {
            scheduler,
            lanes,
            is_open: scheduler == Scheduler::RoundRobin,
            looked: now,
            asked_bytes: vec![0; lanes],
            agreeing: 0,
            since: 0,
            hold: 1,
            changes: 0,
            turn: 0,
        }
    }

    /// Returns whether channels take content in turn, from all lanes.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Returns how often the scheduler has changed between affinity and turns.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Notes a request. Returns its lane: that of its node, or, without one, each lane in turn.
    pub fn ask(&mut self, lane: Option<u16>, bytes: u64) -> u16 {
        let lane = lane.map_or(self.turn, usize::from);
        self.turn = (self.turn + 1) % self.lanes;
        self.asked_bytes[lane] += bytes;
        lane as u16
    }

    /// Returns whether it is time for `look`.
    pub fn is_due(&self, now: Time) -> bool {
        let interval = match self.scheduler {
            Scheduler::Affinity | Scheduler::RoundRobin => return false,
            Scheduler::Dynamic => DYNAMIC_INTERVAL,
            Scheduler::Backlog => BACKLOG_INTERVAL,
        };
        now.saturating_sub(self.looked) >= interval
    }

    /// Looks at the load. `channels` and `waits` are of each lane: channels that work, and whether it has more to send than they carry.
    pub fn look(&mut self, now: Time, channels: &[u64], waits: &[bool]) {
        self.looked = now;
        self.since += 1;
        let wants_open = match self.is_open {
            false => self.affinity_wastes(channels, waits),
            true => self.since < self.hold || !self.affinity_suffices(channels),
        };
        let needed = match self.scheduler {
            Scheduler::Backlog => AGREEING,
            _ => 1,
        };
        self.agreeing = match wants_open == self.is_open {
            true => 0,
            false => self.agreeing + 1,
        };
        if self.agreeing >= needed {
            if wants_open {
                // The load may look as if affinity sufficed, and not be. Then each attempt costs throughput.
                let is_relapse =
                    self.scheduler == Scheduler::Dynamic && self.changes > 0 && self.since <= 2;
                self.hold = match is_relapse {
                    true => (self.hold * 2).min(HOLD_MAX),
                    false => 1,
                };
            }
            (self.is_open, self.agreeing, self.since) = (wants_open, 0, 0);
            self.changes += 1;
        }
        self.asked_bytes.fill(0);
    }

    /// Returns whether channels of one node idle while those of another one do not suffice, as far as the scheduler sees it.
    fn affinity_wastes(&self, channels: &[u64], waits: &[bool]) -> bool {
        let load = self.load(channels);
        match self.scheduler {
            Scheduler::Backlog => {
                let used = || (0..self.lanes).filter(|lane| channels[*lane] > 0);
                let is_short = used().any(|lane| waits[lane]);
                let is_idle = used().any(|lane| !waits[lane]);
                is_short && is_idle && differs(&load, 0)
            }
            _ => differs(&load, DIFFERENCE),
        }
    }

    /// Returns whether the lanes can be closed again.
    ///
    /// While channels take turns, all threads share all channels. So the bytes of a node follow from its threads, and not from what its own channels would carry: with as many
    /// threads on a node with three channels as on a node with one, both ask for the same. Therefore the load of the channels does not tell alone.
    fn affinity_suffices(&self, channels: &[u64]) -> bool {
        let load = self.load(channels);
        match self.scheduler {
            // Nothing waits any more when all channels are used. So the load tells when that is no longer needed.
            Scheduler::Backlog => !differs(&load, DIFFERENCE_BACKLOG),
            // The paper takes the bytes of local requests that a node's channels carry. While channels take turns, these are in proportion to the
            // bytes that the node has asked for.
            _ => !differs(&load, DIFFERENCE) || !differs(&self.asked(channels), DIFFERENCE),
        }
    }

    /// Returns the bytes that were asked for in each lane that has channels.
    fn asked(&self, channels: &[u64]) -> Vec<u64> {
        let used = (0..self.lanes).filter(|lane| channels[*lane] > 0);
        used.map(|lane| self.asked_bytes[lane]).collect()
    }

    /// Returns these bytes divided by the channels of the lane.
    fn load(&self, channels: &[u64]) -> Vec<u64> {
        let used = (0..self.lanes).filter(|lane| channels[*lane] > 0);
        used.map(|lane| self.asked_bytes[lane] / channels[lane])
            .collect()
    }
}

/// Returns whether the least of some numbers is smaller than the greatest one by more than some percent of this.
fn differs(numbers: &[u64], percent: u64) -> bool {
    let greatest = numbers.iter().max().copied().unwrap_or(0);
    let least = numbers.iter().min().copied().unwrap_or(0);
    (greatest - least) * 100 > greatest * percent
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the lanes are open after each look, for the bytes asked for in two lanes of 3 channels and 1.
    fn opens(scheduler: Scheduler, intervals: &[(u64, u64, bool)]) -> Vec<bool> {
        let mut schedule = Schedule::new(scheduler, 2, Time::ZERO);
        let mut now = Time::ZERO;
        let step = match scheduler {
            Scheduler::Backlog => BACKLOG_INTERVAL,
            _ => DYNAMIC_INTERVAL,
        };
        let mut after = Vec::new();
        for &(first, second, waiting) in intervals {
            schedule.ask(Some(0), first);
            schedule.ask(Some(1), second);
            now += step;
            let waits = match first / 3 > second {
                true => [waiting, false],
                false => [false, waiting],
            };
            if schedule.is_due(now) {
                schedule.look(now, &[3, 1], &waits);
            }
            after.push(schedule.is_open());
        }
        after
    }

    /// Figure 13 has 3 interfaces on one node and 1 on the other, and moves threads every minute.
    #[test]
    fn the_dynamic_scheduler_uses_all_channels_while_one_node_has_most_of_the_load() {
        let intervals = [
            (300, 100, false),
            (300, 0, false),
            (300, 300, false),
            (0, 300, false),
            (300, 39, false),
            (300, 41, false),
        ];
        let expected = [false, true, false, true, true, false];
        assert_eq!(opens(Scheduler::Dynamic, &intervals), expected);
        assert_eq!(opens(Scheduler::Affinity, &intervals), [false; 6]);
        assert_eq!(opens(Scheduler::RoundRobin, &intervals), [true; 6]);
    }

    /// Load that the channels carry.
    const EVEN: (u64, u64, bool) = (300, 100, false);

    /// Half of the load's difference is below the paper's threshold, but one node's channels idle and the other's do not suffice.
    #[test]
    fn the_scheduler_with_backlog_uses_idle_channels_and_comes_back() {
        let uneven = (300, 50, true);
        let intervals = [uneven, uneven, uneven, uneven, EVEN, EVEN];
        let expected = [false, true, true, true, true, false];
        assert_eq!(opens(Scheduler::Backlog, &intervals), expected);
        // One look alone changes nothing, nor does load that the channels carry.
        let intervals = [uneven, EVEN, uneven, (300, 10, false), (300, 10, false)];
        assert_eq!(opens(Scheduler::Backlog, &intervals), [false; 5]);
    }

    /// What one channel carries between two looks.
    const CAPACITY: u64 = 1000;
    const CHANNELS: [u64; 2] = [3, 1];

    /// A node's threads: those that always have requests, and what the others ask for between two looks.
    type Threads = (u64, u64);

    /// Runs threads for some looks. Returns whether the lanes are open at the end.
    fn run(schedule: &mut Schedule, now: &mut Time, threads: [Threads; 2], looks: u32) -> bool {
        for _ in 0..looks {
            let greedy = threads[0].0 + threads[1].0;
            let few = threads[0].1 + threads[1].1;
            for (lane, (large, small)) in (0..).zip(threads) {
                let own = CAPACITY * CHANNELS[lane];
                let asked = match (schedule.is_open(), large) {
                    // Greedy threads share what the others leave of all channels.
                    (true, _) => (4 * CAPACITY - few) * large / greedy + small,
                    (false, 0) => small.min(own),
                    (false, _) => own,
                };
                schedule.ask(Some(lane as u16), asked);
            }
            *now += DYNAMIC_INTERVAL;
            let waiting = threads.map(|(large, _)| large > 0);
            assert!(schedule.is_due(*now));
            schedule.look(*now, &CHANNELS, &waiting);
        }
        schedule.is_open()
    }

    /// The paper moves threads between the nodes. In intervals 6 and 8, a quarter of them makes small requests.
    #[test]
    fn the_dynamic_scheduler_is_right_in_the_eight_intervals_of_figure_13() {
        let intervals: [([Threads; 2], bool); 8] = [
            ([(2, 0), (2, 0)], false),
            ([(0, 0), (4, 0)], true),
            ([(4, 0), (0, 0)], true),
            ([(0, 0), (4, 0)], true),
            ([(3, 0), (1, 0)], false),
            ([(0, 200), (3, 0)], true),
            ([(2, 0), (2, 0)], false),
            ([(3, 0), (0, 200)], true),
        ];
        let mut schedule = Schedule::new(Scheduler::Dynamic, 2, Time::ZERO);
        let mut now = Time::ZERO;
        for (number, (threads, expected)) in (1..).zip(intervals) {
            let is_open = run(&mut schedule, &mut now, threads, 4);
            assert_eq!(is_open, expected, "interval {number}");
        }
        assert_eq!(schedule.changes(), 5);
    }

    /// The paper's first half of interval 8: the load differs by less than the threshold.
    #[test]
    fn only_the_scheduler_with_backlog_sees_that_a_channel_is_partly_idle() {
        for (scheduler, expected) in [(Scheduler::Dynamic, false), (Scheduler::Backlog, true)] {
            let mut schedule = Schedule::new(scheduler, 2, Time::ZERO);
            let (threads, mut now) = ([(3, 0), (0, 660)], Time::ZERO);
            assert_eq!(run(&mut schedule, &mut now, threads, 9), expected);
        }
    }

    #[test]
    fn attempts_that_fail_become_rarer() {
        let mut schedule = Schedule::new(Scheduler::Dynamic, 2, Time::ZERO);
        let mut now = Time::ZERO;
        // Node 0 cannot use its channels, but the nodes ask for nearly the same while channels take turns.
        let mut change = |looks| {
            let before = schedule.changes();
            for _ in 0..looks {
                let second = if schedule.is_open() { 2000 } else { 1000 };
                schedule.ask(Some(0), 1100);
                schedule.ask(Some(1), second);
                now += DYNAMIC_INTERVAL;
                schedule.look(now, &CHANNELS, &[false, true]);
            }
            schedule.changes() - before
        };
        assert!(change(20) > 4);
        change(80);
        assert!(change(100) <= 2 * (100 / HOLD_MAX as u64 + 1));
    }

    #[test]
    fn requests_of_no_node_go_to_each_lane_in_turn() {
        let mut schedule = Schedule::new(Scheduler::Affinity, 2, Time::ZERO);
        let lanes: Vec<u16> = (0..4).map(|_| schedule.ask(None, 1)).collect();
        assert_eq!(lanes, [0, 1, 0, 1]);
        assert_eq!(schedule.ask(Some(1), 1), 1);
    }
}
