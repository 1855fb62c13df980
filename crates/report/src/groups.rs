//! Runs by machine, by conditions, by form and by placement. Only runs of the same machine and conditions are in one curve.

use std::collections::BTreeMap;

use crate::line::{Cycles, Disk, Machine, Run, TargetOn};
use crate::statistics::median;
use crate::text;

/// The placements in the order in which they are shown: from the best one to the worst one.
const ORDER: [&str; 15] = [
    "best", "proper", "TLORP0I0", "TLORPLIR", "TRLCPL", "native", "TLORPRIR", "TRLCPR", "TRORP0I0",
    "TRORPLIR", "TRRCPL", "TRORPRIR", "TRRCPR", "worst", "bad",
];

/// Most sets of conditions of a machine.
const BLOCKS_MAX: usize = 60;
/// Most targets that a name lists.
const TARGETS_MAX: usize = 6;

/// All runs of one machine.
pub struct OfMachine<'a> {
    /// The machine. Its counter's rate is that of its first run.
    pub machine: &'a Machine,
    /// Its runs by workload and conditions.
    pub blocks: Vec<Block<'a>>,
    /// Number of further sets of conditions, which exceed what a page shows.
    pub left_out: usize,
}

/// Conditions that must be the same in one curve.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conditions<'a> {
    /// Name of the workload.
    pub workload: &'a str,
    /// Directories or devices.
    pub targets: &'a [String],
    /// What each target is on: filesystem, transport and cache. `None`: unknown.
    pub targets_on: Option<&'a [TargetOn]>,
    /// The disks below the targets. `None`: unknown.
    pub disks: Option<&'a [Disk]>,
    /// The way to the data. Empty: unknown.
    pub path: &'a str,
    /// For `fast`, whether a page was accessed inline. `None`: unknown, or another way.
    pub is_inline: Option<bool>,
    /// What made the operations. Empty: `jericho bench`.
    pub generator: &'a str,
    /// For direct workloads, what made the transfers. Empty: unknown.
    pub engine: &'a [String],
    /// Bytes of the run's files, at most.
    pub data_bytes: u64,
    /// Whether the sizes are the papers'.
    pub as_paper: bool,
    /// Whether threads of mstress copied memory beside the workload.
    pub with_mstress: bool,
    /// When Jericho moved threads to their data. `None`: never.
    pub migration: Option<&'a str>,
}

/// Runs of the same conditions.
pub struct Block<'a> {
    /// The conditions.
    pub conditions: Conditions<'a>,
    /// The forms of the workload.
    pub variants: Vec<Variant<'a>>,
}

/// One form of a workload.
pub struct Variant<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its placements, in the order in which they are shown.
    pub series: Vec<Series<'a>>,
}

/// The runs of one placement.
pub struct Series<'a> {
    /// The placement.
    pub placement: &'a str,
    /// The runs by number of threads.
    pub points: BTreeMap<u32, Vec<&'a Run>>,
}

