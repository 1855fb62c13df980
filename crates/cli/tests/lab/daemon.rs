//! The daemon's threads run on the right nodes. The test leaves out the workers, because a worker's first request binds it.

use std::fs;

use crate::guest::{CPUS, MEMORY_ONLY, NEAREST, NODES, Volume, node_of};

/// Returns the names of the daemon's threads, and the list of CPUs where each may run.
fn threads(volume: &Volume) -> Vec<(String, String)> {
    let pid = volume.stat()["pid"].as_u64().expect("a process id");
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon's threads");
    tasks
        .map(|task| {
            let status = task.expect("a thread").path().join("status");
            let status = fs::read_to_string(status).expect("the thread's status");
            let value = |name: &str| {
                let found = status.lines().find_map(|line| line.strip_prefix(name));
                found.expect("a line").trim().to_owned()
            };
            (value("Name:"), value("Cpus_allowed_list:"))
        })
        .collect()
}

#[test]
#[ignore = "for the guest of make lab"]
fn threads_of_a_slice_run_on_its_home_node() {
    let volume = Volume::new();
    let threads = threads(&volume);
    for slice in 0..NODES {
        let node = if slice == MEMORY_ONLY { NEAREST } else { slice };
        let cpus = (0..CPUS).filter(|cpu| node_of(*cpu) == node);
        let cpus: Vec<String> = cpus.map(|cpu| cpu.to_string()).collect();
        for part in ["pipeline", "evictor"] {
            let name = format!("{part}-{slice}");
            let found = threads.iter().find(|(known, _)| *known == name);
            let (_, allowed) = found.unwrap_or_else(|| panic!("no {name} in {threads:?}"));
            assert_eq!(*allowed, cpus.join(","), "{name}");
        }
    }
}
