//! How many small requests wait for each other, so that one frame carries their records.
//!
//! With more requests in a frame, both sides do less work for each; but a request waits. The degree that gives the most depends on the device and on the load. So it follows the
//! throughput, by climbing (as in Tyche, MSST 2015). A request waits only while others are in progress: one that is alone is sent at once.

use std::time::Duration;

use crate::Time;

/// Longest time that a request waits for others (i10, NSDI 2020, has 50 us, too).
const HOLD: Duration = Duration::from_micros(50);
/// How often the degree is changed.
const INTERVAL: Duration = Duration::from_millis(10);
/// Largest degree.
const DEGREE_MAX: usize = 64;
/// Fewest requests that must have ended in an interval for a decision.
const ENDED_MIN: u64 = 32;
/// Intervals for which no larger degree is tried after one was of no use.
const REST: u32 = 50;
/// Difference of throughputs that decides, in percent. Below it, the degree becomes smaller: requests then wait less.
const DIFFERENCE: u64 = 5;

#[derive(Debug)]
pub(crate) struct Batch {
    is_on: bool,
    /// Records that are sent together.
    degree: usize,
    grows: bool,
    /// Intervals until a larger degree is tried again.
    rest: u32,
    /// Start of the interval, and what has ended since.
    start: Time,
    ended: u64,
    /// Requests that ended in a second, in the interval before.
    before: u64,
    /// When the first record began to wait.
    since: Option<Time>,
}

impl Batch {
    /// Returns a batch with degree 1, which holds nothing back. The degree changes only if `is_on`.
    pub fn new(is_on: bool, now: Time) -> Batch {
        Batch {
            is_on,
            degree: 1,
            grows: true,
            rest: 0,
            start: now,
            ended: 0,
            before: 0,
            since: None,
        }
    }

    /// Notes a request that may wait.
    pub fn asked(&mut self, now: Time) {
        self.since.get_or_insert(now);
    }

    /// Ends the wait of all records: a frame has arrived or was lost, or a record must not wait.
    pub fn release(&mut self) {
        self.since = None;
    }

    /// Returns whether the records must still wait. `records` wait to be sent, and `in_progress` were sent and have not ended.
    pub fn holds(&self, now: Time, records: usize, in_progress: usize) -> bool {
        let is_young = self.since.is_some_and(|since| now < since + HOLD);
        is_young && in_progress > 0 && records < self.degree
    }

    /// Returns when the records that wait are sent.
    pub fn timer(&self) -> Option<Time> {
        self.since
            .filter(|_| self.degree > 1)
            .map(|since| since + HOLD)
    }

    /// Notes that requests have ended.
    pub fn ended(&mut self, now: Time, count: u64) {
        self.ended += count;
        let time = now.saturating_sub(self.start);
        if !self.is_on || time < INTERVAL {
            return;
        }
        let rate = self.ended * 1_000_000 / (time.as_micros() as u64).max(1);
        let is_busy = self.ended >= ENDED_MIN && time < 2 * INTERVAL;
        (self.start, self.ended) = (now, 0);
        if !is_busy {
            (self.degree, self.grows, self.rest, self.before) = (1, true, 0, 0);
            return;
        }
        let before = std::mem::replace(&mut self.before, rate);
        if self.degree == 1 {
            self.grows = self.rest == 0;
            self.rest = self.rest.saturating_sub(1);
        } else if rate * 100 < before * (100 - DIFFERENCE) {
            self.grows = !self.grows;
        } else if rate * 100 <= before * (100 + DIFFERENCE) {
            self.grows = false;
        }
        self.degree = match self.grows {
            true => (self.degree * 2).min(DEGREE_MAX),
            false => (self.degree / 2).max(1),
        };
        if self.degree == 1 && !self.grows && self.rest == 0 {
            self.rest = REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Time::from_secs(1000);

    /// Returns the mean degree of some intervals, in which `rate_of` gives the requests that end.
    fn degree_after(intervals: u32, rate_of: impl Fn(usize) -> u64) -> f64 {
        let mut batch = Batch::new(true, START);
        let mut sum = 0;
        for interval in 1..=intervals {
            let ended = rate_of(batch.degree);
            sum += batch.degree;
            batch.ended(START + INTERVAL * interval, ended);
        }
        sum as f64 / f64::from(intervals)
    }

    #[test]
    fn the_degree_follows_the_throughput() {
        // More is always better; eight is best; nothing helps; a load that is too small to tell.
        assert!(degree_after(1000, |degree| 1000 + 200 * degree as u64) > 20.0);
        let best_at_8 = |degree: usize| 4000 - 400 * (degree as i64 - 8).unsigned_abs().min(9);
        let degree = degree_after(1000, best_at_8);
        assert!((3.0..12.0).contains(&degree), "{degree}");
        assert!(degree_after(1000, |_| 1000) < 1.1);
        assert!(degree_after(1000, |degree| 1000 / degree as u64) < 1.2);
        assert_eq!(degree_after(1000, |_| 31), 1.0);
    }

    #[test]
    fn a_request_waits_only_while_others_are_in_progress_and_not_for_long() {
        let mut batch = Batch::new(true, START);
        batch.degree = 4;
        batch.asked(START);
        assert!(!batch.holds(START, 1, 0));
        assert!(batch.holds(START, 3, 1));
        assert!(!batch.holds(START, 4, 1));
        assert_eq!(batch.timer(), Some(START + HOLD));
        assert!(!batch.holds(START + HOLD, 1, 1));
        batch.release();
        assert!(!batch.holds(START, 1, 1));
        assert_eq!(batch.timer(), None);
    }
}
