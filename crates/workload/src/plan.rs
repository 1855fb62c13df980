//! Which runs a command makes, how long they take, and what each gives.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jericho_sys::limits::Memory;
use jericho_topology::{NodeId, Topology};

use crate::case::{Case, Scale};
use crate::engine::Engine;
use crate::error::{Context, Error, Result, warn};
use crate::kind::{Kind, Variant};
use crate::machine::{self, Machine, SECTOR_BYTES};
use crate::placement::{Placement, Way};
use crate::record::{FORMAT, MachineRecord, Record, SAMPLED, SeatRecord, latencies};
use crate::room;
use crate::run::{self, Outcome, Timing};
use crate::seats::{Places, Seat, seats};
use crate::target::{HomeOf, Scratch, Target};
use crate::work;

/// Time in which one workload ends without a request for another.
const BUDGET: Duration = Duration::from_secs(55);
/// Most bytes of files of a run, unless the papers' sizes are wanted.
const DATA_BYTES_MAX: u64 = 256 << 20;
/// The least: fewer bytes would be in the caches of the CPU.
const DATA_BYTES_MIN: u64 = 16 << 20;
/// Bytes per second with which files are made, as a guess for the length of a run.
const FILL_BYTES_PER_S: u64 = 200 << 20;
/// Time before a measurement.
const WARM_UP: Duration = Duration::from_millis(500);
/// Time of one measurement with the papers' sizes: an iteration of *Jericho*, III.B. The first iteration is discarded.
const ITERATION: Duration = Duration::from_secs(30);
/// Bounds of the time of one measurement without a request.
const MEASURED: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// Most threads of a run. The papers have 128.
const THREADS_MAX: usize = 4096;

/// What the user wants.
#[derive(Clone, Debug)]
pub struct Options {
    /// The workloads.
    pub kinds: Vec<Kind>,
    /// The placement.
    pub placement: Placement,
    /// Numbers of threads. `None`: those of the workload.
    pub threads: Option<Vec<usize>>,
    /// Length of each measurement. `None`: so that a workload ends within a minute.
    pub seconds: Option<Duration>,
    /// Takes the papers' sizes.
    pub as_paper: bool,
    /// Runs threads beside the workload that stream through memory.
    pub with_mstress: bool,
    /// Lets workloads write to devices, which destroys what is on them.
    pub may_destroy: bool,
    /// Seed of offsets and contents.
    pub seed: u64,
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The workload.
    pub kind: Kind,
    /// Its form.
    pub variant: Variant,
    /// Number of threads.
    pub threads: usize,
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Its length.
    pub measured: Duration,
    /// Most bytes of its files together. 0 on devices.
    pub data_bytes: u64,
}

impl Planned {
    /// Returns how long it takes, as a guess.
    fn duration(&self) -> Duration {
        fill_time(self.data_bytes) + self.warm_up + self.measured
    }
}

/// All runs of a command.
pub struct Plan<'a> {
    topology: &'a Topology,
    home_of: HomeOf<'a>,
    targets: Vec<Target>,
    options: Options,
    scale: Scale,
    machine: Machine,
    described: MachineRecord,
    /// The runs, in order.
    pub runs: Vec<Planned>,
}

