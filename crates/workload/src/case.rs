//! One run: what all of its threads need.

use std::sync::Arc;

use jericho_topology::Topology;

use crate::error::{Error, Result};
use crate::kind::{Kind, Variant};
use crate::placement::Placement;
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
    /// Threads that load the memory of the threads' nodes at the same time: *Implications*, figure 4c.
    pub with_mstress: bool,
}

impl<'a> Case<'a> {
    /// Returns whether the files are on a Jericho mount.
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