impl<'a> Conditions<'a> {
    /// Returns those of a run.
    pub fn of(run: &'a Run) -> Conditions<'a> {
        Conditions {
            workload: &run.workload,
            targets: &run.targets,
            targets_on: run.targets_on.as_deref(),
            disks: run.disks.as_deref(),
            path: &run.path,
            is_inline: run
                .inline_pages
                .filter(|_| run.path == "fast")
                .map(|pages| pages.local > 0 || pages.remote > 0),
            generator: &run.generator,
            engine: &run.engine,
            data_bytes: run.data_bytes,
            as_paper: run.as_paper,
            with_mstress: run.with_mstress,
            migration: migration(run),
        }
    }

    /// Returns whether the targets are on a Jericho volume. Returns `None` if the lines do not say it.
    pub fn is_jericho(&self) -> Option<bool> {
        match self.path {
            "mount" | "fast" | "process" => Some(true),
            "directory" | "device" => Some(false),
            _ => None,
        }
    }

    /// Names what the targets are on, each of it once.
    fn on(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for on in self.targets_on.unwrap_or_default() {
            // The way to a Jericho volume has its name already.
            let filesystem = on.filesystem.clone();
            let filesystem = filesystem.filter(|_| self.is_jericho() != Some(true));
            let transport = on.transport.as_ref();
            let transport = transport.map(|transport| format!("transport {transport}"));
            let cache = on
                .cache_bytes
                .map(|size| format!("cache {}", text::bytes(size)));
            for part in [filesystem, transport, cache].into_iter().flatten() {
                if !all.contains(&part) {
                    all.push(part);
                }
            }
        }
        let disks = self.disks.unwrap_or_default().iter();
        let disks: Vec<&str> = disks.map(|disk| disk.name.as_str()).collect();
        let shown = disks.len().min(TARGETS_MAX);
        all.truncate(TARGETS_MAX);
        match disks.len() {
            0 => {}
            1 => all.push(format!("disk {}", disks[0])),
            count => {
                let more = if count > shown { " and others" } else { "" };
                all.push(format!("{count} disks {}{more}", disks[..shown].join(" ")));
            }
        }
        all
    }

    /// Names the targets, their filesystems, caches and disks, and the way to them. Names the generator only if it is not Jericho's own.
    pub fn name(&self) -> String {
        let shown = self.targets.len().min(TARGETS_MAX);
        let more = match self.targets.len() - shown {
            0 => String::new(),
            more => format!(" and {more} others"),
        };
        let path = match self.path {
            "mount" => "Jericho mount",
            "fast" => match self.is_inline {
                Some(true) => "Jericho, hits inline",
                Some(false) => "Jericho, fast path without a hit inline",
                None => "Jericho, fast path, hits unknown",
            },
            "process" => "Jericho volume in the process",
            _ => "",
        };
        let mut on = self.on();
        if !path.is_empty() {
            on.insert(0, path.to_owned());
        }
        let on = match on.is_empty() {
            true => String::new(),
            false => format!(" ({})", on.join(", ")),
        };
        let generator = match self.generator {
            "" | "jericho" => String::new(),
            other => format!(", operations by {other}"),
        };
        let engine = self.engine.iter().take(TARGETS_MAX);
        let engine: String = engine.map(|part| format!(", {part}")).collect();
        let migration = self.migration.map_or(String::new(), |policy| {
            format!(", threads migrate: {policy}")
        });
        self.targets[..shown].join(", ") + &more + &on + &engine + &migration + &generator
    }
}

/// Returns when Jericho moved threads of a run to their data. `None`: never, or not that the line says.
pub fn migration(run: &Run) -> Option<&str> {
    let policy = run.migration.as_deref();
    policy.filter(|policy| *policy != "never")
}

/// Groups runs. Machines are in the order of their first run, and so are conditions and forms.
pub fn by_machine<'a>(runs: &'a [Run]) -> Vec<OfMachine<'a>> {
    let runs: Vec<&Run> = runs.iter().collect();
    // All but the rate of the counter, which is measured.
    let key = |run: &'a Run| {
        let machine = &run.machine;
        let names = (
            &machine.cpu_model,
            &machine.topology,
            &machine.kernel,
            &machine.jericho,
        );
        let later = (
            &machine.build,
            &machine.hypervisor,
            &machine.topology_digest,
            machine.fake_nodes,
            machine.memory_gib(),
        );
        (names, machine.cpus, machine.nodes, later)
    };
    in_order(&runs, key)
        .into_iter()
        .map(|(_, runs)| {
            let of_conditions = in_order(&runs, Conditions::of);
            OfMachine {
                machine: &runs[0].machine,
                left_out: of_conditions.len().saturating_sub(BLOCKS_MAX),
                blocks: of_conditions
                    .into_iter()
                    .take(BLOCKS_MAX)
                    .map(block)
                    .collect(),
            }
        })
        .collect()
}

fn block<'a>((conditions, runs): (Conditions<'a>, Vec<&'a Run>)) -> Block<'a> {
    let variants = in_order(&runs, |run| run.variant.as_str()).into_iter();
    let variants = variants.map(|(name, runs)| Variant {
        name,
        series: series(&runs),
    });
    Block {
        conditions,
        variants: variants.collect(),
    }
}

fn series<'a>(runs: &[&'a Run]) -> Vec<Series<'a>> {
    let mut all: Vec<Series> = in_order(runs, |run| run.placement.as_str())
        .into_iter()
        .map(|(placement, runs)| {
            let mut points: BTreeMap<u32, Vec<&Run>> = BTreeMap::new();
            for run in runs {
                points.entry(run.threads).or_default().push(run);
            }
            Series { placement, points }
        })
        .collect();
    all.sort_by_key(|series| (order(series.placement), series.placement));
    all
}

/// Returns the place of a placement in the order in which they are shown.
pub fn order(placement: &str) -> usize {
    let place = ORDER.iter().position(|name| *name == placement);
    place.unwrap_or(ORDER.len())
}

