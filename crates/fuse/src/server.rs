//! What answers the kernel's requests: the filesystem of a volume, or a disk.

use crate::protocol::InHeader;
use crate::protocol::init::Agreed;
use crate::protocol::request::{Malformed, Operation};
use crate::reply::Reply;

/// The largest read or write in one request.
pub(crate) const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Answers requests. Clones refer to the same filesystem.
pub(crate) trait Server: Clone + Send + Sync + 'static {
    /// Returns the features that the kernel and this side have agreed on.
    fn agreed(&self) -> &Agreed;
    /// Counts a request that the kernel waits for.
    fn note_request(&self);
    /// Serves a request. `reply` is set if the kernel waits for an answer, which may come after this returns.
    fn serve(
        &self,
        header: &InHeader,
        operation: Result<Operation<'_>, Malformed>,
        reply: Option<Reply>,
    );
    /// Returns whether the kernel's reports of signals ever end a request.
    fn serves_reports(&self) -> bool {
        false
    }
    /// Returns whether the reports have to be read now, also if all threads wait.
    fn needs_reports(&self) -> bool {
        false
    }
    /// Returns the reply to a request that no thread serves yet. A signal may end the request until a thread calls `serve`.
    fn park(
        &self,
        _header: &InHeader,
        _operation: &Result<Operation<'_>, Malformed>,
        reply: Reply,
    ) -> Reply {
        reply
    }
    /// Ends requests of programs that end, although no report of their signals was read.
    fn look_for_dying(&self) {}
}

/// Logs a panic in a request; the kernel has received EIO.
pub(crate) fn report_panic(header: &InHeader) {
    tracing::error!(
        opcode = header.opcode,
        ino = header.nodeid,
        "a request panicked; it was answered with an I/O error"
    );
}

/// Answers a request that cannot be read.
pub(crate) fn refuse(why: Malformed, header: &InHeader, reply: Option<Reply>) {
    tracing::error!(%why, ?header, "a request cannot be read");
    if let Some(reply) = reply {
        reply.error(libc::EIO);
    }
}