impl<'a> Plan<'a> {
    /// Plans the runs. Makes nothing. Fails if a workload cannot run on a target, or with the placement, or if there is too little space.
    pub fn new(
        topology: &'a Topology,
        targets: Vec<Target>,
        home_of: HomeOf<'a>,
        options: Options,
    ) -> Result<Plan<'a>> {
        let are_directories = targets.iter().all(|target| target.is_directory);
        if targets.is_empty() || (!are_directories && targets.iter().any(|one| one.is_directory)) {
            return Err(Error::new("name directories or devices, not both"));
        }
        let filesystems = match are_directories {
            true => room::filesystems(&targets)?,
            false => Vec::new(),
        };
        let scale = scale(room::least_free(&filesystems), &options)?;
        let mut runs = Vec::new();
        for kind in &options.kinds {
            options.placement.check(kind.way(), kind.name())?;
            if !are_directories && !kind.runs_on_devices() {
                return Err(Error::new(format!(
                    "{} makes files, and {} is no directory; name a directory",
                    kind.name(),
                    targets[0].path.display()
                )));
            }
            runs.extend(runs_of(*kind, topology, &options, are_directories, scale)?);
        }
        for run in &runs {
            if are_directories {
                let files = (run.threads, run.data_bytes);
                room::check_space(run.kind, &targets, &filesystems, files, scale.as_paper)?;
            }
            // On which nodes it is, is known when the directories of a Jericho mount are made.
            let seats = vec![Seat::default(); run.threads];
            let needs = room::needs(topology, &seats, |thread| {
                work::memory(run.kind, run.variant, run.threads, scale, thread)
            });
            room::check_memory(&needs, scale.as_paper)?;
        }
        let paths: Vec<PathBuf> = targets.iter().map(|target| target.path.clone()).collect();
        let nodes: Vec<_> = targets.iter().map(|target| target.node).collect();
        let places = Places {
            device_nodes: &nodes,
            is_jericho: targets.iter().any(|target| target.is_jericho),
            together: 1,
        };
        seats(topology, options.placement, places, targets.len())?;
        Ok(Plan {
            topology,
            home_of,
            machine: Machine::of(&paths),
            described: MachineRecord::of(topology, machine::tsc_hz()),
            targets,
            options,
            scale,
            runs,
        })
    }

    /// Returns how long all runs take, as a guess.
    pub fn duration(&self) -> Duration {
        self.runs.iter().map(Planned::duration).sum()
    }

    /// Returns the home nodes of the devices of the threads. The directories of a Jericho volume are in its slices in turn, and each slice has a node.
    fn nodes(&self, scratch: Option<&Scratch>, planned: &Planned) -> Result<Vec<Option<NodeId>>> {
        let own = |thread: usize| {
            let index = planned.kind.directory_of(thread, self.targets.len());
            let target = &self.targets[index % self.targets.len()];
            let Some(scratch) = scratch.filter(|_| target.is_jericho) else {
                return Ok(target.node);
            };
            let dir = scratch.shown(index);
            let home = (self.home_of)(dir).ok_or_else(|| {
                Error::new(format!(
                    "{}: the mount does not tell its slice",
                    dir.display()
                ))
            })?;
            Ok(Some(home))
        };
        (0..planned.threads).map(own).collect()
    }

    fn is_jericho(&self) -> bool {
        self.targets.iter().any(|target| target.is_jericho)
    }

    fn are_directories(&self) -> bool {
        self.targets.iter().all(|target| target.is_directory)
    }

    /// Makes one run. Ends it early, and fails, if `interrupted` is set.
    pub fn run(&self, planned: &Planned, interrupted: &AtomicBool) -> Result<Record> {
        let scratch = match self.are_directories() {
            true => Some(Scratch::make(&self.targets, planned.threads)?),
            false => None,
        };
        let record = self.run_in(scratch.as_ref(), planned, interrupted);
        let Some(scratch) = scratch else {
            return record;
        };
        if interrupted.load(Ordering::Relaxed) {
            warn("interrupted; removing the files of the run");
        }
        record.map_err(|error| scratch.named(error))
    }

    /// Makes one run in these directories, or on devices.
    fn run_in(
        &self,
        scratch: Option<&Scratch>,
        planned: &Planned,
        interrupted: &AtomicBool,
    ) -> Result<Record> {
        let nodes = self.nodes(scratch, planned)?;
        let placement = self.options.placement;
        let places = Places {
            device_nodes: &nodes,
            is_jericho: self.is_jericho(),
            together: planned.kind.threads_together(),
        };
        let seats = seats(self.topology, placement, places, planned.threads)?;
        let stopping = AtomicBool::new(false);
        let case = Case {
            topology: self.topology,
            kind: planned.kind,
            variant: planned.variant,
            targets: &self.targets,
            scratch,
            placement,
            seats: &seats,
            scale: self.scale,
            seed: self.options.seed,
            stopping: &stopping,
            engine: Engine::default(),
            with_mstress: self.options.with_mstress,
        };
        let needs = work::needs(&case);
        room::check_memory(&needs, self.scale.as_paper)?;
        let timing = Timing {
            warm_up: planned.warm_up,
            measured: planned.measured,
        };
        let threads = work::threads(&case)?;
        let outcome = run::run(
            self.topology,
            &self.machine,
            threads,
            timing,
            interrupted,
            &stopping,
        )?;
        let seats = seats.iter().map(SeatRecord::from).collect();
        let mut record = self.record(planned, seats, &outcome);
        record.engine = case.engine.used();
        record.notes.extend(case.engine.notes());
        let moved = outcome.meter.read_bytes + outcome.meter.written_bytes;
        let sectors = outcome.span.device_sectors;
        record
            .notes
            .extend(note_on_transfers(placement, moved, sectors));
        Ok(record)
    }

    fn record(&self, planned: &Planned, seats: Vec<SeatRecord>, outcome: &Outcome) -> Record {
        let (meter, span) = (&outcome.meter, &outcome.span);
        let rate = |amount: u64| amount as f64 / span.seconds.max(1e-9);
        let moved = meter.read_bytes + meter.written_bytes;
        let tsc_hz = self.described.tsc_hz;
        let by_node = outcome.bytes_by_node.iter();
        Record {
            format: FORMAT,
            workload: planned.kind.name().to_owned(),
            variant: planned.variant.name.to_owned(),
            targets: self
                .targets
                .iter()
                .map(|one| one.path.display().to_string())
                .collect(),
            placement: self.options.placement.name.to_owned(),
            threads: planned.threads,
            seats,
            with_mstress: self.options.with_mstress,
            seconds: span.seconds,
            data_bytes: planned.data_bytes,
            as_paper: self.options.as_paper,
            seed: self.options.seed,
            engine: Vec::new(),
            throughput_bytes_per_s: rate(moved),
            read_bytes_per_s: rate(meter.read_bytes),
            written_bytes_per_s: rate(meter.written_bytes),
            iops: rate(meter.operations),
            throughput_bytes_per_s_by_node: by_node
                .map(|(node, bytes)| (node.0, rate(*bytes)))
                .collect(),
            latency_ns: latencies(meter),
            local_share: meter.local_share(),
            cpu_seconds: span.cpu_seconds,
            device_sectors: span.device_sectors,
            cpio: tsc_hz.and_then(|hz| span.cpio(hz)),
            cycles_per_moved_sector: tsc_hz.and_then(|hz| span.cycles_per_moved_sector(hz, moved)),
            sampled: SAMPLED.map(str::to_owned).into(),
            machine: self.described.clone(),
            notes: self.notes(),
        }
    }

    /// Returns what a reader must know about all runs.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.topology.nodes.len() == 1 {
            notes.push("The machine has one node: effects of locality cannot appear on it.".into());
        } else if self.topology.is_virtual {
            notes.push(
                "The nodes are virtual: they show where things are, and no effect on speed.".into(),
            );
        }
        let unknown = self.targets.iter().filter(|target| target.node.is_none());
        for target in unknown.filter(|_| self.topology.nodes.len() > 1) {
            let path = target.path.display();
            notes.push(format!("{path}: the node of its device is unknown."));
        }
        notes
    }
}

