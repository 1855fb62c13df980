//! What the results of a machine have to say to a figure of a paper: a quotient by the figure's rule, or why there is none.

use crate::groups::{Block, Conditions, OfMachine, Series, values};
use crate::line::{Evidence, Run};
use crate::papers::{At, Figure, Measure, Quotient, Rule};
use crate::statistics::{Ratio, ratio};
use crate::text;

/// Most quotients of one figure and machine that a page shows. An answer has one more if there are more.
pub const MOST: usize = 4;

/// The answer to a figure.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Quotients, each under other conditions.
    Measured(Vec<Quote>),
    /// There is none, for this reason.
    No(String),
}

/// A quotient.
#[derive(Clone, Debug, PartialEq)]
pub struct Quote {
    /// The quotient, with its interval if there are enough runs.
    pub ratio: Ratio,
    /// What it is of: the sides, the numbers of threads and runs.
    pub of: String,
    /// Number of threads, if it is that of one.
    pub threads: Option<u32>,
}

/// Answers a figure.
pub fn answer(figure: &Figure, of: &OfMachine) -> Answer {
    if let Rule::Cannot(reason) = figure.rule {
        return Answer::No(reason.to_owned());
    }
    if of.machine.evidence() == Evidence::OneNode
        && !matches!(
            figure.rule,
            Rule::BesideMstress { .. } | Rule::Stacks { .. }
        )
    {
        return Answer::No("This machine has one node, so all placements are the same.".into());
    }
    let quotes = match figure.rule {
        Rule::Placements(quotient) => of_placements(quotient, of),
        Rule::Stacks { form, threads } => of_stacks(form, threads, of),
        Rule::BesideMstress {
            form,
            placements,
            threads,
        } => beside_mstress(form, placements, threads, of),
        Rule::Cannot(_) => vec![],
    };
    match quotes.is_empty() {
        true => Answer::No(unlike(&figure.rule, of).unwrap_or_else(|| missing(&figure.rule))),
        false => Answer::Measured(quotes),
    }
}

/// Describes a rule.
pub fn describe(rule: &Rule) -> String {
    let threads = |threads: u32| format!("at {threads} threads, else at the most threads of both");
    let picked = |from: u32, which: &str| match from {
        1 => format!("at the number of threads with the {which} value, without an interval"),
        _ => format!(
            "at the number of threads from {from} on with the {which} value, without an interval"
        ),
    };
    match rule {
        Rule::Placements(Quotient {
            form,
            measure,
            over,
            under,
            at,
        }) => {
            let at = match at {
                At::Threads(number) => threads(*number),
                At::Largest(from) => picked(*from, "largest"),
                At::Smallest(from) => picked(*from, "smallest"),
                At::Most => "at the most threads of both".to_owned(),
                At::Mean => "mean over all numbers of threads of both".to_owned(),
            };
            format!(
                "{} of {} {}: {} over {}, {at}",
                measured_as(*measure),
                form.0,
                form.1,
                over.join(" or "),
                under.join(" or ")
            )
        }
        Rule::Stacks {
            form,
            threads: number,
        } => format!(
            "throughput of {} {}: best or proper on a Jericho volume over native on another filesystem of the machine, {}",
            form.0,
            form.1,
            threads(*number)
        ),
        Rule::BesideMstress {
            form,
            placements,
            threads: number,
        } => format!(
            "throughput of {} {}, placement {}: with --with-mstress over without, {}",
            form.0,
            form.1,
            placements.join(" or "),
            threads(*number)
        ),
        Rule::Cannot(_) => String::new(),
    }
}

fn measured_as(measure: Measure) -> &'static str {
    match measure {
        Measure::Throughput => "throughput",
        Measure::ThroughputOfNode => "throughput of each node's devices",
        Measure::CpioSystem => "kernel's cycles for each sector of the devices",
        Measure::CpioIoWait => "cycles of I/O wait for each sector of the devices",
    }
}

