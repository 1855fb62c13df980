//! The daemon's use of memory and CPU, idle and with very many files.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::mounts::Volume;
use crate::settings::{MIB, Settings};

/// The daemon's use of resources.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Footprint {
    /// Files on the volume.
    pub inodes: u32,
    /// Resident memory of the daemon after the creation of all files, without the cache's frames, in MiB.
    pub private_mib_after_create: f64,
    /// The same after a remount and a walk that read the attributes of all files.
    pub private_mib_after_walk: f64,
    /// All resident memory of the daemon after the walk, in MiB.
    pub resident_mib_after_walk: f64,
    /// Size of the cache, in MiB.
    pub cache_mib: u64,
    /// Files created per second.
    pub creates_per_s: f64,
    /// CPU time in ten idle seconds, in clock ticks of 10 ms.
    pub idle_ticks_in_10_s: u64,
    /// Bookkeeping of the cache for each page of 4 KiB, in bytes.
    pub bookkeeping_bytes_per_page: f64,
}

const CACHE_MIB: u64 = 64;
const FILES_IN_A_DIRECTORY: u32 = 10_000;

/// Returns a number of KiB from /proc/PID/status, in MiB.
fn status_mib(pid: u32, key: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib: f64 = line
        .and_then(|line| line.split_whitespace().next())
        .ok_or("no such line in status")?
        .parse()?;
    Ok(kib / 1024.0)
}

/// Returns utime + stime.
fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat
        .rsplit_once(')')
        .ok_or("unknown format of /proc/PID/stat")?;
    let mut times = fields.split_whitespace().skip(11);
    let mut next = || -> Result<u64> { Ok(times.next().ok_or("short /proc/PID/stat")?.parse()?) };
    Ok(next()? + next()?)
}

fn walk(dir: &Path) -> Result<u64> {
    let mut seen = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        seen += if entry.metadata()?.is_dir() {
            walk(&entry.path())?
        } else {
            1
        };
    }
    Ok(seen)
}

/// Measures a volume with a million files, or with 50,000 in a quick run.
pub fn run(settings: &Settings, selected: impl Fn(&str) -> bool) -> Result<Option<Footprint>> {
    if settings.self_test || !selected("footprint") {
        return Ok(None);
    }
    let inodes = settings.pick(1_000_000, 50_000);
    let cache = format!("{CACHE_MIB}M");
    let mut volume = Volume::format(settings, "footprint", "8G")?;
    volume.mount(&cache)?;
    eprintln!("footprint: creating {inodes} files");
    let begun = std::time::Instant::now();
    for dir in 0..inodes / FILES_IN_A_DIRECTORY {
        let dir = volume.mnt().join(format!("directory{dir}"));
        fs::create_dir(&dir)?;
        for file in 0..FILES_IN_A_DIRECTORY {
            fs::File::create(dir.join(format!("file{file}")))?;
        }
    }
    let creates_per_s = f64::from(inodes) / begun.elapsed().as_secs_f64();
    let pid = volume.daemon_pid()?;
    let private_mib_after_create = status_mib(pid, "RssAnon")?;

    volume.umount()?;
    volume.mount(&cache)?;
    let pid = volume.daemon_pid()?;
    let seen = walk(volume.mnt())?;
    if seen != u64::from(inodes) {
        return Err(format!("found {seen} of {inodes} files after the remount").into());
    }
    let (private, resident) = (status_mib(pid, "RssAnon")?, status_mib(pid, "VmRSS")?);

    // Waits long enough for a commit of the changes that the walk has made (access times).
    std::thread::sleep(Duration::from_secs(settings.pick(60, 15)));
    let before = cpu_ticks(pid)?;
    std::thread::sleep(Duration::from_secs(10));
    let idle_ticks_in_10_s = cpu_ticks(pid)? - before;

    let frames = u32::try_from(CACHE_MIB * MIB / 4096)?;
    let bookkeeping = jericho_shm::bookkeeping_bytes(frames);
    Ok(Some(Footprint {
        inodes,
        private_mib_after_create,
        private_mib_after_walk: private,
        resident_mib_after_walk: resident,
        cache_mib: CACHE_MIB,
        creates_per_s,
        idle_ticks_in_10_s,
        bookkeeping_bytes_per_page: bookkeeping as f64 / f64::from(frames),
    }))
}
