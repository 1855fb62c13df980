//! The pages: the report of some files, and the comparison of two.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::chart::{ChartError, Spread, intervals};
use crate::compare::{Comparison, Pair, Side, Verdict, name};
use crate::groups::{OfMachine, by_machine};
use crate::heat::{self, Probe};
use crate::line::Run;
use crate::papers::Prediction;
use crate::ratios;
use crate::results::Results;
use crate::statistics::runs_needed;
use crate::style::css;
use crate::text;
use crate::workloads::{Looks, conditions, further, machine_card, peaks, workloads};

/// Most machines of a page.
const MACHINES_MAX: usize = 12;
/// Most rows of a comparison, and most intervals of its chart.
const PAIRS_MAX: usize = 2000;
const INTERVALS_MAX: usize = 60;
/// Intervals of one image.
const INTERVALS_OF_IMAGE: usize = 20;
/// Most lines of a list.
const LIST_MAX: usize = 50;

/// Makes the page of some results. The same results make the same page.
pub fn report(
    results: &Results,
    probe: Option<&Probe>,
    predictions: &[Prediction],
) -> Result<String, ChartError> {
    let mut machines = by_machine(&results.runs);
    let left_out = machines.len().saturating_sub(MACHINES_MAX);
    machines.truncate(MACHINES_MAX);
    let names: Vec<String> = (1..=machines.len())
        .map(|number| format!("Machine {number}"))
        .collect();
    let looks = Looks::of(&results.runs);
    let mut of_machines = Vec::new();
    for (index, machine) in machines.iter().enumerate() {
        let title = match machines.len() {
            1 => "The machine".to_owned(),
            _ => format!("{}: {}", names[index], machine.machine.cpu_model),
        };
        of_machines.push(html! {
            section id={ "machine-" (index) } { h2 { (title) } (of_machine(machine, &looks, probe)?) }
        });
    }
    let is_of = |machine: &OfMachine| probe.is_some_and(|probe| is_of(probe, machine));
    let other = probe.filter(|_| !machines.iter().any(is_of));
    let title = "Storage I/O and placement";
    let summary = format!(
        "{} of {}, from {}",
        text::count(results.runs.len(), "run"),
        text::count(machines.len() + left_out, "machine"),
        text::list(&results.files[..results.files.len().min(LIST_MAX)])
    );
    let body = html! {
        @for note in results.notes.iter().take(LIST_MAX) { p.warn { (note) } }
        (further(results.notes.len(), LIST_MAX, "notes"))
        @if left_out > 0 { p.warn { (left_out) " further machines are left out. Give fewer files to see them." } }
        @for part in &of_machines { (part) }
        @if let Some(probe) = other {
            h2 id="nodes" { "Bandwidth and latency between nodes" }
            p.warn { "The probe is of another machine than the results (another CPU, or other nodes)." }
            p.soft { (probe.name) }
            (heat::section(probe))
        }
        h2 id="papers" { "The papers' ratios" }
        (ratios::section(&machines, &names, predictions))
        h2 id="method" { "How to read this page" }
        (method())
    };
    let links: Vec<(String, String)> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            (
                format!("#machine-{index}"),
                if names.len() > 1 {
                    name.clone()
                } else {
                    "Results".to_owned()
                },
            )
        })
        .chain([
            ("#papers".to_owned(), "The papers' ratios".to_owned()),
            ("#method".to_owned(), "How to read this page".to_owned()),
        ])
        .collect();
    Ok(document(title, &summary, &links, &body))
}

/// Returns whether the probe can be of this machine: the same model of the CPU, and the same nodes, as far as the results name them.
fn is_of(probe: &Probe, of: &OfMachine) -> bool {
    let digest = of.machine.topology_digest.as_ref();
    probe.cpu_model == of.machine.cpu_model
        && probe.nodes == of.machine.nodes as usize
        && digest.is_none_or(|digest| *digest == probe.digest)
}

/// Says whose the probe is, as far as that is known.
fn whose(probe: &Probe, of: &OfMachine) -> Markup {
    html! {
        p.soft { (probe.name) }
        @if of.machine.topology_digest.is_none() {
            p.warn { "The results do not name the CPUs and distances of their nodes, so the probe may be of another machine with the same model of the CPU and the same number of nodes." }
        } @else {
            p.soft { "The probe and the results are of the same model of the CPU, with the same CPUs and distances of nodes. Two equal machines cannot be told apart." }
        }
    }
}

fn of_machine(of: &OfMachine, looks: &Looks, probe: Option<&Probe>) -> Result<Markup, ChartError> {
    let probe = probe.filter(|probe| is_of(probe, of));
    Ok(html! {
        (machine_card(of))
        h3 { "Peaks" }
        p.soft { "The largest median throughput of each placement, with its number of threads and its share of local accesses." }
        (peaks(of, looks))
        @if let Some(probe) = probe {
            h3 { "Bandwidth and latency between its nodes" }
            (whose(probe, of))
            (heat::section(probe))
        }
        (workloads(of, looks)?)
    })
}

