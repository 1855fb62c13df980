//! What the whole machine did during a run: CPU time by kind, and the sectors of a device. *Implications*, section IV.C, *cycles per I/O* (CPIO).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::disks::{self, Disk, SECTOR_BYTES, disks_below};
use crate::error::{Context, Error, Result};

/// Returns whether the data of a run was cached: the devices moved less than half of the bytes that the programs moved.
pub(crate) fn is_cached(device_sectors: u64, moved_bytes: u64) -> bool {
    device_sectors.saturating_mul(SECTOR_BYTES) < moved_bytes / 2
}

/// CPU time of all CPUs together, by kind, in seconds: /proc/stat, proc(5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuSeconds {
    /// Programs, also those with a lower priority.
    pub user: f64,
    /// The kernel, for programs.
    pub system: f64,
    /// Nothing to run.
    pub idle: f64,
    /// Nothing to run, while a thread waited for a device.
    pub io_wait: f64,
    /// Interrupts.
    pub irq: f64,
    /// Deferred work of interrupts.
    pub soft_irq: f64,
    /// Taken by the host of a virtual machine.
    pub steal: f64,
}

impl CpuSeconds {
    fn parse(stat: &str, ticks_per_second: f64) -> Option<CpuSeconds> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line
            .split_ascii_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        let at = |index: usize| {
            ticks
                .get(index)
                .map(|ticks| *ticks as f64 / ticks_per_second)
        };
        Some(CpuSeconds {
            user: at(0)? + at(1)?,
            system: at(2)?,
            idle: at(3)?,
            io_wait: at(4)?,
            irq: at(5)?,
            soft_irq: at(6)?,
            steal: at(7).unwrap_or(0.0),
        })
    }

    /// Returns the time from `before` to this.
    fn since(self, before: CpuSeconds) -> CpuSeconds {
        // The kernel's idle and I/O wait may go back by a tick.
        let more = |now: f64, then: f64| (now - then).max(0.0);
        CpuSeconds {
            user: more(self.user, before.user),
            system: more(self.system, before.system),
            idle: more(self.idle, before.idle),
            io_wait: more(self.io_wait, before.io_wait),
            irq: more(self.irq, before.irq),
            soft_irq: more(self.soft_irq, before.soft_irq),
            steal: more(self.steal, before.steal),
        }
    }

    /// Returns all kinds together.
    fn sum(self) -> f64 {
        self.user + self.system + self.idle + self.io_wait + self.irq + self.soft_irq + self.steal
    }

    /// Returns each kind multiplied by `factor`.
    fn times(self, factor: f64) -> CpuSeconds {
        CpuSeconds {
            user: self.user * factor,
            system: self.system * factor,
            idle: self.idle * factor,
            io_wait: self.io_wait * factor,
            irq: self.irq * factor,
            soft_irq: self.soft_irq * factor,
            steal: self.steal * factor,
        }
    }
}

/// Cycles of each kind for each sector.
pub type Cpio = CpuSeconds;

/// A moment of the machine.
#[derive(Clone, Debug)]
pub struct Moment {
    cpu: CpuSeconds,
    sectors: Option<u64>,
    at: Instant,
}

/// What happened between two moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Length.
    pub seconds: f64,
    /// Ticks of the clock on all CPUs together, in which the kernel counts CPU time.
    pub ticks: f64,
    /// CPU time of the whole machine.
    pub cpu_seconds: CpuSeconds,
    /// Sectors of the devices, read and written. `None`: the targets are on no block device.
    pub device_sectors: Option<u64>,
}

impl Span {
    /// Returns cycles per I/O: CPU time of the whole machine times the rate of the time stamp counter, for each sector of the devices. `None`: the devices
    /// moved none, the time was too short, or the data was cached. The few sectors of a journal beside a cached run are not what its cycles are for.
    pub fn cpio(&self, tsc_hz: f64, moved_bytes: u64) -> Option<Cpio> {
        let sectors = self.device_sectors.filter(|sectors| *sectors > 0)?;
        (self.is_long_enough() && !is_cached(sectors, moved_bytes))
            .then(|| self.cpu_seconds.times(tsc_hz / sectors as f64))
    }

    fn is_long_enough(&self) -> bool {
        self.ticks >= TICKS_MIN
    }

    /// Returns the same for each 512 bytes that the programs moved.
    pub fn cycles_per_moved_sector(&self, tsc_hz: f64, moved_bytes: u64) -> Option<Cpio> {
        let sectors = moved_bytes / SECTOR_BYTES;
        (sectors > 0 && self.is_long_enough())
            .then(|| self.cpu_seconds.times(tsc_hz / sectors as f64))
    }
}

/// Fewest ticks of the clock for cycles per I/O: a few would be off by half of their value.
const TICKS_MIN: f64 = 100.0;

/// The counters of the machine and of some disks.
#[derive(Clone, Debug)]
pub struct Machine {
    ticks_per_second: f64,
    /// Files `stat` of block devices: block/stat.rst of the kernel's documentation. `None`: some disks are unknown.
    stats: Option<BTreeSet<PathBuf>>,
}