/// Returns what a reader must know about the transfers of a run, if its placement names some.
fn note_on_transfers(
    placement: Placement,
    moved_bytes: u64,
    sectors: Option<u64>,
) -> Option<String> {
    if placement.only != Some(Way::Cached) {
        return None;
    }
    match sectors.map(|sectors| sectors * SECTOR_BYTES) {
        None => Some(
            "It is unknown how many bytes the devices have moved: the transfers that the placement names may not have taken place.".into(),
        ),
        Some(bytes) if bytes < moved_bytes / 2 => Some(format!(
            "The devices have moved {} MiB, and the threads {} MiB: most transfers that the placement names did not take place.",
            bytes >> 20,
            moved_bytes >> 20
        )),
        Some(_) => None,
    }
}

/// Returns the runs of a workload.
fn runs_of(
    kind: Kind,
    topology: &Topology,
    options: &Options,
    are_directories: bool,
    scale: Scale,
) -> Result<Vec<Planned>> {
    let cpus = topology.nodes.iter().map(|node| node.cpus.len()).sum();
    let threads = match (&options.threads, options.as_paper) {
        (Some(threads), _) => threads.clone(),
        (None, true) => kind.paper_threads().to_vec(),
        (None, false) => kind.default_threads(cpus),
    };
    if threads.contains(&0) {
        return Err(Error::new(
            "a run has at least one thread; remove the 0 from --threads",
        ));
    }
    if let Some(many) = threads.iter().find(|count| **count > THREADS_MAX) {
        return Err(Error::new(format!(
            "a run has at most {THREADS_MAX} threads, and --threads asks for {many}"
        )));
    }
    if kind == Kind::Stream && threads.iter().any(|count| !count.is_multiple_of(2)) {
        return Err(Error::new(
            "stream has pairs of threads; use even numbers in --threads",
        ));
    }
    let variants = kind
        .variants()
        .iter()
        .filter(|variant| are_directories || !variant.writes || options.may_destroy)
        .filter(|variant| !(variant.writes && options.placement.reads_only()));
    let pairs = variants.flat_map(|variant| threads.iter().map(move |count| (*variant, *count)));
    let pairs: Vec<(Variant, usize)> = pairs.collect();
    let each = BUDGET / pairs.len().max(1) as u32;
    let planned = pairs.into_iter().map(|(variant, threads)| {
        let data_bytes = match are_directories {
            true => work::bytes(kind, variant, threads, scale),
            false => 0,
        };
        let rest = each.saturating_sub(fill_time(data_bytes) + WARM_UP);
        let measured = options.seconds.unwrap_or(match scale.as_paper {
            true => ITERATION,
            false => rest.clamp(MEASURED.0, MEASURED.1),
        });
        Planned {
            kind,
            variant,
            threads,
            warm_up: match scale.as_paper {
                true => measured,
                false => WARM_UP.min(measured),
            },
            measured,
            data_bytes,
        }
    });
    Ok(planned.collect())
}

