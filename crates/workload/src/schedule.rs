//! Which runs a workload has, how large their files are, and how long they take.

use std::time::Duration;

use crate::case::Scale;
use crate::error::{Error, Result};
use crate::kind::{Kind, Variant};
use crate::options::Options;
use crate::work;

/// Time in which one workload ends without a request for another, by our guess. A minute is promised.
const BUDGET: Duration = Duration::from_secs(50);
/// Most bytes of files of a run, unless the papers' sizes are wanted.
const DATA_BYTES_MAX: u64 = 256 << 20;
/// The least: fewer bytes would be in the caches of the CPU.
const DATA_BYTES_MIN: u64 = 16 << 20;
/// Time before a measurement.
const WARM_UP: Duration = Duration::from_millis(500);
/// Time of one measurement with the papers' sizes: an iteration of *Jericho*, III.B. The first iteration is discarded.
const ITERATION: Duration = Duration::from_secs(30);
/// Bounds of the time of one measurement without a request.
const MEASURED: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// Most threads of a run. The papers have 128.
const THREADS_MAX: usize = 4096;

/// One run.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The workload.
    pub kind: Kind,
    /// Its form.
    pub variant: Variant,
    /// Number of threads.
    pub threads: usize,
    /// Its sizes.
    pub scale: Scale,
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Length of its measurement.
    pub measured: Duration,
    /// Most bytes of its files together. 0 on devices.
    pub data_bytes: u64,
    /// Time in which its files are made, as a guess.
    pub fill: Duration,
}

impl Planned {
    /// Returns how long it takes, as a guess.
    pub(crate) fn duration(&self) -> Duration {
        self.fill + self.warm_up + self.measured
    }
}

/// What the machine and the targets allow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// CPUs.
    pub cpus: usize,
    /// Number of targets.
    pub targets: usize,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Free bytes of the fullest filesystem of the targets. `None`: the targets are devices.
    pub free_bytes: Option<u64>,
    /// Bytes per second with which files are made.
    pub fill_bytes_per_s: u64,
}

impl Limits {
    fn are_directories(&self) -> bool {
        self.free_bytes.is_some()
    }

    /// Returns how long files of `bytes` bytes are made.
    fn fill_time(&self, bytes: u64) -> Duration {
        match self.are_directories() {
            true => Duration::from_secs_f64(bytes as f64 / self.fill_bytes_per_s.max(1) as f64),
            false => Duration::ZERO,
        }
    }
}

/// Returns the runs of a workload.
pub(crate) fn runs_of(kind: Kind, options: &Options, limits: Limits) -> Result<Vec<Planned>> {
    let threads = match (&options.threads, options.as_paper) {
        (Some(threads), _) => threads.clone(),
        (None, true) => kind.paper_threads(limits.targets),
        (None, false) => kind.default_threads(limits.cpus, limits.targets),
    };
    check_threads(kind, &threads)?;
    let variants = kind.variants().iter().filter(|variant| {
        let refused = check_writes(kind, **variant, options, limits.are_directories());
        let can_make = options.generator.check_variant(kind, **variant).is_ok();
        refused.is_ok() && can_make && is_wanted(variant, options)
    });
    let pairs = variants.flat_map(|variant| threads.iter().map(move |count| (*variant, *count)));
    let pairs: Vec<(Variant, usize)> = pairs.collect();
    let each = BUDGET / pairs.len().max(1) as u32;
    let plan = |(variant, threads): (Variant, usize)| {
        let rest = each.saturating_sub(WARM_UP + MEASURED.0).as_secs_f64();
        // Slow devices get smaller files, so that the workload ends in time.
        let in_time = match (options.seconds, limits.are_directories()) {
            (None, true) => (rest * limits.fill_bytes_per_s as f64) as u64,
            _ => u64::MAX,
        };
        let scale = Scale {
            data_bytes: DATA_BYTES_MAX
                .min(limits.memory_bytes / 8)
                .min(limits.free_bytes.unwrap_or(u64::MAX) / 4)
                .min(in_time)
                .max(DATA_BYTES_MIN),
            as_paper: options.as_paper,
        };
        let data_bytes = match limits.are_directories() {
            true => work::bytes(kind, variant, threads, scale),
            false => 0,
        };
        let fill = limits.fill_time(data_bytes);
        let rest = each.saturating_sub(fill + WARM_UP);
        let measured = options.seconds.unwrap_or(match options.as_paper {
            true => ITERATION,
            false => rest.clamp(MEASURED.0, MEASURED.1),
        });
        Planned {
            kind,
            variant,
            threads,
            scale,
            warm_up: match options.as_paper {
                true => measured,
                false => WARM_UP.min(measured),
            },
            measured,
            data_bytes,
            fill,
        }
    };
    Ok(pairs.into_iter().map(plan).collect())
}

