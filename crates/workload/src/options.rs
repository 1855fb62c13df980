//! What the user wants.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::kind::{Kind, Variant};
use crate::placement::Placement;

/// What makes the operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Generator {
    /// Our threads.
    Own,
    /// fio, of this version.
    Fio(String),
    /// fs_mark, of this version.
    FsMark(String),
}

impl Generator {
    /// Returns the name of the generator, with its version if it is not ours.
    pub fn name(&self) -> &str {
        match self {
            Generator::Own => "jericho",
            Generator::Fio(version) | Generator::FsMark(version) => version,
        }
    }

    /// Fails if the generator does not run this form of a workload that it runs otherwise.
    pub(crate) fn check_variant(&self, kind: Kind, variant: Variant) -> Result<()> {
        match self {
            Generator::Own | Generator::Fio(_) => Ok(()),
            Generator::FsMark(_) => check_created(kind, variant),
        }
    }
}

/// Fails if fs_mark does not do what this form of fsmark does.
fn check_created(kind: Kind, variant: Variant) -> Result<()> {
    match kind == Kind::Fsmark && variant != Variant::CREATE {
        true => Err(Error::new(format!(
            "fs_mark creates files and reads none, so it does not run fsmark {}; use --variant create, or leave out --generator",
            variant.name
        ))),
        false => Ok(()),
    }
}

/// When Jericho moves threads of a run to their data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Migration {
    /// Never: the placement alone says where threads are.
    #[default]
    Never,
    /// When a move pays.
    Adaptive,
    /// At each access to another node.
    Always,
}

impl Migration {
    /// Returns the name of the policy on the command line, for the daemon and in records.
    pub fn name(self) -> &'static str {
        match self {
            Migration::Never => "never",
            Migration::Adaptive => "adaptive",
            Migration::Always => "always",
        }
    }
}

/// What the user wants.
#[derive(Clone, Debug)]
pub struct Options {
    /// The workloads.
    pub kinds: Vec<Kind>,
    /// Forms of the workloads. Empty: all.
    pub variants: Vec<String>,
    /// The placement.
    pub placement: Placement,
    /// Numbers of threads. `None`: those of the workload.
    pub threads: Option<Vec<usize>>,
    /// Length of each measurement. `None`: so that a workload ends within a minute.
    pub seconds: Option<Duration>,
    /// Takes the papers' sizes.
    pub as_paper: bool,
    /// Runs threads beside the workload that stream through memory.
    pub with_mstress: bool,
    /// When Jericho moves threads.
    pub migration: Migration,
    /// Lets workloads write to devices, which destroys what is on them.
    pub may_destroy: bool,
    /// Seed of offsets and contents.
    pub seed: u64,
    /// What makes the operations.
    pub generator: Generator,
}
