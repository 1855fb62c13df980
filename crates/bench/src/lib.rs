//! Workloads and measurements: ratios of two sides measured alternately in one run.
//!
//! Machines are noisy, so this crate makes no claim about absolute times. A [`compare::Comparison`] runs its two sides in turn
//! for several rounds, and reports medians, quartiles and the ratio of each round's pair. Each workload has a module that defines
//! its sides: [`hits`], [`inline`], [`crowds`], [`cold`], [`write_back`], [`small_files`], [`appends`]. [`footprint`] measures
//! the daemon's memory and its idle CPU time.
#![forbid(unsafe_code)]

pub mod access;
pub mod appends;
pub mod cold;
pub mod compare;
pub mod crowds;
pub mod documents;
pub mod fio;
pub mod footprint;
pub mod hits;
pub mod inline;
pub mod mounts;
pub mod null;
pub mod relay;
pub mod remote;
pub mod report;
pub mod settings;
pub mod small_files;
pub mod stats;
pub mod write_back;

/// Error of a measurement. The message names the command or file, and the cause.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The result of a measurement.
pub type Result<T> = std::result::Result<T, Error>;
