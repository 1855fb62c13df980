//! The protocol between an initiator, which uses a device, and a target, which has it, over raw Ethernet. `docs/formats/wire.md` specifies
//! it. This crate does no I/O: frames, times and calls come in, and frames and effects go out. So the same code runs on sockets, on a
//! simulated wire, and under a fuzzer.
//!
//! # Layers
//! A module uses modules of its own layer and of the layers above it.
#![forbid(unsafe_code)]

// Values and sets.
mod content;
mod cookie;
mod errno;
mod frame;
mod key;
mod lanes;
mod operation;
mod pages;
mod pieces;
mod ranges;

// A pair of links: numbers, acknowledgements, loss, window.
mod attachment;
mod channel;
mod dial;
mod noise;
mod received;
mod round_trip;
mod seal;
mod window;

// The requests of a session, on either side, without frames.
mod batch;
mod export;
mod log;
mod requests;
mod schedule;
mod slots;

// The two sides, and a question to all targets.
mod discovery;
mod initiator;
mod target;

/// A time, as the duration since any fixed moment. The caller has the clock.
pub type Time = std::time::Duration;

pub use channel::ChannelStatus;
pub use discovery::{Discovery, Found};
pub use export::{Client, ExportConfig, Owner};
pub use frame::{Body, Entropy, Frame, Link};
pub use initiator::{
    Attached, Ended, Initiator, InitiatorConfig, InitiatorOutput, ReadPlace, UNREACHABLE,
};
pub use key::{Key, NoKey, Security, hexadecimal};
pub use operation::{Action, Operation};
pub use pages::Run;
pub use schedule::Scheduler;
pub use seal::{FrameKey, Seal};
pub use target::{PoolPlace, Strange, Target, TargetConfig, TargetOutput, Work, WorkError};
