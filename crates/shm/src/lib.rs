//! Shared-memory segments of a slice: frames, the page table, reference stamps.
//!
//! All hand-written atomics are here. The layout and the protocol are specified in
//! `docs/formats/shm.md`; a segment holds offsets and indices only, so that it can be mapped anywhere.
//! This crate knows pages of numbered objects; which slice changes the table when is `cache`'s business.

mod entry;
mod memory;

pub use entry::{Entry, Flags, Key, State};
pub use memory::{
    BOOKKEEPING_BYTES_PER_PAGE_MAX, Found, Geometry, Miss, SliceMemory, WAYS, bookkeeping_bytes,
};
