//! Hits of programs under `jericho run`, served in their own threads. Compared with the kernel's page cache and with a plain
//! copy.
//!
//! The same unmodified program (fio, or the small loop of [`crate::access`]) runs on a file of a Jericho mount, on a file of the
//! directory's own filesystem and on a tmpfs. All three answer from memory. The ceiling is fio's mmap engine on the same data,
//! which only copies.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::access::{Access, Engine, Loop};
use crate::compare::{Ceiling, Comparison, Side, in_turn};
use crate::fio::Job;
use crate::mounts::Volume;
use crate::settings::Settings;

/// A job of fio, and its targets.
struct Workload {
    rw: &'static str,
    block: &'static str,
    /// Target ratios to the page cache, to tmpfs and to the mmap engine, if there are any.
    page_cache: f64,
    tmpfs: Option<f64>,
    mmap: Option<f64>,
    threads: &'static [u32],
}

const fn workload(
    rw: &'static str,
    block: &'static str,
    (page_cache, tmpfs, mmap): (f64, Option<f64>, Option<f64>),
    threads: &'static [u32],
) -> Workload {
    Workload {
        rw,
        block,
        page_cache,
        tmpfs,
        mmap,
        threads,
    }
}

const WORKLOADS: [Workload; 8] = [
    workload("randread", "4k", (2.0, Some(1.8), Some(0.9)), &[1, 2]),
    workload("read", "4k", (3.0, None, Some(0.8)), &[1, 2]),
    workload("randwrite", "4k", (2.3, Some(2.0), Some(0.85)), &[1, 2]),
    workload("write", "4k", (3.5, None, Some(0.9)), &[1, 2]),
    workload("read", "64k", (2.0, None, None), &[1]),
    workload("write", "64k", (2.5, None, None), &[1]),
    workload("read", "1M", (3.0, None, None), &[1]),
    workload("write", "1M", (2.0, None, None), &[1]),
];

const OURS: &str = "jericho run";
const PAGE_CACHE: &str = "page cache of the same disk's filesystem";
const TMPFS: &str = "tmpfs";
const MMAP: &str = "mmap engine";
const COPY: &str = "copy from a mapping";
const LOOKUP: &str = "lookup and copy alone";

/// Measurements of inline hits.
#[derive(Default)]
pub struct Inline {
    /// One for each workload and baseline.
    pub comparisons: Vec<Comparison>,
    /// Share of local accesses among all accesses of clients, 0 to 1, if the daemon counts them.
    pub share_local: Option<f64>,
}

/// A directory of this run on the tmpfs that every Linux has.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn make() -> Result<Tmpfs> {
        let root = Path::new("/dev/shm");
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let about = rustix::fs::statfs(root).map_err(|e| format!("{}: {e}", root.display()))?;
        if about.f_type as i64 != TMPFS_MAGIC {
            return Err(format!("{} is not a tmpfs", root.display()).into());
        }
        let dir = root.join(format!("jericho-bench-{}", std::process::id()));
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        Ok(Tmpfs(dir))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.0) {
            eprintln!("{} could not be removed: {e}", self.0.display());
        }
    }
}

/// The three places of the data, with jobs to run there.
struct Places<'a> {
    settings: &'a Settings,
    volume: Volume,
    page_cache: PathBuf,
    tmpfs: Tmpfs,
    size: String,
}

