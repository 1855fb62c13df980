//! Compares the runs of two files under the same conditions.

use std::collections::BTreeMap;

use crate::groups::{Conditions, median_of, migration, order, values};
use crate::line::{Disk, Evidence, Run, TargetOn};
use crate::results::Results;
use crate::statistics::{Ratio, ratio, runs_needed};
use crate::text;

/// What must be the same on both sides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Name of the workload.
    pub workload: String,
    /// Its form.
    pub variant: String,
    /// What made the operations. Empty: `jericho bench`.
    pub generator: String,
    /// Whether threads of mstress copied memory beside it.
    pub with_mstress: bool,
    /// Whether the sizes are the papers'.
    pub as_paper: bool,
    /// Bytes of the run's files, at most.
    pub data_bytes: u64,
    /// The place of the placement in the order in which they are shown.
    pub order: usize,
    /// The placement.
    pub placement: String,
    /// Number of threads.
    pub threads: u32,
    /// When Jericho moved threads to their data. `None`: never.
    pub migration: Option<String>,
}

impl Key {
    fn of(run: &Run) -> Key {
        Key {
            workload: run.workload.clone(),
            variant: run.variant.clone(),
            generator: run.generator.clone(),
            with_mstress: run.with_mstress,
            as_paper: run.as_paper,
            data_bytes: run.data_bytes,
            order: order(&run.placement),
            placement: run.placement.clone(),
            threads: run.threads,
            migration: migration(run).map(str::to_owned),
        }
    }
}

/// The disks of a run, and what its targets are on.
type Below<'a> = (&'a Option<Vec<TargetOn>>, &'a Option<Vec<Disk>>);

/// What later lines tell about a machine.
type Later<'a> = ([&'a Option<String>; 3], Option<bool>, Option<u64>);

/// The targets, the engine and the machine. Lines of all programs have them.
type Names<'a> = ([&'a [String]; 2], [&'a str; 4], (u32, u32));

/// What may differ between the sides, and must not differ on one side: the targets, the way to them, the machine and the version of Jericho.
type Setting<'a> = (Names<'a>, &'a str, Below<'a>, Later<'a>);

fn names(run: &Run) -> Names<'_> {
    let machine = &run.machine;
    let names = [
        &run.path,
        &machine.cpu_model,
        &machine.topology,
        &machine.kernel,
    ];
    (
        [&run.targets, &run.engine],
        names.map(String::as_str),
        (machine.cpus, machine.nodes),
    )
}

fn setting(run: &Run) -> Setting<'_> {
    let machine = &run.machine;
    let later = [
        &machine.build,
        &machine.hypervisor,
        &machine.topology_digest,
    ];
    (
        names(run),
        &machine.jericho,
        (&run.targets_on, &run.disks),
        (later, machine.fake_nodes, machine.memory_gib()),
    )
}

/// One side of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    /// Median of the throughput, in bytes per second.
    pub throughput_bytes_per_s: f64,
    /// Median of the share of local accesses.
    pub local_share: Option<f64>,
    /// Number of runs.
    pub runs: usize,
}

/// What two sides tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// B is faster.
    Faster,
    /// B is slower.
    Slower,
    /// The interval has 1.
    NoDifference,
    /// There are too few runs to tell.
    TooFew,
    /// A run moved nothing.
    NoThroughput,
    /// A side is of an emulated machine, whose speeds mean nothing.
    Emulated,
}

/// A comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The conditions.
    pub key: Key,
    /// The targets of the first file.
    pub on: String,
    /// The first file.
    pub a: Side,
    /// The second file.
    pub b: Side,
    /// B to A. `None`: a run moved nothing, or a machine is emulated.
    pub ratio: Option<Ratio>,
    /// Whether B is faster than A, as far as the runs show it.
    pub verdict: Verdict,
    /// In what the sides differ.
    pub differences: Vec<String>,
}

