//! The workloads by name, and the sizes that they have by default and in the papers.

use crate::error::{Error, Result};
use crate::placement::Way;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Asynchronous direct reads with a bounded status queue: *Implications*, IV.C.1.
    Zmio,
    /// Create, open, write, read and close of small files: *Implications*, IV.C.2.
    Fsmark,
    /// Checkpoints to a shared file, and reads of it (IOR): *Implications*, IV.C.3, and *Jericho*, III.C.
    Checkpoint,
    /// A thread that reads records and one that stores them: *Implications*, IV.C.4.
    Stream,
    /// An index of a corpus (Psearchy): *Implications*, IV.C.5.
    Search,
    /// Sequential and random 4 KiB reads and writes of 64 files (FIO): *Jericho*, III.B.
    Scan,
    /// Sequential direct reads of 512 KiB (dd): *Jericho*, III.D.
    Dd,
    /// Copies of memory, without storage: *Implications*, section III and figure 4(a).
    Mstress,
}

/// All workloads.
pub const KINDS: [Kind; 8] = [
    Kind::Zmio,
    Kind::Fsmark,
    Kind::Checkpoint,
    Kind::Stream,
    Kind::Search,
    Kind::Scan,
    Kind::Dd,
    Kind::Mstress,
];

impl Kind {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Zmio => "zmio",
            Kind::Fsmark => "fsmark",
            Kind::Checkpoint => "checkpoint",
            Kind::Stream => "stream",
            Kind::Search => "search",
            Kind::Scan => "scan",
            Kind::Dd => "dd",
            Kind::Mstress => "mstress",
        }
    }

    /// Returns the workloads with this name: for `all`, all that use storage.
    pub fn named(name: &str) -> Result<Vec<Kind>> {
        if name == "all" {
            let kinds = KINDS.into_iter();
            return Ok(kinds.filter(|kind| kind.way() != Way::Memory).collect());
        }
        let found = KINDS.iter().find(|kind| kind.name() == name);
        found.map(|kind| vec![*kind]).ok_or_else(|| {
            let names: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
            Error::new(format!(
                "there is no workload {name}; the workloads are {} and all",
                names.join(", ")
            ))
        })
    }

    /// Returns how it reaches its data.
    pub fn way(self) -> Way {
        match self {
            Kind::Zmio | Kind::Dd => Way::Direct,
            Kind::Mstress => Way::Memory,
            _ => Way::Cached,
        }
    }

    /// Returns whether it can run on a device. The others need a filesystem.
    pub fn runs_on_devices(self) -> bool {
        self.way() != Way::Cached
    }

    /// Returns the number of the directory that has the data of a thread.
    pub fn directory_of(self, thread: usize, targets: usize) -> usize {
        match self {
            // The file of a target is shared.
            Kind::Checkpoint => thread % targets.max(1),
            // Two threads share a stream.
            Kind::Stream => thread / 2,
            _ => thread,
        }
    }

    /// Returns the number of threads that use the same memory, one after the other, and so belong on the same node.
    pub fn threads_together(self) -> usize {
        match self {
            Kind::Stream => 2,
            _ => 1,
        }
    }

    /// Returns the numbers of threads that the papers have, those of the figure for a range. *Implications* has an instance for each device.
    pub fn paper_threads(self, targets: usize) -> Vec<usize> {
        match self {
            Kind::Zmio | Kind::Mstress => vec![1, 2, 4, 8],
            Kind::Fsmark => vec![128 * targets],
            Kind::Checkpoint | Kind::Search => vec![32 * targets],
            // One thread that reads and one that writes.
            Kind::Stream => vec![2 * targets],
            Kind::Scan | Kind::Dd => vec![1, 8, 16, 24, 32, 40, 48, 56, 64],
        }
    }

    /// Returns the numbers of threads without a request: as the papers if these are a property of the workload, else up to twice the number of CPUs, so that CPUs
    /// have work while threads wait, but no more than in the papers.
    pub fn default_threads(self, cpus: usize, targets: usize) -> Vec<usize> {
        let most = match self {
            Kind::Zmio | Kind::Mstress => 8.min(cpus * 2),
            Kind::Scan | Kind::Dd => 64.min(cpus * 2),
            _ => return self.paper_threads(targets),
        };
        let powers = std::iter::successors(Some(1), |threads| Some(threads * 2));
        powers.take_while(|threads| *threads <= most).collect()
    }

    /// Returns what distinguishes the runs of the workload with the same number of threads.
    pub fn variants(self) -> &'static [Variant] {
        const KIB: usize = 1 << 10;
        match self {
            Kind::Zmio => {
                const {
                    &[
                        Variant::new("read-64k", 64 * KIB, false, false),
                        Variant::new("read-128k", 128 * KIB, false, false).on_request(),
                        Variant::new("read-256k", 256 * KIB, false, false).on_request(),
                        Variant::new("read-512k", 512 * KIB, false, false).on_request(),
                        Variant::new("read-1m", 1024 * KIB, false, false),
                        Variant::new("write-64k", 64 * KIB, true, false).on_request(),
                        Variant::new("write-128k", 128 * KIB, true, false).on_request(),
                        Variant::new("write-256k", 256 * KIB, true, false).on_request(),
                        Variant::new("write-512k", 512 * KIB, true, false).on_request(),
                        Variant::new("write-1m", 1024 * KIB, true, false),
                    ]
                }
            }
            Kind::Fsmark => {
                const { &[Variant::new("files", 50 * KIB, true, true), Variant::CREATE] }
            }
            Kind::Checkpoint => {
                const {
                    &[
                        Variant::new("write-256k", 256 * KIB, true, false),
                        Variant::new("read-256k", 256 * KIB, false, false),
                        Variant::new("write-4k", 4 * KIB, true, false),
                        Variant::new("read-4k", 4 * KIB, false, false),
                    ]
                }
            }
            Kind::Stream => const { &[Variant::new("records-64k", 64 * KIB, true, false)] },
            Kind::Search => const { &[Variant::new("read-2k", 2 * KIB, false, false)] },
            Kind::Scan => {
                const {
                    &[
                        Variant::new("read", 4 * KIB, false, false),
                        Variant::new("write", 4 * KIB, true, false),
                        Variant::new("randread", 4 * KIB, false, true),
                        Variant::new("randwrite", 4 * KIB, true, true),
                    ]
                }
            }
            Kind::Dd => const { &[Variant::new("read-512k", 512 * KIB, false, false)] },
            // Writes nothing to the target.
            Kind::Mstress => const { &[Variant::new("copy", 1024 * KIB, false, false)] },
        }
    }
}