impl Machine {
    /// Finds the counters of the disks below these paths. `None`, or a path without a block device: their sectors are unknown.
    pub fn of(paths: Option<&[PathBuf]>) -> Machine {
        let stats = paths.and_then(|paths| {
            let disks = paths.iter().map(|path| disks_below(path));
            Some(disks.collect::<Option<Vec<_>>>()?.into_iter().flatten())
        });
        let stats = stats.map(|disks| disks.map(|disk| disk.join("stat")).collect());
        Machine {
            ticks_per_second: rustix::param::clock_ticks_per_second().max(1) as f64,
            stats: stats.filter(|stats: &BTreeSet<PathBuf>| !stats.is_empty()),
        }
    }

    /// Describes the disks. `None`: some are unknown.
    pub fn disks(&self) -> Option<Vec<Disk>> {
        let stats = self.stats.as_ref()?.iter();
        Some(
            stats
                .filter_map(|stat| disks::describe(stat.parent()?))
                .collect(),
        )
    }

    /// Reads the counters.
    pub fn now(&self) -> Result<Moment> {
        let path = Path::new("/proc/stat");
        let text = fs::read_to_string(path).at(path, "read it")?;
        let cpu = CpuSeconds::parse(&text, self.ticks_per_second);
        let cpu =
            cpu.ok_or_else(|| Error::new("/proc/stat: no line with the times of all CPUs"))?;
        let stats = self.stats.iter().flatten();
        let sectors = stats.map(|path| {
            let text = fs::read_to_string(path).at(path, "read it")?;
            let fields: Vec<u64> = text
                .split_ascii_whitespace()
                .map_while(|field| field.parse().ok())
                .collect();
            match (fields.get(2), fields.get(6)) {
                (Some(read), Some(written)) => Ok(read + written),
                _ => Err(Error::new(format!(
                    "{}: no counters of sectors",
                    path.display()
                ))),
            }
        });
        let sectors = sectors.sum::<Result<u64>>()?;
        Ok(Moment {
            cpu,
            sectors: self.stats.is_some().then_some(sectors),
            at: Instant::now(),
        })
    }

    /// Returns what happened between two moments.
    pub fn between(&self, first: &Moment, last: &Moment) -> Span {
        let sectors = last.sectors.zip(first.sectors);
        let cpu_seconds = last.cpu.since(first.cpu);
        Span {
            seconds: last.at.duration_since(first.at).as_secs_f64(),
            ticks: cpu_seconds.sum() * self.ticks_per_second,
            cpu_seconds,
            device_sectors: sectors.map(|(last, first)| last.saturating_sub(first)),
        }
    }
}

/// Time over which the rate of the time stamp counter is measured.
const CALIBRATION: Duration = Duration::from_millis(50);

/// Measures the rate of the time stamp counter, of which the papers' cycles are. `None` on a processor without one.
pub fn tsc_hz() -> Option<f64> {
    let first = (jericho_sys::tsc::now()?, Instant::now());
    std::thread::sleep(CALIBRATION);
    let last = (jericho_sys::tsc::now()?, Instant::now());
    let seconds = last.1.duration_since(first.1).as_secs_f64();
    Some(last.0.wrapping_sub(first.0) as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_from_the_line_of_all_cpus() {
        let stat = "cpu  10 10 30 400 50 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1\nintr 5\n";
        let cpu = CpuSeconds::parse(stat, 10.0).unwrap();
        assert_eq!((cpu.user, cpu.system, cpu.idle), (2.0, 3.0, 40.0));
        assert_eq!(
            (cpu.io_wait, cpu.irq, cpu.soft_irq, cpu.steal),
            (5.0, 0.6, 0.7, 0.8)
        );
        assert_eq!(CpuSeconds::parse("cpu  10 10\n", 10.0), None);
        assert_eq!(CpuSeconds::parse("intr 5\n", 10.0), None);
    }

    #[test]
    fn cycles_per_io_divide_by_the_sectors_of_the_device_or_by_those_moved() {
        let span = Span {
            seconds: 1.0,
            ticks: 200.0,
            cpu_seconds: CpuSeconds {
                user: 2.0,
                ..CpuSeconds::default()
            },
            device_sectors: Some(1000),
        };
        assert_eq!(span.cpio(1e6, 1000 * 512).unwrap().user, 2000.0);
        // The run moved 100 times the bytes of its devices: its data was cached, and the sectors are those of a journal.
        assert_eq!(span.cpio(1e6, 100 * 1000 * 512), None);
        assert!(
            span.cycles_per_moved_sector(1e6, 100 * 1000 * 512)
                .is_some()
        );
        assert_eq!(
            span.cycles_per_moved_sector(1e6, 512 * 10).unwrap().user,
            200_000.0
        );
        let cached = Span {
            device_sectors: Some(0),
            ..span
        };
        assert_eq!(
            (cached.cpio(1e6, 0), cached.cycles_per_moved_sector(1e6, 0)),
            (None, None)
        );
        let short = Span {
            ticks: 99.0,
            ..span
        };
        assert_eq!(
            (short.cpio(1e6, 0), short.cycles_per_moved_sector(1e6, 512)),
            (None, None)
        );
    }

    #[test]
    fn the_machine_has_counters_that_only_grow() {
        let machine = Machine::of(Some(&[PathBuf::from("/proc")]));
        let first = machine.now().unwrap();
        let span = machine.between(&first, &machine.now().unwrap());
        assert!(span.seconds >= 0.0);
        assert_eq!(span.device_sectors, None, "/proc is on no device");
    }
}
