//! Cases for the machine `cxl`: node 2 has memory and no CPUs, and is nearest to node 1.

use std::path::Path;

use crate::accesses::{Program, Work};
use crate::evidence::{Evidence, Frames};
use crate::guest::{Volume, ask, tell};
use crate::shape::Shape;

const NODES: usize = 3;
const MEMORY_ONLY: usize = 2;
const NEAREST: usize = 1;
const FILE_BYTES: usize = 4 << 20;

#[test]
#[ignore = "for the guest of make lab"]
fn the_node_without_cpus_is_found_and_has_its_nearest_node() {
    let topology = ask("topology --json");
    let node = &topology["nodes"][MEMORY_ONLY];
    assert_eq!(node["cpus"], serde_json::json!([]), "{topology}");
    assert_eq!(node["nearest_cpu_node"], NEAREST, "{topology}");
    assert_eq!(node["distances"], serde_json::json!([31, 20, 10]));
    let shape = Shape::of_machine();
    assert_eq!(shape.node_of_threads(MEMORY_ONLY), NEAREST);
}

#[test]
#[ignore = "for the guest of make lab"]
fn files_use_memory_without_cpus_and_its_readers_run_on_the_nearest_node() {
    let (volume, shape) = (Volume::new(), Shape::of_machine());
    let files = volume.files_on_nodes(NODES, 1, FILE_BYTES);
    let file: &Path = &files[MEMORY_ONLY];
    let found = volume.where_is(file);
    let all = serde_json::json!([[MEMORY_ONLY, FILE_BYTES]]);
    assert_eq!(found["resident_bytes_by_kernel_node"], all, "{found}");
    let work = Work {
        operation: "read",
        bytes: FILE_BYTES,
        piece: 64 << 10,
        milliseconds: 2000,
        // The thread begins anywhere, and may run anywhere.
        threads: vec![(None, file)],
    };
    let before = volume.accesses();
    let mut program = Program::start(Some("always"), &work);
    program.wait();
    program.passes(1);
    let done = program.end();
    let [local, remote] = volume.accesses();
    let counted = (local - before[0]) as f64 / (local + remote - before[0] - before[1]) as f64;
    let frames = Frames(vec![vec![MEMORY_ONLY; FILE_BYTES / 4096]]);
    let evidence = Evidence::join(done, &frames, &shape);
    let [local, remote] = evidence.pages_since(1, &shape);
    let share = local / (local + remote);
    tell(
        "memory without CPUs: share of accesses from its nearest node, by the kernel",
        share,
    );
    tell("the same, by Jericho's counters", counted);
    assert!(share >= 0.99 && counted >= 0.9, "{share} {counted}");
}
