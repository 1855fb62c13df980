//! The conditions of a run: machine, versions, and what else uses the CPUs.

use std::fs;
use std::time::Duration;

use jericho_sys::load;

use crate::Result;
use crate::remote::plan::Plan;
use crate::remote::usage::Usage;
use crate::report::{first_line, from_proc};

/// How long the machine is watched before the run.
const WATCH: Duration = Duration::from_secs(1);

/// Returns the conditions, one line each. Watches the machine for a second.
pub fn lines(plan: &Plan) -> Result<Vec<String>> {
    let usage = Usage::default();
    let before = usage.now()?;
    std::thread::sleep(WATCH);
    let busy = usage.now()?.since(&before).per(1.0).machine_us / WATCH.as_micros() as f64;
    // This process may use one only.
    let mut cpus = 0;
    load::cpu_times(|_, _| cpus += 1)?;
    let average = fs::read_to_string("/proc/loadavg")?;
    let package = |name| first_line("dpkg-query", &["-W", "-f", "${Version}", name]);
    Ok(vec![
        format!(
            "CPU: {}, {cpus} CPUs; {}",
            from_proc("/proc/cpuinfo", "model name"),
            plan.cpus()
        ),
        format!("Kernel: {}", first_line("uname", &["-r"])),
        format!(
            "NBD: nbdkit {}, memory plugin; AoE: vblade {}, a file on tmpfs, its flush does nothing",
            package("nbdkit"),
            package("vblade")
        ),
        format!(
            "Other programs used {:.0} % of a CPU before the run; load average {}",
            busy * 100.0,
            average.split(' ').take(3).collect::<Vec<_>>().join(" ")
        ),
        format!(
            "Rounds: {} of each side, in turn, {:?} each",
            plan.rounds, plan.time
        ),
    ])
}
