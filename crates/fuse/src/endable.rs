//! Which operations a signal may end while they wait for a silent host.

use crate::control::is_change;
use crate::interrupts::Ending;
use crate::protocol::request::{Operation, SetAttrIn, Transfer};

/// Returns whether a signal may end an operation while it waits. Operations that change something call `Interruption::begin` before
/// they do; those that do not call it are not ended.
pub(crate) fn may_be_ended(operation: &Operation<'_>) -> bool {
    match operation {
        // Holds its reply when it has to wait.
        Operation::Read(_) => false,
        // No program waits for the write-back of a mapping.
        Operation::Write { args, .. } => args.flags & Transfer::WRITE_CACHE == 0,
        Operation::GetXattr { name, .. } | Operation::SetXattr { name, .. } => !is_change(name),
        Operation::RemoveXattr { .. } | Operation::ListXattr { .. } => true,
        Operation::Lookup { .. } | Operation::GetAttr | Operation::StatX | Operation::StatFs => {
            true
        }
        Operation::ReadLink | Operation::ReadDir(_) | Operation::ReadDirPlus(_) => true,
        Operation::Open(_) | Operation::Lseek(_) => true,
        Operation::Fsync(_) | Operation::FsyncDir => true,
        Operation::Create { .. } | Operation::Tmpfile(_) | Operation::Mknod { .. } => true,
        Operation::Mkdir { .. } | Operation::Symlink { .. } | Operation::Link { .. } => true,
        Operation::Unlink { .. } | Operation::Rmdir { .. } | Operation::Rename { .. } => true,
        // A truncation shows inline readers its size before it waits.
        Operation::SetAttr(args) => args.valid & SetAttrIn::SIZE == 0,
        _ => false,
    }
}

/// Returns how a signal may end an operation that no thread has begun. Returns `None` if it must be performed.
pub(crate) fn ending_before_begin(operation: &Operation<'_>) -> Option<Ending> {
    match operation {
        Operation::Read(args) if args.fills_page_cache() => Some(Ending::IfDying),
        // No program waits for these, and their effects are needed.
        Operation::Write { args, .. } if args.flags & Transfer::WRITE_CACHE != 0 => None,
        Operation::Release { .. } | Operation::ReleaseDir | Operation::Destroy => None,
        Operation::Forget { .. } | Operation::BatchForget(_) | Operation::NotifyReply => None,
        Operation::Interrupt { .. } | Operation::Init(_) | Operation::Other => None,
        // The callers are commands, and the library under programs: they expect no EINTR.
        Operation::Ioctl { .. } => Some(Ending::IfDying),
        Operation::GetXattr { name, .. } | Operation::SetXattr { name, .. } if is_change(name) => {
            Some(Ending::IfDying)
        }
        _ => Some(Ending::Answer),
    }
}
