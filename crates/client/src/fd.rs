//! Reads and writes by fd, as a program makes them.
//!
//! Each function that returns an `Option` returns `None` when the caller must make the ordinary libc call: the fd is not on a
//! Jericho mount, or takes the kernel path, or the kernel keeps its offset. `Some` is the result of the call, made here: without
//! the kernel where that is possible, otherwise by the same system call at the right offset.
//!
//! An fd gets a description when its calls have cost enough (`early`). The library keeps its offset if this process opened it and
//! has not shared it with another process (`share`, `share_all`). Otherwise the kernel keeps the offset, and only calls with an
//! offset of their own go inline.

mod buffers;
mod companions;
mod data;
mod early;
mod grant;
mod kernel_path;
mod kernel_write;
mod meaning;
mod offset;
mod read;
mod reserve;
mod route;
mod seek;
mod share;
mod size;
mod size_limit;
mod state;
mod way;
mod wish;
mod write;

pub use crate::session::report::{Reason, report};
pub use buffers::LOWEST_ADDRESS;
pub use kernel_path::{errno_after, to_kernel};
pub use meaning::{
    Closing, closing, closing_range, duplicated, flags_changed, forget, forget_range, has_threads,
    mapped, opened,
};
pub(crate) use offset::with_offset;
pub use read::{pread, read, readv};
pub use seek::lseek;
pub use share::{Forking, before_bare_fork, before_fork, prepare, share, share_all};
pub use size::{refresh_size, size};
pub use size_limit::size_limit_changed;
pub use way::{make_way_everywhere, make_way_in_all_files};
pub use write::{pwrite, write, writev};

#[cfg(test)]
mod tests;
