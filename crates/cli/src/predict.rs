//! `jericho bench --model`: what the cost model predicts. The crate `model` computes; this file reads machines and traces, and prints.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::ExitCode;

use jericho_model::{
    LINE_BYTES_MAX, Machine, NOT_PREDICTED, NotPredicted, Placement, Prediction, Row, SHIPPED,
    Trace, Verdict, changes, named, names, parse, predict_placement, rows, shipped,
};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::{Context, Failure, Outcome, print, print_json};

/// What is read of a machine file at most. The model refuses files that are shorter than this.
const MACHINE_BYTES_MAX: u64 = 8 << 20;

/// Predictions for a placement.
#[derive(Serialize)]
struct Curve {
    placement: String,
    predictions: Vec<Prediction>,
}

#[derive(Serialize)]
struct Output<'a> {
    machine: &'a str,
    curves: &'a [Curve],
}

pub fn run(model: &str, args: &BenchArgs) -> Outcome {
    match model {
        "list" => list(args.json)?,
        "judged" => judged(args.json)?,
        _ => predict(model, args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn predict(model: &str, args: &BenchArgs) -> Result<(), Failure> {
    let machine = machine(model)?;
    let curves = match &args.trace {
        Some(path) => vec![of_trace(&machine, path, &args.threads)?],
        None => of_placements(&machine, args)?,
    };
    if args.json {
        return print_json(&Output {
            machine: &machine.name,
            curves: &curves,
        });
    }
    print(&human(&machine, &curves))
}

/// Reads the machine with this name, or from this file.
fn machine(name: &str) -> Result<Machine, Failure> {
    if let Some(machine) = shipped(name) {
        return machine.map_err(|e| Failure::new(e.to_string()));
    }
    let mut text = String::new();
    let file = File::open(name).map_err(|e| {
        Failure::new(format!(
            "{name}: {e}. It is neither a file nor a machine of the papers: {}",
            known()
        ))
    })?;
    file.take(MACHINE_BYTES_MAX)
        .read_to_string(&mut text)
        .context(name)?;
    parse(name, &text).map_err(|e| Failure::new(e.to_string()))
}

fn known() -> String {
    let names: Vec<&str> = SHIPPED.iter().map(|shipped| shipped.name).collect();
    names.join(", ")
}

/// Returns 1, 2, 4 and so on, and `most`.
fn powers(most: u32) -> Vec<u32> {
    let mut powers: Vec<u32> = (0..32).map(|i| 1 << i).take_while(|n| *n < most).collect();
    powers.push(most);
    powers
}

fn of_placements(machine: &Machine, args: &BenchArgs) -> Result<Vec<Curve>, Failure> {
    let placements: Vec<(String, Placement)> = match &args.placement {
        Some(name) => {
            let placement = named(machine, name).context("--placement")?;
            vec![(name.clone(), placement)]
        }
        None => names(machine),
    };
    let hosts = machine.hosts();
    let cpus: u32 = hosts[0].iter().map(|node| machine.nodes[*node].cpus).sum();
    let threads = if args.threads.is_empty() {
        powers(cpus.max(1))
    } else {
        args.threads.clone()
    };
    let curve = |(name, placement): (String, Placement)| {
        let predict = |threads: &u32| predict_placement(machine, placement, *threads);
        let predictions = threads.iter().map(predict).collect::<Result<_, _>>();
        Ok(Curve {
            predictions: predictions.context(&name)?,
            placement: name,
        })
    };
    placements.into_iter().map(curve).collect()
}

fn of_trace(machine: &Machine, path: &Path, threads: &[u32]) -> Result<Curve, Failure> {
    let name = path.display();
    let mut lines = BufReader::new(File::open(path).context(&name)?);
    let mut trace = Trace::new(machine);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut part = lines.by_ref().take(LINE_BYTES_MAX as u64 + 2);
        if part.read_until(b'\n', &mut line).context(&name)? == 0 {
            break;
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        trace.add(&line).context(&name)?;
    }
    let all = u32::try_from(trace.threads()).unwrap_or(u32::MAX).max(1);
    let threads = if threads.is_empty() {
        powers(all)
    } else {
        threads.to_vec()
    };
    let predictions = threads.iter().map(|threads| trace.predict(*threads));
    Ok(Curve {
        placement: "trace".to_owned(),
        predictions: predictions.collect::<Result<_, _>>().context(&name)?,
    })
}

fn human(machine: &Machine, curves: &[Curve]) -> String {
    let mut text = format!("{}\n\nthreads", machine.name);
    let width = |curve: &Curve| curve.placement.len().max(7) + 2;
    for curve in curves {
        text += &format!("{:>1$}", curve.placement, width(curve));
    }
    text += "  (GB/s)\n";
    let rows = curves.first().map_or(0, |curve| curve.predictions.len());
    for row in 0..rows {
        text += &format!("{:>7}", curves[0].predictions[row].threads);
        for curve in curves {
            let rate = curve.predictions[row].bytes_per_s / 1e9;
            text += &format!("{rate:>0$.2}", width(curve));
        }
        text.push('\n');
    }
    text += "\nwhat limits the last row (threads):\n";
    for curve in curves {
        let limits = curve
            .predictions
            .last()
            .map_or(&[][..], |last| &last.limits);
        let mut names: Vec<String> = limits
            .iter()
            .take(4)
            .map(|limit| format!("{} ({})", limit.what, limit.threads))
            .collect();
        if limits.len() > 4 {
            names.push("...".to_owned());
        }
        text += &format!("  {}: {}\n", curve.placement, names.join(", "));
    }
    text
}

fn list(json: bool) -> Result<(), Failure> {
    if json {
        let names: Vec<&str> = SHIPPED.iter().map(|shipped| shipped.name).collect();
        return print_json(&names);
    }
    let line =
        |shipped: &jericho_model::Shipped| format!("{:<12}{}\n", shipped.name, shipped.description);
    print(&SHIPPED.iter().map(line).collect::<String>())
}

#[derive(Serialize)]
struct Judged {
    rows: Vec<Row>,
    not_predicted: &'static [NotPredicted],
    sensitivity: Vec<jericho_model::Change>,
}

fn judged(json: bool) -> Result<(), Failure> {
    let machine = |name: &str| shipped(name)?.ok();
    let judged = Judged {
        rows: rows(machine).context("the judged rows")?,
        not_predicted: NOT_PREDICTED,
        sensitivity: changes(machine).context("the judged rows")?,
    };
    if json {
        return print_json(&judged);
    }
    let mut text = String::from("  paper   model  bounds          verdict\n");
    for row in &judged.rows {
        let unit = if row.is_percent { "%" } else { "x" };
        let bounds = row.bounds.map_or(String::new(), |(least, most)| {
            format!("{least:.1} to {most:.1}")
        });
        let verdict = match row.verdict {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
            Verdict::Shown => "shown",
        };
        text += &format!(
            "{:>6.1}{unit} {:>6.1}{unit}  {bounds:<15} {verdict:<7} {} [{}]\n",
            row.paper, row.model, row.what, row.id
        );
        if !row.note.is_empty() {
            text += &format!("{:>41}{}\n", "", row.note);
        }
    }
    text += "\nNot predicted:\n";
    for result in judged.not_predicted {
        text += &format!("  {}: {}\n", result.what, result.reason);
    }
    text += "\nWith one figure of the machine 20 % smaller, as it is, and 20 % larger (figures that move a row):\n";
    for change in &judged.sensitivity {
        if change.smaller != change.model || change.larger != change.model {
            text += &format!(
                "{:>8.2} {:>8.2} {:>8.2}  {}: {}\n",
                change.smaller, change.model, change.larger, change.id, change.figure
            );
        }
    }
    print(&text)
}