/// Says how to get the results that a rule needs.
fn missing(rule: &Rule) -> String {
    match rule {
        Rule::Placements(Quotient {
            form,
            measure,
            over,
            under,
            ..
        }) => {
            let cached = match measure {
                Measure::CpioSystem | Measure::CpioIoWait => {
                    ", on devices that move data (--as-paper)"
                }
                _ => "",
            };
            format!(
                "Not in these files. It takes jericho bench {} with --placement {} and with {}{cached}.",
                form.0, over[0], under[0]
            )
        }
        Rule::Stacks { form, .. } => format!(
            "Not in these files. It takes jericho bench {} with --placement best on a Jericho volume, and with --placement native on another filesystem.",
            form.0
        ),
        Rule::BesideMstress {
            form, placements, ..
        } => format!(
            "Not in these files. It takes jericho bench {} --placement {} with --with-mstress, and without.",
            form.0, placements[0]
        ),
        Rule::Cannot(reason) => (*reason).to_owned(),
    }
}

/// Says why there is no quotient although both sides are there. Returns `None` if a side is missing.
fn unlike(rule: &Rule, of: &OfMachine) -> Option<String> {
    let side = |form, placements: &[&str], is_side: &dyn Fn(&Conditions) -> bool| {
        let blocks = of.blocks.iter();
        let mut blocks = blocks.filter(|block| is_side(&block.conditions));
        blocks.find(|block| find(block, form, placements).is_some())
    };
    let (over, under) = match *rule {
        Rule::Placements(Quotient {
            form, over, under, ..
        }) => {
            let alone = |of: &Conditions| !of.with_mstress;
            let has_both = |block: &&Block| {
                let has = |placements| find(block, form, placements).is_some();
                alone(&block.conditions) && has(over) && has(under)
            };
            if of.blocks.iter().any(|block| has_both(&block)) {
                return Some("Both sides are in these files, but not with the same number of threads, or a run has no such value, or 0. Cycles for each sector need longer runs, on devices that move data (--as-paper).".into());
            }
            (side(form, over, &alone), side(form, under, &alone))
        }
        Rule::Stacks { form, .. } => {
            let is = |jericho| {
                move |of: &Conditions| !of.with_mstress && of.is_jericho() == Some(jericho)
            };
            (
                side(form, &["best", "proper"], &is(true)),
                side(form, &["native"], &is(false)),
            )
        }
        Rule::BesideMstress {
            form, placements, ..
        } => (
            side(form, placements, &|of| of.with_mstress),
            side(form, placements, &|of| !of.with_mstress),
        ),
        Rule::Cannot(_) => (None, None),
    };
    let (over, under) = over.zip(under)?;
    Some(format!(
        "Both sides are in these files, but under conditions that are never divided, or with other numbers of threads. For example: {}, and {}. Name the same targets in both commands, and the same --seconds: without it, the size of the data follows the speed of the device.",
        named(&over.conditions),
        named(&under.conditions)
    ))
}

fn of_placements(quotient: Quotient, of: &OfMachine) -> Vec<Quote> {
    let blocks = of
        .blocks
        .iter()
        .filter(|block| !block.conditions.with_mstress);
    let quotes = blocks.flat_map(|block| {
        let over = find(block, quotient.form, quotient.over);
        let under = find(block, quotient.form, quotient.under);
        match over.zip(under) {
            Some((over, under)) => {
                let quotes = quotes(over, under, quotient.measure, quotient.at);
                on(&block.conditions, quotes)
            }
            None => vec![],
        }
    });
    quotes.take(MOST + 1).collect()
}

/// Names the conditions of quotients.
fn on(conditions: &Conditions, mut quotes: Vec<Quote>) -> Vec<Quote> {
    for quote in &mut quotes {
        quote.of = format!("{}; {}", named(conditions), quote.of);
    }
    quotes
}

