//! System calls and foreign functions that the standard library does not offer.
//!
//! One of the three crates that may contain `unsafe`. It knows nothing of slices, files or volumes. It turns kernel interfaces
//! into safe functions whose errors keep the errno.

pub mod accounts;
pub mod affinity;
pub mod block;
pub mod build_id;
pub mod doorbell;
pub mod files;
pub mod fuse_device;
pub mod fuse_ring;
pub mod futex;
pub mod handshake;
pub mod heap;
pub mod hypervisor;
pub mod errno {
    //! Error numbers that callers compare with.
    pub use libc::{
        EACCES, EAGAIN, EBADF, EBUSY, ECANCELED, ECONNABORTED, EDQUOT, EEXIST, EFAULT, EFBIG,
        EINTR, EINVAL, EIO, ENOBUFS, ENODATA, ENODEV, ENOENT, ENOMEM, ENOSPC, ENOSYS, ENOTCONN,
        ENOTTY, EOPNOTSUPP, EPERM, EROFS,
    };
}
pub mod limits;
pub mod load;
pub mod loop_device;
pub mod memory;
pub mod node_memory;
pub mod packet;
mod packet_filter;
pub mod poller;
pub mod port;
pub mod process;
pub mod queued_write;
pub mod rseq;
pub mod service;
pub mod signals;
pub mod sockets;
pub mod timer;
pub mod tsc;
mod unfinished;
pub mod uring;
pub mod xdp;
mod xdp_features;
mod xdp_program;
mod xdp_rings;
