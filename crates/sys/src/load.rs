//! CPU load, and the time that a thread waited for a CPU. The basis of decisions to migrate a thread.
//!
//! Reads files of /proc in pieces through a buffer on the stack, because threads of programs call it at any point, also inside of
//! an allocation.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// Time of a CPU since the start of the machine, in ticks of the kernel (`busy` has it as a time).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// Time with a thread or interrupt to run.
    pub busy: u64,
    /// Time with nothing to run, or waiting for a device.
    pub idle: u64,
}

/// Calls `each` with every CPU that is online, ascending. Fails without /proc.
pub fn cpu_times(mut each: impl FnMut(u32, CpuTime)) -> io::Result<()> {
    let file = open("/proc/stat")?;
    let mut buffer = [0u8; 4096];
    let mut held = 0;
    loop {
        let read = read(&file, &mut buffer[held..])?;
        held += read;
        let mut rest = &buffer[..held];
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            // The lines of CPUs come first in the file.
            if !rest.starts_with(b"cpu") {
                return Ok(());
            }
            if let Some((cpu, time)) = cpu_line(&rest[..end]) {
                each(cpu, time);
            }
            rest = &rest[end + 1..];
        }
        let left = rest.len();
        // The end of the file, or a line longer than any line of a CPU.
        if read == 0 || left == buffer.len() {
            return Ok(());
        }
        buffer.copy_within(held - left..held, 0);
        held = left;
    }
}

/// Parses `cpu7 user nice system idle iowait irq softirq steal ...`. Returns `None` for the sum over all CPUs.
fn cpu_line(line: &[u8]) -> Option<(u32, CpuTime)> {
    let line = std::str::from_utf8(line).ok()?;
    let mut fields = line.strip_prefix("cpu")?.split_ascii_whitespace();
    // In the line of the sum, a space follows `cpu`.
    if line.as_bytes().get(3)? == &b' ' {
        return None;
    }
    let cpu = fields.next()?.parse().ok()?;
    let mut time = CpuTime::default();
    // Further fields (guests) are included in `user`.
    for (at, field) in fields.take(8).enumerate() {
        let ticks: u64 = field.parse().ok()?;
        match at {
            3 | 4 => time.idle += ticks,
            _ => time.busy += ticks,
        }
    }
    Some((cpu, time))
}

/// Returns for how long a CPU has had something to run since the start of the machine, in steps of a tick. Fails without /proc, and with
/// NotFound for a CPU that is not online.
pub fn busy(cpu: u32) -> io::Result<Duration> {
    let mut ticks = None;
    cpu_times(|number, time| {
        if number == cpu {
            ticks = Some(time.busy);
        }
    })?;
    let ticks = ticks.ok_or(io::ErrorKind::NotFound)?;
    let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_nanos(
        ticks.saturating_mul(1_000_000_000 / ticks_per_second),
    ))
}

/// Returns the CPU time of the calling thread.
pub fn ran() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // The clock is never negative.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// What a thread has done since its start, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// Time on a CPU.
    pub ran_ns: u64,
    /// Time in which the thread was ready to run but had no CPU.
    pub waited_ns: u64,
}

/// Returns the times of the calling thread. Returns `None` where the kernel does not count them. Allocates nothing.
pub fn own_times() -> Option<ThreadTimes> {
    times_at("/proc/thread-self/schedstat")
}

/// Returns the times of the thread with this id, as [`own_times`]. Returns `None` also if there is no such thread, or it has not run yet.
pub fn times_of(tid: u32) -> Option<ThreadTimes> {
    times_at(&format!("/proc/{tid}/schedstat"))
}

fn times_at(path: &str) -> Option<ThreadTimes> {
    let file = open(path).ok()?;
    let mut buffer = [0u8; 128];
    let length = read(&file, &mut buffer).ok()?;
    let mut fields = std::str::from_utf8(&buffer[..length])
        .ok()?
        .split_ascii_whitespace();
    let ran_ns: u64 = fields.next()?.parse().ok()?;
    let waited_ns = fields.next()?.parse().ok()?;
    // A thread that uses data has run, so 0 means that the kernel does not count.
    (ran_ns > 0).then_some(ThreadTimes { ran_ns, waited_ns })
}

fn open(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

fn read(file: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(file, &mut *buffer) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_of_this_process_is_reported_once_with_some_time() {
        let mut seen = vec![];
        cpu_times(|cpu, time| seen.push((cpu, time))).unwrap();
        let numbers: Vec<u32> = seen.iter().map(|(cpu, _)| *cpu).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
        for cpu in crate::affinity::get(None).unwrap() {
            assert!(numbers.contains(&cpu), "CPU {cpu} is not in {numbers:?}");
        }
        assert!(seen.iter().all(|(_, t)| t.busy + t.idle > 0), "{seen:?}");
    }

    #[test]
    fn a_line_is_split_into_busy_and_idle() {
        let line = b"cpu12 1 2 4 8 16 32 64 128 1000 1000";
        let time = CpuTime {
            busy: 1 + 2 + 4 + 32 + 64 + 128,
            idle: 8 + 16,
        };
        assert_eq!(cpu_line(line), Some((12, time)));
        assert_eq!(cpu_line(b"cpu  1 2 3 4 5 6 7 8"), None);
        assert_eq!(cpu_line(b"cpu1 x"), None);
        assert_eq!(cpu_line(b"intr 1"), None);
    }

    #[test]
    fn a_thread_that_computes_makes_its_cpu_busy() {
        let cpu = crate::affinity::get(None).unwrap()[0];
        let spun = std::thread::spawn(move || {
            crate::affinity::set(None, &[cpu]).unwrap();
            let (ran_before, busy_before) = (ran(), busy(cpu).unwrap());
            while ran() - ran_before < Duration::from_millis(50) {}
            busy(cpu).unwrap() - busy_before
        });
        // The kernel counts ticks of 10 ms.
        assert!(spun.join().unwrap() >= Duration::from_millis(30));
        assert!(busy(u32::MAX).is_err());
    }

    #[test]
    fn the_times_of_a_thread_only_grow_and_others_see_them() {
        // The kernel may not yet have counted anything of a new thread.
        while ran() < Duration::from_millis(20) {}
        // If the kernel does not count, all values are `None`.
        let first = own_times();
        while ran() < Duration::from_millis(40) {}
        let seen = times_of(crate::affinity::current_tid());
        let last = own_times();
        assert_eq!(
            (first.is_some(), last.is_some()),
            (seen.is_some(), seen.is_some())
        );
        if let (Some(first), Some(seen), Some(last)) = (first, seen, last) {
            assert!(first.ran_ns <= seen.ran_ns && seen.ran_ns <= last.ran_ns);
            assert!(first.waited_ns <= seen.waited_ns && seen.waited_ns <= last.waited_ns);
            assert!(last.ran_ns >= 10_000_000, "{last:?}");
        }
        assert_eq!(times_of(u32::MAX), None);
    }
}
