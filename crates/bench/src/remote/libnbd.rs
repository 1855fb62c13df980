//! The NBD client of this crate beside libnbd, which fio's engine `nbd` uses: the client must not make NBD look slow.

use std::fmt::Write as _;

use crate::Result;
use crate::fio::{Job, Measured};
use crate::remote::hosts::Host;
use crate::remote::load::Load;
use crate::remote::plan::Plan;
use crate::remote::record::{Record, ratios, spread};
use crate::remote::sides::{HERE, THERE, join_segments, nbd, number};

const TABLE: &str = "libnbd";

const LOADS: [Load; 6] = [
    Load::random(false, 1),
    Load::random(true, 1),
    Load::random(false, 16),
    Load::random(true, 16),
    Load::sequential(false, 128 << 10),
    Load::sequential(true, 128 << 10),
];

/// What both have reached, by round.
#[derive(Default)]
struct Row {
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
    fio_rates: Vec<f64>,
    fio_cpu_us: Vec<f64>,
}

/// Runs a load with fio and libnbd.
fn fio(plan: &Plan, load: &Load, uri: &str) -> Result<Measured> {
    let (order, verb) = (
        if load.is_random { "rand" } else { "" },
        if load.is_write { "write" } else { "read" },
    );
    let args = [
        format!("rw={order}{verb}"),
        format!("bs={}", load.block_bytes),
        format!("iodepth={}", load.depth),
        format!("runtime={}ms", plan.time.as_millis()),
        "time_based".into(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Job::on_nbd(uri, &args).run()
}

/// Measures the table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let host = Host::of_targets(plan)?;
    host.join(HERE, THERE)?;
    number(&host, HERE, THERE)?;
    join_segments(&host, HERE, THERE, true)?;
    let mut pair = nbd(plan, &host)?;
    crate::remote::check::fill(&mut *pair.client)?;
    let uri = "nbd://10.0.0.2";
    let mut rows = LOADS.map(|_| Row::default());
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        for (load, row) in LOADS.iter().zip(&mut rows) {
            let reached = pair.measure(load, plan.time)?;
            let name = load.name();
            record.reached((TABLE, &name, "nbd"), round, &reached, load.block_bytes)?;
            row.rates.push(reached.rate_per_s);
            row.cpu_us.push(reached.used.initiator_us);
            let fio = fio(plan, load, uri)?;
            let line = serde_json::json!({"table": TABLE, "row": name, "side": "fio with libnbd", "round": round, "rate_per_s": fio.iops, "initiator_us": fio.cpu_us});
            record.write(&line)?;
            row.fio_rates.push(fio.iops);
            row.fio_cpu_us.push(fio.cpu_us);
        }
    }
    let mut text = format!(
        "## The NBD client and libnbd\n\nfio's engine `nbd` uses libnbd; TSO and GSO on; {} rounds. CPU time in us for each transfer, of the initiator.\n\n\
         | load | this client, transfers/s | fio with libnbd | client to libnbd | CPU, this client | CPU, fio |\n|---|---|---|---|---|---|\n",
        plan.rounds
    );
    for (load, row) in LOADS.iter().zip(&rows) {
        let _ = writeln!(
            text,
            "| {} | {} | {} | **{}** | {} | {} |",
            load.name(),
            spread(&row.rates),
            spread(&row.fio_rates),
            spread(&ratios(&row.rates, &row.fio_rates)),
            spread(&row.cpu_us),
            spread(&row.fio_cpu_us)
        );
    }
    Ok(text)
}
