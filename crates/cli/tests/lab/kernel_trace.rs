//! The kernel's tracing: where each thread of a program ran at what time.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::commands::succeed;

/// Room for the events of each CPU.
const BUFFER_KIB: &str = "4096";

/// Returns the directory of the kernel's tracing. Mounts it first if nobody has.
pub fn tracing() -> &'static Path {
    let path = Path::new("/sys/kernel/tracing");
    if !path.join("trace").exists() {
        let mut mount = Command::new("mount");
        succeed(mount.args(["-t", "tracefs", "none"]).arg(path));
    }
    path
}

fn set(file: &str, value: &str) {
    let path = tracing().join(file);
    fs::write(&path, value).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// A time in which a thread ran on a CPU without a break, in ticks of the time-stamp counter. All CPUs of an emulated machine have the same counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    pub cpu: usize,
    pub from: u64,
    pub until: u64,
}

/// For each thread, its stays in the order of time.
pub type Stays = BTreeMap<u32, Vec<Stay>>;

/// A recording of the switches of CPUs to and from the threads of one program.
pub struct Recording;

impl Recording {
    /// Begins. Records all threads that have this name.
    pub fn start(program: &str) -> Recording {
        set("tracing_on", "0");
        set("trace_clock", "x86-tsc");
        set("buffer_size_kb", BUFFER_KIB);
        set("trace", "");
        set(
            "events/sched/sched_switch/filter",
            &format!("prev_comm == \"{program}\" || next_comm == \"{program}\""),
        );
        set("events/sched/sched_switch/enable", "1");
        set("tracing_on", "1");
        Recording
    }

    /// Ends. Panics if the kernel had no room for an event.
    pub fn end(self) -> Stays {
        drop(self);
        for cpu in fs::read_dir(tracing().join("per_cpu")).expect("CPUs") {
            let path = cpu.expect("a CPU").path().join("stats");
            let stats = fs::read_to_string(&path).expect("counters");
            for lost in ["overrun: ", "dropped events: "] {
                let count = stats.lines().find_map(|line| line.strip_prefix(lost));
                assert_eq!(count, Some("0"), "{}: {lost}", path.display());
            }
        }
        let text = fs::read_to_string(tracing().join("trace")).expect("the trace");
        set("trace", "");
        stays(&text)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        set("tracing_on", "0");
        set("events/sched/sched_switch/enable", "0");
    }
}

/// A switch of a CPU from one thread to another.
struct Switch {
    cpu: usize,
    time: u64,
    from: u32,
    to: u32,
}

/// Parses a line of the trace. Returns `None` for a comment.
fn parse(line: &str) -> Option<Switch> {
    let (before, what) = line.split_once(": sched_switch: ")?;
    let number = |name: &str| what.split_once(name)?.1.split(' ').next()?.parse().ok();
    let cpu = before.rsplit_once('[')?.1.split(']').next()?;
    Some(Switch {
        cpu: cpu.parse().ok()?,
        time: before.split_whitespace().last()?.parse().ok()?,
        from: number(" prev_pid=")?,
        to: number(" next_pid=")?,
    })
}

fn stays(text: &str) -> Stays {
    let mut stays = Stays::new();
    let mut current: BTreeMap<u32, Stay> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let switch = parse(line).unwrap_or_else(|| panic!("the kernel's trace says {line:?}"));
        if let Some(stay) = current.remove(&switch.from) {
            let until = switch.time;
            stays
                .entry(switch.from)
                .or_default()
                .push(Stay { until, ..stay });
        }
        let stay = Stay {
            cpu: switch.cpu,
            from: switch.time,
            until: u64::MAX,
        };
        current.insert(switch.to, stay);
    }
    for (thread, stay) in current {
        stays.entry(thread).or_default().push(stay);
    }
    stays
}
