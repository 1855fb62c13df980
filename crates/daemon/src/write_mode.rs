//! How a write is made, and how durable it is before the reply.

/// The durability that a write requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteSync {
    /// None.
    No = 0,
    /// O_DSYNC.
    Data = 1,
    /// O_SYNC.
    Full = 2,
}

/// How a write is made.
#[derive(Clone, Copy, Debug)]
pub struct WriteMode {
    /// Writes at the end of the file, wherever that is at the time of the write.
    pub append: bool,
    /// Durability that the write has before the reply.
    pub sync: WriteSync,
    /// The write clears set-id bits. Every write clears capabilities.
    pub strip_suid: bool,
    /// The kernel writes back pages of its page cache.
    pub of_mapping: bool,
}

impl WriteMode {
    /// A program's write at its offset, which clears no set-id bits and is not synced.
    pub const PLAIN: WriteMode = WriteMode {
        append: false,
        sync: WriteSync::No,
        strip_suid: false,
        of_mapping: false,
    };
}
