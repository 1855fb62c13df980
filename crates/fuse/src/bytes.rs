//! Operations on open files: reads, writes, space, and the ioctls of the fast path.

use std::sync::Arc;

use jericho_daemon::{Asker, Handle, Served, WriteMode, WriteSync};
use jericho_fs::Error;
use jericho_fs::types::Ino;
use jericho_shm::{Answer, Call};
use zerocopy::{FromBytes, IntoBytes};

use crate::control::TrimRange;
use crate::convert::errno;
use crate::filesystem::{Jericho, Outcome};
use crate::protocol::InHeader;
use crate::protocol::answer::{IoctlOut, SizeOut};
use crate::protocol::request::{CopyIn, FallocateIn, FsyncIn, IoctlIn, LseekIn, Transfer};
use crate::reply::{Reply, Room};
use crate::server::REQUEST_BYTES_MAX;

/// Returns the mode of a write from its arguments.
fn mode(args: &Transfer) -> WriteMode {
    // Pages that the kernel writes back for a mapping carry no descriptor flags.
    let of_mapping = args.flags & Transfer::WRITE_CACHE != 0;
    let open_flags = args.open_flags as i32;
    WriteMode {
        // The kernel serialises appending writes, and has put the size into the offset. But the daemon knows the size better when
        // clients extend the file inline. A mapping's pages go to the given offset.
        append: open_flags & libc::O_APPEND != 0 && !of_mapping,
        sync: match of_mapping {
            true => WriteSync::No,
            false => write_sync(open_flags),
        },
        strip_suid: args.flags & Transfer::WRITE_KILL_SUIDGID != 0,
        of_mapping,
    }
}

/// Returns whether a write with this mode answers a wish of its thread. Write-back of a mapping has no such thread, and
/// synchronous writes are never inline.
fn answers_wish(mode: WriteMode) -> bool {
    !mode.of_mapping && mode.sync == WriteSync::No
}

/// Returns where a write of `len` bytes ends. Returns `None` for an append.
fn end_of(args: &Transfer, mode: WriteMode, len: usize) -> Option<u64> {
    (!mode.append).then(|| args.offset.saturating_add(len as u64))
}

/// Returns whether reads with these descriptor flags leave the access time unchanged.
pub(crate) fn no_access_time(flags: i32) -> bool {
    flags & libc::O_NOATIME != 0
}

/// Returns the number of bytes that a read may return.
fn room_for(args: &Transfer, room: &mut Room) -> usize {
    room.at_most(args.size.min(REQUEST_BYTES_MAX) as usize)
}

/// Returns the thread that makes a request.
pub(crate) fn asker(req: &InHeader) -> Asker {
    Asker {
        uid: req.uid,
        gid: req.gid,
        thread: req.pid,
    }
}

fn answer_read(read: Result<usize, Error>, room: Room) {
    match read {
        Ok(len) => room.filled(len),
        Err(e) => room.error(errno("read", &e)),
    }
}

impl Jericho {
    #[inline]
    pub(crate) fn read(&self, req: &InHeader, args: &Transfer, reply: Reply) {
        let ticket = self.mounted.may_fall_silent().then(|| self.ticket(req));
        self.read_into(asker(req), args, reply.room(ticket));
    }

    pub(crate) fn write(&self, req: &InHeader, args: &Transfer, data: &[u8], reply: Reply) {
        let answer = move |written| match written {
            Ok(n) => reply.with(&SizeOut::new(n)),
            Err(e) => reply.error(e),
        };
        self.write_bytes(asker(req), args, data, answer);
    }

    /// Prepares a read. Returns the number of bytes that it may return, and whether they are for the kernel's page cache.
    #[inline]
    fn begin_read(
        &self,
        handle: &Arc<Handle>,
        asker: Asker,
        args: &Transfer,
        room: &mut Room,
    ) -> (usize, bool) {
        // The program may have changed the flag with fcntl since the open.
        handle.set_no_access_time(no_access_time(args.open_flags as i32));
        let fills = args.fills_page_cache();
        match fills {
            true => room.is_for_page_cache(),
            false => self.mounted.answer_wish(handle, asker, Served::Read),
        }
        (room_for(args, room), fills)
    }

