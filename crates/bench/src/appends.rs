//! Small writes at the end of a file through the mount, as programs write logs. The baseline is a filesystem that does nothing.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Result;
use crate::compare::Comparison;
use crate::mounts::Volume;
use crate::null::{self, NullMount};
use crate::settings::{Settings, Transport};

const RECORD_BYTES: usize = 100;
/// Writes between two reads of the clock.
const RECORDS: u32 = 64;

/// Returns records per second, without the time to open and remove the file.
fn append(mnt: &Path, time: Duration) -> Result<f64> {
    let path = mnt.join("log");
    let mut log = File::options().append(true).create(true).open(&path)?;
    let begun = Instant::now();
    let mut records = 0u32;
    while begun.elapsed() < time {
        for _ in 0..RECORDS {
            log.write_all(&[b'x'; RECORD_BYTES])?;
        }
        records += RECORDS;
    }
    let per_s = f64::from(records) / begun.elapsed().as_secs_f64();
    drop(log);
    fs::remove_file(&path)?;
    Ok(per_s)
}

/// Makes one comparison, over one transport.
pub fn run(
    settings: &Settings,
    selected: impl Fn(&str) -> bool,
    transport: Transport,
) -> Result<Vec<Comparison>> {
    let name = format!("{}appends", transport.prefix());
    if settings.self_test || !selected(&name) {
        return Ok(Vec::new());
    }
    let mut volume = Volume::format(settings, "appends", "2G")?;
    volume.transport = transport;
    volume.mount("512M")?;
    let nothing = NullMount::mount(settings)?;
    let time = Duration::from_secs(settings.pick(3, 1));
    let comparison = Comparison {
        name,
        conditions: format!("write(2) of {RECORD_BYTES} bytes with O_APPEND, one thread"),
        unit: "writes/s".into(),
        ours: transport.side().into(),
        baseline: null::NAME.into(),
        target_ratio: Some(0.9),
        our_values: Vec::new(),
        baseline_values: Vec::new(),
        ceilings: Vec::new(),
    };
    Ok(vec![comparison.run(
        settings.rounds,
        || append(volume.mnt(), time),
        || append(nothing.mnt(), time),
    )?])
}
