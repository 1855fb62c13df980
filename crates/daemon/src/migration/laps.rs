//! What threads of other processes did between two checks: how long they ran and waited for a CPU, and how much they used.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use jericho_client::migration::crowding::Lap;
use jericho_client::migration::migrator::CHECK_EVERY;
use jericho_sys::load::{self, ThreadTimes};

use crate::tasks::Task;

/// Shortest lap.
const LAP_MIN: Duration = Duration::from_nanos(CHECK_EVERY);
/// A longer lap tells nothing: the thread did something else for a while.
const LAP_MAX: Duration = Duration::from_secs(3);
/// Most threads whose laps are known.
const THREADS_MAX: usize = 4096;

struct Begin {
    task: Task,
    at: Instant,
    times: Option<ThreadTimes>,
    bytes: u64,
    last: Option<Lap>,
}

/// The laps of threads, by thread id.
#[derive(Default)]
pub(super) struct Laps(HashMap<u32, Begin>);

impl Laps {
    /// Adds bytes that a thread has used. Returns whether that ends a lap, and the thread's last whole lap.
    pub fn used(&mut self, task: &Task, bytes: u64, now: Instant) -> (bool, Option<Lap>) {
        self.used_with(task, bytes, now, load::times_of)
    }

    fn used_with(
        &mut self,
        task: &Task,
        bytes: u64,
        now: Instant,
        times_of: impl Fn(u32) -> Option<ThreadTimes>,
    ) -> (bool, Option<Lap>) {
        if self.0.len() >= THREADS_MAX && !self.0.contains_key(&task.tid) {
            return (false, None);
        }
        let fresh = || Begin {
            task: *task,
            at: now,
            times: times_of(task.tid),
            bytes: 0,
            last: None,
        };
        let begin = self.0.entry(task.tid).or_insert_with(fresh);
        if begin.task != *task || now > begin.at + LAP_MAX {
            *begin = fresh();
        }
        begin.bytes += bytes;
        let elapsed = now - begin.at;
        if elapsed < LAP_MIN {
            return (false, begin.last);
        }
        let times = times_of(task.tid);
        let lap = begin.times.zip(times).map(|(before, after)| {
            Lap::between(before, after, elapsed.as_nanos() as u64, begin.bytes as f32)
        });
        (begin.at, begin.times, begin.bytes, begin.last) = (now, times, 0, lap);
        (lap.is_some(), lap)
    }

    /// Returns a thread's last whole lap.
    pub fn last(&self, task: &Task) -> Option<Lap> {
        self.0
            .get(&task.tid)
            .filter(|begin| begin.task == *task)?
            .last
    }

    /// Forgets threads that have used nothing for a while.
    pub fn forget(&mut self, now: Instant) {
        self.0.retain(|_, begin| now <= begin.at + LAP_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lap_has_what_the_thread_did_in_a_quarter_of_a_second() {
        let (mut laps, base) = (Laps::default(), Instant::now());
        let task = Task {
            tid: 7,
            pid: 7,
            start: 1,
        };
        let mut at = |task: &Task, ms: u64, ran_ns: u64, waited_ns: u64| {
            let times = ThreadTimes { ran_ns, waited_ns };
            laps.used_with(task, 5, base + Duration::from_millis(ms), |_| Some(times))
        };
        assert_eq!(at(&task, 0, 1000, 0), (false, None));
        assert_eq!(at(&task, 249, 2000, 0), (false, None));
        let lap = Lap {
            elapsed: 250e6,
            ran: 100e6,
            waited: 50e6,
            bytes: 15.0,
        };
        assert_eq!(at(&task, 250, 100_001_000, 50_000_000), (true, Some(lap)));
        assert_eq!(at(&task, 300, 0, 0), (false, Some(lap)));
        // Too long ago, and another thread with the same id.
        assert_eq!(at(&task, 4000, 0, 0), (false, None));
        let other = Task { start: 2, ..task };
        assert_eq!(at(&other, 4300, 0, 0), (false, None));
        assert!(at(&other, 4600, 300_000_000, 0).0);
    }
}
