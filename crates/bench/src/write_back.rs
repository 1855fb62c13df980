//! Sequential writes and a sync, through a cache that is much smaller, against fio's O_DIRECT writes.

use crate::Result;
use crate::compare::Comparison;
use crate::fio::Job;
use crate::mounts::Volume;
use crate::settings::Settings;

/// Writes in flight on the raw side: enough to keep the device busy.
const RAW_DEPTH: u32 = 8;

/// One comparison.
pub fn run(settings: &Settings, wanted: impl Fn(&str) -> bool) -> Result<Vec<Comparison>> {
    let name = "write-back";
    if !wanted(name) || settings.self_test {
        return Ok(Vec::new());
    }
    let size = format!("size={}M", settings.pick(1024, 256));
    let cache = settings.pick("256M", "64M");
    let mut volume = Volume::format(settings, "write-back", "3G")?;
    volume.mount(cache)?;
    let raw_file = settings.dir.join("write-back.raw");
    let depth = format!("iodepth={RAW_DEPTH}");
    let raw = || {
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
    let ours = || {
        let args = ["rw=write", "bs=1M", &size, "ioengine=psync", "end_fsync=1"];
        Ok(Job::on_file(&volume.mnt().join("file"), &args)
            .run()?
            .mib_per_s)
    };
    // Both files have their blocks before it counts.
    ours()?;
    raw()?;
    let comparison = Comparison {
        name: name.into(),
        conditions: format!(
            "1 MiB writes and fsync, cache {cache}, {size}; peer: io_uring, depth {RAW_DEPTH}"
        ),
        unit: "MiB/s",
        ours: "mount",
        peer: "fio O_DIRECT on the same device",
        target_ratio: Some(0.9),
        our_values: Vec::new(),
        peer_values: Vec::new(),
    };
    let comparison = comparison.run(settings.rounds, ours, raw);
    std::fs::remove_file(&raw_file)?;
    Ok(vec![comparison?])
}
