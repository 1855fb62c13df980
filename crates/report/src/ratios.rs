//! The papers' ratios beside those of the results.

use maud::{Markup, html};

use crate::groups::OfMachine;
use crate::line::Evidence;
use crate::measured::{Answer, MOST, Quote, answer, describe};
use crate::papers::{FIGURES, Figure, PAPERS, Prediction, Rule, Value};
use crate::text;

/// Reasons why figures have no value, in the order in which the table refers to them.
#[derive(Default)]
struct Reasons(Vec<String>);

impl Reasons {
    /// Returns the number of a reason, from 1.
    fn number(&mut self, reason: &str) -> usize {
        let known = self.0.iter().position(|known| known == reason);
        known.unwrap_or_else(|| {
            self.0.push(reason.to_owned());
            self.0.len() - 1
        }) + 1
    }
}

/// Shows the table. `names` are those of the machines.
pub fn section(machines: &[OfMachine], names: &[String], predictions: &[Prediction]) -> Markup {
    let mut reasons = Reasons::default();
    let mut tables = Vec::new();
    let mut measured = 0;
    for paper in PAPERS {
        let mut rows = Vec::new();
        for figure in FIGURES.iter().filter(|figure| figure.paper == paper) {
            let answers: Vec<Answer> = machines
                .iter()
                .map(|machine| answer(figure, machine))
                .collect();
            measured += usize::from(
                answers
                    .iter()
                    .any(|answer| matches!(answer, Answer::Measured(_))),
            );
            let cells = cells(figure, machines, names, &answers, &mut reasons);
            rows.push(row(
                figure,
                &cells,
                prediction(figure, predictions).as_deref(),
            ));
        }
        tables.push((paper, rows));
    }
    html! {
        p {
            (measured) " of " (FIGURES.len()) " figures have a value in these files. "
            "Only ratios are compared, because the machines differ. A value is the median of the quotients of each run of one side by each run of the other one. Its 95 % interval follows, if there are at least "
            (crate::statistics::runs_needed()) " runs on each side. "
            "Cost model: what jericho bench --model judged predicts for the paper's machine from bandwidths alone."
        }
        @for (paper, rows) in &tables {
            h3 { (paper.title()) }
            p.soft { (paper.conditions()) }
            table.rows {
                thead { tr {
                    th scope="col" { "Figure" }
                    th scope="col" { "What is compared" }
                    th.number scope="col" { "Paper" }
                    th scope="col" { "These results" }
                } }
                tbody { @for row in rows { (row) } }
            }
        }
        h3 { "Why figures have no value" }
        ol.notes { @for (index, reason) in reasons.0.iter().enumerate() { li id={ "reason-" (index + 1) } { (reason) } } }
    }
}

/// Returns what each machine has to say to a figure.
fn cells(
    figure: &Figure,
    machines: &[OfMachine],
    names: &[String],
    answers: &[Answer],
    reasons: &mut Reasons,
) -> Vec<Markup> {
    match figure.rule {
        Rule::Cannot(reason) => vec![no_value(reason, reasons)],
        _ => {
            let machines = machines.iter().zip(names).zip(answers);
            machines
                .map(|((machine, name), answer)| {
                    cell(figure, machine, name, answer, reasons, answers.len())
                })
                .collect()
        }
    }
}

/// Formats the prediction for a figure as the paper does.
fn prediction(figure: &Figure, predictions: &[Prediction]) -> Option<String> {
    let id = figure.prediction?;
    let value = predictions
        .iter()
        .find(|prediction| prediction.id == id)?
        .value;
    Some(match figure.value {
        Value::Times(_) => times(value),
        Value::Percent(paper) if paper < 0.0 => text::change(-value),
        Value::Between(..) => text::change(-value),
        Value::Percent(_) | Value::Same => text::change(value),
    })
}

fn row(figure: &Figure, cells: &[Markup], predicted: Option<&str>) -> Markup {
    let rule = describe(&figure.rule);
    html! {
        tr {
            td { (figure.place) }
            td { (figure.what) @if !rule.is_empty() { span.rule { "Rule: " (rule) "." } } }
            td.number data-label="Paper" {
                b { (paper_value(figure.value)) }
                @if let Some(predicted) = predicted { span.of { "cost model: " (predicted) } }
            }
            td data-label="These results" { @for cell in cells { (cell) } }
        }
    }
}

