//! The planned faults of a device.

use std::fmt;
use std::time::Duration;

/// An operation of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A write that is durable when it ends (FUA).
    DurableWrite,
}

impl Operation {
    /// Returns the operation's name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::DurableWrite => "durable write",
        }
    }

    /// Returns whether a power cut before, during or after the operation may leave different contents.
    pub(crate) fn is_change(self) -> bool {
        self != Operation::Read
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Fails with this errno and does nothing.
    Errno(i32),
    /// Transfers this many bytes and fails with `Cause::Short`, as for a device that ends a transfer early without an errno. For a
    /// flush or discard the same as EIO.
    Short {
        /// Bytes transferred; always fewer than requested.
        done_bytes: u64,
    },
}

/// A planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Counts only operations of this kind; `None`: all.
    pub operation: Option<Operation>,
    /// Number of the failing operation, counted from 1 since the plan was set.
    pub nth: u64,
    /// Whether later operations fail as well.
    pub is_lasting: bool,
    /// The kind of failure.
    pub effect: Effect,
}

/// All planned faults of a device. The default plans none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The first fault that applies to an operation decides its result.
    pub faults: Vec<Fault>,
    /// The power is cut during the operation of this number, counted from 1 over all kinds. It and all later ones fail with EIO.
    /// A write that the cut interrupts may be lost or torn. Devices on the same supply lose their power at that moment as well.
    pub power_cut_at: Option<u64>,
    /// The operation of this kind (`None`: any) and number panics in the requesting thread and does nothing. Simulates a defect
    /// in that thread.
    pub panic_at: Option<(Option<Operation>, u64)>,
    /// Maximum number of blocks with data, as in a sparse file on a full filesystem. A write that needs more fails with ENOSPC at
    /// the first block without space; the blocks before it are written.
    pub room_blocks: Option<u64>,
    /// Maximum latency of an operation; each takes a random time up to this.
    pub latency_max: Option<Duration>,
    /// A failed flush is reported once, as a kernel reports lost writes. The changes that it should have made durable are durable, lost
    /// or torn from then on, as the seed decides, although reads still see them. Later flushes succeed. Not for a device that records.
    pub forgets_failed_flushes: bool,
    /// Seed of the latencies, and of what a forgotten flush loses.
    pub seed: u64,
}

impl FaultPlan {
    /// Returns a plan in which operation number `nth` of a kind (`None`: of all) fails once with `errno`.
    pub fn fail_nth(operation: Option<Operation>, nth: u64, errno: i32) -> FaultPlan {
        let fault = Fault {
            operation,
            nth,
            is_lasting: false,
            effect: Effect::Errno(errno),
        };
        FaultPlan {
            faults: vec![fault],
            ..FaultPlan::default()
        }
    }

    /// Returns a plan in which operation number `nth` of a kind (`None`: of all) panics.
    pub fn panic_at(operation: Option<Operation>, nth: u64) -> FaultPlan {
        FaultPlan {
            panic_at: Some((operation, nth)),
            ..FaultPlan::default()
        }
    }

    /// Returns a plan in which the power is cut during operation number `nth`.
    pub fn cut_power_at(nth: u64) -> FaultPlan {
        FaultPlan {
            power_cut_at: Some(nth),
            ..FaultPlan::default()
        }
    }
}

/// Numbers of operations begun since the plan was set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) all: u64,
    by_kind: [u64; 5],
}

impl Counts {
    pub(crate) fn count(&mut self, operation: Operation) {
        self.all += 1;
        self.by_kind[operation as usize] += 1;
    }

    pub(crate) fn of(&self, operation: Option<Operation>) -> u64 {
        operation.map_or(self.all, |operation| self.by_kind[operation as usize])
    }

    /// Returns the planned effect on the operation that was counted last.
    pub(crate) fn effect(&self, plan: &FaultPlan, operation: Operation) -> Option<Effect> {
        let applies = |fault: &&Fault| {
            let count = self.of(fault.operation);
            fault.operation.is_none_or(|kind| kind == operation)
                && (count == fault.nth || (fault.is_lasting && count > fault.nth))
        };
        plan.faults.iter().find(applies).map(|fault| fault.effect)
    }
}