fn is_wanted(variant: &Variant, options: &Options) -> bool {
    match &options.variants[..] {
        [] => variant.is_default,
        wanted => wanted.iter().any(|name| name == variant.name),
    }
}

/// Fails if the workload writes in this form, and the placement or the user does not let it.
fn check_writes(
    kind: Kind,
    variant: Variant,
    options: &Options,
    are_directories: bool,
) -> Result<()> {
    let (kind, name) = (kind.name(), variant.name);
    if variant.writes && options.placement.reads_only() {
        return Err(Error::new(format!(
            "{kind} {name} writes, and all transfers of the placement {} are reads; use proper, best, worst or native",
            options.placement.name
        )));
    }
    if variant.writes && !are_directories && !options.may_destroy {
        return Err(Error::new(format!(
            "{kind} {name} destroys what is on the devices; allow that with --force"
        )));
    }
    Ok(())
}

/// Returns why forms of these workloads that the user has chosen make no run. Fails with the reasons, and with those in `left_out`, if there is no run at all.
pub(crate) fn without_run(
    options: &Options,
    are_directories: bool,
    left_out: &[String],
) -> Result<Vec<String>> {
    let (mut runs, mut reasons) = (0, Vec::new());
    for kind in &options.kinds {
        for variant in kind.variants() {
            if is_wanted(variant, options) {
                match check_writes(*kind, *variant, options, are_directories) {
                    Ok(()) => runs += 1,
                    Err(why) => reasons.push(why.to_string()),
                }
            }
        }
    }
    if runs == 0 {
        let all: Vec<&str> = left_out
            .iter()
            .chain(&reasons)
            .map(String::as_str)
            .collect();
        return Err(Error::new(format!("there is no run: {}", all.join("; "))));
    }
    if options.variants.is_empty() {
        reasons.clear();
    }
    Ok(reasons)
}

/// Fails if a variant is wanted that none of the workloads has.
pub(crate) fn check_variants(options: &Options) -> Result<()> {
    let names: Vec<&str> = options
        .kinds
        .iter()
        .flat_map(|kind| kind.variants())
        .map(|variant| variant.name)
        .collect();
    match options
        .variants
        .iter()
        .find(|name| !names.contains(&name.as_str()))
    {
        None => Ok(()),
        Some(name) => Err(Error::new(format!(
            "there is no variant {name}; the variants are {}",
            names.join(", ")
        ))),
    }
}

