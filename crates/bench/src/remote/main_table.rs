//! The main table: 4 KiB at random offsets and large blocks in order, on all sides in turn.

use std::fmt::Write as _;

use crate::Result;
use crate::remote::load::{Load, Reached};
use crate::remote::plan::Plan;
use crate::remote::raw::{Ceilings, Raw};
use crate::remote::record::{Record, median, ratios, spread};
use crate::remote::sides::{HERE, Sides, THERE};
use crate::stats::number;

const TABLE: &str = "main";

/// Returns the rows.
fn loads() -> Vec<Load> {
    let mut loads = Vec::new();
    for depth in [1, 16, 64] {
        loads.extend([false, true].map(|is_write| Load::random(is_write, depth)));
    }
    for block_bytes in [128 << 10, 1 << 20] {
        loads.extend([false, true].map(|is_write| Load::sequential(is_write, block_bytes)));
    }
    loads
}

/// A row, and what each side reached in each round.
struct Row {
    load: Load,
    reached: Vec<Vec<Reached>>,
}

impl Row {
    fn rates(&self, side: usize) -> Vec<f64> {
        self.reached[side].iter().map(|r| r.rate_per_s).collect()
    }

    fn cpu(&self, side: usize, of: impl Fn(&Reached) -> f64) -> String {
        let values: Vec<f64> = self.reached[side].iter().map(of).collect();
        number(median(&values))
    }

    /// Compares a side with the ceilings of its rounds: the time of a transfer with that of an echo of 4 KiB, or the throughput with that of a
    /// stream.
    fn of_ceiling(&self, side: usize, ceilings: &[Ceilings]) -> String {
        let rates = self.rates(side);
        let pairs = rates.iter().zip(ceilings);
        if self.load.is_random && self.load.depth > 1 {
            return "-".into();
        }
        if self.load.is_random {
            let times: Vec<f64> = pairs.map(|(rate, c)| 1e6 / rate / c.ping_4k_us).collect();
            return format!("{} x echo", spread(&times));
        }
        let block_bytes = self.load.block_bytes as f64;
        let shares: Vec<f64> = pairs
            .map(|(rate, c)| rate * block_bytes / c.stream_bytes_per_s)
            .collect();
        format!("{} of stream", spread(&shares))
    }
}

/// Measures the main table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let sides = Sides::new(plan)?;
    let title = format!(
        "## Jericho, NBD and AoE\n\nOne pair of interfaces, MTU 9000. The AoE target lets {} frames be in progress.",
        sides.aoe_window
    );
    measure(plan, record, (TABLE, &title), sides)
}

/// Measures packet sockets and XDP sockets. Returns the table as Markdown.
pub fn links(plan: &Plan, record: &mut Record) -> Result<String> {
    if !is_real_root() {
        return Ok("Packet sockets and XDP sockets were not compared: XDP needs root.\n".into());
    }
    let title = "## Packet sockets and XDP sockets\n\nA pair of interfaces each, MTU 9000.";
    measure(plan, record, ("links", title), Sides::with_links(plan)?)
}

/// Returns whether this process is root, and not only in a user namespace.
fn is_real_root() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn measure(
    plan: &Plan,
    record: &mut Record,
    (table, title): (&str, &str),
    mut sides: Sides,
) -> Result<String> {
    let mut raw = Raw::new(&sides.host, HERE, THERE, &plan.dir.join("answer.log"))?;
    let selected = loads()
        .into_iter()
        .filter(|load| plan.selects(&load.name()));
    let mut rows: Vec<Row> = selected
        .map(|load| Row {
            load,
            reached: vec![Vec::new(); sides.sides.len()],
        })
        .collect();
    let mut ceilings = Vec::new();
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        let ceiling = raw.measure(plan.time / 4)?;
        record
            .write(&serde_json::json!({"table": "ceilings", "round": round, "reached": ceiling}))?;
        ceilings.push(ceiling);
        for row in &mut rows {
            let name = row.load.name();
            let count = sides.sides.len();
            // The first side changes from round to round.
            for side in (0..count).map(|turn| (turn + round as usize) % count) {
                let reached = sides.measure(side, &row.load, plan.time)?;
                let key = (table, name.as_str(), sides.sides[side].name);
                record.reached(key, round, &reached, row.load.block_bytes)?;
                row.reached[side].push(reached);
            }
        }
    }
    Ok(markdown(title, plan, &sides, &rows, &ceilings))
}

fn markdown(
    title: &str,
    plan: &Plan,
    sides: &Sides,
    rows: &[Row],
    ceilings: &[Ceilings],
) -> String {
    let of = |value: fn(&Ceilings) -> f64| {
        let values: Vec<f64> = ceilings.iter().map(value).collect();
        spread(&values)
    };
    let mut text = format!(
        "{title} Raw frames: an echo of 64 bytes takes {} us, one of 4 KiB {} us; a stream of frames of 8 KiB carries {} MB/s. \
         Median (least..greatest) of {} rounds; ratios are of the same round. CPU time in us for each transfer, as the kernel accounts it.\n\n",
        of(|c| c.ping_64b_us),
        of(|c| c.ping_4k_us),
        of(|c| c.stream_bytes_per_s / 1e6),
        plan.rounds,
    );
    let ours: Vec<usize> = (0..sides.sides.len())
        .filter(|&side| sides.sides[side].is_ours)
        .collect();
    text.push_str("| load | side | transfers/s | MB/s |");
    for &our in &ours {
        let _ = write!(text, " {} to it |", sides.sides[our].name);
    }
    text.push_str(" to raw frames | CPU initiator | CPU target | CPU machine |\n|---|---|---|---|");
    text.push_str(&"---|".repeat(ours.len() + 4));
    text.push('\n');
    for row in rows {
        for (side, described) in sides.sides.iter().enumerate() {
            let rates = row.rates(side);
            let mb_per_s = median(&rates) * row.load.block_bytes as f64 / 1e6;
            let _ = write!(
                text,
                "| {} | {} | {} | {} |",
                row.load.name(),
                described.name,
                spread(&rates),
                number(mb_per_s)
            );
            for &our in &ours {
                let cell = match our == side {
                    true => "-".into(),
                    false => format!("**{}**", spread(&ratios(&row.rates(our), &rates))),
                };
                let _ = write!(text, " {cell} |");
            }
            let _ = writeln!(
                text,
                " {} | {} | {} | {} |",
                row.of_ceiling(side, ceilings),
                row.cpu(side, |r| r.used.initiator_us),
                row.cpu(side, |r| r.used.target_us),
                row.cpu(side, |r| r.used.machine_us)
            );
        }
    }
    let repeated: Vec<String> = (sides.repetitions().iter())
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    let _ = writeln!(
        text,
        "\nFrames that the client sent again: {}.",
        repeated.join(", ")
    );
    text
}
