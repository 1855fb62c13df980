//! The results of one machine: its conditions, a table of peaks, and charts for each workload and form.

use maud::{Markup, html};

use crate::chart::{ChartError, Curve, Shares, Spread, curves_and_shares, stacks, times};
use crate::groups::{Block, OfMachine, Series, Variant, median_cycles, median_of, values};
use crate::line::{Cycles, Evidence, KINDS, Machine, PERCENTILES, Run};
use crate::palette;
use crate::statistics::median;
use crate::text;

/// Most forms of a workload, and most placements of a form.
const VARIANTS_MAX: usize = 12;
const SERIES_MAX: usize = 8;
/// Most numbers of threads of a chart.
const THREADS_MAX: usize = 40;
/// Most bars of a chart.
const BARS_MAX: usize = 12;
/// Most runs in the tables of a machine.
const ROWS_MAX: usize = 2000;
/// Most notes of a machine.
const NOTES_MAX: usize = 30;
/// Most different texts that a condition lists.
const TEXTS_MAX: usize = 6;

/// Placements with a look of their own. Those that are in the same chart have different colors, as far as there are colors.
const LOOKS: [(&str, usize); 15] = [
    ("best", 0),
    ("native", 1),
    ("worst", 2),
    ("TRLCPL", 3),
    ("TLORP0I0", 3),
    ("bad", 4),
    ("proper", 5),
    ("TRLCPR", 6),
    ("TLORPLIR", 6),
    ("TRRCPL", 7),
    ("TLORPRIR", 7),
    ("TRRCPR", 8),
    ("TRORP0I0", 8),
    ("TRORPLIR", 9),
    ("TRORPRIR", 10),
];

/// Colors and marks of placements. A placement has the same ones in all charts of a page.
pub struct Looks<'a>(Vec<&'a str>);

impl<'a> Looks<'a> {
    /// Gives placements that are not in the list their looks.
    pub fn of(runs: &'a [Run]) -> Looks<'a> {
        let mut others: Vec<&str> = runs.iter().map(|run| run.placement.as_str()).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|name| LOOKS.iter().all(|(known, _)| known != name));
        Looks(others)
    }

    fn look(&self, placement: &str) -> usize {
        let known = LOOKS.iter().find(|(name, _)| *name == placement);
        let other = || {
            self.0
                .binary_search(&placement)
                .ok()
                .map(|place| LOOKS.len() + place)
        };
        known.map(|(_, look)| *look).or_else(other).unwrap_or(0)
    }
}

/// Shows the machine's conditions.
pub fn machine_card(of: &OfMachine) -> Markup {
    let machine = of.machine;
    let runs = || of.blocks.iter().flat_map(Block::runs);
    let facts = machine_facts(machine);
    let unconfirmed = runs().filter(|run| run.confirmed == Some(false)).count();
    let mut notes: Vec<&str> = runs()
        .flat_map(|run| run.notes.iter().map(String::as_str))
        .collect();
    notes.sort_unstable();
    notes.dedup();
    let evidence = machine.evidence();
    // The warning says it.
    let is_said = |note: &&str| {
        note.contains("effects of locality")
            || note.starts_with("The nodes are virtual")
            || note.starts_with("The CPUs are emulated")
            || (note.starts_with("The nodes are fake") && evidence == Evidence::Fake)
    };
    notes.retain(|note| !is_said(note));
    html! {
        div.card { dl {
            @for (name, value) in &facts { div { dt { (name) } dd { (value) } } }
        } }
        @if let Some(warning) = evidence.warning() { p.warn { (warning) } }
        @if unconfirmed > 0 {
            p.warn { (text::count(unconfirmed, "run")) ": the kernel did not confirm that threads and pages were where the placement says." }
        }
        @for note in notes.iter().take(NOTES_MAX) { p.soft { (note) } }
        (further(notes.len(), NOTES_MAX, "notes"))
    }
}