/// Names conditions with the size of the data.
fn named(conditions: &Conditions) -> String {
    let sizes = match (conditions.data_bytes, conditions.as_paper) {
        (0, _) => String::new(),
        (bytes, false) => format!(", {} of data", text::bytes(bytes)),
        (bytes, true) => format!(", at most {} of data as in the paper", text::bytes(bytes)),
    };
    conditions.name() + &sizes
}

fn of_stacks(form: (&str, &str), threads: u32, of: &OfMachine) -> Vec<Quote> {
    let blocks = |is_jericho: bool, placements: &'static [&'static str]| {
        let is_side = move |block: &&Block| {
            !block.conditions.with_mstress && block.conditions.is_jericho() == Some(is_jericho)
        };
        of.blocks
            .iter()
            .filter(is_side)
            .filter_map(move |block| Some((block, find(block, form, placements)?)))
    };
    let others = || blocks(false, &["native"]);
    let pairs = blocks(true, &["best", "proper"])
        .flat_map(|jericho| others().map(move |other| (jericho, other)));
    let is_alike = |((one, _), (other, _)): &((&Block, _), (&Block, _))| {
        let rest = |block: &Block| {
            let of = &block.conditions;
            (of.data_bytes, of.as_paper, of.generator.to_owned())
        };
        rest(one) == rest(other)
    };
    let quotes = pairs
        .filter(is_alike)
        .flat_map(|((mine, over), (theirs, under))| {
            let name = |block: &Block| named(&block.conditions);
            let mut quotes = quotes(over, under, Measure::Throughput, At::Threads(threads));
            for quote in &mut quotes {
                quote.of = format!("{} over {}; {}", name(mine), name(theirs), quote.of);
            }
            quotes
        });
    quotes.take(MOST + 1).collect()
}

fn beside_mstress(
    form: (&str, &str),
    placements: &[&str],
    threads: u32,
    of: &OfMachine,
) -> Vec<Quote> {
    let beside = of
        .blocks
        .iter()
        .filter(|block| block.conditions.with_mstress);
    let quotes = beside.flat_map(|block| {
        let alone = of.blocks.iter().find(|other| {
            let same = Conditions {
                with_mstress: true,
                ..other.conditions.clone()
            };
            !other.conditions.with_mstress && same == block.conditions
        });
        let pair = alone.and_then(|alone| {
            let over = find(block, form, placements)?;
            Some((over, find(alone, form, &[over.placement])?))
        });
        pair.map_or(vec![], |(over, under)| {
            let quotes = quotes(over, under, Measure::Throughput, At::Threads(threads));
            on(&block.conditions, quotes)
        })
    });
    quotes.take(MOST + 1).collect()
}

/// Finds the first of the placements that the form of the workload was measured with.
fn find<'a, 'b>(
    block: &'b Block<'a>,
    (workload, variant): (&str, &str),
    placements: &[&str],
) -> Option<&'b Series<'a>> {
    if block.conditions.workload != workload {
        return None;
    }
    let variant = block.variants.iter().find(|found| found.name == variant)?;
    let named = |name: &&str| {
        variant
            .series
            .iter()
            .find(|series| series.placement == *name)
    };
    placements.iter().find_map(named)
}