/// Groups by a key, in the order in which keys appear first.
fn in_order<'a, K: Ord + Clone>(
    runs: &[&'a Run],
    key: impl Fn(&'a Run) -> K,
) -> Vec<(K, Vec<&'a Run>)> {
    let mut places: BTreeMap<K, usize> = BTreeMap::new();
    let mut groups: Vec<(K, Vec<&Run>)> = Vec::new();
    for run in runs {
        let key = key(run);
        let place = *places.entry(key.clone()).or_insert(groups.len());
        if place == groups.len() {
            groups.push((key, vec![]));
        }
        groups[place].1.push(run);
    }
    groups
}

impl Variant<'_> {
    /// Returns all numbers of threads.
    pub fn threads(&self) -> Vec<u32> {
        let mut threads: Vec<u32> = self
            .series
            .iter()
            .flat_map(|series| series.points.keys().copied())
            .collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// Returns the largest number of threads that all placements have. Returns that of the first placement if they share none.
    pub fn shared_threads(&self) -> u32 {
        let all = self.threads().into_iter().rev();
        let has_all = |threads: &u32| {
            self.series
                .iter()
                .all(|series| series.points.contains_key(threads))
        };
        let largest = || self.series.first()?.points.keys().next_back().copied();
        all.into_iter().find(has_all).or_else(largest).unwrap_or(0)
    }
}

impl<'a> Block<'a> {
    /// Returns all runs of the block.
    pub fn runs(&self) -> impl Iterator<Item = &'a Run> + '_ {
        let series = self.variants.iter().flat_map(|variant| &variant.series);
        series.flat_map(|series| series.points.values().flatten().copied())
    }
}

/// Returns the values of some runs.
pub fn values(runs: &[&Run], of: impl Fn(&Run) -> Option<f64>) -> Vec<f64> {
    runs.iter().filter_map(|run| of(run)).collect()
}

/// Returns the median of a value of some runs. Returns `None` if no run has it.
pub fn median_of(runs: &[&Run], of: impl Fn(&Run) -> Option<f64>) -> Option<f64> {
    median(&values(runs, of))
}

/// Returns the medians of the kinds of CPU time, in the order of [`crate::line::KINDS`]. Returns `None` if no run has them.
pub fn median_cycles(runs: &[&Run], of: impl Fn(&Run) -> Option<Cycles>) -> Option<[f64; 7]> {
    let all: Vec<[f64; 7]> = runs
        .iter()
        .filter_map(|run| of(run))
        .map(|cycles| cycles.kinds())
        .collect();
    let kind = |index: usize| {
        let values: Vec<f64> = all.iter().map(|kinds| kinds[index]).collect();
        median(&values)
    };
    let mut medians = [0.0; 7];
    for (index, place) in medians.iter_mut().enumerate() {
        *place = kind(index)?;
    }
    Some(medians)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::run;
    use crate::line::InlinePages;

    #[test]
    fn machines_and_conditions_are_never_in_one_curve() {
        let form = ("scan", "read");
        let first = run(form, "best", 1, 1e9);
        let mut other_machine = run(form, "best", 1, 2e9);
        other_machine.machine.kernel = "6.19".into();
        let mut other_size = run(form, "best", 1, 3e9);
        other_size.data_bytes *= 2;
        let mut other_target = run(form, "best", 1, 4e9);
        other_target.targets = vec!["/mnt/other".into()];
        let mut cached = run(form, "best", 1, 6e9);
        cached.engine = vec!["page cache".into()];
        let mut beside = run(form, "best", 1, 5e9);
        beside.with_mstress = true;
        let mut moved = run(form, "best", 1, 7e9);
        moved.migration = Some("adaptive".into());
        let mut unmoved = run(form, "best", 1, 8e9);
        unmoved.migration = Some("never".into());
        let again = Run {
            seed: 2,
            seconds: 1.1,
            ..first.clone()
        };
        let runs = [
            first,
            other_machine,
            other_size,
            other_target,
            cached,
            beside,
            again,
            moved,
            unmoved,
        ];
        let machines = by_machine(&runs);
        assert_eq!(machines.len(), 2);
        let counts: Vec<usize> = machines[0]
            .blocks
            .iter()
            .map(|block| block.runs().count())
            .collect();
        assert_eq!(counts, [3, 1, 1, 1, 1, 1]);
        assert_eq!(
            machines[0].blocks[0].variants[0].series[0].points[&1].len(),
            3
        );
        let name = machines[0].blocks[5].conditions.name();
        assert!(name.ends_with("threads migrate: adaptive"), "{name}");
    }

    #[test]
    fn transports_caches_filesystems_and_disks_are_never_in_one_curve() {
        let on = |filesystem: &str, transport: Option<&str>, cache_bytes| {
            Some(vec![TargetOn {
                filesystem: Some(filesystem.into()),
                transport: transport.map(str::to_owned),
                cache_bytes,
                build: None,
            }])
        };
        let disk = |name: &str| {
            let name = name.to_owned();
            Some(vec![Disk {
                name,
                ..Disk::default()
            }])
        };
        let settings = [
            (
                "mount",
                on("fuse.jericho", Some("ring"), Some(64 << 20)),
                disk("vda"),
            ),
            (
                "mount",
                on("fuse.jericho", Some("device"), Some(64 << 20)),
                disk("vda"),
            ),
            (
                "mount",
                on("fuse.jericho", Some("ring"), Some(32 << 20)),
                disk("vda"),
            ),
            (
                "mount",
                on("fuse.jericho", Some("ring"), Some(64 << 20)),
                disk("vdb"),
            ),
            ("mount", None, None),
            ("directory", on("ext4", None, None), disk("vda")),
            ("directory", on("xfs", None, None), disk("vda")),
        ];
        let runs = settings.map(|(path, targets_on, disks)| Run {
            path: path.into(),
            targets_on,
            disks,
            ..run(("scan", "read"), "best", 1, 1e9)
        });
        let machines = by_machine(&runs);
        let blocks = &machines[0].blocks;
        let names: Vec<String> = blocks.iter().map(|block| block.conditions.name()).collect();
        assert_eq!(
            names,
            [
                "/mnt/data (Jericho mount, transport ring, cache 64.0 MiB, disk vda)",
                "/mnt/data (Jericho mount, transport device, cache 64.0 MiB, disk vda)",
                "/mnt/data (Jericho mount, transport ring, cache 32.0 MiB, disk vda)",
                "/mnt/data (Jericho mount, transport ring, cache 64.0 MiB, disk vdb)",
                "/mnt/data (Jericho mount)",
                "/mnt/data (ext4, disk vda)",
                "/mnt/data (xfs, disk vda)",
            ]
        );
    }

    #[test]
    fn builds_and_hypervisors_are_machines_of_their_own() {
        let first = run(("scan", "read"), "best", 1, 1e9);
        let changes: [fn(&mut Machine); 5] = [
            |machine| machine.build = Some("ab".into()),
            |machine| machine.hypervisor = Some("KVMKVMKVM".into()),
            |machine| machine.fake_nodes = Some(true),
            |machine| machine.topology_digest = Some("0".into()),
            |machine| machine.memory_bytes = Some(64 << 30),
        ];
        for change in changes {
            let mut other = first.clone();
            change(&mut other.machine);
            assert_eq!(by_machine(&[first.clone(), other]).len(), 2);
        }
        // The kernel's own memory differs from start to start.
        let mut runs = [first.clone(), first];
        runs[0].machine.memory_bytes = Some(64 << 30);
        runs[1].machine.memory_bytes = Some((64 << 30) - (3 << 20));
        assert_eq!(by_machine(&runs).len(), 1);
    }

    #[test]
    fn only_runs_with_hits_inline_are_called_so() {
        let mut run = run(("scan", "read"), "best", 1, 1e9);
        run.path = "fast".into();
        let mut name = |pages: Option<u64>| {
            run.inline_pages = pages.map(|local| InlinePages { local, remote: 0 });
            Conditions::of(&run).name()
        };
        assert!(name(Some(9)).ends_with("(Jericho, hits inline)"));
        assert!(name(Some(0)).ends_with("without a hit inline)"));
        assert!(name(None).ends_with("hits unknown)"));
    }

    #[test]
    fn placements_are_in_the_order_from_best_to_worst() {
        let runs =
            ["worst", "mine", "native", "best"].map(|name| run(("scan", "read"), name, 2, 1e9));
        let machines = by_machine(&runs);
        let variant = &machines[0].blocks[0].variants[0];
        let names: Vec<&str> = variant
            .series
            .iter()
            .map(|series| series.placement)
            .collect();
        assert_eq!(names, ["best", "native", "worst", "mine"]);
    }

    #[test]
    fn the_largest_shared_number_of_threads_is_one_that_all_placements_have() {
        let form = ("scan", "read");
        let mut runs = vec![
            run(form, "best", 1, 1.0),
            run(form, "best", 8, 1.0),
            run(form, "worst", 1, 1.0),
        ];
        let shared = |runs: &[Run]| by_machine(runs)[0].blocks[0].variants[0].shared_threads();
        assert_eq!(shared(&runs), 1);
        runs[2].threads = 4;
        assert_eq!(shared(&runs), 8);
    }
}