/// Says how many lines of a list are left out. Says nothing if there are at most `most`.
pub fn further(count: usize, most: usize, what: &str) -> Markup {
    html! {
        @if count > most { p.soft { (count - most) " further " (what) " are not listed." } }
    }
}

/// Describes a machine.
pub fn machine_facts(machine: &Machine) -> Vec<(&'static str, String)> {
    let counter = match machine.tsc_hz {
        Some(hz) => format!("{} GHz", text::number(hz / 1e9)),
        None => "none, so no cycles".to_owned(),
    };
    let mut facts = vec![
        ("CPU", machine.cpu_model.clone()),
        (
            "CPUs, nodes",
            format!("{}, {} ({})", machine.cpus, machine.nodes, machine.topology),
        ),
        ("Kernel", machine.kernel.clone()),
        ("Jericho", machine.jericho_build()),
        ("Time stamp counter", counter),
    ];
    if let Some(bytes) = machine.memory_bytes {
        facts.push(("Memory", text::bytes(bytes)));
    }
    if let Some(vendor) = &machine.hypervisor {
        let told = match vendor.as_str() {
            "none" => "none that the CPU tells of".to_owned(),
            vendor => format!("{vendor}: the machine is a guest"),
        };
        facts.push(("Hypervisor", told));
    }
    if machine.fake_nodes == Some(true) {
        facts.push(("Nodes", "fake (numa=fake)".to_owned()));
    }
    facts
}

/// Shows the largest median throughput of each placement, and its share of local accesses there.
pub fn peaks(of: &OfMachine, looks: &Looks) -> Markup {
    let is_emulated = of.machine.evidence() == Evidence::Emulated;
    let variants = of.blocks.iter().flat_map(|block| {
        let variants = block.variants.iter().take(VARIANTS_MAX);
        variants.map(move |variant| (block, variant))
    });
    html! {
        table.rows.peaks {
            thead { tr { th scope="col" { "Workload" } th scope="col" { "Placements" } } }
            tbody {
                @for (block, variant) in variants {
                    tr {
                        td { (block.conditions.workload) " " (variant.name) span.of { (block.conditions.name()) } }
                        td { (peaks_of(variant, looks, is_emulated)) }
                    }
                }
            }
        }
    }
}

fn throughput(runs: &[&Run]) -> Option<f64> {
    median_of(runs, |run| Some(run.throughput_bytes_per_s))
}

/// Returns the number of threads with the largest median throughput, and that throughput.
fn peak_of<'b>(series: &'b Series) -> Option<(u32, f64, &'b [&'b Run])> {
    let medians = series.points.iter();
    let medians =
        medians.filter_map(|(threads, runs)| Some((*threads, throughput(runs)?, runs.as_slice())));
    medians.max_by(|one, other| one.1.total_cmp(&other.1))
}

fn peaks_of(variant: &Variant, looks: &Looks, is_relative: bool) -> Markup {
    let series = variant.series.iter().take(SERIES_MAX);
    let peaks = series.filter_map(|series| Some((series.placement, peak_of(series)?)));
    let peaks: Vec<_> = peaks.collect();
    let largest = peaks
        .iter()
        .map(|(_, (_, most, _))| *most)
        .fold(0.0, f64::max);
    html! {
        div.bars {
            @for (placement, (threads, most, runs)) in &peaks {
                @let part = most / largest.max(f64::MIN_POSITIVE);
                div {
                    span.of { (placement) }
                    div class={ "bar s" (looks.look(placement) % palette::SERIES.len()) } style={ "width:" (format!("{:.1}", part * 100.0)) "%" } {}
                    b { @if is_relative { (text::share(part)) } @else { (text::rate(*most)) } }
                    span.of {
                        (text::count(*threads as usize, "thread"))
                        @if let Some(local) = median_of(runs, |run| run.local_share) { ", " (text::share(local)) " local" }
                    }
                }
            }
        }
    }
}