pub(crate) fn check_threads(kind: Kind, threads: &[usize]) -> Result<()> {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::KINDS;
    use crate::options::{Generator, Migration};
    use crate::placement::Placement;

    fn options() -> Options {
        Options {
            kinds: KINDS.to_vec(),
            variants: Vec::new(),
            placement: Placement::named("native").unwrap(),
            threads: None,
            seconds: None,
            as_paper: false,
            with_mstress: false,
            migration: Migration::Never,
            may_destroy: true,
            seed: 1,
            generator: Generator::Own,
        }
    }

    fn two_cpus(fill_bytes_per_s: u64) -> Limits {
        Limits {
            cpus: 2,
            targets: 1,
            memory_bytes: 8 << 30,
            free_bytes: Some(100 << 30),
            fill_bytes_per_s,
        }
    }

    #[test]
    fn each_workload_ends_within_a_minute_on_two_cpus_also_on_a_slow_device() {
        for mib_per_s in [5, 10, 20, 50, 100, 200, 1000] {
            for kind in KINDS {
                let runs = runs_of(kind, &options(), two_cpus(mib_per_s << 20)).unwrap();
                let all: Duration = runs.iter().map(Planned::duration).sum();
                assert!(
                    all < Duration::from_secs(58),
                    "{} with {mib_per_s} MiB/s: {all:?}",
                    kind.name()
                );
                assert!(runs.iter().all(|run| run.measured >= MEASURED.0));
            }
        }
        let device = Limits {
            free_bytes: None,
            ..two_cpus(1)
        };
        let runs = runs_of(Kind::Zmio, &options(), device).unwrap();
        assert!(runs.iter().all(|run| run.fill == Duration::ZERO));
    }

    #[test]
    fn a_slow_device_gets_smaller_files_unless_the_user_sets_the_time() {
        let bytes = |options: &Options, mib_per_s: u64| {
            let runs = runs_of(Kind::Scan, options, two_cpus(mib_per_s << 20));
            runs.unwrap()[0].data_bytes
        };
        assert_eq!(bytes(&options(), 1000), DATA_BYTES_MAX);
        assert!(bytes(&options(), 20) < DATA_BYTES_MAX);
        assert_eq!(bytes(&options(), 1), DATA_BYTES_MIN);
        let timed = Options {
            seconds: Some(Duration::from_secs(1)),
            ..options()
        };
        assert_eq!(bytes(&timed, 1), DATA_BYTES_MAX);
        let as_paper = Options {
            as_paper: true,
            ..options()
        };
        assert_eq!(bytes(&as_paper, 1), 128 << 30);
    }

    #[test]
    fn with_the_papers_sizes_a_run_has_the_papers_length_after_an_iteration_that_is_discarded() {
        let as_paper = |seconds| Options {
            as_paper: true,
            seconds,
            ..options()
        };
        let second = Duration::from_secs(1);
        for (seconds, expected) in [(None, ITERATION), (Some(second), second)] {
            for run in runs_of(Kind::Scan, &as_paper(seconds), two_cpus(200 << 20)).unwrap() {
                assert_eq!((run.warm_up, run.measured), (expected, expected));
            }
        }
    }

    #[test]
    fn a_variant_is_chosen_by_its_name() {
        let chosen = Options {
            variants: vec!["randread".to_owned()],
            threads: Some(vec![4]),
            ..options()
        };
        check_variants(&chosen).unwrap();
        let runs = runs_of(Kind::Scan, &chosen, two_cpus(100 << 20)).unwrap();
        let names: Vec<&str> = runs.iter().map(|run| run.variant.name).collect();
        assert_eq!(names, ["randread"]);
        assert!(without_run(&chosen, true, &[]).unwrap().is_empty());
        let wrong = Options {
            variants: vec!["backwards".to_owned()],
            ..chosen
        };
        let refused = check_variants(&wrong).unwrap_err().to_string();
        assert!(refused.contains("randwrite"), "{refused}");
    }

    #[test]
    fn a_form_that_makes_no_run_has_a_reason() {
        let zmio = |placement: &str, variants: &[&str]| Options {
            kinds: vec![Kind::Zmio],
            variants: variants.iter().map(|name| (*name).to_owned()).collect(),
            placement: Placement::named(placement).unwrap(),
            may_destroy: false,
            ..options()
        };
        let refused = |options: &Options, are_directories| {
            without_run(options, are_directories, &["stream is left out".into()])
                .unwrap_err()
                .to_string()
        };
        let forced = refused(&zmio("native", &["write-1m"]), false);
        assert!(forced.contains("--force"), "{forced}");
        assert!(forced.contains("stream is left out"), "{forced}");
        let reads = refused(&zmio("TLORPLIR", &["write-1m"]), true);
        assert!(reads.contains("TLORPLIR are reads"), "{reads}");
        // The other forms run.
        let both = zmio("native", &["read-1m", "write-1m"]);
        assert_eq!(without_run(&both, false, &[]).unwrap().len(), 1);
        let all = zmio("native", &[]);
        assert!(without_run(&all, false, &[]).unwrap().is_empty());
    }
}
