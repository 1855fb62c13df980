//! Results for tests.

use crate::line::{Run, parse};

/// Returns the line of a run on two nodes.
pub(crate) fn line() -> String {
    let cycles = |user: f64| {
        format!(
            r#"{{"user":{user:?},"system":200.0,"idle":400.0,"io_wait":100.0,"irq":5.0,"soft_irq":10.0,"steal":0.0}}"#
        )
    };
    format!(
        r#"{{"format":1,"workload":"scan","variant":"randread","targets":["/mnt/data"],"placement":"native","threads":4,"seats":[],"with_mstress":false,"seconds":1.0,"data_bytes":268435456,"as_paper":false,"seed":1,"throughput_bytes_per_s":1e9,"read_bytes_per_s":1e9,"written_bytes_per_s":0.0,"iops":244140.6,"throughput_bytes_per_s_by_node":{{"0":5e8,"1":5e8}},"latency_ns":{{"min":1000,"p50":10000,"p90":15000,"p99":20000,"p99.9":30000,"p99.99":50000,"max":90000,"mean":11000}},"local_share":0.75,"cpu_seconds":{{"user":1.0,"system":2.0,"idle":3.0,"io_wait":0.0,"irq":0.0,"soft_irq":0.0,"steal":0.0}},"device_sectors":2000000,"cpio":{},"cycles_per_moved_sector":{},"sampled":["user","system","idle","io_wait","steal"],"machine":{{"cpu_model":"Example CPU","cpus":16,"nodes":2,"topology":"sysfs","kernel":"6.18","tsc_hz":2.1e9,"jericho":"0.1.0"}},"notes":[]}}"#,
        cycles(50.0),
        cycles(5.0)
    )
}

/// Returns a run that differs from [`line()`] in these properties.
pub(crate) fn run(
    (workload, variant): (&str, &str),
    placement: &str,
    threads: u32,
    throughput_bytes_per_s: f64,
) -> Run {
    let run = parse(line().as_bytes()).expect("the line is right");
    Run {
        workload: workload.into(),
        variant: variant.into(),
        placement: placement.into(),
        threads,
        throughput_bytes_per_s,
        ..run
    }
}