impl Places<'_> {
    fn make(settings: &Settings) -> Result<Places<'_>> {
        let mut volume = Volume::format(settings, "inline", "2G")?;
        // The files of two threads stay below a tenth of the cache, where write-back would begin.
        volume.mount(settings.pick("3G", "1536M"))?;
        let page_cache = settings.dir.join("inline.page-cache");
        fs::create_dir_all(&page_cache)?;
        let places = Places {
            settings,
            volume,
            page_cache,
            tmpfs: Tmpfs::make()?,
            size: format!("size={}M", settings.pick(128, 64)),
        };
        for dir in [places.volume.mnt(), &places.page_cache, &places.tmpfs.0] {
            for rw in ["rw=write", "rw=read"] {
                let args = [rw, "bs=1M", &places.size, "numjobs=2", "ioengine=psync"];
                Job::in_dir(dir, &args).run()?;
            }
        }
        Ok(places)
    }

    fn job(&self, dir: &Path, engine: &str, workload: &Workload, threads: u32) -> Job {
        let args = [
            format!("rw={}", workload.rw),
            format!("bs={}", workload.block),
            format!("numjobs={threads}"),
            format!("ioengine={engine}"),
            format!("runtime={}", self.settings.pick(2, 1)),
            self.size.clone(),
        ];
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        // Turns off fio's other work, which would hide the difference. fio must not empty the caches either.
        args.extend(["gtod_reduce=1", "norandommap=1", "invalidate=0"]);
        args.extend(["time_based", "thread"]);
        if workload.rw.ends_with("write") {
            args.push("overwrite=1");
        }
        Job::in_dir(dir, &args)
    }

    /// Runs something on the Jericho mount. Fails when more than 1 % of the operations missed.
    fn hits_only(&self, run: impl FnOnce() -> Result<(f64, u64)>) -> Result<f64> {
        let before = self.volume.total("misses")?;
        let (value, operations) = run()?;
        let missed = self.volume.total("misses")? - before;
        if missed * 100 > operations {
            return Err(format!(
                "{missed} of {operations} operations missed, so this does not measure hits"
            )
            .into());
        }
        Ok(value)
    }

    fn compare(&self, workload: &Workload, threads: u32, name: &str) -> Result<Vec<Comparison>> {
        let run = |dir: &Path, engine| {
            let measured = self.job(dir, engine, workload, threads).run()?;
            Ok(measured.iops)
        };
        let ours = || {
            self.hits_only(|| {
                let job = self.job(self.volume.mnt(), "psync", workload, threads);
                let measured = job.under(&self.settings.jericho).run()?;
                Ok((measured.iops, measured.operations))
            })
        };
        let mut sides = [
            Side::new(OURS, ours),
            Side::new(PAGE_CACHE, || run(&self.page_cache, "psync")),
            Side::new(TMPFS, || run(&self.tmpfs.0, "psync")),
            Side::new(MMAP, || run(&self.page_cache, "mmap")),
        ];
        let values = in_turn(name, self.settings.rounds, &mut sides)?;
        let [ours, page_cache, tmpfs, mmap] = <[Vec<f64>; 4]>::try_from(values)
            .map_err(|_| "four sides give four lists of values")?;
        let ceiling = Ceiling {
            name: MMAP.into(),
            values: mmap.clone(),
        };
        let row = |baseline: &'static str, baseline_values, target_ratio, ceilings| Comparison {
            name: name.into(),
            conditions: format!(
                "fio psync, {threads} thread(s), a file of {} MiB each, everything cached",
                self.settings.pick(128, 64)
            ),
            unit: "IOPS".into(),
            ours: OURS.into(),
            baseline: baseline.into(),
            target_ratio,
            our_values: ours.clone(),
            baseline_values,
            ceilings,
        };
        Ok(vec![
            row(
                PAGE_CACHE,
                page_cache,
                Some(workload.page_cache),
                vec![ceiling.clone()],
            ),
            row(TMPFS, tmpfs, workload.tmpfs, vec![ceiling]),
            row(MMAP, mmap, workload.mmap, Vec::new()),
        ])
    }

    /// Compares a tight loop, because fio's own cost would hide the difference. The ceilings are a plain copy, and a lookup with
    /// a copy.
    fn compare_loop(&self, access: &Access, name: &str, tight: &Tight) -> Result<Comparison> {
        let job = Loop {
            engine: Engine::Calls,
            direction: tight.direction,
            order: tight.order,
            block_bytes: tight.block_bytes,
            seconds: self.settings.pick(2.0, 0.5),
        };
        let file = if tight.order == "append" {
            "new"
        } else {
            "bench.0.0"
        };
        let (ours, theirs) = (self.volume.mnt().join(file), self.page_cache.join(file));
        let run_ours = || access.measure(job, &[&ours], true);
        let measure_ours = || {
            // Pages of a new file always miss.
            if tight.order == "append" {
                return run_ours();
            }
            self.hits_only(|| {
                let per_s = run_ours()?;
                Ok((per_s, (per_s * job.seconds) as u64))
            })
        };
        let copy = Loop {
            engine: Engine::Copy,
            // No copy makes a file longer. The ceiling is the copy into a file that is long enough.
            order: if tight.order == "append" {
                "sequential"
            } else {
                tight.order
            },
            ..job
        };
        let mapped = self.page_cache.join("bench.0.0");
        let bare = |engine| {
            let (access, mapped, job) = (access, &mapped, Loop { engine, ..copy });
            move || access.measure(job, &[mapped], false)
        };
        let mut ceilings = vec![Side::new(COPY, bare(Engine::Copy))];
        if tight.order == "random" {
            ceilings.push(Side::new(LOOKUP, bare(Engine::Lookup)));
        }
        let comparison = Comparison {
            name: name.into(),
            conditions: tight.conditions.into(),
            unit: "operations/s".into(),
            ours: OURS.into(),
            baseline: PAGE_CACHE.into(),
            target_ratio: tight.target_ratio,
            our_values: Vec::new(),
            baseline_values: Vec::new(),
            ceilings: Vec::new(),
        };
        let run_theirs = || access.measure(job, &[&theirs], false);
        comparison.run_with(self.settings.rounds, measure_ours, run_theirs, ceilings)
    }

    /// Measures the throughput of two threads relative to one: Jericho's and the plain copy's.
    fn scaling(&self, access: &Access, name: &str, hot: bool) -> Result<Comparison> {
        let scale = |dir: &Path, engine, inline| {
            let job = Loop {
                engine,
                direction: "read",
                order: if hot { "hot" } else { "random" },
                block_bytes: 4096,
                seconds: self.settings.pick(2.0, 0.5),
            };
            let (first, second) = (dir.join("bench.0.0"), dir.join("bench.1.0"));
            let second = if hot { &first } else { &second };
            let one = access.measure(job, &[&first], inline)?;
            let two = access.measure(job, &[&first, second], inline)?;
            Ok(two / one)
        };
        let comparison = Comparison {
            name: name.into(),
            conditions: format!(
                "4 KiB pread, two threads on {}, in multiples of one thread",
                if hot {
                    "the same page"
                } else {
                    "a file each, random"
                }
            ),
            unit: "threads".into(),
            ours: OURS.into(),
            baseline: COPY.into(),
            target_ratio: None,
            our_values: Vec::new(),
            baseline_values: Vec::new(),
            ceilings: Vec::new(),
        };
        comparison.run(
            self.settings.rounds,
            || scale(self.volume.mnt(), Engine::Calls, true),
            || scale(&self.page_cache, Engine::Copy, false),
        )
    }
}

