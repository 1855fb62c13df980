//! The program's open files: an entry for each open file description that uses the fast path, and a word for each fd.
//!
//! Knows neither the daemon nor its memory: a description names its file's slot by numbers.

mod description;
mod fds;
mod offset;
mod past;
mod read_ahead;
mod word;

pub use description::{
    APPEND, Description, Facts, FileIdentity, NEVER, NO_INLINE_WRITE, OpenFd, READ, SYNC,
    TO_KERNEL, WRITE,
};
pub use fds::{
    FdState, begin_close, call_ended, count_call, describe, described, disown, duplicated, fds,
    forget, forget_range, has_closed, note_ours, opened, set_kernel, state, unopened,
};
pub use offset::{OFFSET_MAX, Offset, Position, SEEK_CUR, SEEK_END, SEEK_SET};
#[cfg(test)]
pub use past::forget_past;
pub use past::proved;
pub use read_ahead::ReadAhead;
pub use word::{is_in_use, is_ours, is_promising, is_same_unknown, is_wished, units};