    /// Reads from an open file; see `Mounted::read`.
    #[inline]
    pub(crate) fn read_into(&self, asker: Asker, args: &Transfer, mut room: Room) {
        let open = self.handles.get(args.fh);
        let Some(handle) = open.as_ref() else {
            return room.error(libc::EBADF);
        };
        let (size, fills) = self.begin_read(handle, asker, args, &mut room);
        self.mounted.requested(handle, asker.thread, size);
        self.mounted
            .read(handle, args.offset, size as u32, fills, room, answer_read);
    }

    /// Does the same as `read_into` without waiting for inline writers. Returns the room when it would have to wait.
    #[inline]
    #[must_use]
    pub(crate) fn try_read(&self, asker: Asker, args: &Transfer, mut room: Room) -> Option<Room> {
        let open = self.handles.get(args.fh);
        let Some(handle) = open.as_ref() else {
            room.error(libc::EBADF);
            return None;
        };
        let (size, fills) = self.begin_read(handle, asker, args, &mut room);
        let left =
            (self.mounted).try_read(handle, args.offset, size as u32, fills, room, answer_read);
        if left.is_none() {
            self.mounted.requested(handle, asker.thread, size);
        }
        left.map(|(room, _)| room)
    }

    /// Writes to an open file; see `Mounted::write`.
    pub(crate) fn write_bytes(
        &self,
        asker: Asker,
        args: &Transfer,
        data: &[u8],
        reply: impl FnOnce(Outcome<u32>) + Send + 'static,
    ) {
        let open = self.handles.get(args.fh);
        let Some(handle) = open.as_ref() else {
            return reply(Err(libc::EBADF));
        };
        let mode = mode(args);
        // The kernel writes pages of a mapping back on behalf of no user.
        if !mode.of_mapping {
            handle.set_user(asker.uid);
        }
        let may_wish = answers_wish(mode) && self.mounted.may_wish(asker);
        let this_thread = || std::thread::current().id();
        let wisher = may_wish.then(|| (self.mounted.clone(), handle.clone(), this_thread()));
        let end = end_of(args, mode, data.len());
        let answer = move |written: Result<u32, Error>| {
            if let (Ok(len), Some((mounted, handle, thread))) = (&written, wisher) {
                let served = Served::Write {
                    end,
                    len: *len as usize,
                    // A thread of a slice may not wait.
                    may_wait: this_thread() == thread,
                };
                mounted.answer_wish(&handle, asker, served);
            }
            reply(written.map_err(|e| errno("write", &e)));
        };
        self.mounted.requested(handle, asker.thread, data.len());
        self.mounted.write(handle, args.offset, data, mode, answer);
    }

    /// Writes the rest of a write of which `done` bytes were written before, and answers.
    pub(crate) fn write_rest(
        &self,
        asker: Asker,
        args: &Transfer,
        rest: &[u8],
        done: usize,
        reply: Reply,
    ) {
        self.write_bytes(asker, args, rest, move |written| match written {
            Ok(len) => reply.with(&SizeOut::new(done as u32 + len)),
            // An error after the first bytes is a short write.
            Err(_) if done > 0 => reply.with(&SizeOut::new(done as u32)),
            Err(e) => reply.error(e),
        });
    }

    /// Writes as much as possible without waiting; see `Mounted::try_write`. Returns the number of bytes written.
    pub(crate) fn try_write(&self, asker: Asker, args: &Transfer, data: &[u8]) -> usize {
        let open = self.handles.get(args.fh);
        let Some(handle) = open.as_ref() else {
            return 0;
        };
        let mode = mode(args);
        let written = self.mounted.try_write(handle, args.offset, data, mode);
        if written > 0 {
            self.mounted.requested(handle, asker.thread, written);
        }
        if written == data.len() && answers_wish(mode) {
            let served = Served::Write {
                end: end_of(args, mode, written),
                len: written,
                may_wait: false,
            };
            self.mounted.answer_wish(handle, asker, served);
        }
        written
    }

    pub(crate) fn fsync(&self, args: &FsyncIn, reply: Reply) {
        self.with_handle(args.fh, reply, |handle, reply| {
            let done = Box::new(move |result| reply.done("fsync", result));
            self.mounted.fsync(handle, args.is_datasync(), done);
        });
    }

    pub(crate) fn fallocate(&self, req: &InHeader, ino: Ino, args: &FallocateIn, reply: Reply) {
        self.with_handle(args.fh, reply, |handle, reply| {
            handle.set_user(req.uid);
            let (mode, offset, length) = (args.mode as i32, args.offset, args.length);
            // A separate SETATTR has cleared the set-id bits.
            let stripped = (self.mounted.fs()).drop_privileges(ino, false);
            if stripped.is_err() {
                return reply.done("fallocate", stripped);
            }
            let answer = move |result| reply.done("fallocate", result);
            self.mounted.fallocate(handle, mode, offset, length, answer);
        });
    }