/// Shows all workloads of a machine.
pub fn workloads(of: &OfMachine, looks: &Looks) -> Result<Markup, ChartError> {
    let evidence = of.machine.evidence();
    let mut rows_left = ROWS_MAX;
    let mut parts = Vec::new();
    for block in &of.blocks {
        parts.push(workload(block, looks, evidence, &mut rows_left)?);
    }
    Ok(html! {
        @for part in &parts { (part) }
        @if of.left_out > 0 { p.warn { (of.left_out) " further sets of conditions are left out. Give fewer files to see them." } }
    })
}

fn workload(
    block: &Block,
    looks: &Looks,
    evidence: Evidence,
    rows_left: &mut usize,
) -> Result<Markup, ChartError> {
    let mut placements: Vec<&str> = Vec::new();
    for series in block
        .variants
        .iter()
        .flat_map(|variant| variant.series.iter().take(SERIES_MAX))
    {
        if !placements.contains(&series.placement) {
            placements.push(series.placement);
        }
    }
    placements.sort_unstable_by_key(|name| looks.look(name));
    let mut forms = Vec::new();
    for variant in block.variants.iter().take(VARIANTS_MAX) {
        forms.push(html! {
            h4 { (block.conditions.workload) " " (variant.name) }
            div.charts { (charts(variant, looks, evidence)?) }
        });
    }
    let has_more = block.variants.len() > VARIANTS_MAX
        || block
            .variants
            .iter()
            .any(|variant| variant.series.len() > SERIES_MAX);
    Ok(html! {
        section {
            h3 { (block.conditions.workload) }
            p.soft { (conditions(block)) }
            ul.legend { @for name in &placements { li { (mark(looks.look(name))) (name) } } }
            @for form in &forms { (form) }
            @if has_more { p.warn { "Charts show the first " (VARIANTS_MAX) " forms of a workload and " (SERIES_MAX) " placements of each." } }
            (table(block, evidence, rows_left))
        }
    })
}

/// Describes the conditions of all runs of a block.
pub fn conditions(block: &Block) -> String {
    let each = |of: &dyn Fn(&Run) -> String| {
        let mut texts: Vec<String> = block.runs().map(of).collect();
        let count = texts.len();
        texts.sort_unstable();
        texts.dedup();
        let more = texts.len().saturating_sub(TEXTS_MAX);
        texts.truncate(TEXTS_MAX);
        if more > 0 {
            texts.push(format!("{more} others"));
        }
        (text::list(&texts), count)
    };
    let seconds: Vec<f64> = block.runs().map(|run| run.seconds).collect();
    let (least, most) = (
        seconds.iter().copied().fold(f64::INFINITY, f64::min),
        seconds.iter().copied().fold(0.0, f64::max),
    );
    let seconds = match most < least * 1.1 {
        true => format!("{:.1} s each", median(&seconds).unwrap_or(0.0)),
        false => format!("{least:.1} to {most:.1} s each"),
    };
    let (seeds, count) = each(&|run| run.seed.to_string());
    let sizes = if block.conditions.as_paper {
        "the papers' sizes, at most "
    } else {
        ""
    };
    let beside = if block.conditions.with_mstress {
        " Threads of mstress copied memory at the same time."
    } else {
        ""
    };
    // A run on a device makes no files.
    let data = match block.conditions.data_bytes {
        0 => String::new(),
        bytes => format!(" Data: {sizes}{}.", text::bytes(bytes)),
    };
    let (disks, daemons, confirmed) = (disks(block), daemons(block), confirmed(block));
    format!(
        "On {}.{disks}{daemons}{data} {}, {seconds}; seed {seeds}.{beside}{confirmed}",
        block.conditions.name(),
        text::count(count, "run"),
    )
}

