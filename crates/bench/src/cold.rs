//! Reads that miss. The baseline is fio with io_uring and O_DIRECT on the same blocks of the volume's file.
//!
//! The same misses are measured twice: through the mount, with the kernel's FUSE transport, and through the slices in this
//! process, without it.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use jericho_daemon::{Handle, Mounted, OpenOptions};
use jericho_topology::Topology;

use crate::Result;
use crate::compare::{Comparison, Side};
use crate::fio::Job;
use crate::mounts::{Volume, run as run_command};
use crate::null::{self, NullMount};
use crate::relay::{self, Relay};
use crate::settings::{MIB, Settings, Transport};

/// A way to read the file.
struct Pattern {
    name: &'static str,
    rw: &'static str,
    block_bytes: u32,
    depth: u32,
}

const PATTERNS: [Pattern; 2] = [
    Pattern {
        name: "sequential",
        rw: "read",
        block_bytes: 131_072,
        depth: 8,
    },
    Pattern {
        name: "random",
        rw: "randread",
        block_bytes: 4096,
        depth: 16,
    },
];

const CACHE: &str = "256M";
const CACHE_BYTES: u64 = 256 * MIB;
const NAME: &str = "file";

/// Returns the longest run of data in the volume's file as (offset, length), found with SEEK_DATA.
fn longest_data(file: &Path) -> Result<(u64, u64)> {
    use rustix::fs::{SeekFrom, seek};
    let fd = File::open(file)?;
    let (mut best, mut at) = ((0, 0), 0);
    loop {
        let start = match seek(&fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(best),
            Err(e) => return Err(format!("{}: {e}", file.display()).into()),
        };
        let end =
            seek(&fd, SeekFrom::Hole(start)).map_err(|e| format!("{}: {e}", file.display()))?;
        if end - start > best.1 {
            best = (start, end - start);
        }
        at = end;
    }
}

/// Returns the options that both sides share.
fn common(pattern: &Pattern, bytes: u64, runtime_s: u32) -> Vec<String> {
    vec![
        format!("rw={}", pattern.rw),
        format!("bs={}", pattern.block_bytes),
        format!("iodepth={}", pattern.depth),
        format!("size={bytes}"),
        format!("runtime={runtime_s}"),
        "ioengine=io_uring".into(),
        "direct=1".into(),
        "readonly".into(),
    ]
}

fn fio(file: &Path, args: &[String]) -> Result<f64> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Ok(Job::on_file(file, &args).run()?.mib_per_s)
}

/// Returns the offsets of a pattern's reads in order. Random reads visit every block once, like fio's.
fn offsets(pattern: &Pattern, bytes: u64) -> Vec<u64> {
    let block = u64::from(pattern.block_bytes);
    let mut offsets: Vec<u64> = (0..bytes / block).map(|n| n * block).collect();
    if pattern.rw == "randread" {
        let mut random = Instant::now().elapsed().as_nanos() as u64 | 0x9e37_79b9_7f4a_7c15;
        for last in (1..offsets.len()).rev() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            offsets.swap(last, (random % (last as u64 + 1)) as usize);
        }
    }
    offsets
}

/// Chains of reads. The end of a read starts the next one, in any thread.
struct Driver {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
    block_bytes: u32,
    rest: Mutex<std::vec::IntoIter<u64>>,
    until: Instant,
    /// Bytes read so far. A channel would wake the waiting thread for each read, which would be measured too.
    read_bytes: Arc<AtomicU64>,
    /// Sends an error to the thread that waits. Its wait ends when the last chain has dropped this sender.
    failed: mpsc::Sender<String>,
}

impl Driver {
    /// Continues a chain, with its buffer.
    fn pump(self: Arc<Self>, mut buffer: Vec<u8>) {
        const ENDED: u8 = 1;
        const RETURNED: u8 = 2;
        loop {
            let next = self.rest.lock().map_or(None, |mut rest| rest.next());
            let Some(offset) = next.filter(|_| Instant::now() < self.until) else {
                break;
            };
            // The read ends in this thread at once, or later in another one. The later of the two, the return of `read` or the
            // end of the read, continues the chain.
            let state = Arc::new((AtomicU8::new(0), Mutex::new(Vec::new())));
            let (driver, theirs) = (self.clone(), state.clone());
            let answer = move |result: jericho_fs::Result<usize>, buffer: Vec<u8>| {
                match result {
                    Ok(bytes) => {
                        driver.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                    }
                    // The receiver outlives every sender.
                    Err(error) => drop(driver.failed.send(error.to_string())),
                }
                // The other thread reads this only after the swap.
                if let Ok(mut kept) = theirs.1.lock() {
                    *kept = buffer;
                }
                if theirs.0.swap(ENDED, Ordering::AcqRel) == RETURNED {
                    driver.pump(take(&theirs.1));
                }
            };
            let (handle, block_bytes) = (&self.handle, self.block_bytes);
            self.mounted
                .read(handle, offset, block_bytes, false, buffer, answer);
            if state.0.swap(RETURNED, Ordering::AcqRel) != ENDED {
                break;
            }
            buffer = take(&state.1);
        }
    }
}

fn take(kept: &Mutex<Vec<u8>>) -> Vec<u8> {
    kept.lock()
        .map_or_else(|_| Vec::new(), |mut kept| std::mem::take(&mut *kept))
}

