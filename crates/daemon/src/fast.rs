//! The daemon's end of the fast path: the files that clients read and write inline, and the clients themselves.
//!
//! The lowest files have the tables and records that [`Fast`] consists of:
//!
//! - `slot_file`: a file with a slot, with the daemon's holds on the slot's locks (`extend`, `range`) and what the kernel has of the
//!   file (`kernel_pages`). `files`: all of them. `changing`: files that get no slot for now
//! - `client_table`, `rings`, `wishers`: the clients, their reports, and their threads that may leave wishes
//! - `trusted`, `tokens`: the users whose processes are served, and the processes that may write
//! - `keeper_process`: the process that ends inline access when the daemon dies
//!
//! Above them is `state`, which has [`Fast`] itself. The other files have its functions. Each file uses only those before it in
//! this list:
//!
//! - `areas`: what clients say in their areas. `locks`: taking a slot's locks. `reports`: the pages that clients report
//! - `absorb`: changes of size and times. `write_guard`, `read_guard`: locks held for a write or a read of the mount
//! - `withholding`: no inline writes while the kernel may have pages. `grants`: how a file gets a slot and writers, and their
//!   release
//! - `reserve`, `wishes`, `calls`: the requests on a file's descriptor. `waits`: reads that wait for a client's loan to end
//! - `client_end`, `admission`: deaths of clients, and the socket. `keeping`: a keeper for this daemon
//! - `threads`: opens and closes all of it
//!
//! The bytes and the protocol: `docs/formats/shm.md`.
//!
//! Rule: code that answers the kernel about a file, or changes the file, first absorbs the clients' changes to it. Code that
//! changes its size updates the slot. Nothing here waits for a client without a bound.

mod absorb;
mod admission;
mod areas;
mod calls;
mod changing;
mod client_end;
mod client_table;
mod extend;
mod files;
mod grants;
mod keeper_process;
mod keeping;
mod kernel_pages;
mod locks;
mod range;
mod read_guard;
mod reports;
mod reserve;
mod rings;
mod slot_file;
mod state;
mod threads;
mod tokens;
mod trusted;
mod waits;
mod wishers;
mod wishes;
mod withholding;
mod write_guard;

pub use client_table::ClientStat;
pub use keeper_process::KeeperCommand;
pub(crate) use read_guard::{LockedOut, ReadGuard};
pub(crate) use slot_file::{Grants, SlotFile};
pub(crate) use state::Fast;
pub use state::Moment;
pub(crate) use threads::join_all;
pub use trusted::{Asker, Trusted, TrustedError};
pub(crate) use waits::{LoanWaits, Waited, serve as serve_waits};
pub use wishes::Served;
pub(crate) use write_guard::WriteGuard;
