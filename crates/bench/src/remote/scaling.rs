//! Throughput over one to four links of 1 Gbit/s each, relative to one link.

use std::fmt::Write as _;

use crate::Result;
use crate::remote::hosts::{Host, Running, run_words};
use crate::remote::jericho::Jericho;
use crate::remote::load::{self, Load};
use crate::remote::modes::PLAIN;
use crate::remote::plan::Plan;
use crate::remote::record::{Record, ratios, spread};
use crate::remote::targets;
use crate::remote::usage::Usage;

const TABLE: &str = "scaling";
/// Interfaces of the initiator.
pub const HERE: [&str; 4] = ["i0", "i1", "i2", "i3"];
/// Interfaces of the target.
pub const THERE: [&str; 4] = ["t0", "t1", "t2", "t3"];
/// Throughput that each number of links must reach, relative to one.
const TARGETS: [Option<f64>; 4] = [None, Some(1.9), Some(2.8), Some(3.7)];
/// Queue of a link. A burst is more than a frame; the queue holds 6 MB, as much as the ring of a network card with 700 frames.
pub const RATE: &str = "tbf rate 1gbit burst 128kb latency 50ms";

/// The loads of the tables of links.
pub const LOADS: [Load; 2] = [
    Load::sequential(false, 128 << 10),
    Load::sequential(true, 128 << 10),
];

/// Two hosts with four links of limited rate, and a target on all of them.
pub struct Linked {
    /// The target.
    pub target: Running,
    /// The other host.
    pub host: Host,
}

impl Linked {
    /// Makes them.
    pub fn new(plan: &Plan) -> Result<Linked> {
        let host = Host::of_targets(plan)?;
        for (here, there) in HERE.into_iter().zip(THERE) {
            host.join(here, there)?;
            run_words(&format!("tc qdisc add dev {here} root {RATE}"))?;
            host.run(&format!("tc qdisc add dev {there} root {RATE}"))?;
        }
        let target = targets::jericho(plan, &host, &PLAIN, &THERE)?;
        Ok(Linked { target, host })
    }

    /// Attaches the device over the first links.
    pub fn attach(&self, links: usize) -> Result<Jericho> {
        Jericho::attach(&PLAIN.attach_config(&HERE[..links])?)
    }

    /// Returns the processes whose time counts.
    pub fn usage(&self) -> Usage {
        Usage {
            targets: vec![self.target.pid()],
        }
    }
}

/// Measures the table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let linked = Linked::new(plan)?;
    let usage = linked.usage();
    let mut rates = LOADS.map(|_| vec![Vec::new(); HERE.len()]);
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        for turn in 0..HERE.len() {
            let links = (turn + round as usize) % HERE.len() + 1;
            let mut client = linked.attach(links)?;
            for (load, rates) in LOADS.iter().zip(&mut rates) {
                let reached = load::measure(&mut client, load, &usage, plan.time)?;
                let row = format!("{}, links {links}", load.name());
                let key = (TABLE, row.as_str(), PLAIN.name);
                record.reached(key, round, &reached, load.block_bytes)?;
                rates[links - 1].push(reached.rate_per_s);
            }
        }
    }
    let mut text = format!(
        "## Links of 1 Gbit/s\n\nEach link is a pair of interfaces with `{RATE}` on both; MTU 9000. The throughput of one link is 1; {} rounds.\n\n\
         | load | links | MB/s | to one link | target |\n|---|---|---|---|---|\n",
        plan.rounds
    );
    for (load, rates) in LOADS.iter().zip(&rates) {
        for (links, values) in (1..).zip(rates) {
            let mb_per_s = |rate: &f64| rate * load.block_bytes as f64 / 1e6;
            let target = TARGETS[links - 1].map_or("-".into(), |target| target.to_string());
            let _ = writeln!(
                text,
                "| {} | {links} | {} | **{}** | {target} |",
                load.name(),
                spread(&values.iter().map(mb_per_s).collect::<Vec<_>>()),
                spread(&ratios(values, &rates[0]))
            );
        }
    }
    Ok(text)
}
