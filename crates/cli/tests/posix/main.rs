//! The behaviour that POSIX programs expect of a filesystem, tested through the mount.
#![forbid(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

mod access_times;
mod attributes;
mod data;
mod mapping;
mod names;
mod privileges;
mod space;
mod under_run;