/// One form of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Its name in records.
    pub name: &'static str,
    /// Bytes of a request, for fsmark of a file.
    pub request_bytes: usize,
    /// Whether it writes.
    pub writes: bool,
    /// Whether its offsets are random.
    pub is_random: bool,
    /// Whether it runs if the user chooses no variant. The others would make a workload longer than a minute.
    pub is_default: bool,
}

impl Variant {
    /// Creates files and removes them, as the program fs_mark: a form of [`Kind::Fsmark`].
    pub const CREATE: Variant = Variant::new("create", 50 << 10, true, false);

    const fn new(
        name: &'static str,
        request_bytes: usize,
        writes: bool,
        is_random: bool,
    ) -> Variant {
        Variant {
            name,
            request_bytes,
            writes,
            is_random,
            is_default: true,
        }
    }

    /// Leaves the variant to users who choose it.
    const fn on_request(self) -> Variant {
        Variant {
            is_default: false,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_workload_has_its_name_and_all_has_all() {
        for kind in KINDS {
            assert_eq!(Kind::named(kind.name()).unwrap(), [kind]);
            assert!(!kind.variants().is_empty());
        }
        assert_eq!(Kind::named("all").unwrap(), KINDS[..7]);
        assert!(
            Kind::named("ior")
                .unwrap_err()
                .to_string()
                .contains("checkpoint")
        );
    }

    #[test]
    fn zmio_has_all_sizes_from_64_kib_to_1_mib_in_both_directions() {
        let sizes = |writes| {
            let variants = Kind::Zmio.variants().iter();
            let variants = variants.filter(move |variant| variant.writes == writes);
            variants.map(|variant| variant.request_bytes >> 10)
        };
        for writes in [false, true] {
            assert!(sizes(writes).eq([64, 128, 256, 512, 1024]));
        }
        let defaults = Kind::Zmio.variants().iter();
        let defaults = defaults.filter(|variant| variant.is_default);
        let names: Vec<&str> = defaults.map(|variant| variant.name).collect();
        assert_eq!(names, ["read-64k", "read-1m", "write-1m"]);
    }

    #[test]
    fn numbers_of_threads_follow_the_machine_unless_the_workload_has_its_own() {
        assert_eq!(Kind::Scan.default_threads(2, 1), [1, 2, 4]);
        assert_eq!(Kind::Zmio.default_threads(64, 1), [1, 2, 4, 8]);
        assert_eq!(Kind::Fsmark.default_threads(2, 1), [128]);
        // An instance for each device.
        assert_eq!(Kind::Fsmark.default_threads(2, 4), [512]);
        assert_eq!(Kind::Stream.default_threads(2, 4), [8]);
    }
}