    pub(crate) fn lseek(&self, ino: Ino, args: &LseekIn, reply: Reply) {
        self.with_handle(args.fh, reply, |handle, reply| {
            // The kernel implements the other kinds itself.
            let data = match args.whence as i32 {
                libc::SEEK_DATA => true,
                libc::SEEK_HOLE => false,
                _ => return reply.error(libc::EINVAL),
            };
            if i64::try_from(args.offset).is_err() {
                return reply.error(libc::ENXIO);
            }
            self.mounted.absorb(ino);
            match self
                .mounted
                .fs()
                .seek(self.mounted.file(handle), args.offset, data)
            {
                Ok(found) => reply.with(&found),
                Err(e) => reply.error(errno("lseek", &e)),
            }
        });
    }

    /// Copies bytes between two files. `long`: the kernel accepts a 64-bit answer.
    pub(crate) fn copy_file_range(&self, req: &InHeader, args: &CopyIn, long: bool, reply: Reply) {
        let (from, to) = (self.handles.get(args.fh_in), self.handles.get(args.fh_out));
        let (Some(from), Some(to)) = (from.as_ref(), to.as_ref()) else {
            return reply.error(libc::EBADF);
        };
        if args.flags != 0 {
            return reply.error(libc::EINVAL);
        }
        to.set_user(req.uid);
        let (from, to) = ((from, args.offset_in), (to, args.offset_out));
        let answer = move |copied| match copied {
            Ok(copied) if long => reply.with(&copied),
            // A request is far shorter than 4 GiB.
            Ok(copied) => reply.with(&SizeOut::new(copied as u32)),
            Err(e) => reply.error(errno("copy_file_range", &e)),
        };
        self.mounted.copy_range(from, to, args.len, answer);
    }

    pub(crate) fn ioctl(&self, req: &InHeader, args: &IoctlIn, data: &[u8], reply: Reply) {
        if args.cmd == FITRIM {
            return self.fitrim(req, data, reply);
        }
        // Directories have no handle here.
        if args.is_of_directory() {
            return reply.error(libc::ENOTTY);
        }
        let call = match Call::decode(args.cmd, data) {
            Ok(Some(call)) => call,
            Ok(None) => return reply.error(libc::ENOTTY),
            Err(why) => return reply_call(reply, &Answer::refused(why)),
        };
        self.with_handle(args.fh, reply, |handle, reply| {
            let answer = move |answer: Answer| reply_call(reply, &answer);
            self.mounted.call(handle, call, asker(req), answer);
        });
    }
}

impl Jericho {
    /// Answers FITRIM, the ioctl of fstrim(8): discards all free space in a range.
    fn fitrim(&self, req: &InHeader, data: &[u8], reply: Reply) {
        let Ok(range) = TrimRange::read_from_bytes(data) else {
            return reply.error(libc::EINVAL);
        };
        self.control
            .trim(range, None, req.uid, move |result| match result {
                Ok(trim) => {
                    let mut out = IoctlOut::default().as_bytes().to_vec();
                    let len = trim.bytes;
                    out.extend_from_slice(TrimRange { len, ..range }.as_bytes());
                    reply.bytes(&out);
                }
                Err(e) => reply.error(e),
            });
    }
}

/// `FITRIM` of linux/fs.h.
const FITRIM: u32 = 0xc018_5879;

/// Answers an ioctl with result 0; `answer` may be a refusal.
fn reply_call(reply: Reply, answer: &Answer) {
    let mut out = IoctlOut::default().as_bytes().to_vec();
    out.extend_from_slice(&answer.encode());
    reply.bytes(&out);
}

pub(crate) fn write_sync(flags: i32) -> WriteSync {
    if flags & libc::O_SYNC == libc::O_SYNC {
        WriteSync::Full
    } else if flags & libc::O_DSYNC != 0 {
        WriteSync::Data
    } else {
        WriteSync::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_a_descriptor_give_the_durability_of_its_writes() {
        assert_eq!(write_sync(libc::O_RDWR), WriteSync::No);
        assert_eq!(write_sync(libc::O_RDWR | libc::O_DSYNC), WriteSync::Data);
        assert_eq!(write_sync(libc::O_RDWR | libc::O_SYNC), WriteSync::Full);
    }
}
