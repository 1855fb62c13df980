//! Counters of a mount that belong to no slice.

use std::sync::atomic::AtomicU64;

use jericho_cache::counters::Sharded;

jericho_cache::counters! {
    /// Cells of a mount's counters.
    cells MountCounts;
    /// Counters of a mount since it began.
    values MountCounters;

    threads_moved: AtomicU64, Events, "Migrations of threads that access their data through the kernel.";
    companions_moved: AtomicU64, Events, "Migrations of threads whose companions use data (--with-parent).";
    writes_withheld: AtomicU64, Events, "Revocations of a file's inline writes because the kernel read pages of it.";
    writes_granted: AtomicU64, Events, "Grants of a file's inline writes.";
    slots_by_request: AtomicU64, Events, "Requests of programs for the slot of a file.";
    slots_by_wish: AtomicU64, Events, "Slots that programs got with a read or write, without a request for them.";
    mapped_kept: AtomicU64, Events, "Records of pages changed while the kernel could have them for a mapping.";
    mapped_forgotten: AtomicU64, Events, "Records of such pages that were discarded because there were too many.";
    requests: Sharded, Events, "Requests of the kernel that want an answer.";
    ring_helped: AtomicU64, Events, "Requests that a thread of the FUSE ring passed to a helper thread.";
}
