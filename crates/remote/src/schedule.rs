//! Which channels carry a request: those of the node of the thread that asked, or all (Tyche, section 5).
//!
//! Content waits in the lane of its request (`lanes`). Channels take it from the lane of their own node, and from others that are *open*. A lane without a channel
//! that works is open in any case.

use std::time::Duration;

use crate::Time;

/// Threshold of the dynamic scheduler, in percent (section 5: "60 %").
const DIFFERENCE: u64 = 60;
/// How often the dynamic scheduler looks (section 6: "every 5 s").
const DYNAMIC_INTERVAL: Duration = Duration::from_secs(5);
/// How often the scheduler with backlog looks.
const BACKLOG_INTERVAL: Duration = Duration::from_millis(100);
/// Consecutive checks that must agree before the backlog scheduler changes `is_open`.
const AGREEING: u32 = 2;

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
    /// By affinity, or in turn while a node has more to send than its channels take and another one's channels are idle. Looks ten
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

    /// Looks at the load, if it is time. `channels` and `waiting_bytes` are of each lane: channels that work, and bytes that wait to be sent.
    pub fn look(&mut self, now: Time, channels: &[u64], waiting_bytes: &[u64]) {
        let interval = match self.scheduler {
            Scheduler::Affinity | Scheduler::RoundRobin => return,
            Scheduler::Dynamic => DYNAMIC_INTERVAL,
            Scheduler::Backlog => BACKLOG_INTERVAL,
        };
        if now.saturating_sub(self.looked) < interval {
            return;
        }
        self.looked = now;
        let is_used = |lane: &usize| channels[*lane] > 0;
        let load = |lane: usize| self.asked_bytes[lane] / channels[lane];
        let used = || (0..self.lanes).filter(is_used);
        let greatest = used().map(load).max().unwrap_or(0);
        let least = used().map(load).min().unwrap_or(0);
        let differs = (greatest - least) * 100 > greatest * DIFFERENCE;
        let wants_open = match self.scheduler {
            Scheduler::Backlog if !self.is_open => {
                let waits = used().any(|lane| waiting_bytes[lane] > 0);
                let is_idle = used().any(|lane| waiting_bytes[lane] == 0);
                waits && is_idle && greatest > least
            }
            // Nothing waits any more when all channels are used. So the load tells when that is no longer needed.
            Scheduler::Backlog => greatest > 0 && (greatest - least) * 100 > greatest * 20,
            _ => differs,
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
            (self.is_open, self.agreeing) = (wants_open, 0);
            self.changes += 1;
        }
        self.asked_bytes.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the lanes are open after each look, for the bytes asked for in two lanes of 3 channels and 1.
    fn opens(scheduler: Scheduler, intervals: &[(u64, u64, u64)]) -> Vec<bool> {
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
                true => [waiting, 0],
                false => [0, waiting],
            };
            schedule.look(now, &[3, 1], &waits);
            after.push(schedule.is_open());
        }
        after
    }

    /// Figure 13 has 3 interfaces on one node and 1 on the other, and moves threads every minute.
    #[test]
    fn the_dynamic_scheduler_uses_all_channels_while_one_node_has_most_of_the_load() {
        let intervals = [
            (300, 100, 0),
            (300, 0, 0),
            (300, 300, 0),
            (0, 300, 0),
            (300, 39, 0),
            (300, 41, 0),
        ];
        let expected = [false, true, true, true, true, false];
        assert_eq!(opens(Scheduler::Dynamic, &intervals), expected);
        assert_eq!(opens(Scheduler::Affinity, &intervals), [false; 6]);
        assert_eq!(opens(Scheduler::RoundRobin, &intervals), [true; 6]);
    }

    /// Half of the load's difference is below the paper's threshold, but one node's channels idle and the other's do not suffice.
    #[test]
    fn the_scheduler_with_backlog_uses_idle_channels_and_comes_back() {
        let uneven = (300, 50, 10);
        let intervals = [uneven, uneven, uneven, uneven, (300, 100, 0), (300, 100, 0)];
        let expected = [false, true, true, true, true, false];
        assert_eq!(opens(Scheduler::Backlog, &intervals), expected);
        // One look alone changes nothing, nor does load that the channels carry.
        let intervals = [uneven, (300, 100, 0), uneven, (300, 10, 0), (300, 10, 0)];
        assert_eq!(opens(Scheduler::Backlog, &intervals), [false; 5]);
    }

    #[test]
    fn requests_of_no_node_go_to_each_lane_in_turn() {
        let mut schedule = Schedule::new(Scheduler::Affinity, 2, Time::ZERO);
        let lanes: Vec<u16> = (0..4).map(|_| schedule.ask(None, 1)).collect();
        assert_eq!(lanes, [0, 1, 0, 1]);
        assert_eq!(schedule.ask(Some(1), 1), 1);
    }
}