/// The comparison of two files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// What both files have.
    pub pairs: Vec<Pair>,
    /// What is not compared, and why.
    pub left_out: Vec<String>,
    /// In what the machines of the pairs differ.
    pub machines_differ: Vec<&'static str>,
}

/// Compares two files.
pub fn compare(a: &Results, b: &Results) -> Comparison {
    let (of_a, of_b) = (by_key(&a.runs), by_key(&b.runs));
    let mut comparison = Comparison::default();
    for (key, runs_a) in &of_a {
        let Some(runs_b) = of_b.get(key) else {
            comparison
                .left_out
                .push(format!("{}: only in the first file", name(key)));
            continue;
        };
        match pairs_of_settings(runs_a, runs_b) {
            Some(settings) => {
                for (a, b) in &settings.pairs {
                    comparison.add(key, a, b);
                }
                let alone = [(settings.only_a, "first"), (settings.only_b, "second")];
                for (runs, file) in alone {
                    comparison.left_out.extend(runs.iter().map(|run| {
                        let (on, machine) = (Conditions::of(run).name(), &run.machine);
                        format!(
                            "{}: the runs on {on} with {}, kernel {} and Jericho {} are only in the {file} file",
                            name(key), machine.cpu_model, machine.kernel, machine.jericho_build()
                        )
                    }));
                }
            }
            None => comparison.left_out.push(format!(
                "{}: a file has runs on several targets or machines, and the other one has not the same; compare files with one of each",
                name(key)
            )),
        }
    }
    for key in of_b.keys().filter(|key| !of_a.contains_key(key)) {
        comparison
            .left_out
            .push(format!("{}: only in the second file", name(key)));
    }
    comparison
}

fn by_key(runs: &[Run]) -> BTreeMap<Key, Vec<&Run>> {
    let mut keys: BTreeMap<Key, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        keys.entry(Key::of(run)).or_default().push(run);
    }
    keys
}

type Sides<'a> = (Vec<&'a Run>, Vec<&'a Run>);

/// Runs of the same conditions by their settings.
struct Settings<'a> {
    /// The runs that are compared.
    pairs: Vec<Sides<'a>>,
    /// A run of each setting that only the first file has.
    only_a: Vec<&'a Run>,
    /// A run of each setting that only the second file has.
    only_b: Vec<&'a Run>,
}

