//! CPU time of the processes on both sides, and of the machine.
//!
//! The kernel counts the softirq in which a frame passes a virtual interface for the thread that it interrupts, of whichever process. So
//! the time of a process is inexact, and that of the machine is not.

use std::fs;
use std::time::Duration;

use jericho_sys::load;

use crate::Result;

/// The processes of a side.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Processes of the target; this process is the initiator.
    pub targets: Vec<u32>,
}

/// CPU time so far.
#[derive(Clone, Copy, Debug)]
pub struct Spent {
    initiator_ns: u64,
    target_ns: u64,
    machine_ns: u64,
}

/// CPU time of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Used {
    /// Of this process.
    pub initiator_us: f64,
    /// Of the target's processes.
    pub target_us: f64,
    /// Of all CPUs: everything that ran meanwhile.
    pub machine_us: f64,
}

impl Usage {
    /// Returns the CPU time so far.
    pub fn now(&self) -> Result<Spent> {
        let target = self.targets.iter().map(|pid| ran_ns(&pid.to_string()));
        Ok(Spent {
            initiator_ns: ran_ns("self")?,
            target_ns: target.sum::<Result<u64>>()?,
            machine_ns: machine_ns()?,
        })
    }
}

impl Spent {
    /// Returns the time since an earlier moment.
    pub fn since(&self, before: &Spent) -> Spent {
        Spent {
            initiator_ns: self.initiator_ns - before.initiator_ns,
            target_ns: self.target_ns - before.target_ns,
            machine_ns: self.machine_ns - before.machine_ns,
        }
    }

    /// Returns the time of each of a number of transfers.
    pub fn per(&self, transfers: f64) -> Used {
        let us = |ns: u64| ns as f64 / 1000.0 / transfers;
        Used {
            initiator_us: us(self.initiator_ns),
            target_us: us(self.target_ns),
            machine_us: us(self.machine_ns),
        }
    }
}

/// Returns for how long the threads of a process have run. Threads that have ended do not count.
fn ran_ns(process: &str) -> Result<u64> {
    let tasks = format!("/proc/{process}/task");
    let mut sum = 0;
    for task in fs::read_dir(&tasks).map_err(|e| format!("cannot read {tasks}: {e}"))? {
        let path = task?.path().join("schedstat");
        // A thread may have ended meanwhile.
        let text = fs::read_to_string(&path).unwrap_or_default();
        sum += text
            .split(' ')
            .next()
            .and_then(|ns| ns.parse().ok())
            .unwrap_or(0);
    }
    match sum {
        0 => Err(format!("{tasks} shows no CPU time: the kernel needs CONFIG_SCHED_INFO").into()),
        sum => Ok(sum),
    }
}

/// Returns for how long all CPUs have been busy, in steps of a tick.
fn machine_ns() -> Result<u64> {
    let mut cpus = Vec::new();
    load::cpu_times(|cpu, _| cpus.push(cpu))?;
    let busy = cpus.into_iter().map(load::busy);
    Ok(busy.sum::<std::io::Result<Duration>>()?.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_loop_is_counted() {
        let usage = Usage::default();
        let before = usage.now().expect("the CPU time");
        let end = std::time::Instant::now() + Duration::from_millis(30);
        while std::time::Instant::now() < end {}
        let used = usage.now().expect("the CPU time").since(&before).per(1.0);
        assert!(used.initiator_us > 1000.0, "{used:?}");
        assert!(used.target_us == 0.0, "{used:?}");
    }
}