/// Describes the disks of a block in a sentence. The kernel's name alone is in the name of the conditions.
fn disks(block: &Block) -> String {
    let disks = block.conditions.disks.unwrap_or_default();
    let described = disks.iter().take(TEXTS_MAX).filter_map(|disk| {
        let size = disk.size_bytes.map(text::bytes);
        let kind = disk.rotational.map(|rotational| match rotational {
            true => "rotating".to_owned(),
            false => "not rotating".to_owned(),
        });
        let parts = [disk.model.clone(), size, kind];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| format!("{}: {}", disk.name, parts.join(", ")))
    });
    let described: Vec<String> = described.collect();
    match described.is_empty() {
        true => String::new(),
        false => format!(" Disks: {}.", described.join("; ")),
    }
}

/// Names the builds of the daemons of a block in a sentence.
fn daemons(block: &Block) -> String {
    let builds = block
        .runs()
        .next()
        .map(Run::daemon_builds)
        .unwrap_or_default();
    match builds.is_empty() {
        true => String::new(),
        false => format!(" Build of the daemon: {}.", text::list(&builds)),
    }
}

/// Says in a sentence what the kernel has confirmed of all runs of a block.
fn confirmed(block: &Block) -> String {
    let mut asked = block.runs().map(|run| match run.confirmed {
        Some(true) => run.confirmed_for.as_slice(),
        _ => &[],
    });
    let first = asked.next().unwrap_or_default();
    match !first.is_empty() && asked.all(|other| other == first) {
        true => format!(" The kernel confirmed the places of {}.", text::list(first)),
        false => String::new(),
    }
}

/// The mark of a placement in legends.
fn mark(look: usize) -> Markup {
    html! {
        svg class={ "mark s" (look % palette::SERIES.len()) } viewBox="0 0 14 14" aria-hidden="true" {
            @match look % 3 {
                0 => { circle cx="7" cy="7" r="5" fill="currentColor" {} }
                1 => { path d="M7 1 13 12H1z" fill="currentColor" {} }
                _ => { path d="M2 2 12 12M12 2 2 12" stroke="currentColor" stroke-width="2.5" {} }
            }
        }
    }
}

fn charts(variant: &Variant, looks: &Looks, evidence: Evidence) -> Result<Markup, ChartError> {
    let speed = speed(variant, looks, evidence)?;
    if evidence == Evidence::Emulated {
        return Ok(speed);
    }
    Ok(
        html! { (speed) (latencies(variant, looks)?) (cycles_of_devices(variant)?) (cycles_of_programs(variant)?) },
    )
}

/// Shows throughput over threads, with shares of local accesses below.
fn speed(variant: &Variant, looks: &Looks, evidence: Evidence) -> Result<Markup, ChartError> {
    let all = variant.threads();
    let step = all.len().div_ceil(THREADS_MAX).max(1);
    let threads: Vec<u32> = all.iter().copied().step_by(step).collect();
    let series = || variant.series.iter().take(SERIES_MAX);
    let spread =
        |runs: &Vec<&Run>| Spread::of(&values(runs, |run| Some(run.throughput_bytes_per_s)));
    let points = |series: &Series| -> Vec<Option<Spread>> {
        threads
            .iter()
            .map(|threads| series.points.get(threads).and_then(spread))
            .collect()
    };
    let mut curves: Vec<Curve> = series()
        .map(|series| Curve {
            look: looks.look(series.placement),
            values: points(series),
        })
        .collect();
    let medians = curves
        .iter()
        .flat_map(|curve| curve.values.iter().flatten());
    let largest = medians.map(|spread| spread.median).fold(0.0, f64::max);
    let (unit, size) = match evidence {
        Evidence::Emulated => ("% of the largest", largest.max(1.0) / 100.0),
        _ => text::rate_unit(largest),
    };
    for spread in curves
        .iter_mut()
        .flat_map(|curve| curve.values.iter_mut().flatten())
    {
        for value in [&mut spread.median, &mut spread.least, &mut spread.most] {
            *value /= size;
        }
    }
    let share = |runs: &Vec<&Run>| median_of(runs, |run| run.local_share);
    let shares = series().map(|series| Shares {
        look: looks.look(series.placement),
        values: threads
            .iter()
            .map(|threads| series.points.get(threads).and_then(share))
            .collect(),
    });
    let categories: Vec<String> = threads.iter().map(u32::to_string).collect();
    let svg = curves_and_shares(&categories, unit, &curves, &shares.collect::<Vec<_>>())?;
    let label = format!("Throughput of {} over threads", variant.name);
    let caption = html! {
        "Throughput over threads"
        span.soft { "Medians, with the range of several runs." }
        @if step > 1 { span.soft { "Numbers of threads: one in " (step) "." } }
    };
    Ok(figure(&label, &caption, &svg))
}

