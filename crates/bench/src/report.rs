//! The results of a run, as JSON for programs and as a table.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use jericho_topology::Topology;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::compare::Comparison;
use crate::footprint::Footprint;
use crate::settings::Settings;
use crate::stats::{Summary, number};

/// The results of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Machine and versions, one line each.
    pub conditions: Vec<String>,
    /// The comparisons, with their ratios.
    pub comparisons: Vec<Comparison>,
    /// Share of local accesses among all accesses of clients, 0 to 1, if clients were measured.
    pub share_local: Option<f64>,
    /// The daemon's use of resources, if it was measured.
    pub footprint: Option<Footprint>,
}

/// Returns the first line that a command prints, or why it failed.
pub(crate) fn first_line(program: &str, args: &[&str]) -> String {
    match std::process::Command::new(program).args(args).output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()
            .unwrap_or("?")
            .to_owned(),
        Err(e) => format!("{program}: {e}"),
    }
}

/// Returns a value of a `key: value` or `key : value` file of /proc.
pub(crate) fn from_proc(file: &str, key: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text
        .lines()
        .find(|line| line.starts_with(key))
        .and_then(|line| line.split_once(':'));
    line.map_or("?".into(), |(_, value)| value.trim().to_owned())
}

/// Returns the model of the processors, and the numbers of CPUs and NUMA nodes.
fn processors() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, |n| n.get());
    let nodes = Topology::detect().map_or(0, |topology| topology.nodes.len());
    format!(
        "{}, {}, {}",
        from_proc("/proc/cpuinfo", "model name"),
        count(cpus, "CPU"),
        count(nodes, "NUMA node")
    )
}

fn count(number: usize, noun: &str) -> String {
    let end = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{end}")
}

/// Returns the conditions of this run.
pub fn conditions(settings: &Settings) -> Vec<String> {
    let dir = settings.dir.display().to_string();
    vec![
        format!("CPU: {}", processors()),
        format!("Memory: {}", from_proc("/proc/meminfo", "MemTotal")),
        format!("Kernel: {}", first_line("uname", &["-r"])),
        format!(
            "Filesystem under the volume: {}",
            first_line("stat", &["-f", "-c", "%T", &dir])
        ),
        format!("Generator: {}", first_line("fio", &["--version"])),
        format!(
            "Passthrough: libfuse {}, passthrough_hp, direct I/O, --nosplice",
            first_line(
                "dpkg-query",
                &["-W", "-f", "${source:Version}", "libfuse3-dev"]
            )
        ),
        format!(
            "Rounds: {} of each side, in turn{}",
            settings.rounds,
            settings.pick("", " (quick: not for quoting)")
        ),
    ]
}

pub(crate) fn cell(summary: Option<Summary>) -> String {
    summary.map_or("-".into(), |s| {
        format!(
            "{} ({}-{})",
            number(s.median),
            number(s.lower_quartile),
            number(s.upper_quartile)
        )
    })
}

impl Report {
    /// Returns a table of medians with quartiles.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            let _ = writeln!(text, "- {line}");
        }
        text.push_str(
            "\nMedian (lower-upper quartile); ratio: Jericho to the baseline; ceiling: what a simpler program reaches that does less of the same work, to the same baseline.\n\n",
        );
        text.push_str("| workload | Jericho | baseline | unit | ratio | target | ceiling | conditions |\n|---|---|---|---|---|---|---|---|\n");
        for c in &self.comparisons {
            let (ours, baseline) = (Summary::of(&c.our_values), Summary::of(&c.baseline_values));
            let target = c
                .target_ratio
                .map_or("-".into(), |target| target.to_string());
            let ceilings: Vec<String> = c
                .ceilings
                .iter()
                .map(|ceiling| {
                    format!("{}: {}", ceiling.name, cell(c.to_baseline(&ceiling.values)))
                })
                .collect();
            let ceiling = match ceilings.is_empty() {
                true => "-".into(),
                false => ceilings.join("; "),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | **{}** | {target} | {ceiling} | {}; {} against {} |",
                c.name,
                cell(ours),
                cell(baseline),
                c.unit,
                cell(c.ratio()),
                c.conditions,
                c.ours,
                c.baseline
            );
        }
        if let Some(share) = self.share_local {
            let _ = writeln!(text, "\nLocal accesses of clients: {:.1} %", share * 100.0);
        }
        if let Some(f) = &self.footprint {
            let _ = write!(
                text,
                "\n| the daemon | measured |\n|---|---|\n\
                 | bookkeeping of the cache | {:.1} bytes a page of 4 KiB |\n\
                 | private memory after making {} files | {:.0} MiB (cache of {} MiB not counted) |\n\
                 | private memory after a remount and a walk over all of them | {:.0} MiB |\n\
                 | resident memory then, cache included | {:.0} MiB |\n\
                 | files made a second, one thread | {} |\n\
                 | CPU time in ten idle seconds | {} ms |\n",
                f.bookkeeping_bytes_per_page,
                number(f.inodes.into()),
                f.private_mib_after_create,
                f.cache_mib,
                f.private_mib_after_walk,
                f.resident_mib_after_walk,
                number(f.creates_per_s),
                f.idle_ticks_in_10_s * 10,
            );
        }
        text
    }

    /// Writes `bench.json` and `bench.md`.
    pub fn write(&self, out: &Path) -> Result<()> {
        fs::create_dir_all(out)?;
        fs::write(out.join("bench.json"), serde_json::to_string_pretty(self)?)?;
        fs::write(out.join("bench.md"), self.markdown())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Ceiling;

    #[test]
    fn one_node_has_no_plural() {
        assert_eq!(count(2, "CPU"), "2 CPUs");
        assert_eq!(count(1, "NUMA node"), "1 NUMA node");
    }

    #[test]
    fn the_table_has_medians_quartiles_and_the_ratios_of_the_pairs() {
        let report = Report {
            comparisons: vec![Comparison {
                name: "x".into(),
                conditions: "c".into(),
                unit: "IOPS".into(),
                ours: "a".into(),
                baseline: "b".into(),
                target_ratio: Some(1.3),
                our_values: vec![3000.0, 2000.0, 4000.0],
                baseline_values: vec![1000.0, 1000.0, 1000.0],
                ceilings: vec![Ceiling {
                    name: "nothing".into(),
                    values: vec![4000.0; 3],
                }],
            }],
            ..Report::default()
        };
        let expected = "| x | 3,000 (2,500-3,500) | 1,000 (1,000-1,000) | IOPS | **3.00 (2.50-3.50)** | 1.3 | nothing: 4.00 (4.00-4.00) | c; a against b |";
        assert!(
            report.markdown().contains(expected),
            "{}",
            report.markdown()
        );
    }
}
