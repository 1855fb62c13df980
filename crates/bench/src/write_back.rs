//! Sequential write-back, alone and after writes through the mount. The baseline is fio's O_DIRECT writes.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use crate::Result;
use crate::compare::Comparison;
use crate::fio::Job;
use crate::mounts::Volume;
use crate::settings::{MIB, Settings};

/// Writes of the baseline in flight: enough to keep the device busy.
const RAW_DEPTH: u32 = 8;

/// Dirty bytes for the measurement of write-back alone. They are less than the background limit of the cache (a tenth), so that
/// write-back does not begin before the measurement.
const ALONE_BYTES: u64 = 120 << 20;
const ALONE_CACHE: &str = "1280M";

fn comparison(name: &str, conditions: String, target_ratio: Option<f64>) -> Comparison {
    Comparison {
        name: name.into(),
        conditions,
        unit: "MiB/s".into(),
        ours: "mount".into(),
        baseline: "fio O_DIRECT on the same device".into(),
        target_ratio,
        our_values: Vec::new(),
        baseline_values: Vec::new(),
        ceilings: Vec::new(),
    }
}

/// Compares write-back alone (fsync of dirty pages), and writes with their fsync through the mount.
pub fn run(settings: &Settings, selected: impl Fn(&str) -> bool) -> Result<Vec<Comparison>> {
    let (alone, whole) = ("write-back", "write and fsync");
    if settings.self_test || !(selected(alone) || selected(whole)) {
        return Ok(Vec::new());
    }
    let whole_bytes = settings.pick(1024, 256) * MIB;
    let whole_cache = settings.pick("1G", "256M");
    let mut volume = Volume::format(settings, "write-back", "3G")?;
    let raw_file = settings.dir.join("write-back.raw");
    let raw = |bytes: u64| {
        let (size, depth) = (format!("size={bytes}"), format!("iodepth={RAW_DEPTH}"));
        let args = [
            "rw=write",
            "bs=1M",
            &size,
            "ioengine=io_uring",
            "direct=1",
            &depth,
            "end_fsync=1",
            "overwrite=1",
        ];
        Ok(Job::on_file(&raw_file, &args).run()?.mib_per_s)
    };
    let mut comparisons = Vec::new();
    // Both files get their blocks before the measurement.
    raw(whole_bytes)?;
    if selected(alone) {
        volume.mount(ALONE_CACHE)?;
        let file = volume.mnt().join("alone");
        let ours = || write_back_alone(&file);
        ours()?;
        let conditions = format!(
            "fsync of {} MiB of dirty pages, cache {ALONE_CACHE}; baseline: 1 MiB writes, io_uring, depth {RAW_DEPTH}",
            ALONE_BYTES / MIB
        );
        let comparison = comparison(alone, conditions, Some(0.9));
        comparisons.push(comparison.run(settings.rounds, ours, || raw(ALONE_BYTES))?);
        volume.umount()?;
    }
    if selected(whole) {
        volume.mount(whole_cache)?;
        let size = format!("size={whole_bytes}");
        let ours = || {
            let args = ["rw=write", "bs=1M", &size, "ioengine=psync", "end_fsync=1"];
            let job = Job::on_file(&volume.mnt().join("whole"), &args);
            Ok(job.run()?.mib_per_s)
        };
        ours()?;
        let conditions = format!(
            "fio psync, 1 MiB writes and fsync, {} MiB, cache {whole_cache}; baseline: io_uring, depth {RAW_DEPTH}",
            whole_bytes / MIB
        );
        let comparison = comparison(whole, conditions, None);
        comparisons.push(comparison.run(settings.rounds, ours, || raw(whole_bytes))?);
    }
    std::fs::remove_file(&raw_file)?;
    Ok(comparisons)
}

/// Makes pages dirty, then measures their fsync. Returns MiB per second.
fn write_back_alone(file: &Path) -> Result<f64> {
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(file)?;
    let block = vec![0x5a; MIB as usize];
    for _ in 0..ALONE_BYTES / MIB {
        file.write_all(&block)?;
    }
    let begun = Instant::now();
    file.sync_data()?;
    Ok((ALONE_BYTES / MIB) as f64 / begun.elapsed().as_secs_f64())
}
