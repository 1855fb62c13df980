//! The handshake: the features that the kernel offers and those that the daemon accepts.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_KERNEL_VERSION`.
const MAJOR: u32 = 7;
/// The newest protocol version whose structures are known here.
const MINOR: u32 = 45;
/// The oldest version that is supported: Linux 4.20, whose handshake contains the number of pages in a request.
const MINOR_MIN: u32 = 28;
const PAGE_BYTES: u32 = 4096;

/// `struct fuse_init_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitIn {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    flags2: u32,
    unused: [u32; 11],
}

impl InitIn {
    /// Length of the structure in kernels before 7.36.
    pub(crate) const SHORT_BYTES: usize = 16;
}

/// `struct fuse_init_out`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct InitOut {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion_threshold: u16,
    max_write: u32,
    time_gran: u32,
    max_pages: u16,
    map_alignment: u16,
    flags2: u32,
    max_stack_depth: u32,
    request_timeout: u16,
    unused: [u16; 11],
}

const _: () = {
    assert!(size_of::<InitIn>() == 64);
    assert!(size_of::<InitOut>() == 64);
};

/// Flags of the handshake (`FUSE_ASYNC_READ` and so on), those above bit 31 in `flags2`.
mod flag {
    pub(super) const ASYNC_READ: u64 = 1 << 0;
    pub(super) const EXPORT_SUPPORT: u64 = 1 << 4;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const DONT_MASK: u64 = 1 << 6;
    pub(super) const HAS_IOCTL_DIR: u64 = 1 << 11;
    pub(super) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(super) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(super) const ASYNC_DIO: u64 = 1 << 15;
    pub(super) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(super) const POSIX_ACL: u64 = 1 << 20;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const CACHE_SYMLINKS: u64 = 1 << 23;
    pub(super) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub(super) const SETXATTR_EXT: u64 = 1 << 29;
    pub(super) const INIT_EXT: u64 = 1 << 30;
    pub(super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(super) const OVER_IO_URING: u64 = 1 << 41;
}

/// Features that a volume accepts. Each is useful alone, so the handshake drops those that the kernel does not know.
///
/// `FUSE_ATOMIC_O_TRUNC` is left out: an open for reading with `O_TRUNC` would truncate a running program before the kernel
/// refuses it with ETXTBSY.
pub(crate) const VOLUME: u64 = flag::ASYNC_READ
    | flag::EXPORT_SUPPORT
    | flag::BIG_WRITES
    | flag::DONT_MASK
    | flag::HAS_IOCTL_DIR
    | flag::DO_READDIRPLUS
    | flag::READDIRPLUS_AUTO
    | flag::ASYNC_DIO
    | flag::PARALLEL_DIROPS
    | flag::POSIX_ACL
    | flag::MAX_PAGES
    | flag::CACHE_SYMLINKS
    | flag::HANDLE_KILLPRIV_V2
    | flag::SETXATTR_EXT
    | flag::INIT_EXT
    | flag::DIRECT_IO_ALLOW_MMAP;

/// Features that an attached disk accepts. Without `DIRECT_IO_ALLOW_MMAP` the kernel refuses shared mappings, whose pages could
/// overwrite what direct writes have changed. With `HANDLE_KILLPRIV_V2` it does not ask for capabilities before each write.
pub(crate) const DISK: u64 = flag::ASYNC_READ
    | flag::BIG_WRITES
    | flag::ASYNC_DIO
    | flag::PARALLEL_DIROPS
    | flag::MAX_PAGES
    | flag::HANDLE_KILLPRIV_V2
    | flag::INIT_EXT;

/// The features, limits and transport that the mount asks for in the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// `VOLUME` or `DISK`.
    pub(crate) features: u64,
    /// The largest read or write in one request.
    pub(crate) request_bytes_max: u32,
    /// Most background requests (read-ahead, asynchronous direct I/O) that may be with the daemon at once.
    pub(crate) background_requests: u16,
    /// Use FUSE over io_uring.
    pub(crate) ring: bool,
}

/// The result of the handshake.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Agreed {
    flags: u64,
}

