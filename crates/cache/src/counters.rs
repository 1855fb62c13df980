//! Counters: each is declared once, with its name, unit and help, and feeds `jericho stat`, its JSON and `jericho top`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

const SHARDS: usize = 32;

#[repr(align(64))]
#[derive(Default)]
struct Line(AtomicU64);

/// A counter that many threads add to and few read. Each thread adds to one of several cache lines, so that threads rarely share
/// a line.
#[derive(Default)]
pub struct Sharded([Line; SHARDS]);

impl Sharded {
    /// Adds to the counter.
    pub fn add(&self, n: u64) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static SHARD: usize = NEXT.fetch_add(1, Relaxed) % SHARDS);
        SHARD.with(|shard| self.0[*shard].0.fetch_add(n, Relaxed));
    }
}

/// A cell that a counter's value is read from.
pub trait Cell {
    /// Returns the value.
    fn value(&self) -> u64;
}

impl Cell for AtomicU64 {
    fn value(&self) -> u64 {
        self.load(Relaxed)
    }
}

impl Cell for Sharded {
    fn value(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Relaxed)).sum()
    }
}

/// Unit of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Pages of 4 KiB.
    Pages,
    /// Bytes.
    Bytes,
    /// Events.
    Events,
}

/// Declaration of a counter.
#[derive(Clone, Copy, Debug)]
pub struct Declared {
    /// Name in JSON.
    pub name: &'static str,
    /// Unit.
    pub unit: Unit,
    /// What the counter counts.
    pub help: &'static str,
}

/// Declares counters: a struct of the cells that threads add to, and a struct of their values with the same fields. Additions and
/// subtractions of values saturate, because programs write some of the counters and may write any value.
#[macro_export]
macro_rules! counters {
    (
        $(#[$cells_doc:meta])* cells $cells:ident;
        $(#[$values_doc:meta])* values $values:ident;
        $($name:ident: $cell:ty, $unit:ident, $help:literal;)*
    ) => {
        $(#[$cells_doc])*
        #[derive(Default)]
        pub(crate) struct $cells {
            $(#[doc = $help] pub $name: $cell,)*
        }

        impl $cells {
            /// Reads all cells.
            pub fn values(&self) -> $values {
                $values { $($name: $crate::counters::Cell::value(&self.$name),)* }
            }
        }

        $(#[$values_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(default)]
        pub struct $values {
            $(#[doc = $help] pub $name: u64,)*
        }

        impl $values {
            /// Declarations of all counters.
            pub const DECLARED: &'static [$crate::counters::Declared] = &[
                $($crate::counters::Declared {
                    name: stringify!($name),
                    unit: $crate::counters::Unit::$unit,
                    help: $help,
                },)*
            ];

            /// Returns the sums of both.
            #[must_use]
            pub fn and(self, other: Self) -> Self {
                Self { $($name: self.$name.saturating_add(other.$name),)* }
            }

            /// Returns how much each counter grew since `earlier`.
            #[must_use]
            pub fn since(self, earlier: Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Cells of a slice's counters.
    cells Counts;
    /// Counters of a slice since it was started.
    values Counters;

    hits: Sharded, Pages, "Page lookups that found their page in the cache.";
    misses: Sharded, Pages, "Page lookups that did not find their page in the cache.";
    evictions: AtomicU64, Pages, "Pages that the evictor dropped to make room.";
    read_bytes: AtomicU64, Bytes, "Bytes read from devices.";
    read_ahead_bytes: AtomicU64, Bytes, "Bytes read from devices ahead of a request; part of read_bytes.";
    written_back_bytes: AtomicU64, Bytes, "Bytes written back to devices.";
    write_backs: AtomicU64, Events, "Write transfers; written_back_bytes / write_backs is their mean size.";
    small_syncs: AtomicU64, Events, "Syncs whose caller wrote the pages itself (also in write_backs).";
    evictor_wakes: AtomicU64, Events, "Times that a thread woke the evictor.";
    stalled: AtomicU64, Events, "Requests that waited for a free frame.";
    clashed: AtomicU64, Events, "Requests that waited for I/O of another request on the same page.";
    throttled: AtomicU64, Events, "Writers that waited at the limit of dirty pages.";
    write_errors: AtomicU64, Events, "Write-backs that failed.";
    checksum_errors: AtomicU64, Pages, "Pages read from devices that did not have their checksum.";
    scrubbed_bytes: AtomicU64, Bytes, "Bytes read in the background to compare them with their checksums.";
    spill_taken: AtomicU64, Pages, "Frames that the slice took after the mount; see --spill.";
    spill_given_back: AtomicU64, Pages, "Frames that the slice gave back; see --spill.";
    spill_moved: AtomicU64, Pages, "Pages moved to other frames because theirs were given back.";
    dead_client_entries: AtomicU64, Pages, "Page table entries that were checked because a client died.";
}

/// Use of a slice's frames now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Frames of the slice that have memory.
    pub frames: u64,
    /// Frames of these that are in spill ranges.
    pub spilled: u64,
    /// Frames that hold a page.
    pub resident: u64,
    /// Pages that are newer than the device.
    pub dirty: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_cells_and_have_declarations() {
        let counts = Counts::default();
        counts.hits.add(3);
        counts.read_bytes.fetch_add(4096, Relaxed);
        let first = counts.values();
        assert_eq!((first.hits, first.read_bytes, first.misses), (3, 4096, 0));
        counts.hits.add(2);
        let grown = counts.values().since(first);
        assert_eq!((grown.hits, grown.read_bytes), (2, 0));
        let most = Counters {
            hits: u64::MAX,
            ..first
        };
        assert_eq!(first.and(most).hits, u64::MAX);
        let names = Counters::DECLARED.iter().map(|counter| counter.name);
        assert_eq!(names.clone().next(), Some("hits"));
        for counter in Counters::DECLARED {
            let is_bytes = counter.name.ends_with("_bytes");
            assert_eq!(counter.unit == Unit::Bytes, is_bytes, "{}", counter.name);
        }
    }
}