/// Divides two series at one number of threads, or over all of them.
fn quotes(over: &Series, under: &Series, measure: Measure, at: At) -> Vec<Quote> {
    let shared: Vec<u32> = over
        .points
        .keys()
        .copied()
        .filter(|threads| under.points.contains_key(threads))
        .collect();
    if measure == Measure::ThroughputOfNode {
        let wanted = match at {
            At::Threads(wanted) if shared.contains(&wanted) => Some(wanted),
            _ => shared.last().copied(),
        };
        return wanted.map_or(vec![], |threads| by_node(over, under, threads));
    }
    let divided = |threads: u32| {
        let (over, under) = (&over.points[&threads], &under.points[&threads]);
        let of = |runs: &[&Run]| values(runs, |run| value(run, measure));
        Some((threads, ratio(&of(under), &of(over))?))
    };
    let all: Vec<(u32, Ratio)> = shared
        .iter()
        .filter_map(|threads| divided(*threads))
        .collect();
    let quote = |(threads, ratio): (u32, Ratio)| Quote {
        ratio,
        of: sides(over, under, threads),
        threads: Some(threads),
    };
    let found = match at {
        At::Threads(wanted) => {
            let exact = all.iter().find(|(threads, _)| *threads == wanted);
            exact.or(all.last()).copied().map(quote)
        }
        At::Most => all.last().copied().map(quote),
        At::Largest(from) | At::Smallest(from) => {
            let enough = all.iter().filter(|(threads, _)| *threads >= from);
            let by = |one: &&(u32, Ratio), other: &&(u32, Ratio)| {
                one.1.estimate.total_cmp(&other.1.estimate)
            };
            let picked = match at {
                At::Smallest(_) => enough.min_by(by),
                _ => enough.max_by(by),
            };
            // The interval of a picked number does not hold: the more numbers there are, the further from 1 the picked one is by chance.
            picked.map(|(threads, ratio)| {
                let interval = None;
                quote((*threads, Ratio { interval, ..*ratio }))
            })
        }
        At::Mean => {
            let sum: f64 = all.iter().map(|(_, ratio)| ratio.estimate).sum();
            (!all.is_empty()).then(|| Quote {
                ratio: Ratio {
                    estimate: sum / all.len() as f64,
                    interval: None,
                },
                of: format!(
                    "{} over {}, {}",
                    over.placement,
                    under.placement,
                    text::count(all.len(), "number") + " of threads"
                ),
                threads: None,
            })
        }
    };
    found.into_iter().collect()
}

fn by_node(over: &Series, under: &Series, threads: u32) -> Vec<Quote> {
    let (dividend, divisor) = (&over.points[&threads], &under.points[&threads]);
    let mut nodes: Vec<u16> = dividend
        .iter()
        .flat_map(|run| run.throughput_bytes_per_s_by_node.keys().copied())
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    let of_node = |node: u16| {
        let of = |runs: &[&Run]| {
            values(runs, |run| {
                run.throughput_bytes_per_s_by_node.get(&node).copied()
            })
        };
        let ratio = ratio(&of(divisor), &of(dividend))?;
        Some(Quote {
            ratio,
            of: format!("devices of node {node}: {}", sides(over, under, threads)),
            threads: Some(threads),
        })
    };
    nodes.into_iter().filter_map(of_node).collect()
}

fn sides(over: &Series, under: &Series, threads: u32) -> String {
    let runs = |series: &Series| series.points[&threads].len();
    let placements = match over.placement == under.placement {
        true => over.placement.to_owned(),
        false => format!("{} over {}", over.placement, under.placement),
    };
    let counts = match (runs(over), runs(under)) {
        (1, 1) => "1 run of each".to_owned(),
        (one, other) if one == other => format!("{one} runs of each"),
        (one, other) => format!("{one} and {other} runs"),
    };
    format!(
        "{placements}, {}, {counts}",
        text::count(threads as usize, "thread")
    )
}

