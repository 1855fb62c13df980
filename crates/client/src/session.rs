//! The daemons of this process's files: how it asks them, and the segments that it has mapped.

mod ask;
pub mod death;
pub mod devices;
mod file;
mod guards;
mod handshake;
pub mod report;
mod segments;
mod sessions;
mod why;

pub use ask::ask;
#[cfg(test)]
pub use ask::tests as asked;
pub use file::InlineFile;
pub use guards::{HeldLock, LockedRange};
pub use segments::{SESSIONS_MAX, Session};
#[cfg(test)]
pub use sessions::mark;
pub use sessions::{
    AttachLock, all, allow_attaching, attach, attach_writable, before_bare_fork, find, get,
    lock_attaching, may_attach, of_device,
};
pub use why::Why;