impl Agreed {
    pub(crate) fn ring(&self) -> bool {
        self.flags & flag::OVER_IO_URING != 0
    }

    /// Returns whether SETXATTR carries its flags.
    pub(crate) fn long_setxattr(&self) -> bool {
        self.flags & flag::SETXATTR_EXT != 0
    }

    /// Returns an agreement on all features, for tests and fuzzers.
    pub(crate) fn all() -> Agreed {
        Agreed { flags: VOLUME }
    }
}

/// The result of a negotiation.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Send this answer; the mount begins.
    Agreed(InitOut, Agreed),
    /// Send this answer: the kernel has a newer major version, and tries again with this one.
    Again(InitOut),
    /// Answer EPROTO: the kernel is too old.
    TooOld(u32, u32),
}

/// Chooses among the features that the kernel offers.
pub(crate) fn negotiate(init: &InitIn, wanted: &Wanted) -> Outcome {
    let out = InitOut {
        major: MAJOR,
        minor: MINOR.min(init.minor),
        ..InitOut::default()
    };
    if init.major > MAJOR {
        let minor = MINOR;
        return Outcome::Again(InitOut { minor, ..out });
    }
    if init.major < MAJOR || init.minor < MINOR_MIN {
        return Outcome::TooOld(init.major, init.minor);
    }
    let mut offered = u64::from(init.flags);
    if offered & flag::INIT_EXT != 0 {
        offered |= u64::from(init.flags2) << 32;
    }
    let mut flags = wanted.features;
    if wanted.ring {
        flags |= flag::OVER_IO_URING;
    }
    flags &= offered;
    let out = InitOut {
        max_readahead: init.max_readahead,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        max_background: wanted.background_requests,
        congestion_threshold: wanted.background_requests / 4 * 3,
        max_write: wanted.request_bytes_max,
        max_pages: (wanted.request_bytes_max / PAGE_BYTES) as u16,
        // Nanoseconds.
        time_gran: 1,
        ..out
    };
    Outcome::Agreed(out, Agreed { flags })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Wanted = Wanted {
        features: VOLUME,
        request_bytes_max: 1 << 20,
        background_requests: 256,
        ring: true,
    };

    fn kernel(major: u32, minor: u32, flags: u64) -> InitIn {
        InitIn {
            major,
            minor,
            max_readahead: 1 << 17,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            ..InitIn::default()
        }
    }

    #[test]
    fn features_that_the_kernel_does_not_offer_are_not_accepted() {
        let offered = VOLUME & !flag::POSIX_ACL | 1 << 16;
        let Outcome::Agreed(out, agreed) = negotiate(&kernel(7, 99, offered), &ASKED) else {
            panic!("refused");
        };
        assert_eq!(agreed.flags, VOLUME & !flag::POSIX_ACL);
        assert!(!agreed.ring() && agreed.long_setxattr());
        assert_eq!((out.major, out.minor), (7, MINOR));
        assert_eq!((out.max_write, out.max_pages), (1 << 20, 256));
    }

    #[test]
    fn flags_above_bit_31_count_only_if_the_kernel_says_that_there_are_some() {
        let offered = VOLUME | flag::OVER_IO_URING;
        for (offered, ring) in [(offered, true), (offered & !flag::INIT_EXT, false)] {
            let Outcome::Agreed(out, agreed) = negotiate(&kernel(7, 40, offered), &ASKED) else {
                panic!("refused");
            };
            assert_eq!(agreed.ring(), ring);
            assert_eq!(out.flags2 != 0, ring);
            assert_eq!(out.minor, 40);
        }
    }

    #[test]
    fn a_newer_major_version_is_negotiated_and_an_older_one_refused() {
        let newer = negotiate(&kernel(8, 0, VOLUME), &ASKED);
        assert!(matches!(newer, Outcome::Again(out) if (out.major, out.minor) == (7, MINOR)));
        for (major, minor) in [(6, 40), (7, 27)] {
            let older = negotiate(&kernel(major, minor, VOLUME), &ASKED);
            assert!(matches!(older, Outcome::TooOld(..)));
        }
    }
}
