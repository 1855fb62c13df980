//! One run: what all of its threads need.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use jericho_topology::Topology;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::kind::{Kind, Variant};
use crate::placement::Placement;
use crate::reach::Files;
use crate::run::Thread;
use crate::seats::Seat;
use crate::target::{Scratch, Target};

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes that all files of a run may have together, unless the papers' sizes are wanted.
    pub data_bytes: u64,
    /// Takes the papers' sizes.
    pub as_paper: bool,
}

impl Scale {
    /// Returns the bytes of one of `count` files: the paper's, or an equal part of the run's, a multiple of `unit`.
    pub(crate) fn file_bytes(&self, paper: u64, count: usize, unit: u64) -> u64 {
        if self.as_paper {
            return paper;
        }
        let part = self.data_bytes / count.max(1) as u64;
        (part.min(paper) / unit).max(1) * unit
    }
}

/// Everything that the threads of a run need.
pub struct Case<'a> {
    /// The nodes.
    pub topology: &'a Topology,
    /// The workload.
    pub kind: Kind,
    /// Its form.
    pub variant: Variant,
    /// Where it runs.
    pub targets: &'a [Target],
    /// The files of the directories.
    pub files: Arc<dyn Files>,
    /// The directories of the instances. `None`: the targets are devices.
    pub scratch: Option<&'a Scratch>,
    /// The placement.
    pub placement: Placement,
    /// The seats of the threads.
    pub seats: &'a [Seat],
    /// The sizes.
    pub scale: Scale,
    /// Makes the same offsets and bytes each time.
    pub seed: u64,
    /// Set when the run ends. A thread that still makes its files then fails.
    pub stopping: &'a AtomicBool,
    /// How direct transfers are made.
    pub engine: Engine,
    /// Whether threads of mstress load the nodes of the cached pages or buffers during the run: *Implications*, figure 4(c).
    pub with_mstress: bool,
}

impl<'a> Case<'a> {
    /// Returns the targets that are devices, or plain files that stand for them.
    pub(crate) fn devices(&self) -> &'a [Target] {
        match self.scratch {
            None => self.targets,
            Some(_) => &[],
        }
    }

    /// Returns whether the files are on a Jericho volume.
    pub(crate) fn is_jericho(&self) -> bool {
        self.targets.iter().any(|target| target.is_jericho)
    }

    /// Returns the directories of the instances. Fails if the targets are devices.
    pub(crate) fn scratch(&self) -> Result<&'a Scratch> {
        self.scratch.ok_or_else(|| {
            Error::new(format!(
                "{} needs a directory, not a device",
                self.kind.name()
            ))
        })
    }

    /// Returns the threads, one for each seat, that `make` makes from their number.
    pub(crate) fn each(
        &'a self,
        make: impl Fn(usize, &Seat) -> Result<Box<dyn crate::run::Worker>> + Send + Sync + 'a,
    ) -> Vec<Thread<'a>> {
        let make = Arc::new(make);
        let seats = self.seats.iter().enumerate();
        seats
            .map(|(index, seat)| {
                let (make, own) = (make.clone(), seat.clone());
                Thread {
                    seat: seat.clone(),
                    make: Box::new(move || make(index, &own)),
                    counts: true,
                }
            })
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reach::KernelFiles;
    use crate::seats::{Places, seats};
    use jericho_topology::NodeId;

    /// A run of one or more threads on two virtual nodes, in a directory whose device is on node 1.
    pub(crate) struct Story {
        topology: Topology,
        kind: Kind,
        placement: Placement,
        targets: Vec<Target>,
        files: Arc<dyn Files>,
        scratch: Scratch,
        seats: Vec<Seat>,
        pub(crate) scale: Scale,
        pub(crate) stopping: AtomicBool,
        // Removed after its contents.
        _root: tempfile::TempDir,
    }

    impl Story {
        pub(crate) fn new(kind: Kind, placement: &str) -> Story {
            Story::with(kind, placement, 1, 1)
        }

        /// Makes `count` targets on one filesystem.
        pub(crate) fn with(kind: Kind, placement: &str, threads: usize, count: usize) -> Story {
            let topology = Topology::from_spec("virtual:2").unwrap();
            // On a disk, because /tmp may be without direct I/O.
            let built = std::env::current_exe().unwrap();
            let root = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
            let targets = (0..count).map(|number| {
                let path = root.path().join(format!("target.{number}"));
                std::fs::create_dir(&path).unwrap();
                Target {
                    path,
                    is_directory: true,
                    is_jericho: false,
                    node: Some(NodeId(1)),
                }
            });
            let targets: Vec<Target> = targets.collect();
            let files: Arc<dyn Files> = Arc::new(KernelFiles);
            let placement = Placement::named(placement).unwrap();
            let places = Places {
                device_nodes: &[Some(NodeId(1))],
                is_jericho: false,
                together: kind.threads_together(),
            };
            Story {
                seats: seats(&topology, placement, places, threads).unwrap(),
                scratch: Scratch::make(&files, &targets, threads).unwrap(),
                files,
                topology,
                kind,
                placement,
                targets,
                scale: Scale {
                    data_bytes: 1 << 20,
                    as_paper: false,
                },
                stopping: AtomicBool::new(false),
                _root: root,
            }
        }

        /// Puts one thread and its pages on the first node of this machine. The kernel knows that node, unlike virtual ones, so it binds pages.
        pub(crate) fn on_this_machine(mut self) -> Story {
            self.topology = Topology::detect().unwrap();
            let node = Some(self.topology.nodes[0].id);
            self.seats = vec![Seat {
                device: None,
                frame: node,
                thread: node,
            }];
            self
        }

        pub(crate) fn case(&self) -> Case<'_> {
            Case {
                topology: &self.topology,
                kind: self.kind,
                variant: self.kind.variants()[0],
                targets: &self.targets,
                files: self.files.clone(),
                scratch: Some(&self.scratch),
                placement: self.placement,
                seats: &self.seats,
                scale: self.scale,
                seed: 1,
                stopping: &self.stopping,
                engine: Engine::default(),
                with_mstress: false,
            }
        }
    }
}
