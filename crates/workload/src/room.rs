//! Whether a run has room: space for its files on each filesystem, and memory on each node. A run that has too little is refused, because filling a filesystem
//! harms other programs, and the kernel ends a process that takes more memory than there is.

use std::collections::BTreeMap;

use jericho_sys::limits::{self, Memory};
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};
use crate::kind::Kind;
use crate::reach::{Files, Filesystem};
use crate::seats::Seat;
use crate::target::Target;

/// One part in this many of the files' bytes is kept for the filesystem's own data.
const OVERHEAD_PART: u64 = 16;

/// Returns what to do about too little room.
fn remedy(as_paper: bool, or: &str) -> String {
    match as_paper {
        true => format!("leave out --as-paper, or {or}"),
        false => format!("use fewer threads, or {or}"),
    }
}

/// Fails if a filesystem has too little space for the files of its targets. `filesystems` are those of the targets, in the same order. Threads have
/// equal parts of `bytes`.
pub(crate) fn check_space(
    kind: Kind,
    targets: &[Target],
    filesystems: &[Filesystem],
    (threads, bytes): (usize, u64),
    as_paper: bool,
) -> Result<()> {
    let mut needs = BTreeMap::new();
    let each = bytes.div_ceil(threads.max(1) as u64);
    for thread in 0..threads {
        let target = kind.directory_of(thread, targets.len()) % targets.len();
        let need = needs
            .entry(filesystems[target].device)
            .or_insert((target, 0));
        need.1 += each;
    }
    for (target, need) in needs.into_values() {
        let (need, free) = (need + need / OVERHEAD_PART, filesystems[target].free_bytes);
        if free < need {
            return Err(Error::new(format!(
                "{}: its filesystem has {} MiB of free space, and {} with {threads} threads needs {} MiB there; {}",
                targets[target].path.display(),
                free >> 20,
                kind.name(),
                need.div_ceil(1 << 20),
                remedy(as_paper, "another directory")
            )));
        }
    }
    Ok(())
}

/// Bytes of memory that a thread takes, besides cached pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadMemory {
    /// On the frame's node.
    pub frame_bytes: u64,
    /// On the thread's node.
    pub thread_bytes: u64,
}

/// Bytes of memory by the kernel's number of the node. `None`: the kernel chooses the node.
pub(crate) type Needs = BTreeMap<Option<u32>, u64>;

/// Returns what the threads in these seats need together.
pub(crate) fn needs(
    topology: &Topology,
    seats: &[Seat],
    memory: impl Fn(usize) -> ThreadMemory,
) -> Needs {
    let kernel_node = |id: Option<NodeId>| id.and_then(|id| topology.node(id)?.kernel_node);
    let mut needs = Needs::new();
    for (index, seat) in seats.iter().enumerate() {
        let memory = memory(index);
        *needs.entry(kernel_node(seat.frame)).or_default() += memory.frame_bytes;
        *needs.entry(kernel_node(seat.thread)).or_default() += memory.thread_bytes;
    }
    needs
}

/// Fails if a node, or the machine, has too little memory available.
pub(crate) fn check_memory(needs: &Needs, as_paper: bool) -> Result<()> {
    let machine = Memory::read().doing("read the size of the memory")?;
    check_available(
        needs,
        as_paper,
        machine.usable_now_bytes(),
        limits::node_available_bytes,
    )
}

fn check_available(
    needs: &Needs,
    as_paper: bool,
    all: u64,
    on: impl Fn(u32) -> Option<u64>,
) -> Result<()> {
    let check = |place: String, available: u64, need: u64| match available < need {
        true => Err(Error::new(format!(
            "{place} has {} MiB of memory available, and the run needs {} MiB of it for buffers; {}",
            available >> 20,
            need.div_ceil(1 << 20),
            remedy(as_paper, "another placement")
        ))),
        false => Ok(()),
    };
    check("this process".into(), all, needs.values().sum())?;
    for (node, need) in needs {
        if let Some(node) = node
            && let Some(available) = on(*node)
        {
            check(format!("node {node}"), available, *need)?;
        }
    }
    Ok(())
}

/// Returns the least free space of the filesystems.
pub(crate) fn least_free(filesystems: &[Filesystem]) -> Option<u64> {
    filesystems.iter().map(|one| one.free_bytes).min()
}