/// Shows percentiles of latency at one number of threads.
fn latencies(variant: &Variant, looks: &Looks) -> Result<Markup, ChartError> {
    let threads = variant.shared_threads();
    let at = |runs: &[&Run], name: &str| {
        Spread::of(&values(runs, |run| {
            run.latency_ns.get(name).map(|ns| *ns as f64)
        }))
    };
    let curves: Vec<Curve> = variant
        .series
        .iter()
        .take(SERIES_MAX)
        .filter_map(|series| Some((series, series.points.get(&threads)?)))
        .map(|(series, runs)| Curve {
            look: looks.look(series.placement),
            values: PERCENTILES.iter().map(|name| at(runs, name)).collect(),
        })
        .collect();
    if curves
        .iter()
        .all(|curve| curve.values.iter().all(Option::is_none))
    {
        return Ok(html! {});
    }
    let svg = times(&PERCENTILES.map(str::to_owned), &curves)?;
    let label = format!("Latency percentiles of {}", variant.name);
    let caption = html! {
        "Latency, " (text::count(threads as usize, "thread"))
        span.soft { "Percentiles of the operations, on a logarithmic scale." }
    };
    Ok(figure(&label, &caption, &svg))
}

/// Shows cycles for each sector of the devices. Runs whose data was cached have none.
fn cycles_of_devices(variant: &Variant) -> Result<Markup, ChartError> {
    cycles(
        variant,
        &bars(variant, |run| run.cpio),
        "Cycles per I/O (CPIO)",
        "Cycles of the whole machine for each 512 bytes that the devices moved.",
    )
}

/// Shows cycles for each 512 bytes that the programs moved, if a run has no cycles for each sector of the devices.
fn cycles_of_programs(variant: &Variant) -> Result<Markup, ChartError> {
    let series = variant.series.iter();
    let mut runs = series.flat_map(|series| series.points.values().flatten());
    if runs.all(|run| run.cpio.is_some()) {
        return Ok(html! {});
    }
    cycles(
        variant,
        &bars(variant, |run| run.cycles_per_moved_sector),
        "Cycles for each 512 bytes moved",
        "Cycles of the whole machine for each 512 bytes that the programs moved. Some runs have no CPIO: their data was cached, their disks are unknown, or they were too short.",
    )
}

/// Shows cycles by kind of CPU time.
fn cycles(
    variant: &Variant,
    bars: &[(String, [f64; 7])],
    title: &str,
    of: &str,
) -> Result<Markup, ChartError> {
    if bars.is_empty() {
        return Ok(html! {});
    }
    let svg = stacks(bars)?;
    let runs = || {
        variant
            .series
            .iter()
            .flat_map(|series| series.points.values().flatten())
    };
    let is_sampled = |kind: &str| runs().any(|run| run.sampled.iter().any(|name| name == kind));
    let is_used = |kind: usize| bars.iter().any(|(_, parts)| parts[kind] > 0.0);
    let caption = html! {
        (title)
        span.soft { (of) }
        ul.legend {
            @for (kind, name) in KINDS.iter().enumerate().filter(|(kind, _)| is_used(*kind)) {
                li {
                    svg class={ "mark k" (kind) } viewBox="0 0 14 14" aria-hidden="true" { rect width="14" height="14" rx="3" fill="currentColor" {} }
                    (kind_name(name))
                    @if is_sampled(name) { "*" }
                }
            }
        }
        @if KINDS.iter().any(|kind| is_sampled(kind)) { span.soft { "* sampled by the kernel at each tick" } }
    };
    Ok(figure(
        &format!("{title} of {}", variant.name),
        &caption,
        &svg,
    ))
}