/// A loop of the program `access`.
struct Tight {
    name: &'static str,
    direction: &'static str,
    order: &'static str,
    block_bytes: u32,
    target_ratio: Option<f64>,
    conditions: &'static str,
}

const TIGHT: [Tight; 3] = [
    Tight {
        name: "inline loop 64 B",
        direction: "read",
        order: "random",
        block_bytes: 64,
        target_ratio: Some(15.0),
        conditions: "64 B pread at random offsets, one thread, a loop in C",
    },
    Tight {
        name: "inline loop 4k",
        direction: "read",
        order: "random",
        block_bytes: 4096,
        target_ratio: None,
        conditions: "4 KiB pread at random offsets, one thread, a loop in C",
    },
    Tight {
        name: "inline append",
        direction: "write",
        order: "append",
        block_bytes: 4096,
        target_ratio: Some(1.5),
        conditions: "4 KiB write at the end of a new file until it has 64 MiB, without fsync, a loop in C",
    },
];

const SCALING: [(&str, bool); 2] = [
    ("inline scaling, private files", false),
    ("inline scaling, one hot page", true),
];

/// Runs the comparisons with `inline` in their names.
pub fn run(settings: &Settings, selected: impl Fn(&str) -> bool) -> Result<Inline> {
    let jobs: Vec<(String, &Workload, u32)> = WORKLOADS
        .iter()
        .flat_map(|w| {
            let name = |threads| format!("inline {} {} {threads}", w.rw, w.block);
            w.threads.iter().map(move |t| (name(t), w, *t))
        })
        .filter(|(name, ..)| selected(name))
        .collect();
    let tight: Vec<&Tight> = TIGHT.iter().filter(|t| selected(t.name)).collect();
    let scaling: Vec<_> = SCALING.iter().filter(|(name, _)| selected(name)).collect();
    if settings.self_test || jobs.is_empty() && tight.is_empty() && scaling.is_empty() {
        return Ok(Inline::default());
    }
    let places = Places::make(settings)?;
    let access = Access::compile(settings)?;
    let mut inline = Inline::default();
    for (name, workload, threads) in jobs {
        let rows = places.compare(workload, threads, &name)?;
        inline.comparisons.extend(rows);
    }
    for tight in tight {
        let row = places.compare_loop(&access, tight.name, tight)?;
        inline.comparisons.push(row);
    }
    for (name, hot) in scaling {
        inline
            .comparisons
            .push(places.scaling(&access, name, *hot)?);
    }
    inline.share_local = places.volume.stat()?["locality"]["share_local"].as_f64();
    Ok(inline)
}