fn value(run: &Run, measure: Measure) -> Option<f64> {
    match measure {
        Measure::Throughput | Measure::ThroughputOfNode => Some(run.throughput_bytes_per_s),
        Measure::CpioSystem => run.cpio.map(|cycles| cycles.system),
        Measure::CpioIoWait => run.cpio.map(|cycles| cycles.io_wait),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::run;
    use crate::groups::by_machine;
    use crate::papers::{FIGURES, Value};

    fn figure(place: &str, what: &str) -> &'static Figure {
        let found = FIGURES
            .iter()
            .find(|figure| figure.place.starts_with(place) && figure.what.contains(what));
        found.unwrap_or_else(|| panic!("no {place} {what}"))
    }

    fn first(figure: &Figure, runs: &[Run]) -> Quote {
        match answer(figure, &by_machine(runs)[0]) {
            Answer::Measured(quotes) => quotes[0].clone(),
            Answer::No(reason) => panic!("{reason}"),
        }
    }

    fn reason(figure: &Figure, runs: &[Run]) -> String {
        match answer(figure, &by_machine(runs)[0]) {
            Answer::Measured(quotes) => panic!("{quotes:?}"),
            Answer::No(reason) => reason,
        }
    }

    #[test]
    fn a_quotient_is_at_the_papers_threads_or_at_the_most_that_both_sides_have() {
        let form = ("scan", "randread");
        let mut runs = vec![
            run(form, "proper", 2, 3e9),
            run(form, "worst", 2, 2e9),
            run(form, "worst", 8, 1e9),
        ];
        let best = figure("figure 10", "best over worst");
        let quote = first(best, &runs);
        assert_eq!((quote.ratio.estimate, quote.threads), (1.5, Some(2)));
        assert_eq!(
            quote.of,
            "/mnt/data, 256 MiB of data; proper over worst, 2 threads, 1 run of each"
        );
        runs.extend([run(form, "best", 64, 8e9), run(form, "worst", 64, 1e9)]);
        let quote = first(best, &runs);
        assert_eq!((quote.ratio.estimate, quote.threads), (8.0, Some(64)));
    }

    #[test]
    fn sides_under_other_conditions_are_not_divided() {
        let form = ("scan", "randread");
        let mut runs = vec![run(form, "best", 2, 3e9), run(form, "worst", 2, 2e9)];
        runs[1].data_bytes = 1;
        let best = figure("figure 10", "best over worst");
        let unlike = reason(best, &runs);
        assert!(
            unlike.contains("256 MiB of data, and /mnt/data, 1 B"),
            "{unlike}"
        );
        let missing = reason(best, &runs[..1]);
        assert!(
            missing.contains("jericho bench scan with --placement best and with worst"),
            "{missing}"
        );
    }

    #[test]
    fn the_largest_and_the_mean_difference_are_over_all_numbers_of_threads() {
        let form = ("dd", "read-512k");
        let runs: Vec<Run> = [(1, 1.0), (2, 1.5), (4, 1.1)]
            .into_iter()
            .flat_map(|(threads, gain)| {
                [
                    run(form, "proper", threads, gain * 1e9),
                    run(form, "bad", threads, 1e9),
                ]
            })
            .collect();
        let largest = first(figure("figure 13", "largest"), &runs);
        assert_eq!((largest.ratio.estimate, largest.threads), (1.5, Some(2)));
        // A larger difference in the other direction is none that the paper has.
        let mut more = runs.clone();
        more.extend([run(form, "proper", 8, 1e8), run(form, "bad", 8, 1e9)]);
        let largest = first(figure("figure 13", "largest"), &more);
        assert_eq!((largest.ratio.estimate, largest.threads), (1.5, Some(2)));
        // The largest of several has no interval, however many runs there are.
        let many: Vec<Run> = (0..4).flat_map(|_| runs.clone()).collect();
        let largest = first(figure("figure 13", "largest"), &many);
        assert_eq!(largest.ratio.interval, None);
        let mean = first(figure("figure 13", "mean"), &runs);
        assert!((mean.ratio.estimate - 1.2).abs() < 1e-9, "{mean:?}");
    }

    #[test]
    fn cycles_are_divided_by_their_kind_and_streams_by_node() {
        let form = ("fsmark", "files");
        let mut runs = vec![run(form, "TRLCPL", 128, 1e9), run(form, "TRRCPR", 128, 1e9)];
        runs[1].cpio.as_mut().unwrap().io_wait = 230.0;
        let waits = first(figure("figure 5(a)", "I/O wait"), &runs);
        assert!((waits.ratio.estimate - 2.3).abs() < 1e-9, "{waits:?}");
        runs[1].cpio = None;
        let missing = reason(figure("figure 5(a)", "I/O wait"), &runs);
        assert!(missing.contains("--as-paper"), "{missing}");
        let form = ("stream", "records-64k");
        // With two threads, only the first set of devices is used.
        let sides = ["TRLCPL", "TRRCPR"];
        let few = sides.map(|placement| run(form, placement, 2, 9e9));
        let mut runs = sides.map(|placement| run(form, placement, 4, 1e9)).to_vec();
        runs.extend(few);
        runs[1].throughput_bytes_per_s_by_node = [(0, 4e8), (1, 3e8)].into();
        let Answer::Measured(quotes) =
            answer(figure("figure 5(d)", "Stream"), &by_machine(&runs)[0])
        else {
            panic!("no quotient");
        };
        let estimates: Vec<f64> = quotes.iter().map(|quote| quote.ratio.estimate).collect();
        assert_eq!(estimates, [0.8, 0.6]);
    }

    #[test]
    fn a_run_beside_mstress_is_divided_by_the_same_run_alone() {
        let form = ("zmio", "read-1m");
        let mut runs = vec![
            run(form, "TLORPLIR", 8, 1e9),
            run(form, "TLORPLIR", 8, 7.5e8),
        ];
        runs[1].with_mstress = true;
        let quote = first(figure("figure 4(c)", "mstress"), &runs);
        assert_eq!(quote.ratio.estimate, 0.75);
        let loss = figure("figure 4(b)", "remote over local transfers");
        assert_eq!(loss.value, Value::Between(-40.0, -8.0));
    }

    #[test]
    fn quotients_name_their_conditions_and_more_than_the_shown_ones_are_noticed() {
        let mut runs = Vec::new();
        for target in 0..6 {
            for placement in ["best", "worst"] {
                let mut run = run(("scan", "randread"), placement, 2, 1e9);
                run.targets = vec![format!("/mnt/{target}")];
                run.path = "fast".into();
                runs.push(run);
            }
        }
        let machines = by_machine(&runs);
        let Answer::Measured(quotes) = answer(figure("figure 10", "best over worst"), &machines[0])
        else {
            panic!("no quotient");
        };
        assert_eq!(quotes.len(), MOST + 1);
        let of = &quotes[1].of;
        assert!(of.starts_with("/mnt/1 (Jericho, fast path"), "{of}");
    }

    #[test]
    fn one_node_and_what_no_file_can_have_get_a_reason() {
        let mut runs = vec![
            run(("scan", "randread"), "best", 2, 3e9),
            run(("scan", "randread"), "worst", 2, 2e9),
        ];
        for run in &mut runs {
            run.machine.nodes = 1;
        }
        assert!(reason(figure("figure 10", "best over worst"), &runs).contains("one node"));
        assert!(reason(figure("figure 6", "Dedup"), &runs).contains("left out"));
        assert!(reason(figure("figure 17", "NVM"), &runs).contains("Hardware"));
    }

    /// The values that the task of this page names, in the order of the papers.
    #[test]
    fn all_figures_that_were_asked_for_are_there_once() {
        let has = |value: Value| {
            FIGURES
                .iter()
                .filter(|figure| figure.value == value)
                .count()
        };
        for times in [3.3, 2.9, 1.8, 3.4, 2.3, 2.8, 1.7, 3.6, 5.5, 2.4, 2.25, 2.57] {
            assert_eq!(has(Value::Times(times)), 1, "{times}");
        }
        // Jericho's figure 9, and Tyche's figure 15.
        assert_eq!(has(Value::Times(2.0)), 2);
        for percent in [
            218.0, 89.0, 60.0, 11.0, -5.0, -23.0, 40.0, 15.0, 130.0, 57.0, 69.0, -16.0, -19.0,
            23.7, 22.1, 85.0, 37.6, 84.8, 76.0, 66.2, 64.9, 9.9, 24.0, 5.0, 21.4, 55.4,
        ] {
            assert_eq!(has(Value::Percent(percent)), 1, "{percent}");
        }
        assert_eq!(has(Value::Between(-27.0, -14.0)), 1);
    }
}
