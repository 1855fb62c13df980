//! Real programs on a mounted volume. The tests use only the built `jericho` command.
//!
//! A test fails if its program is not installed. `scripts/setup test` installs all programs.
#![forbid(unsafe_code)]

#[path = "../support/again.rs"]
mod again;
mod appends;
mod attaching;
mod calls;
mod coherent;
#[path = "../support/commands.rs"]
mod commands;
mod companions;
mod compile;
mod copies;
mod crash;
mod crowd;
mod damaged;
mod dead;
mod direct;
mod fio;
mod full;
mod git;
mod halves;
mod hostile;
mod hot_set;
mod idle;
mod instructions;
mod interrupted;
mod keeper;
mod killed;
mod killing;
mod large;
mod overlapping;
mod program;
mod records;
mod rehome;
mod roles;
mod same;
mod size_known;
mod sizes;
mod small_files;
#[cfg(feature = "faults")]
mod spill;
mod sqlite;
mod stopped;
mod syncs;
mod threads;
mod trees;
mod under_run;
mod volume;
mod wishes;