/// Names a kind of CPU time as the papers do.
fn kind_name(kind: &str) -> &str {
    match kind {
        "io_wait" => "I/O wait",
        "irq" => "IRQ",
        "soft_irq" => "softIRQ",
        other => other,
    }
}

fn bars(variant: &Variant, of: impl Fn(&Run) -> Option<Cycles>) -> Vec<(String, [f64; 7])> {
    let series = || variant.series.iter().take(SERIES_MAX);
    let points = || {
        series().flat_map(|series| {
            series
                .points
                .iter()
                .map(move |(threads, runs)| (series.placement, *threads, runs))
        })
    };
    let is_small = points().count() <= BARS_MAX;
    let threads = variant.shared_threads();
    points()
        .filter(|(_, number, _)| is_small || *number == threads)
        .filter_map(|(placement, threads, runs)| {
            let kinds = median_cycles(runs, &of)?;
            Some((format!("{placement}, {threads}"), kinds))
        })
        .filter(|(_, kinds)| kinds.iter().sum::<f64>() > 0.0)
        .collect()
}

fn figure(label: &str, caption: &Markup, svg: &str) -> Markup {
    html! {
        figure role="group" aria-label=(label) { figcaption { (caption) } (maud::PreEscaped(svg)) }
    }
}

/// Lists the runs of a block.
fn table(block: &Block, evidence: Evidence, rows_left: &mut usize) -> Markup {
    let count = block.runs().count();
    let shown = count.min(*rows_left);
    *rows_left -= shown;
    if evidence == Evidence::Emulated {
        return html! {};
    }
    let latency = |run: &Run, name: &str| run.latency_ns.get(name).map(|ns| text::time(*ns as f64));
    let busy = |cycles: Option<Cycles>| {
        cycles
            .map(|cycles| text::number(cycles.user + cycles.system + cycles.irq + cycles.soft_irq))
    };
    html! {
        details {
            summary { "All runs in numbers (" (count) ")" }
            div.scroll tabindex="0" { table {
                thead { tr {
                    @for name in ["Form", "Placement"] { th scope="col" { (name) } }
                    @for name in ["Threads", "Throughput", "IOPS", "p50", "p99", "Local", "Busy cycles per sector of the devices", "Busy cycles per sector moved", "Seconds", "Seed"] {
                        th.number scope="col" { (name) }
                    }
                } }
                tbody {
                    @for run in block.runs().take(shown) {
                        tr {
                            td { (run.variant) } td { (run.placement) }
                            td.number { (run.threads) } td.number { (text::rate(run.throughput_bytes_per_s)) } td.number { (text::number(run.iops)) }
                            td.number { (latency(run, "p50").unwrap_or_default()) } td.number { (latency(run, "p99").unwrap_or_default()) }
                            td.number { (run.local_share.map(text::share).unwrap_or_default()) }
                            td.number { (busy(run.cpio).unwrap_or_default()) } td.number { (busy(run.cycles_per_moved_sector).unwrap_or_default()) }
                            td.number { (format!("{:.1}", run.seconds)) } td.number { (run.seed) }
                        }
                    }
                }
            } }
            @if shown < count { p.soft { (count - shown) " further runs are not listed: the tables of a machine have at most " (ROWS_MAX) " rows." } }
        }
    }
}
