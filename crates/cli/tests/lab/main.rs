//! Binding, placement and locality on a machine with several nodes. `make lab` runs this suite in a virtual machine with five nodes.
//! Elsewhere its cases are ignored.
//!
//! Times mean nothing in the virtual machine. The cases compare the nodes of pages and threads, and shares of local accesses.
#![forbid(unsafe_code)]

#[path = "../support/commands.rs"]
mod commands;
mod daemon;
mod dynamic;
mod guest;
mod machine;
mod network;
mod pages;
mod reader;
mod threads;