/// Asks for the filesystems of directories, in their order.
pub(crate) fn filesystems(files: &dyn Files, targets: &[Target]) -> Result<Vec<Filesystem>> {
    let directories = targets.iter().filter(|target| target.is_directory);
    directories
        .map(|target| {
            let found = files.filesystem(&target.path);
            found.at(&target.path, "ask for its filesystem")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Scale;
    use crate::kind::KINDS;
    use crate::work;

    const MIB: u64 = 1 << 20;

    fn target(name: &str) -> Target {
        Target {
            path: name.into(),
            is_directory: true,
            is_jericho: false,
            node: None,
        }
    }

    #[test]
    fn space_is_counted_once_for_each_filesystem_and_the_tight_one_is_named() {
        let targets = ["/a", "/b", "/c"].map(target);
        let free = |device, mib: u64| Filesystem {
            device,
            free_bytes: mib * MIB,
        };
        let check = |filesystems: [Filesystem; 3], mib: u64| {
            check_space(Kind::Scan, &targets, &filesystems, (3, mib * MIB), false)
        };
        // Three directories on one filesystem of 300 MiB do not have 900 MiB.
        let one = [free(1, 300), free(1, 300), free(1, 300)];
        check(one, 270).unwrap();
        let refused = check(one, 600).unwrap_err().to_string();
        assert!(
            refused.contains("/a: its filesystem has 300 MiB"),
            "{refused}"
        );
        assert!(refused.contains("needs 638 MiB"), "{refused}");
        let two = [free(1, 1000), free(2, 50), free(1, 1000)];
        let refused = check(two, 300).unwrap_err().to_string();
        assert!(
            refused.contains("/b: its filesystem has 50 MiB"),
            "{refused}"
        );
        // All threads of a checkpoint with one thread are in one target.
        let first = [free(1, 1000), free(2, 0), free(2, 0)];
        check_space(Kind::Checkpoint, &targets, &first, (1, 900 * MIB), false).unwrap();
    }

    #[test]
    fn a_run_makes_no_more_files_than_its_scale_allows_whatever_the_number_of_threads() {
        let scale = Scale {
            data_bytes: 256 * MIB,
            as_paper: false,
        };
        for kind in KINDS {
            for variant in kind.variants() {
                for threads in [2, 32, 128, 256] {
                    let bytes = work::bytes(kind, *variant, threads, scale);
                    assert!(
                        bytes <= scale.data_bytes,
                        "{} with {threads} threads: {bytes}",
                        kind.name()
                    );
                }
            }
        }
        // These need at least one request a thread, and say so.
        let most = |kind: Kind| work::bytes(kind, kind.variants()[0], 4096, scale);
        assert_eq!(most(Kind::Zmio), 4096 * MIB);
        assert_eq!(most(Kind::Scan), 256 * MIB);
        assert!(most(Kind::Fsmark) <= 256 * MIB);
    }

    #[test]
    fn memory_is_counted_over_all_threads_on_the_nodes_that_they_use() {
        let mut topology = Topology::from_spec("virtual:2").unwrap();
        topology.nodes[1].kernel_node = Some(1);
        let seat = |frame, thread| Seat {
            device: None,
            frame: Some(NodeId(frame)),
            thread: Some(NodeId(thread)),
        };
        let scale = Scale {
            data_bytes: 256 * MIB,
            as_paper: true,
        };
        let of = |kind: Kind, seats: &[Seat]| {
            let variant = kind.variants()[0];
            needs(&topology, seats, |index| {
                work::memory(kind, variant, seats.len(), scale, index)
            })
        };
        // The records of a stream are on the node of its threads: 128 Ki records of 64 KiB for each pair.
        let streams = of(Kind::Stream, &vec![seat(0, 1); 8]);
        assert_eq!(streams[&Some(1)], 4 * 8192 * MIB);
        assert_eq!(streams[&Some(0)], 0);
        let on = |node| Some(if node == 1 { 20_000 * MIB } else { 0 });
        let refused = check_available(&streams, true, 64_000 * MIB, on);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("node 1 has 20000 MiB"), "{refused}");
        assert!(refused.contains("needs 32768 MiB"), "{refused}");
        // Each thread alone would fit, and the kernel chooses the node.
        let native = of(Kind::Zmio, &vec![Seat::default(); 1024]);
        let refused = check_available(&native, false, 100 * MIB, |_| None);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("this process has 100 MiB"), "{refused}");
        check_available(&native, false, 64_000 * MIB, |_| None).unwrap();
    }
}