fn method() -> Markup {
    html! {
        p { "A point is the median of all runs under the same conditions; a vertical line goes from the least to the most of them. Runs of other machines, targets, sizes or versions of Jericho are never in the same curve." }
        p { "Local accesses: the share of the accesses whose thread ran on the node of the cached page, or with direct I/O of the buffer; of one operation in 64." }
        p { "CPIO: the CPU time of the whole machine, by kind, times the rate of the time stamp counter, for each sector of 512 bytes that the devices moved (NUMA Implications, section IV.C). A run has no CPIO if its devices moved less than half of its bytes, because its data was cached; its cycles are those for each 512 bytes that the programs moved. Busy cycles are those of user, system, IRQ and softIRQ." }
        p { "Placements: TR is the transfer between device and cached page, CP the copy between cached page and program, each local (L) or remote (R). In TLORPRIR, T is the transfer between device and buffer, and P the processor that uses the data. best and proper: each thread is on the node of its cached pages or buffers. worst and bad: each thread is on a node far from these. In these four, the memory is on all nodes in turn, wherever the device is; best and worst are the names of the Jericho paper's figure 10, proper and bad those of its figure 13. native: the kernel chooses." }
        p { (of_ratios()) }
    }
}

fn of_ratios() -> String {
    format!(
        "Ratios: the estimate is the median of all ratios of a run of one side to a run of the other one. The 95 % interval is from the ranks of these ratios (Hodges and Lehmann 1963; Mann and Whitney 1947). It assumes no distribution, and that the runs of a side are independent. It takes {} runs on each side. Of 20 intervals of sides without a difference, about one leaves out 1.",
        runs_needed()
    )
}

/// Makes the page of a comparison of two files.
pub fn comparison(comparison: &Comparison, files: [&Results; 2]) -> Result<String, ChartError> {
    let [a, b] = files;
    let pairs = &comparison.pairs[..comparison.pairs.len().min(PAIRS_MAX)];
    let mut images = Vec::new();
    let rows = interval_rows(pairs);
    let shown = &rows[..rows.len().min(INTERVALS_MAX)];
    for rows in shown.chunks(INTERVALS_OF_IMAGE) {
        images.push(intervals(rows)?);
    }
    let file = |results: &Results| results.files.first().cloned().unwrap_or_default();
    let body = html! {
        @for note in a.notes.iter().chain(&b.notes).take(LIST_MAX) { p.warn { (note) } }
        (further(a.notes.len() + b.notes.len(), LIST_MAX, "notes"))
        @if !comparison.machines_differ.is_empty() {
            p.warn { "The files are of different machines (" (text::list(&comparison.machines_differ)) "). The ratios below are of machines and of everything else that differs." }
        }
        h2 id="result" { "Result" }
        p { b { (comparison.summary()) "." } " A ratio above 1 says that the second file is faster." }
        @if pairs.is_empty() { p.warn { "The files have no run under the same conditions." } }
        @if !images.is_empty() {
            div.charts { @for image in &images {
                figure role="group" aria-label="Ratios with their intervals" {
                    figcaption { "Second file over first file" span.soft { "Estimate and 95 % interval, on a logarithmic scale; the line is at 1." } }
                    (PreEscaped(image))
                }
            } }
        }
        (further(rows.len(), INTERVALS_MAX, "intervals"))
        @if !pairs.is_empty() { (pairs_table(pairs)) }
        @if comparison.pairs.len() > pairs.len() { p.warn { (comparison.pairs.len() - pairs.len()) " further comparisons are not listed." } }
        @if !comparison.left_out.is_empty() {
            h2 id="left-out" { "Not compared" }
            ul.soft { @for line in comparison.left_out.iter().take(LIST_MAX) { li { (line) } } }
            (further(comparison.left_out.len(), LIST_MAX, "ones"))
        }
        h2 id="conditions" { "Conditions" }
        (conditions_of("First file", &file(a), &a.runs))
        (conditions_of("Second file", &file(b), &b.runs))
        h2 id="method" { "How to read this page" }
        p { "Compared are runs of the same workload, form, placement, number of threads and sizes. Repetitions are lines of the same conditions in one file." }
        p { (of_ratios()) }
        p { "Runs of the two files that were made at different times also differ by what changed meanwhile: other load, temperature, the state of the devices. Make runs of both sides in turn." }
    };
    let links = [
        ("#result", "Result"),
        ("#conditions", "Conditions"),
        ("#method", "How to read this page"),
    ];
    let links = links.map(|(to, name)| (to.to_owned(), name.to_owned()));
    Ok(document(
        "Comparison",
        &format!("{} and {}", file(a), file(b)),
        &links,
        &body,
    ))
}

