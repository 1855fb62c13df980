//! Compares a Jericho remote device with NBD and AoE; see docs/performance/method.md.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use jericho_bench::Result;
use jericho_bench::remote::plan::{Pinning, Plan};
use jericho_bench::remote::record::Record;
use jericho_bench::remote::{
    conditions, failover, faulty, hosts, libnbd, main_table, raw, scaling, senders,
};
use jericho_sys::affinity;

/// Compares a Jericho remote device with NBD and AoE, over virtual interfaces between network namespaces.
#[derive(Parser)]
struct Arguments {
    /// The jericho command.
    #[arg(long, default_value = "target/release/jericho")]
    jericho: PathBuf,
    /// Directory for remote.md and remote.jsonl.
    #[arg(long, default_value = "target/remote")]
    out: PathBuf,
    /// Rounds of each side [default: 7, quick: 3].
    #[arg(long)]
    rounds: Option<u32>,
    /// Milliseconds that a side is measured in a round [default: 1000, quick: 300].
    #[arg(long)]
    time_ms: Option<u64>,
    /// A few minutes; not for quoting.
    #[arg(long)]
    quick: bool,
    /// Lets all processes run on all CPUs. Otherwise the initiator has CPU 0, and the targets have CPU 1.
    #[arg(long)]
    unpinned: bool,
    /// Only these tables: main, links, libnbd, scaling, senders, failover, faulty.
    #[arg(long, value_delimiter = ',')]
    tables: Vec<String>,
    /// Only rows whose name contains one of these.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Answers raw frames on an interface. The run starts this process on the other host.
    #[arg(long, hide = true)]
    answer: Option<String>,
}

/// Measures a table. Returns it as Markdown.
type Table = fn(&Plan, &mut Record) -> Result<String>;

fn measure(plan: &Plan, tables: &[String], record: &mut Record) -> Result<String> {
    let runs: [(&str, Table); 7] = [
        ("main", main_table::run),
        ("links", main_table::links),
        ("libnbd", libnbd::run),
        ("scaling", scaling::run),
        ("senders", senders::run),
        ("failover", failover::run),
        ("faulty", faulty::run),
    ];
    let conditions = conditions::lines(plan)?;
    record.write(&serde_json::json!({"table": "conditions", "lines": conditions}))?;
    let mut texts = vec![format!("- {}\n", conditions.join("\n- "))];
    println!("{}", texts[0]);
    for (name, run) in runs {
        if tables.is_empty() || tables.iter().any(|table| table == name) {
            eprintln!("table {name}");
            let text = run(plan, record).map_err(|e| format!("table {name}: {e}"))?;
            println!("{text}");
            texts.push(text);
        }
    }
    Ok(texts.join("\n"))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(interface) = &arguments.answer {
        return raw::answer(interface);
    }
    fs::create_dir_all(&arguments.out)?;
    let out = fs::canonicalize(&arguments.out)?;
    let dir = out.join("memory");
    fs::create_dir_all(&dir)?;
    if !hosts::enter(&dir)? {
        return Ok(());
    }
    // One CPU is no choice.
    let has_two = std::thread::available_parallelism()?.get() > 1;
    let pinning = (has_two && !arguments.unpinned).then_some(Pinning {
        initiator: 0,
        target: 1,
    });
    if let Some(cpus) = pinning {
        // Before any thread is started: all threads of this process inherit it.
        affinity::set(None, &[cpus.initiator])?;
    }
    let pick = |full, quick| if arguments.quick { quick } else { full };
    let plan = Plan {
        jericho: std::path::absolute(&arguments.jericho)?,
        dir,
        rounds: arguments.rounds.unwrap_or(pick(7, 3)).max(1),
        time: Duration::from_millis(arguments.time_ms.unwrap_or(pick(1000, 300).into())),
        is_quick: arguments.quick,
        pinning,
        only: arguments.only,
    };
    let mut record = Record::create(&out.join("remote.jsonl"))?;
    let text = measure(&plan, &arguments.tables, &mut record)?;
    fs::write(out.join("remote.md"), text)?;
    eprintln!("written to {}", out.join("remote.{md,jsonl}").display());
    Ok(())
}
