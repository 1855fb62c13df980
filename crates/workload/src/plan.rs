//! Which runs a command makes, how long they take, and what each gives.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jericho_sys::limits::Memory;
use jericho_topology::{NodeId, Topology};

use crate::case::Case;
use crate::disks::SECTOR_BYTES;
use crate::engine::Engine;
use crate::error::{Context, Error, Result, warn};
use crate::fio;
use crate::fits::{Fitting, check_migration, check_targets, choose};
use crate::fs_mark;
use crate::kind::{Kind, Variant};
use crate::machine::{self, Machine, is_cached};
use crate::meter::Meter;
use crate::options::{Generator, Options};
use crate::placement::{Placement, Way};
use crate::reach::{InlinePages, Reach, Route};
use crate::record::{
    FORMAT, MachineRecord, MstressRecord, Record, SAMPLED, SeatRecord, TargetRecord, latencies,
};
use crate::room;
use crate::run::{self, Outcome, Timing, Watched};
use crate::schedule::{Limits, Planned, check_variants, runs_of, without_run};
use crate::seats::{Places, Seat, seats};
use crate::speed::fill_bytes_per_s;
use crate::target::{Scratch, Target, filesystem_of};
use crate::trace;
use crate::work;

/// All runs of a command.
pub struct Plan<'a> {
    topology: &'a Topology,
    reach: &'a Reach,
    targets: Vec<Target>,
    options: Options,
    /// Workloads of `all` that are left out, with the reasons.
    left_out: Vec<String>,
    described: MachineRecord,
    /// The runs, in order.
    pub runs: Vec<Planned>,
}

