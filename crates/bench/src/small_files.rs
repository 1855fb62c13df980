//! Many small files, created and written through both mounts.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::Result;
use crate::compare::Comparison;
use crate::mounts::{Passthrough, Volume};
use crate::settings::{Settings, Transport};

const FILES_IN_A_DIRECTORY: u32 = 1000;
const FILE_BYTES: usize = 4096;

/// Returns files per second, without the removal afterwards.
fn create(mnt: &Path, files: u32) -> Result<f64> {
    let root = mnt.join("files");
    fs::create_dir(&root)?;
    let content = [0x5a; FILE_BYTES];
    let begun = Instant::now();
    for dir in 0..files / FILES_IN_A_DIRECTORY {
        let dir = root.join(format!("directory{dir}"));
        fs::create_dir(&dir)?;
        for file in 0..FILES_IN_A_DIRECTORY {
            fs::write(dir.join(format!("file{file}")), content)?;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    fs::remove_dir_all(&root)?;
    Ok(f64::from(files) / seconds)
}

/// Returns `files`, or fewer if the limit of descriptors is too low: the passthrough keeps a descriptor for each file that the
/// kernel knows.
fn files_possible(files: u32) -> u32 {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Programs that this process starts have the same limit.
    let _ = setrlimit(Resource::Nofile, limit);
    let room = limit.maximum.map_or(files, |most| {
        u32::try_from(most.saturating_sub(u64::from(2 * FILES_IN_A_DIRECTORY))).unwrap_or(files)
    });
    files.min(room / FILES_IN_A_DIRECTORY * FILES_IN_A_DIRECTORY)
}

/// Makes one comparison, over one transport.
pub fn run(
    settings: &Settings,
    selected: impl Fn(&str) -> bool,
    transport: Transport,
) -> Result<Vec<Comparison>> {
    let name = format!("{}small files", transport.prefix());
    if !selected(&name) {
        return Ok(Vec::new());
    }
    let files = files_possible(settings.pick(100_000, 10_000));
    let passthrough = Passthrough::mount(settings, "passthrough")?;
    let comparison = Comparison {
        name,
        conditions: format!("{files} files of 4 KiB created, written and closed by one thread"),
        unit: "files/s".into(),
        ours: transport.side().into(),
        baseline: "libfuse passthrough_hp, direct I/O".into(),
        target_ratio: Some(1.0),
        our_values: Vec::new(),
        baseline_values: Vec::new(),
        ceilings: Vec::new(),
    };
    let baseline = || create(passthrough.mnt(), files);
    if settings.self_test {
        let other = Passthrough::mount(settings, "self")?;
        return Ok(vec![comparison.run(
            settings.rounds,
            || create(other.mnt(), files),
            baseline,
        )?]);
    }
    let mut volume = Volume::format(settings, "small-files", "4G")?;
    volume.transport = transport;
    volume.mount("1G")?;
    Ok(vec![comparison.run(
        settings.rounds,
        || create(volume.mnt(), files),
        baseline,
    )?])
}
