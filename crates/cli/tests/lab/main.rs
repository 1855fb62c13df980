//! Binding, placement and locality where there are nodes: the suite that `make lab` runs in a machine with five of
//! them. Elsewhere its cases are ignored.
//!
//! Times mean nothing in there. What is compared is where pages and threads are, and shares of accesses.
#![forbid(unsafe_code)]

mod daemon;
mod guest;
mod machine;
mod pages;
mod reader;
mod threads;
