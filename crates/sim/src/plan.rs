//! What goes wrong, and when.

use std::fmt;
use std::time::Duration;

/// What a device is asked to do.
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
}

impl Operation {
    /// Its name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
        }
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
    /// With this errno, having done nothing.
    Errno(i32),
    /// After this many bytes, with no error: a device that ends early. For a flush or discard the
    /// same as EIO.
    Short {
        /// Bytes transferred; never as many as were asked for.
        done_bytes: u64,
    },
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Only operations of this kind count; `None`: all.
    pub operation: Option<Operation>,
    /// Which one fails, counted from 1 since the plan was set.
    pub nth: u64,
    /// Those after it fail as well.
    pub is_lasting: bool,
    /// How.
    pub effect: Effect,
}

/// Everything that goes wrong with a device. The default: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The first that applies to an operation is its fate.
    pub faults: Vec<Fault>,
    /// The power goes during the operation of this number, counted from 1 over all kinds: it and
    /// all later ones fail with EIO. A write that it interrupts may be lost or torn.
    pub power_cut_at: Option<u64>,
    /// The operation of this kind (`None`: of any) and number panics in the thread that asked, having done nothing: a
    /// defect of the caller that the thread works for.
    pub panic_at: Option<(Option<Operation>, u64)>,
    /// Blocks that may hold data at a time, like a sparse file on a full filesystem: a write that
    /// needs more is ENOSPC at the block that does not fit; those before it are written.
    pub room_blocks: Option<u64>,
    /// Each operation takes a random time up to this.
    pub latency_max: Option<Duration>,
    /// Of the latencies.
    pub seed: u64,
}

impl FaultPlan {
    /// A plan in which operation number `nth` of a kind (`None`: of all) fails once with `errno`.
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

    /// A plan in which operation number `nth` of a kind (`None`: of all) panics.
    pub fn panic_at(operation: Option<Operation>, nth: u64) -> FaultPlan {
        FaultPlan {
            panic_at: Some((operation, nth)),
            ..FaultPlan::default()
        }
    }

    /// A plan in which the power goes during operation number `nth`.
    pub fn cut_power_at(nth: u64) -> FaultPlan {
        FaultPlan {
            power_cut_at: Some(nth),
            ..FaultPlan::default()
        }
    }
}

/// How many operations were begun since the plan was set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) all: u64,
    by_kind: [u64; 4],
}

impl Counts {
    pub(crate) fn count(&mut self, operation: Operation) {
        self.all += 1;
        self.by_kind[operation as usize] += 1;
    }

    pub(crate) fn of(&self, operation: Option<Operation>) -> u64 {
        operation.map_or(self.all, |operation| self.by_kind[operation as usize])
    }

    /// What the plan has for the operation that was counted last.
    pub(crate) fn effect(&self, plan: &FaultPlan, operation: Operation) -> Option<Effect> {
        let applies = |fault: &&Fault| {
            let count = self.of(fault.operation);
            fault.operation.is_none_or(|kind| kind == operation)
                && (count == fault.nth || (fault.is_lasting && count > fault.nth))
        };
        plan.faults.iter().find(applies).map(|fault| fault.effect)
    }
}