fn interval_rows(pairs: &[Pair]) -> Vec<(String, Spread, usize)> {
    // Colors of curves: what is faster, what is slower, and the rest.
    let look = |verdict: Verdict| match verdict {
        Verdict::Faster => 3,
        Verdict::Slower => 2,
        _ => 7,
    };
    let row = |pair: &Pair| {
        let ratio = pair.ratio?;
        let (least, most) = ratio.interval?;
        let key = &pair.key;
        let text = format!(
            "{} {}, {}, {}",
            key.workload, key.variant, key.placement, key.threads
        );
        let spread = Spread {
            median: ratio.estimate,
            least,
            most,
        };
        Some((text, spread, look(pair.verdict)))
    };
    pairs.iter().filter_map(row).collect()
}

fn pairs_table(pairs: &[Pair]) -> Markup {
    let local = |share: Option<f64>| {
        share.map_or(String::new(), |share| {
            format!(", {} local", text::share(share))
        })
    };
    let runs = |count: usize| text::count(count, "run");
    html! {
        table.rows {
            thead { tr {
                th scope="col" { "Conditions" }
                th.number scope="col" { "First file, median" }
                th.number scope="col" { "Second file, median" }
                th.number scope="col" { "Ratio (95 % interval)" }
                th scope="col" { "Verdict" }
            } }
            tbody { @for pair in pairs {
                tr {
                    td { (name(&pair.key)) span.of { "on " (pair.on) } @if !pair.differences.is_empty() { span.of { "Differ in " (pair.differences.join("; ")) } } }
                    td.number data-label="First file, median" { (rate_of(pair, &pair.a)) span.of { (runs(pair.a.runs)) (local(pair.a.local_share)) } }
                    td.number data-label="Second file, median" { (rate_of(pair, &pair.b)) span.of { (runs(pair.b.runs)) (local(pair.b.local_share)) } }
                    td.number data-label="Ratio (95 % interval)" { (ratio_of(pair)) }
                    td data-label="Verdict" { span.verdict { (verdict_of(pair)) } }
                }
            } }
        }
    }
}

/// Formats the throughput of a side, but not that of an emulated machine.
fn rate_of(pair: &Pair, side: &Side) -> String {
    match pair.verdict == Verdict::Emulated {
        true => "emulated".to_owned(),
        false => text::rate(side.throughput_bytes_per_s),
    }
}

fn ratio_of(pair: &Pair) -> String {
    let Some(ratio) = pair.ratio else {
        return "\u{2013}".to_owned();
    };
    let interval = ratio.interval.map_or(String::new(), |(low, high)| {
        format!(" ({} to {})", precise(low), precise(high))
    });
    precise(ratio.estimate) + &interval
}

/// Formats a ratio so precisely that one a little above 1 does not look like 1.
fn precise(ratio: f64) -> String {
    match (0.1..10.0).contains(&ratio) {
        true => format!("{ratio:.3}"),
        false => text::number(ratio),
    }
}

fn verdict_of(pair: &Pair) -> String {
    match pair.verdict {
        Verdict::Faster => "faster".into(),
        Verdict::Slower => "slower".into(),
        Verdict::NoDifference => "no difference: the interval has 1".into(),
        Verdict::TooFew => format!(
            "no difference: too few runs to tell; it takes {} on each side",
            runs_needed()
        ),
        Verdict::NoThroughput => "not comparable: a run moved nothing".into(),
        Verdict::Emulated => "no verdict: the speeds of an emulated machine mean nothing".into(),
    }
}

/// Shows the machines of a file, and what else its runs have in common.
fn conditions_of(title: &str, file: &str, runs: &[Run]) -> Markup {
    let machines = by_machine(runs);
    html! {
        h3 { (title) ": " (file) }
        @for of in machines.iter().take(MACHINES_MAX) {
            (machine_card(of))
            ul.soft { @for block in of.blocks.iter().take(LIST_MAX) { li { (block.conditions.workload) ": " (conditions(block)) } } }
            (further(of.blocks.len() + of.left_out, of.blocks.len().min(LIST_MAX), "sets of conditions"))
        }
        (further(machines.len(), MACHINES_MAX, "machines"))
    }
}

fn document(title: &str, summary: &str, links: &[(String, String)], body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="generator" content="jericho report";
                title { (title) }
                style { (PreEscaped(css())) }
            }
            body {
                header {
                    h1 { (title) }
                    p.soft { (summary) }
                    nav { @for (to, name) in links { a href=(to) { (name) } } }
                }
                main { (body) }
                footer { "Made by jericho report. The file needs nothing from elsewhere." }
            }
        }
    };
    page.into_string()
}