fn cell(
    figure: &Figure,
    machine: &OfMachine,
    name: &str,
    answer: &Answer,
    reasons: &mut Reasons,
    count: usize,
) -> Markup {
    let name = (count > 1).then_some(name);
    let tag = match machine.machine.evidence() {
        Evidence::Virtual => Some("virtual nodes: no effect on speed"),
        Evidence::Fake => Some("fake nodes: times say nothing about locality"),
        Evidence::Emulated => Some("emulated: speeds mean nothing"),
        Evidence::Real | Evidence::OneNode => None,
    };
    html! {
        div {
            @if let Some(name) = name { span.tag { (name) } " " }
            @match answer {
                Answer::Measured(quotes) => {
                    @if let Some(tag) = tag { span.tag { (tag) } }
                    @for quote in quotes.iter().take(MOST) { div { b { (quotient(figure.value, quote)) } span.of { (quote.of) } } }
                    @if quotes.len() > MOST { span.of { "Values under more conditions are left out." } }
                }
                Answer::No(reason) => { (no_value(reason, reasons)) }
            }
        }
    }
}

fn no_value(reason: &str, reasons: &mut Reasons) -> Markup {
    let number = reasons.number(reason);
    html! { span.soft { "no value: " a href={ "#reason-" (number) } { "reason " (number) } } }
}

/// Formats a quotient as the paper does.
fn quotient(like: Value, quote: &Quote) -> String {
    let form = |ratio: f64| match like {
        Value::Times(_) => times(ratio),
        _ => text::change((ratio - 1.0) * 100.0),
    };
    let interval = quote.ratio.interval.map_or(String::new(), |(low, high)| {
        format!(" ({} to {})", form(low), form(high))
    });
    form(quote.ratio.estimate) + &interval
}

fn paper_value(value: Value) -> String {
    match value {
        Value::Times(ratio) => format!("{ratio}\u{d7}"),
        Value::Percent(percent) => signed(percent),
        Value::Between(one, other) => format!("{} to {}", signed(one), signed(other)),
        Value::Same => "no noticeable difference".to_owned(),
    }
}

/// Formats a percentage with the digits that the paper has.
fn signed(percent: f64) -> String {
    let sign = if percent < 0.0 { '\u{2212}' } else { '+' };
    format!("{sign}{} %", percent.abs())
}

fn times(ratio: f64) -> String {
    format!("{}\u{d7}", text::number(ratio))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::run;
    use crate::groups::by_machine;

    #[test]
    fn the_table_has_each_figure_its_value_and_its_marks() {
        let form = ("scan", "randread");
        let mut runs = vec![run(form, "best", 2, 3e9), run(form, "worst", 2, 2e9)];
        let shown = |runs: &[crate::line::Run]| {
            let machines = by_machine(runs);
            let names: Vec<String> = (1..=machines.len())
                .map(|number| format!("machine {number}"))
                .collect();
            let predictions = [Prediction {
                id: "jericho-10-best-worst".into(),
                value: 1.97,
            }];
            section(&machines, &names, &predictions).into_string()
        };
        let html = shown(&runs);
        assert_eq!(html.matches("<tr>").count(), FIGURES.len() + PAPERS.len());
        assert!(
            html.contains("<b>5.5\u{d7}</b>") && html.contains("<b>1.50\u{d7}</b>"),
            "{html}"
        );
        assert!(html.contains("cost model: 1.97\u{d7}"), "{html}");
        assert!(
            html.contains("1 of ") && !html.contains("virtual nodes"),
            "{html}"
        );
        assert!(html.contains("\u{2212}27 % to \u{2212}14 %"));
        for run in &mut runs {
            run.machine.topology = "virtual:2".into();
        }
        assert!(shown(&runs).contains("virtual nodes: no effect on speed"));
        let mut other = runs[0].clone();
        other.machine.cpu_model = "QEMU TCG CPU".into();
        runs.push(other);
        let html = shown(&runs);
        assert!(
            html.contains("machine 1") && html.contains("machine 2"),
            "{html}"
        );
    }

    #[test]
    fn quotients_have_the_papers_form_and_their_interval() {
        let quote = Quote {
            ratio: crate::statistics::Ratio {
                estimate: 0.6,
                interval: Some((0.5, 0.7)),
            },
            of: String::new(),
            threads: None,
        };
        assert_eq!(
            quotient(Value::Percent(1.0), &quote),
            "\u{2212}40.0 % (\u{2212}50.0 % to \u{2212}30.0 %)"
        );
        assert_eq!(
            quotient(Value::Times(1.0), &quote),
            "0.60\u{d7} (0.50\u{d7} to 0.70\u{d7})"
        );
    }
}