/// Pairs runs of equal settings, or all runs if each side has one setting. Then pairs the settings that differ only in what has no name in both files, such as the build, if
/// each side has one of them. Returns `None` if there is no pair.
fn pairs_of_settings<'a>(a: &[&'a Run], b: &[&'a Run]) -> Option<Settings<'a>> {
    let split = |runs: &[&'a Run]| {
        let mut settings: BTreeMap<_, Vec<&'a Run>> = BTreeMap::new();
        for run in runs {
            settings.entry(setting(run)).or_default().push(*run);
        }
        settings
    };
    let (of_a, mut of_b) = (split(a), split(b));
    let mut settings = Settings {
        pairs: Vec::new(),
        only_a: Vec::new(),
        only_b: Vec::new(),
    };
    if of_a.len() == 1 && of_b.len() == 1 {
        settings.pairs.push((a.to_vec(), b.to_vec()));
        return Some(settings);
    }
    let (mut rest_a, mut rest_b) = (BTreeMap::new(), BTreeMap::new());
    for (setting, a) in of_a {
        match of_b.remove(&setting) {
            Some(b) => settings.pairs.push((a, b)),
            None => rest_a.entry(names(a[0])).or_insert_with(Vec::new).push(a),
        }
    }
    for b in of_b.into_values() {
        rest_b.entry(names(b[0])).or_insert_with(Vec::new).push(b);
    }
    for (names, a) in rest_a {
        let mut b = rest_b.remove(&names).unwrap_or_default();
        match (&a[..], b.len()) {
            ([a], 1) => settings.pairs.push((a.clone(), b.remove(0))),
            _ => {
                settings.only_a.extend(a.iter().map(|runs| runs[0]));
                settings.only_b.extend(b.iter().map(|runs| runs[0]));
            }
        }
    }
    let rest = rest_b.into_values().flatten();
    settings.only_b.extend(rest.map(|runs| runs[0]));
    (!settings.pairs.is_empty()).then_some(settings)
}

impl Comparison {
    fn add(&mut self, key: &Key, a: &[&Run], b: &[&Run]) {
        let machines = a[0].machine.differences(&b[0].machine);
        for difference in &machines {
            if !self.machines_differ.contains(difference) {
                self.machines_differ.push(*difference);
            }
        }
        let rates = |runs: &[&Run]| values(runs, |run| Some(run.throughput_bytes_per_s));
        let is_emulated = [a[0], b[0]]
            .iter()
            .any(|run| run.machine.evidence() == Evidence::Emulated);
        let (ratio, verdict) = match is_emulated {
            true => (None, Verdict::Emulated),
            false => {
                let ratio = ratio(&rates(a), &rates(b));
                (ratio, verdict(ratio))
            }
        };
        self.pairs.push(Pair {
            key: key.clone(),
            on: Conditions::of(a[0]).name(),
            a: side(a),
            b: side(b),
            ratio,
            verdict,
            differences: differences(a, b),
        });
    }

    /// Returns how many pairs have each verdict, as a sentence.
    pub fn summary(&self) -> String {
        let count = |verdict: Verdict| {
            self.pairs
                .iter()
                .filter(|pair| pair.verdict == verdict)
                .count()
        };
        let (few, none) = (count(Verdict::TooFew), count(Verdict::NoThroughput));
        let mut text = format!(
            "{}: {} faster, {} slower, {} no difference",
            text::count(self.pairs.len(), "comparison"),
            count(Verdict::Faster),
            count(Verdict::Slower),
            count(Verdict::NoDifference) + few,
        );
        if few > 0 {
            text += &format!(
                " ({few} with too few runs to tell; it takes {} on each side)",
                runs_needed()
            );
        }
        if none > 0 {
            text += &format!(", {none} without throughput");
        }
        let emulated = count(Verdict::Emulated);
        if emulated > 0 {
            text += &format!(", {emulated} without a verdict because a machine is emulated");
        }
        text
    }
}

fn side(runs: &[&Run]) -> Side {
    let rate = median_of(runs, |run| Some(run.throughput_bytes_per_s));
    Side {
        throughput_bytes_per_s: rate.unwrap_or(0.0),
        local_share: median_of(runs, |run| run.local_share),
        runs: runs.len(),
    }
}

fn verdict(ratio: Option<Ratio>) -> Verdict {
    match ratio.map(|ratio| ratio.interval) {
        None => Verdict::NoThroughput,
        Some(None) => Verdict::TooFew,
        Some(Some((low, _))) if low > 1.0 => Verdict::Faster,
        Some(Some((_, high))) if high < 1.0 => Verdict::Slower,
        Some(Some(_)) => Verdict::NoDifference,
    }
}

/// Names what differs beside the placement's effect: targets, versions, lengths.
fn differences(a: &[&Run], b: &[&Run]) -> Vec<String> {
    let (first, second) = (a[0], b[0]);
    let mut differences = Vec::new();
    let name = |run: &Run| Conditions::of(run).name();
    if (&first.targets, &first.path, &first.engine)
        != (&second.targets, &second.path, &second.engine)
        || name(first) != name(second)
    {
        differences.push(format!("targets: {} and {}", name(first), name(second)));
    }
    let jericho = |run: &Run| run.machine.jericho_build();
    if jericho(first) != jericho(second) {
        differences.push(format!(
            "Jericho {} and {}",
            jericho(first),
            jericho(second)
        ));
    }
    let daemons = [first.daemon_builds(), second.daemon_builds()];
    if daemons[0] != daemons[1] && daemons.iter().all(|builds| !builds.is_empty()) {
        let [first, second] = daemons.map(|builds| text::list(&builds));
        differences.push(format!("builds of the daemons: {first} and {second}"));
    }
    let seconds = |runs: &[&Run]| median_of(runs, |run| Some(run.seconds)).unwrap_or(0.0);
    let (one, other) = (seconds(a), seconds(b));
    if one.max(other) > one.min(other) * 1.2 {
        differences.push(format!("length: {one:.1} s and {other:.1} s"));
    }
    differences
}

/// Names the conditions in one line.
pub fn name(key: &Key) -> String {
    let beside = if key.with_mstress {
        ", beside mstress"
    } else {
        ""
    };
    let migration = key.migration.as_ref().map_or(String::new(), |policy| {
        format!(", threads migrate: {policy}")
    });
    format!(
        "{} {}, {}, {}{beside}{migration}",
        key.workload,
        key.variant,
        key.placement,
        text::count(key.threads as usize, "thread")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::run;

    fn results(rates: &[f64]) -> Results {
        let one = |rate: &f64| run(("scan", "read"), "best", 2, *rate);
        Results {
            runs: rates.iter().map(one).collect(),
            ..Results::default()
        }
    }

    fn only(a: &Results, b: &Results) -> Pair {
        let comparison = compare(a, b);
        assert_eq!(comparison.pairs.len(), 1, "{:?}", comparison.left_out);
        comparison.pairs[0].clone()
    }

    #[test]
    fn a_difference_is_one_that_the_interval_shows() {
        let a = results(&[100.0, 101.0, 99.0, 102.0, 98.0]);
        assert_eq!(
            only(&a, &results(&[150.0, 149.0, 151.0, 152.0])).verdict,
            Verdict::Faster
        );
        assert_eq!(
            only(&a, &results(&[50.0, 49.0, 51.0, 52.0])).verdict,
            Verdict::Slower
        );
        assert_eq!(
            only(&a, &results(&[100.0, 97.0, 103.0, 99.5])).verdict,
            Verdict::NoDifference
        );
        assert_eq!(only(&a, &a).verdict, Verdict::NoDifference);
        // Three runs cannot tell, however far apart.
        let few = only(&results(&[1.0, 1.0, 1.0]), &results(&[9.0, 9.0, 9.0]));
        assert_eq!(
            (few.verdict, few.ratio.unwrap().estimate),
            (Verdict::TooFew, 9.0)
        );
        assert_eq!(only(&a, &results(&[0.0])).verdict, Verdict::NoThroughput);
        let summary = compare(&results(&[1.0]), &results(&[2.0])).summary();
        assert!(
            summary.contains("1 no difference (1 with too few runs to tell; it takes 4"),
            "{summary}"
        );
    }

    #[test]
    fn only_runs_under_the_same_conditions_are_compared() {
        let a = results(&[1.0]);
        let changes: [fn(&mut Run); 7] = [
            |run| run.threads = 3,
            |run| run.placement = "worst".into(),
            |run| run.variant = "write".into(),
            |run| run.data_bytes = 1,
            |run| run.with_mstress = true,
            |run| run.as_paper = true,
            |run| run.migration = Some("always".into()),
        ];
        for change in changes {
            let mut b = results(&[1.0]);
            change(&mut b.runs[0]);
            let comparison = compare(&a, &b);
            assert_eq!((comparison.pairs.len(), comparison.left_out.len()), (0, 2));
        }
    }

    #[test]
    fn builds_are_compared_on_each_of_several_targets() {
        let of_build = |build: Option<&str>, rate: f64| {
            let mut results = results(&[rate, 2.0 * rate]);
            for (run, target) in results.runs.iter_mut().zip(["/mnt/one", "/mnt/two"]) {
                run.targets = vec![target.into()];
                run.machine.build = build.map(str::to_owned);
            }
            results
        };
        let a = of_build(Some("x"), 1.0);
        for b in [of_build(Some("y"), 3.0), of_build(None, 3.0)] {
            let comparison = compare(&a, &b);
            let medians = comparison.pairs.iter().map(|pair| {
                let [a, b] = [&pair.a, &pair.b].map(|side| side.throughput_bytes_per_s);
                (a, b)
            });
            let medians: Vec<(f64, f64)> = medians.collect();
            assert_eq!(medians, [(1.0, 3.0), (2.0, 6.0)]);
            assert_eq!(comparison.left_out.len(), 0);
        }
        // Which of two builds is meant is unknown.
        let mut both = a.clone();
        both.runs.extend(of_build(Some("z"), 1.0).runs);
        let comparison = compare(&both, &of_build(Some("y"), 3.0));
        assert_eq!(comparison.pairs.len(), 0);
    }

    #[test]
    fn other_machines_and_targets_are_named_and_never_mixed() {
        let a = results(&[1.0, 1.0]);
        let mut b = results(&[2.0, 2.0]);
        for run in &mut b.runs {
            run.machine.kernel = "6.19".into();
            run.machine.jericho = "0.2.0".into();
            run.targets = vec!["/mnt/other".into()];
            run.seconds = 9.0;
        }
        let comparison = compare(&a, &b);
        assert_eq!(comparison.machines_differ, ["kernel"]);
        let differences = comparison.pairs[0].differences.join("; ");
        for part in [
            "/mnt/data and /mnt/other",
            "0.1.0 and 0.2.0",
            "1.0 s and 9.0 s",
        ] {
            assert!(differences.contains(part), "{differences}");
        }
        // Now the second file has two settings, one of which the first one has.
        b.runs.extend(a.runs.clone());
        let comparison = compare(&a, &b);
        assert_eq!(comparison.pairs[0].b.runs, 2);
        assert!(comparison.machines_differ.is_empty());
        // The other setting is not dropped silently.
        let left_out = &comparison.left_out;
        assert!(
            left_out.len() == 1
                && left_out[0].contains("/mnt/other with Example CPU, kernel 6.19 and Jericho 0.2.0 are only in the second file"),
            "{left_out:?}"
        );
        b.runs[2].targets = vec!["/mnt/third".into()];
        b.runs[3].targets = vec!["/mnt/third".into()];
        let comparison = compare(&a, &b);
        assert!(
            comparison.pairs.is_empty() && comparison.left_out[0].contains("several targets"),
            "{comparison:?}"
        );
    }

    #[test]
    fn transports_and_builds_are_named_and_never_mixed() {
        let on = |transport: &str| {
            Some(vec![TargetOn {
                filesystem: Some("fuse.jericho".into()),
                transport: Some(transport.into()),
                cache_bytes: Some(64 << 20),
                build: Some(transport.into()),
            }])
        };
        let (mut a, mut b) = (results(&[1.0]), results(&[2.0, 2.0]));
        for (results, transport) in [(&mut a, "device"), (&mut b, "ring")] {
            for run in &mut results.runs {
                run.path = "mount".into();
                run.targets_on = on(transport);
                run.machine.build = Some(format!("build-of-{transport}"));
            }
        }
        let differences = only(&a, &b).differences.join("; ");
        for part in [
            "transport device",
            "transport ring",
            "build build-of-dev and 0.1.0, build build-of-rin",
            "builds of the daemons: device and ring",
        ] {
            assert!(differences.contains(part), "{part}: {differences}");
        }
        // Now the second file has runs over both, and the first one over one of them.
        b.runs[0] = a.runs[0].clone();
        assert_eq!(only(&a, &b).b.runs, 1);
    }

    #[test]
    fn an_emulated_machine_is_neither_faster_nor_slower() {
        let (mut a, mut b) = (results(&[1.0; 4]), results(&[9.0; 4]));
        for run in a.runs.iter_mut().chain(&mut b.runs) {
            run.machine.cpu_model = "QEMU TCG CPU".into();
        }
        let pair = only(&a, &b);
        assert_eq!((pair.verdict, pair.ratio), (Verdict::Emulated, None));
        let summary = compare(&a, &b).summary();
        assert!(
            summary.contains("0 faster, 0 slower, 0 no difference, 1 without a verdict"),
            "{summary}"
        );
    }
}
