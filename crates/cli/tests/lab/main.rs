//! Binding, placement and locality on machines with several nodes. `make lab` runs this suite in virtual machines: each of `scripts/machines` names
//! the modules with its cases. Elsewhere the cases are ignored.
//!
//! Times mean nothing in a virtual machine. The cases compare the nodes of pages and threads, and shares of local accesses.
#![forbid(unsafe_code)]

mod accesses;
#[path = "../support/commands.rs"]
mod commands;
mod controllers;
mod costs;
mod cxl;
mod daemon;
mod dynamic;
mod evidence;
mod guest;
mod kernel_trace;
mod locality;
mod machine;
mod measured;
mod network;
mod nvdimm;
mod opteron;
mod pages;
mod reader;
mod shape;
mod spill;
mod threads;
