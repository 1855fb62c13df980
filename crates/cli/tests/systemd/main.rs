//! The systemd units of the project. `make systemd` runs this suite in a container with systemd. Elsewhere its cases are ignored.
#![forbid(unsafe_code)]

#[path = "../support/commands.rs"]
mod commands;
mod processes;
mod program;
mod served;
mod service;
mod unit;
