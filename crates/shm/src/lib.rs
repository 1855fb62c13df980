//! Shared-memory segments: a slice's frames, page table and reference ages; the slots, areas and control segment of a volume.
//!
//! All hand-written atomics are here. `docs/formats/shm.md` specifies the layout and the protocol. A segment holds only offsets
//! and indices, so that it can be mapped at any address. This crate knows pages of numbered objects. `cache` decides when the
//! slice changes its table.

mod access;
mod ahead;
mod area;
mod call;
mod control;
mod entry;
mod hit;
mod intent;
pub mod keep;
mod lent;
mod lock;
mod memory;
#[cfg(all(test, loom))]
mod model;
mod owners;
mod parts;
mod prefetch;
mod reports;
mod ring;
mod slots;
mod spill;
mod sync;
mod wish;
mod writer;

pub use access::Miss;
pub use ahead::Ahead;
pub use area::{Access, Area, BLOCKS, Counter, MARKS, RING_KEYS};
pub use call::{
    Answer, CALL_BYTES, Call, ClientThread, HANDSHAKE_BYTES, PROTOCOL, Refusal, Reply, Request,
    socket_name,
};
pub use control::{Control, SlotInfo, SlotWord};
pub use entry::{Entry, Flags, Key, PageState};
pub use hit::{Hit, ReadHit, WrittenPage};
pub use lent::{Lent, SlotLock};
pub use lock::{HELD_MAX, Holding, Lock, WAIT_MAX};
pub use memory::{
    BOOKKEEPING_BYTES_PER_PAGE_MAX, Found, Geometry, SPILL_FRAMES, SliceMemory, WAYS,
    bookkeeping_bytes,
};
pub use owners::Owners;
pub use parts::{SourceParts, TargetParts, is_in_page, pieces};
pub use reports::Draining;
pub use ring::RingReader;
pub use slots::{
    Kept, RangeCounts, RangeHeld, RangeTaken, Segments, Seized, SizeWord, Slot, Slots, WORDS,
};
pub use wish::{Granted, Wish, Wishing};
pub use writer::Writer;
