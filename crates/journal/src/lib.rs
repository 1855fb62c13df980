//! A redo journal in a range of blocks of a device.
//!
//! A caller appends batches of bytes. Each batch is durable when `append` returns, and atomic: after a crash all of it is there or
//! none. The caller later puts the batch's effect into a durable place of its own, the *checkpoint store*, and frees the journal's space.
//! The crate knows nothing of files, rows or that store. It has no threads.
//!
//! The bytes are in `docs/formats/journal.md`. `docs/internals/journal.md` has the protocol, and why it is safe at each point of a
//! crash.
//!
//! # How to use it
//! - Format: [`Journal::create`]. The checkpoint store begins with [`Journal::end`].
//! - Mount: [`Journal::recover`] with the position of the checkpoint store. Apply each batch of [`Recovery::next_batch`]. Make
//!   all of it durable in the checkpoint store, with the position [`Recovery::end`]. Then [`Recovery::begin_incarnation`].
//! - Commit: [`Journal::append`].
//! - Checkpoint: take [`Journal::end`], make everything before it durable in the checkpoint store together with this position, then
//!   [`Journal::set_tail`]. A checkpoint that appends, too, uses the class [`AppendClass::Checkpoint`].
//! - Unmount: a checkpoint, then [`Journal::close`]. Without `close` the next recovery reads the whole ring and finds no batch.
//!
//! ```
//! use std::sync::Arc;
//! use jericho_journal::{AppendClass, Journal, JournalArea, JournalVolume};
//! use jericho_sim::SimDevice;
//!
//! let device = Arc::new(SimDevice::new("disk", 1 << 20));
//! let area = JournalArea { first_block: 0, blocks: 256 };
//! let volume = JournalVolume { uuid: [7; 16], secret: [8; 8] };
//! let mut journal = Journal::create(device.clone(), area, volume, 0)?;
//! let checkpoint = journal.end();
//! journal.append(b"row 1", AppendClass::Ordinary)?;
//! drop(journal);
//!
//! let mut recovery = Journal::recover(device, area, volume, 0, checkpoint)?;
//! while let Some(batch) = recovery.next_batch()? {
//!     assert_eq!(batch.payload, b"row 1");
//! }
//! // Here the caller makes the batches durable elsewhere, together with this position.
//! let checkpoint = recovery.end();
//! let journal = recovery.begin_incarnation(checkpoint)?;
//! assert_eq!(journal.used_bytes(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where to read on
//! `append` is the journal that takes appends, over the geometry in `ring`. `recovery` returns its batches, over `window` (reads
//! the ring once) and `segment` (checks one segment). `headers` reads and writes the two header copies, `area` the blocks of the
//! area.

#![forbid(unsafe_code)]

mod append;
mod area;
mod error;
mod headers;
mod position;
mod recovery;
mod ring;
mod segment;
mod window;

pub use append::{AppendClass, Journal};
pub use area::{JournalArea, JournalVolume};
pub use error::{
    AppendError, AreaError, BeginError, CreateError, Damage, Evidence, Found, Lost, RecoverError,
};
pub use jericho_format::journal::{AREA_BLOCKS, BATCH_BYTES_MAX, POSITION_BYTES};
pub use position::Position;
pub use recovery::{Batch, History, Recovery};