impl<'a> Plan<'a> {
    /// Plans the runs. Writes a file to a directory for a moment, to see how fast that is. Fails if a workload cannot run on a target, or with the placement, or if there is too little space.
    pub fn new(
        topology: &'a Topology,
        targets: Vec<Target>,
        reach: &'a Reach,
        mut options: Options,
    ) -> Result<Plan<'a>> {
        check_targets(&targets)?;
        check_variants(&options)?;
        check_migration(&targets, &options, reach.route)?;
        let Fitting {
            kinds,
            mut left_out,
        } = choose(&targets, &options, reach.route)?;
        options.kinds = kinds;
        let are_directories = targets.iter().all(|target| target.is_directory);
        left_out.extend(without_run(&options, are_directories, &left_out)?);
        let nodes: Vec<_> = targets.iter().map(|target| target.node).collect();
        let places = Places {
            device_nodes: &nodes,
            is_jericho: targets.iter().any(|target| target.is_jericho),
            together: 1,
        };
        seats(topology, options.placement, places, targets.len())?;
        let runs = runs(topology, &targets, reach, &options)?;
        Ok(Plan {
            topology,
            reach,
            left_out,
            described: MachineRecord::of(topology, machine::tsc_hz()),
            targets,
            options,
            runs,
        })
    }

    /// Returns how long all runs take, as a guess.
    pub fn duration(&self) -> Duration {
        let runs = self.runs.iter();
        runs.map(Planned::duration).sum()
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
            let home = self.reach.daemon.home_of(dir).ok_or_else(|| {
                Error::new(format!(
                    "{}: the volume does not tell its slice",
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
    pub fn run(&self, planned: &Planned, interrupted: &AtomicBool) -> Result<(Record, Outcome)> {
        let scratch = match self.are_directories() {
            true => Some(Scratch::make(
                &self.reach.files,
                &self.targets,
                planned.threads,
            )?),
            false => None,
        };
        let result = self.run_in(scratch.as_ref(), planned, interrupted);
        let Some(scratch) = scratch else {
            return result;
        };
        if interrupted.load(Ordering::Relaxed) {
            warn("interrupted; removing the files of the run");
        }
        result.map_err(|error| scratch.named(error))
    }

    /// Makes one run in these directories, or on devices.
    fn run_in(
        &self,
        scratch: Option<&Scratch>,
        planned: &Planned,
        interrupted: &AtomicBool,
    ) -> Result<(Record, Outcome)> {
        self.set_migration(scratch)?;
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
            files: self.reach.files.clone(),
            scratch,
            placement,
            seats: &seats,
            scale: planned.scale,
            seed: self.options.seed,
            stopping: &stopping,
            engine: Engine::default(),
            with_mstress: self.options.with_mstress,
        };
        let needs = work::needs(&case);
        room::check_memory(&needs, self.options.as_paper)?;
        let timing = Timing {
            warm_up: planned.warm_up,
            measured: planned.measured,
        };
        let threads = work::threads(&case)?;
        let machine = self.machine(planned);
        let watched = Watched {
            machine: &machine,
            daemon: &*self.reach.daemon,
        };
        let outcome = match self.options.generator {
            Generator::Own => run::run(
                self.topology,
                watched,
                threads,
                timing,
                interrupted,
                &stopping,
            )?,
            Generator::Fio(_) => fio::run(&case, threads, timing.measured, watched, interrupted)?,
            Generator::FsMark(_) => fs_mark::run(&case, timing, watched, interrupted)?,
        };
        let asked = self.asked_about(planned, &seats, &outcome);
        let seats = seats.iter().map(SeatRecord::from).collect();
        let mut record = self.record(planned, seats, &outcome);
        record.confirmed_for = asked;
        record.disks = machine.disks();
        record.engine = case.engine.used();
        record.notes.extend(case.engine.notes());
        if planned.variant == Variant::CREATE {
            record.notes.push("Rates are over the time in which threads create files. They leave out the time in which threads remove files.".into());
        }
        let moved = outcome.meter.read_bytes + outcome.meter.written_bytes;
        let sectors = outcome.span.device_sectors;
        record
            .notes
            .extend(note_on_transfers(placement, moved, sectors));
        if self.options.generator == Generator::Own {
            let note = note_on_inline(self.reach.route, outcome.inline_pages);
            record.notes.extend(note);
        }
        Ok((record, outcome))
    }

    /// Returns the placement trace of a run. Fails if the nodes of its accesses are unknown.
    pub fn trace(&self, planned: &Planned, outcome: &Outcome) -> Result<Vec<trace::Line>> {
        trace::lines(&outcome.meters, planned.kind.way())
    }

    /// Tells Jericho when to move threads that use the directories of a run.
    fn set_migration(&self, scratch: Option<&Scratch>) -> Result<()> {
        if let Some(scratch) = scratch
            && self.is_jericho()
        {
            for dir in scratch.all_shown() {
                let migration = self.options.migration;
                self.reach.daemon.set_migration(dir, migration)?;
            }
        }
        Ok(())
    }

    /// Returns the targets that a run uses.
    fn used(&self, planned: &Planned) -> Vec<&Target> {
        let count = self.targets.len();
        let used: BTreeSet<usize> = (0..planned.threads)
            .map(|thread| planned.kind.directory_of(thread, count) % count)
            .collect();
        used.into_iter().map(|index| &self.targets[index]).collect()
    }

    /// Returns the counters of the machine and of the disks that a run uses.
    fn machine(&self, planned: &Planned) -> Machine {
        let paths = self
            .used(planned)
            .into_iter()
            .map(|target| match target.is_jericho {
                true => self.reach.daemon.devices_of(&target.path),
                false => Some(vec![target.path.clone()]),
            });
        let paths = paths.collect::<Option<Vec<_>>>();
        Machine::of(paths.map(|paths| paths.concat()).as_deref())
    }

    /// Describes what a target is on.
    fn on(&self, target: &Target) -> TargetRecord {
        let mount = match target.is_jericho {
            true => self.reach.daemon.mount_of(&target.path),
            false => None,
        };
        TargetRecord {
            filesystem: match self.reach.route {
                // The path is that of the volume.
                Route::Process => None,
                _ => filesystem_of(&target.path),
            },
            transport: mount.as_ref().and_then(|mount| mount.transport.clone()),
            cache_bytes: mount.as_ref().and_then(|mount| mount.cache_bytes),
            build: mount.and_then(|mount| mount.build),
        }
    }

    /// Returns what the kernel was asked about after a run.
    fn asked_about(&self, planned: &Planned, seats: &[Seat], outcome: &Outcome) -> Vec<String> {
        if outcome.confirmed.is_none() {
            return Vec::new();
        }
        let is_bound = |seat: &Seat| seat.kernel_node(self.topology).is_some();
        let makes_own_files =
            planned.variant == Variant::CREATE && self.options.generator == Generator::Own;
        let is_unknown = planned.kind == Kind::Fsmark && !makes_own_files;
        let memory = match planned.kind.way() {
            Way::Direct | Way::Memory => Some("buffers"),
            // Any thread may have written any file of fsmark last, or fs_mark has removed the files. On a Jericho volume, the daemon has the pages.
            Way::Cached if is_unknown || self.is_jericho() => None,
            Way::Cached => Some("cached pages"),
        };
        let threads = seats.iter().any(|seat| seat.thread.is_some());
        let memory = memory.filter(|_| seats.iter().any(is_bound));
        let asked = threads.then_some("threads").into_iter().chain(memory);
        asked.map(str::to_owned).collect()
    }

    /// Returns the way to the data, for the record.
    fn path(&self) -> &'static str {
        match (self.are_directories(), self.is_jericho(), self.reach.route) {
            (false, ..) => "device",
            (true, false, _) => "directory",
            (true, true, Route::Kernel) => "mount",
            (true, true, Route::Fast) => "fast",
            (true, true, Route::Process) => "process",
        }
    }

    fn record(&self, planned: &Planned, seats: Vec<SeatRecord>, outcome: &Outcome) -> Record {
        let (meter, span) = (&outcome.meter, &outcome.span);
        let moved = |meter: &Meter| meter.read_bytes + meter.written_bytes;
        let tsc_hz = self.described.tsc_hz;
        let by_node = outcome.bytes_per_s_by_node().into_iter();
        Record {
            format: FORMAT,
            path: self.path().to_owned(),
            generator: self.options.generator.name().to_owned(),
            workload: planned.kind.name().to_owned(),
            variant: planned.variant.name.to_owned(),
            targets: self
                .used(planned)
                .iter()
                .map(|one| one.path.display().to_string())
                .collect(),
            targets_on: Some(
                self.used(planned)
                    .into_iter()
                    .map(|one| self.on(one))
                    .collect(),
            ),
            disks: None,
            placement: self.options.placement.name.to_owned(),
            threads: planned.threads,
            seats,
            with_mstress: self.options.with_mstress,
            mstress: self.options.with_mstress.then(|| MstressRecord {
                threads: outcome.beside.threads,
                bytes_per_s: outcome.beside.bytes as f64 / span.seconds.max(1e-9),
            }),
            seconds: span.seconds,
            data_bytes: planned.data_bytes,
            as_paper: self.options.as_paper,
            seed: self.options.seed,
            engine: Vec::new(),
            throughput_bytes_per_s: outcome.rate(moved),
            read_bytes_per_s: outcome.rate(|meter| meter.read_bytes),
            written_bytes_per_s: outcome.rate(|meter| meter.written_bytes),
            iops: outcome.rate(|meter| meter.operations),
            throughput_bytes_per_s_by_node: by_node.map(|(node, rate)| (node.0, rate)).collect(),
            latency_ns: match outcome.latency_ns_mean {
                Some(mean) => BTreeMap::from([("mean".to_owned(), mean)]),
                None => latencies(meter),
            },
            local_share: meter.local_share(),
            confirmed: outcome.confirmed,
            confirmed_for: Vec::new(),
            migration: self
                .is_jericho()
                .then(|| self.options.migration.name().to_owned()),
            inline_pages: outcome.inline_pages,
            cpu_seconds: span.cpu_seconds,
            device_sectors: span.device_sectors,
            cpio: tsc_hz.and_then(|hz| span.cpio(hz, moved(meter))),
            cycles_per_moved_sector: tsc_hz
                .and_then(|hz| span.cycles_per_moved_sector(hz, moved(meter))),
            sampled: SAMPLED.map(str::to_owned).into(),
            machine: self.described.clone(),
            notes: self.notes(),
        }
    }

    /// Returns what a reader must know about all runs.
    pub fn notes(&self) -> Vec<String> {
        let left_out = self.left_out.iter();
        let mut notes: Vec<String> = left_out.map(|why| format!("Left out: {why}.")).collect();
        notes.extend(self.described.notes());
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
        match &self.options.generator {
            Generator::Own => {}
            Generator::Fio(version) => notes.push(format!(
                "{version} adds no bytes up, does not warm up, and tells nothing of nodes. Times of CPUs are also of its start."
            )),
            Generator::FsMark(version) => notes.push(format!(
                "{version} tells no latency but the mean, and nothing of nodes. It starts again for each round of files. Rates leave out the starts, and times of CPUs do not."
            )),
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
    match sectors {
        None => Some(
            "It is unknown how many bytes the devices have moved: the transfers that the placement names may not have taken place.".into(),
        ),
        Some(sectors) if is_cached(sectors, moved_bytes) => Some(format!(
            "The devices have moved {} MiB, and the threads {} MiB: most transfers that the placement names did not take place.",
            sectors.saturating_mul(SECTOR_BYTES) >> 20,
            moved_bytes >> 20
        )),
        Some(_) => None,
    }
}

/// Returns what a reader must know about a run on the fast path of which Jericho counts no page.
fn note_on_inline(route: Route, pages: Option<InlinePages>) -> Option<String> {
    if route != Route::Fast {
        return None;
    }
    let note = match pages {
        None => {
            "The daemon knows no process with this id that accesses pages inline: perhaps all accesses went through the kernel. Does the mount's --fast-path include this user? In a container, the daemon sees another id."
        }
        Some(pages) if pages == InlinePages::default() => {
            "No page was accessed inline: all accesses went through the kernel."
        }
        Some(_) => return None,
    };
    Some(note.to_owned())
}

/// Returns all runs, and checks that the targets and the memory have room for each.
fn runs(
    topology: &Topology,
    targets: &[Target],
    reach: &Reach,
    options: &Options,
) -> Result<Vec<Planned>> {
    let are_directories = targets.iter().all(|target| target.is_directory);
    let filesystems = match are_directories {
        true => room::filesystems(&*reach.files, targets)?,
        false => Vec::new(),
    };
    let memory = Memory::read().doing("read the size of the memory")?;
    let mut limits = Limits {
        cpus: topology.nodes.iter().map(|node| node.cpus.len()).sum(),
        targets: targets.len(),
        memory_bytes: memory.usable_bytes(),
        free_bytes: room::least_free(&filesystems),
        fill_bytes_per_s: u64::MAX,
    };
    let plan = |limits: Limits| {
        let runs = options.kinds.iter();
        let runs = runs.map(|kind| runs_of(*kind, options, limits));
        Ok(runs.collect::<Result<Vec<_>>>()?.concat())
    };
    for run in plan(limits)? {
        if are_directories {
            let files = (run.threads, run.data_bytes);
            room::check_space(run.kind, targets, &filesystems, files, options.as_paper)?;
        }
        // On which nodes it is, is known when the directories of a Jericho volume are made.
        let seats = vec![Seat::default(); run.threads];
        let needs = room::needs(topology, &seats, |thread| {
            work::memory(run.kind, run.variant, run.threads, run.scale, thread)
        });
        room::check_memory(&needs, options.as_paper)?;
    }
    // Writes, so only now that all fits.
    if are_directories {
        limits.fill_bytes_per_s = fill_bytes_per_s(&reach.files, targets)?;
    }
    plan(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_path_without_an_inline_page_says_so() {
        let pages = |local| Some(InlinePages { local, remote: 0 });
        let note = note_on_inline(Route::Fast, pages(0)).unwrap();
        assert!(note.contains("No page was accessed inline"), "{note}");
        let note = note_on_inline(Route::Fast, None).unwrap();
        assert!(note.contains("--fast-path"), "{note}");
        assert_eq!(note_on_inline(Route::Fast, pages(1)), None);
        assert_eq!(note_on_inline(Route::Kernel, pages(0)), None);
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
