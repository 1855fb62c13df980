//! Which requests a thread of the FUSE ring serves itself, besides reads, writes and syncs.
//!
//! Such a request may read metadata from the device, and takes the locks that every operation on names and attributes takes: the gate, the
//! locks of inodes, and between directories the rename lock. No thread holds one of these while it waits for another request or for a
//! program. The others go to helpers: a truncation, a change of set-id bits and the release of the last inline writer wait for programs
//! that write inline, a rename over a file waits for write-back, and a listing may be long.

use jericho_sys::fuse_ring::Received;

use crate::filesystem::Jericho;
use crate::protocol::request::{Operation, SetAttrIn, parse};
use crate::protocol::{InHeader, op};
use crate::xattrs::is_of_control;

/// Returns whether the thread of the ring serves the request itself, when it may wait for locks.
pub(crate) fn is_served_here(filesystem: &Jericho, header: &InHeader, received: &Received) -> bool {
    match header.opcode {
        op::OPENDIR | op::RELEASEDIR | op::FLUSH => true,
        // Any of the others may need the metadata of a slice whose host is silent, and all requests of this CPU would wait with it.
        _ if filesystem.mounted.may_fall_silent() => false,
        op::LOOKUP | op::GETATTR | op::STATX | op::READLINK | op::LISTXATTR => true,
        op::CREATE | op::TMPFILE | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK => true,
        op::UNLINK | op::RMDIR => true,
        // Never truncates: the kernel sends that as a separate request.
        op::OPEN => true,
        // The release of a file's last inline writer may wait for a program that has stopped in a write that extends the file.
        op::RELEASE => {
            let [a, b, c, d, e, f, g, h, ..] = received.arguments;
            let handle = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            !filesystem.may_write_inline(handle)
        }
        op::SETATTR | op::GETXATTR | op::RENAME | op::RENAME2 => {
            let arguments = &received.arguments[..received.arguments_len];
            let rest = received.payload.as_ref().map_or(&[][..], AsRef::as_ref);
            match parse(header, arguments, rest, &filesystem.agreed) {
                Ok(Operation::SetAttr(args)) => !may_wait_for_writers(&args),
                Ok(Operation::GetXattr { name, .. }) => !is_of_control(name),
                // A new name: nothing to write back. The kernel locks both directories, so no other request makes the name meanwhile. If a
                // thread of the daemon makes it, this thread waits for the evictor and for a truncation. Neither waits for a request.
                Ok(Operation::Rename {
                    dir_to, name_to, ..
                }) => !filesystem.mounted.fs().has_entry(dir_to, name_to),
                _ => false,
            }
        }
        _ => false,
    }
}

/// Returns whether a change of attributes keeps inline writers out: a truncation, or set-id bits.
fn may_wait_for_writers(args: &SetAttrIn) -> bool {
    let is_set_id = args.valid & SetAttrIn::MODE != 0 && args.mode & 0o6000 != 0;
    args.valid & SetAttrIn::SIZE != 0 || is_set_id
}
