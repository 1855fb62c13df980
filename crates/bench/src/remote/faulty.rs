//! Links that lose, reorder, repeat and damage frames: `jericho wire` between the two hosts, on a third one.

use std::fmt::Write as _;
use std::fs;

use crate::Result;
use crate::remote::check;
use crate::remote::hosts::{Host, Running, until};
use crate::remote::jericho::Jericho;
use crate::remote::load::Load;
use crate::remote::modes::{Behind, Mode, PLAIN};
use crate::remote::plan::Plan;
use crate::remote::record::{Record, ratios, spread};
use crate::remote::sides::{HERE, Pair, THERE, nbd, number};
use crate::remote::targets;

const TABLE: &str = "faulty";
/// The interfaces of the host between the two.
const BETWEEN: [&str; 2] = ["wa", "wb"];
/// A fault makes the throughput uneven, so each measurement is longer than in other tables.
const LONGER: u32 = 3;

/// Faults: name, options of `jericho wire`, and what Jericho must reach relative to a link without faults. The first one is that link.
const FAULTS: [(&str, &[&str], Option<f64>); 7] = [
    ("none", &[], None),
    ("0.1 % lost", &["--loss", "0.1%"], Some(0.9)),
    ("1 % lost", &["--loss", "1%"], Some(0.6)),
    ("5 % lost", &["--loss", "5%"], Some(0.2)),
    ("10 % reordered", &["--reorder", "10%"], Some(0.9)),
    ("10 % repeated", &["--duplicate", "10%"], Some(0.9)),
    ("1 % damaged", &["--corrupt", "1%"], None),
];
const LOADS: [Load; 2] = [
    Load::sequential(false, 128 << 10),
    Load::sequential(true, 128 << 10),
];

/// The target has memory behind it, so that bytes can be compared.
const MODE: Mode = Mode {
    name: "jericho-memory",
    behind: Behind::Memory,
    ..PLAIN
};

/// A host between two others.
struct Middle {
    host: Host,
}

impl Middle {
    /// Starts to forward with faults.
    fn forward(&self, plan: &Plan, options: &[&str], seed: u32) -> Result<Running> {
        let log = plan.dir.join("wire.log");
        let mut command = self.host.command(&plan.jericho.display().to_string());
        command.arg("wire").args(BETWEEN).args(options);
        command.args(["--seed", &seed.to_string()]);
        let running = self.host.start(&mut command, &log)?;
        until("jericho wire", || {
            Ok(fs::read_to_string(&log)?.contains("forwarding between"))
        })?;
        Ok(running)
    }
}

/// Measures the table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let middle = Middle {
        host: Host::anywhere()?,
    };
    let far = Host::of_targets(plan)?;
    middle.host.join(HERE, BETWEEN[0])?;
    middle.host.join_to(BETWEEN[1], &far, THERE)?;
    number(&far, HERE, THERE)?;
    let clean = middle.forward(plan, &[], 0)?;
    let target = targets::jericho(plan, &far, &MODE, &[THERE])?;
    let client = Jericho::attach(&MODE.attach_config(&[HERE])?)?;
    let mut sides = [
        (MODE.name, Pair::new(Box::new(client), target)),
        ("nbd", nbd(plan, &far)?),
    ];
    for (_, pair) in &mut sides {
        check::fill(&mut *pair.client)?;
    }
    clean.end()?;
    // By side, load and fault.
    let mut rates = sides
        .each_ref()
        .map(|_| LOADS.map(|_| FAULTS.map(|_| Vec::new())));
    for round in 0..plan.rounds {
        for (at, (fault, options, _)) in FAULTS.into_iter().enumerate() {
            eprintln!("{fault}: round {} of {}", round + 1, plan.rounds);
            let wire = middle.forward(plan, options, round + 1)?;
            for ((side, pair), rates) in sides.iter_mut().zip(&mut rates) {
                let failed = |e| format!("{side}, {fault}: {e}");
                for (load, rates) in LOADS.iter().zip(rates) {
                    let reached = pair.measure(load, plan.time * LONGER).map_err(failed)?;
                    let row = format!("{}, {fault}", load.name());
                    let key = (TABLE, row.as_str(), *side);
                    record.reached(key, round, &reached, load.block_bytes)?;
                    rates[at].push(reached.rate_per_s);
                }
                check::check(side, &mut *pair.client, u64::from(round) << 8 | at as u64)
                    .map_err(failed)?;
            }
            wire.end()?;
        }
    }
    Ok(markdown(
        plan,
        &sides.each_ref().map(|(name, _)| *name),
        &rates,
    ))
}

type Rates = [[Vec<f64>; FAULTS.len()]; LOADS.len()];

fn markdown(plan: &Plan, sides: &[&str; 2], rates: &[Rates; 2]) -> String {
    let mut text = format!(
        "## Faults of the link\n\n`jericho wire` forwards between the two hosts, on any CPU. Frames are reordered by at most 16. Shares are of the throughput without faults in the same round; {} rounds. \
         After each measurement, written bytes were read and compared.\n\n| load | faults |",
        plan.rounds
    );
    for side in sides {
        let _ = write!(text, " {side}, MB/s | {side}, share |");
    }
    text.push_str(" target |\n|---|---|---|---|---|---|---|\n");
    for (n, load) in LOADS.iter().enumerate() {
        for (at, (fault, _, target)) in FAULTS.iter().enumerate() {
            let _ = write!(text, "| {} | {fault} |", load.name());
            for rates in rates {
                let (values, clean) = (&rates[n][at], &rates[n][0]);
                let mb_per_s = values
                    .iter()
                    .map(|rate| rate * load.block_bytes as f64 / 1e6);
                let _ = write!(
                    text,
                    " {} | **{}** |",
                    spread(&mb_per_s.collect::<Vec<_>>()),
                    spread(&ratios(values, clean))
                );
            }
            let target = target.map_or("-".into(), |target| target.to_string());
            let _ = writeln!(text, " {target} |");
        }
    }
    text
}