/// Returns how long a run makes files, as a guess.
fn fill_time(data_bytes: u64) -> Duration {
    Duration::from_millis(data_bytes * 1000 / FILL_BYTES_PER_S)
}

/// Returns the sizes of runs on filesystems of which the fullest has `free` bytes of space.
fn scale(free: Option<u64>, options: &Options) -> Result<Scale> {
    let memory = Memory::read()
        .doing("read the size of the memory")?
        .usable_bytes();
    let data_bytes = DATA_BYTES_MAX
        .min(memory / 8)
        .min(free.unwrap_or(u64::MAX) / 4);
    Ok(Scale {
        data_bytes: data_bytes.max(DATA_BYTES_MIN),
        as_paper: options.as_paper,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(as_paper: bool, seconds: Option<Duration>) -> Vec<Planned> {
        let options = Options {
            kinds: vec![Kind::Scan],
            placement: Placement::named("native").unwrap(),
            threads: None,
            seconds,
            as_paper,
            with_mstress: false,
            may_destroy: false,
            seed: 1,
        };
        let scale = Scale {
            data_bytes: DATA_BYTES_MAX,
            as_paper,
        };
        let topology = Topology::from_spec("virtual:1").unwrap();
        runs_of(Kind::Scan, &topology, &options, true, scale).unwrap()
    }

    #[test]
    fn with_the_papers_sizes_a_run_has_the_papers_length_after_an_iteration_that_is_discarded() {
        for run in planned(true, None) {
            assert_eq!((run.warm_up, run.measured), (ITERATION, ITERATION));
            assert_eq!(run.data_bytes, 128 << 30);
            assert!(run.duration() > 2 * ITERATION);
        }
        let second = Duration::from_secs(1);
        for run in planned(true, Some(second)) {
            assert_eq!((run.warm_up, run.measured), (second, second));
        }
        let all: Duration = planned(false, None).iter().map(Planned::duration).sum();
        assert!(all <= Duration::from_secs(60), "{all:?}");
    }

    #[test]
    fn a_placement_of_transfers_says_so_if_the_devices_moved_little() {
        let note =
            |name, sectors| note_on_transfers(Placement::named(name).unwrap(), 64 << 20, sectors);
        let little = note("TRRCPL", Some(2048)).unwrap();
        assert!(
            little.contains("moved 1 MiB, and the threads 64 MiB"),
            "{little}"
        );
        assert!(note("TRRCPL", None).unwrap().contains("unknown"));
        assert_eq!(note("TRRCPL", Some(64 << 11)), None);
        // Data of the other placements is cached.
        assert_eq!(note("best", Some(0)), None);
    }
}
