//! Workloads and measurements: ratios of two things measured alternately in one run.
//!
//! Machines are noisy, so no absolute time is a claim here. A [`compare::Comparison`] runs its two sides in
//! turn, several rounds, and reports medians, quartiles and the ratio of each round's pair. What the
//! two sides are is in one module for each workload: [`hits`], [`inline`], [`crowds`], [`cold`], [`write_back`],
//! [`small_files`]; [`footprint`] measures the daemon's memory and idleness.
#![forbid(unsafe_code)]

pub mod access;
pub mod appends;
pub mod cold;
pub mod compare;
pub mod crowds;
pub mod fio;
pub mod footprint;
pub mod hits;
pub mod inline;
pub mod mounts;
pub mod null;
pub mod relay;
pub mod report;
pub mod settings;
pub mod small_files;
pub mod stats;
pub mod write_back;

/// What any measurement may fail with; the message names the command or file and the cause.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The result of a measurement.
pub type Result<T> = std::result::Result<T, Error>;
