//! Small random reads and writes that hit, through the mount. The baseline is libfuse's passthrough with direct I/O.
//!
//! Both sides answer from memory: Jericho from a slice's frames, the passthrough from the kernel's page cache. The comparison is
//! of the path from the program to that memory and back. The ceiling is a filesystem that does nothing, which shows the cost of
//! the kernel's transport.

use std::path::{Path, PathBuf};

use crate::Result;
use crate::compare::{Comparison, Side};
use crate::fio::{Job, Measured};
use crate::mounts::{Passthrough, Volume};
use crate::null::{self, NullMount};
use crate::settings::{Settings, Transport};

/// A mount that serves the jobs.
enum Mount {
    Jericho(Volume),
    Passthrough(Passthrough),
    Null(NullMount),
}

impl Mount {
    fn mnt(&self) -> PathBuf {
        match self {
            Mount::Jericho(volume) => volume.mnt().to_owned(),
            Mount::Passthrough(passthrough) => passthrough.mnt().to_owned(),
            Mount::Null(null) => null.mnt().to_owned(),
        }
    }

    fn misses(&self) -> Result<u64> {
        match self {
            Mount::Jericho(volume) => volume.total("misses"),
            Mount::Passthrough(_) | Mount::Null(_) => Ok(0),
        }
    }

    /// Runs the job. Fails when more than 1 % of the operations missed.
    fn measure(&self, job: impl Fn(&Path) -> Result<Measured>) -> Result<f64> {
        let before = self.misses()?;
        let measured = job(&self.mnt())?;
        let missed = self.misses()? - before;
        if missed * 100 > measured.operations {
            return Err(format!(
                "{missed} of {} operations missed, so this does not measure hits",
                measured.operations
            )
            .into());
        }
        Ok(measured.iops)
    }
}

/// Compares reads and writes, each with one and two jobs, over one transport.
pub fn run(
    settings: &Settings,
    selected: impl Fn(&str) -> bool,
    transport: Transport,
) -> Result<Vec<Comparison>> {
    let workloads = [
        ("randread", 1),
        ("randread", 2),
        ("randwrite", 1),
        ("randwrite", 2),
    ];
    let workloads =
        workloads.map(|(rw, jobs)| (format!("{}hit {rw} {jobs}", transport.prefix()), rw, jobs));
    if !workloads.iter().any(|(name, ..)| selected(name)) {
        return Ok(Vec::new());
    }
    let ours = if settings.self_test {
        Mount::Passthrough(Passthrough::mount(settings, "self")?)
    } else {
        let mut volume = Volume::format(settings, "hits", "2G")?;
        volume.transport = transport;
        // The files of both jobs are smaller than a tenth of the cache, where write-back would begin.
        volume.mount(settings.pick("4G", "1536M"))?;
        Mount::Jericho(volume)
    };
    let baseline = Mount::Passthrough(Passthrough::mount(settings, "passthrough")?);
    let null_side = Mount::Null(NullMount::mount(settings)?);
    let size = format!("size={}M", settings.pick(192, 64));
    let runtime = format!("runtime={}", settings.pick(8, 2));
    // Writes and reads the files of both jobs once, so that they are in the caches.
    for side in [&ours, &baseline] {
        for rw in ["write", "read"] {
            let rw = format!("rw={rw}");
            Job::in_dir(
                &side.mnt(),
                &[&rw, "bs=1M", &size, "numjobs=2", "ioengine=psync"],
            )
            .run()?;
        }
    }
    let mut comparisons = Vec::new();
    for (name, rw, jobs) in workloads {
        if !selected(&name) {
            continue;
        }
        let job = |mnt: &Path| {
            let (rw, jobs) = (format!("rw={rw}"), format!("numjobs={jobs}"));
            Job::in_dir(
                mnt,
                &[
                    &rw,
                    &jobs,
                    &size,
                    &runtime,
                    "bs=4k",
                    "ioengine=psync",
                    "time_based",
                ],
            )
            .run()
        };
        let comparison = Comparison {
            name,
            conditions: format!("4 KiB, fio psync, {jobs} job(s), everything cached"),
            unit: "IOPS".into(),
            ours: transport.side().into(),
            baseline: "libfuse passthrough_hp, direct I/O".into(),
            target_ratio: Some(1.3),
            our_values: Vec::new(),
            baseline_values: Vec::new(),
            ceilings: Vec::new(),
        };
        comparisons.push(comparison.run_with(
            settings.rounds,
            || ours.measure(job),
            || baseline.measure(job),
            vec![Side::new(null::NAME, || null_side.measure(job))],
        )?);
    }
    Ok(comparisons)
}