/// Reads through the slices in this process, `depth` reads at a time. Returns MiB per second.
fn drive_slices(volume: &Path, pattern: &Pattern, bytes: u64, runtime: Duration) -> Result<f64> {
    let mounted = Mounted::open(OpenOptions {
        threads: Default::default(),
        with_parent: false,
        move_costs: Default::default(),
        fast_path: Default::default(),
        keeper: None,
        volume: volume.to_owned(),
        read_only: true,
        devices: vec![],
        force: false,
        cache_bytes: Some(CACHE_BYTES),
        spill_bytes: 0,
        topology: Topology::detect()?,
    })?;
    let attr = mounted
        .fs()
        .lookup(jericho_fs::types::ROOT, NAME.as_bytes())?;
    let handle = mounted.open_file(attr.ino, false)?;
    let (failed, failures) = mpsc::channel();
    let read_bytes = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let driver = Arc::new(Driver {
        mounted: mounted.clone(),
        handle: handle.clone(),
        block_bytes: pattern.block_bytes,
        rest: Mutex::new(offsets(pattern, bytes).into_iter()),
        until: begun + runtime,
        read_bytes: read_bytes.clone(),
        failed,
    });
    for _ in 0..pattern.depth {
        driver.clone().pump(Vec::new());
    }
    drop(driver);
    // The loop ends when the last chain of reads has dropped its driver.
    if let Some(error) = failures.into_iter().next() {
        return Err(error.into());
    }
    let seconds = begun.elapsed().as_secs_f64();
    let read_bytes = read_bytes.load(Ordering::Relaxed);
    mounted.close_file(&handle);
    mounted.close()?;
    Ok(read_bytes as f64 / MIB as f64 / seconds)
}

/// Returns a volume with a file whose data is on the device. Also returns the offset and length of that data in the volume's own
/// file.
fn written_volume(settings: &Settings) -> Result<(Volume, u64, u64)> {
    let file_bytes = settings.pick(2048, 512) * MIB;
    let mut volume = Volume::format(settings, "cold", "4G")?;
    volume.mount(CACHE)?;
    let size = format!("size={file_bytes}");
    Job::on_file(
        &volume.mnt().join(NAME),
        &["rw=write", "bs=1M", &size, "ioengine=psync", "end_fsync=1"],
    )
    .run()?;
    volume.umount()?;
    run_command(Command::new("sync").arg(&volume.file))?;
    let (data_offset, data_bytes) = longest_data(&volume.file)?;
    // Both sides read the same number of bytes. The baseline reads the blocks that Jericho wrote.
    let bytes = data_bytes.min(file_bytes) / MIB * MIB;
    if bytes < file_bytes / 2 {
        return Err(format!(
            "the volume's file is too scattered: its longest run of data is {data_bytes} bytes"
        )
        .into());
    }
    Ok((volume, data_offset, bytes))
}

/// Compares two patterns, each through the mount over each transport, and in process.
pub fn run(settings: &Settings, selected: impl Fn(&str) -> bool) -> Result<Vec<Comparison>> {
    let over = |t: &Transport, p: &Pattern| format!("{}cold {} mount", t.prefix(), p.name);
    let in_process = |p: &Pattern| format!("cold {} slice", p.name);
    let any =
        |p| selected(&in_process(p)) || settings.transports.iter().any(|t| selected(&over(t, p)));
    if settings.self_test || !PATTERNS.iter().any(any) {
        return Ok(Vec::new());
    }
    let runtime_s = settings.pick(10, 3);
    let (mut volume, data_offset, bytes) = written_volume(settings)?;
    let mut comparisons = Vec::new();
    for pattern in &PATTERNS {
        let args = common(pattern, bytes, runtime_s);
        let raw_file = volume.file.clone();
        let raw = || {
            let args: Vec<String> = args
                .iter()
                .cloned()
                .chain([format!("offset={data_offset}")])
                .collect();
            fio(&raw_file, &args)
        };
        let comparison = |name: String, ours: &'static str, target_ratio| Comparison {
            name,
            conditions: format!(
                "{} bytes, depth {}, {} MiB read once, cache {CACHE} and empty at the start",
                pattern.block_bytes,
                pattern.depth,
                bytes / MIB
            ),
            unit: "MiB/s".into(),
            ours: ours.into(),
            baseline: "fio io_uring O_DIRECT on the same file".into(),
            target_ratio,
            our_values: Vec::new(),
            baseline_values: Vec::new(),
            ceilings: Vec::new(),
        };
        for transport in &settings.transports {
            let name = over(transport, pattern);
            if !selected(&name) {
                continue;
            }
            volume.transport = *transport;
            let through_the_mount = || {
                volume.mount(CACHE)?;
                let result = fio(&volume.mnt().join(NAME), &args);
                volume.umount()?;
                result
            };
            // The ceiling of the transport alone, without a device.
            let null = NullMount::mount(settings)?;
            // The ceiling of the transport with the device.
            let relay = Relay::mount(settings, &raw_file, data_offset, bytes, *transport)?;
            let nothing = || fio(&null.mnt().join(NAME), &args);
            let mut ceilings = vec![Side::new(null::NAME, nothing)];
            if let Some(relay) = &relay {
                let relayed = || fio(&relay.mnt().join(NAME), &args);
                ceilings.push(Side::new(relay::NAME, relayed));
            }
            let through_fuse = comparison(name, transport.side(), Some(0.9));
            comparisons.push(through_fuse.run_with(
                settings.rounds,
                through_the_mount,
                raw,
                ceilings,
            )?);
        }
        let name = in_process(pattern);
        if selected(&name) {
            let runtime = Duration::from_secs(runtime_s.into());
            let driven = || drive_slices(&raw_file, pattern, bytes, runtime);
            let without_fuse = comparison(name, "slice, in process", Some(0.9));
            comparisons.push(without_fuse.run(settings.rounds, driven, raw)?);
        }
    }
    Ok(comparisons)
}
