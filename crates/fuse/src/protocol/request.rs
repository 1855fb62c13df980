//! Parses requests: maps bytes to an operation, without side effects. No bytes make it panic, as the tests check.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::init::{Agreed, InitIn};
use super::{InHeader, op};

/// A request whose bytes do not fit its operation, with the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(&'static str);

type Result<T> = std::result::Result<T, Malformed>;

/// `struct fuse_read_in` and `struct fuse_write_in`, which have the same layout.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Transfer {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) size: u32,
    /// `read_flags`, `write_flags`.
    pub(crate) flags: u32,
    pub(crate) lock_owner: u64,
    /// Flags of the descriptor.
    pub(crate) open_flags: u32,
    pub(crate) padding: u32,
}

impl Transfer {
    /// `FUSE_WRITE_CACHE`: pages of a mapping that the kernel writes back.
    pub(crate) const WRITE_CACHE: u32 = 1 << 0;
    /// `FUSE_READ_LOCKOWNER`: a program waits for the bytes, and `lock_owner` is the owner of its locks.
    const READ_LOCK_OWNER: u32 = 1 << 1;
    /// `FUSE_WRITE_KILL_SUIDGID`: the write clears set-id bits.
    pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;

    /// Returns whether the bytes of this read go to the kernel's page cache.
    pub(crate) fn fills_page_cache(&self) -> bool {
        self.flags & Transfer::READ_LOCK_OWNER == 0
    }
}

/// `struct fuse_setattr_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetAttrIn {
    /// Bits for the fields that are set; see the constants below.
    pub(crate) valid: u32,
    pub(crate) padding: u32,
    pub(crate) fh: u64,
    pub(crate) size: u64,
    pub(crate) lock_owner: u64,
    /// Seconds of atime, mtime and ctime.
    pub(crate) seconds: [i64; 3],
    /// Nanoseconds; they count forwards even before 1970.
    pub(crate) nanoseconds: [u32; 3],
    pub(crate) mode: u32,
    pub(crate) unused4: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) unused5: u32,
}

impl SetAttrIn {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const CTIME: u32 = 1 << 10;
    /// `FATTR_KILL_SUIDGID`: clear the set-id bits.
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
    const ALL: u32 = SetAttrIn::MODE
        | SetAttrIn::UID
        | SetAttrIn::GID
        | SetAttrIn::SIZE
        | SetAttrIn::ATIME
        | SetAttrIn::MTIME
        | SetAttrIn::ATIME_NOW
        | SetAttrIn::MTIME_NOW
        | SetAttrIn::CTIME;

    /// Returns whether to clear the set-id bits. A request that sets no attribute has this as its only purpose. The kernel sends
    /// one before fallocate(2) by a user who may not keep the bits, and for a chown(2) that names the current owner and group.
    pub(crate) fn drops_set_id(&self) -> bool {
        self.valid & SetAttrIn::KILL_SUIDGID != 0 || self.valid & SetAttrIn::ALL == 0
    }

    /// Returns `value` if the request sets it.
    pub(crate) fn given<T>(&self, field: u32, value: T) -> Option<T> {
        (self.valid & field != 0).then_some(value)
    }
}

/// `struct fuse_open_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OpenIn {
    pub(crate) flags: u32,
    pub(crate) open_flags: u32,
}

/// `struct fuse_create_in`, also of TMPFILE.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CreateIn {
    pub(crate) flags: u32,
    pub(crate) mode: u32,
    pub(crate) umask: u32,
    pub(crate) open_flags: u32,
}

/// `struct fuse_mknod_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MknodIn {
    pub(crate) mode: u32,
    pub(crate) rdev: u32,
    pub(crate) umask: u32,
    pub(crate) padding: u32,
}

/// `struct fuse_mkdir_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MkdirIn {
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

/// `struct fuse_rename2_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Rename2In {
    dir: u64,
    flags: u32,
    padding: u32,
}

/// `struct fuse_fsync_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FsyncIn {
    pub(crate) fh: u64,
    flags: u32,
    padding: u32,
}

impl FsyncIn {
    /// `FUSE_FSYNC_FDATASYNC`.
    pub(crate) fn is_datasync(&self) -> bool {
        self.flags & 1 != 0
    }
}

/// `struct fuse_setxattr_in`. A kernel that has not agreed to the longer form sends only the first 8 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetXattrIn {
    size: u32,
    /// Flags of setxattr(2).
    pub(crate) flags: u32,
    /// `setxattr_flags`.
    pub(crate) kernel_flags: u32,
    padding: u32,
}

impl SetXattrIn {
    /// `FUSE_SETXATTR_ACL_KILL_SGID`: a user outside of the file's group sets the access control list.
    pub(crate) fn is_of_outsider(&self) -> bool {
        self.kernel_flags & 1 != 0
    }
}

/// `struct fuse_fallocate_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FallocateIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) mode: u32,
    padding: u32,
}

/// `struct fuse_lseek_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct LseekIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) whence: u32,
    padding: u32,
}

/// `struct fuse_ioctl_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoctlIn {
    pub(crate) fh: u64,
    flags: u32,
    pub(crate) cmd: u32,
    arg: u64,
    in_size: u32,
    pub(crate) out_size: u32,
}

impl IoctlIn {
    /// `FUSE_IOCTL_DIR`.
    pub(crate) fn is_of_directory(&self) -> bool {
        self.flags & (1 << 4) != 0
    }
}

/// `struct fuse_forget_one`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ForgetOne {
    pub(crate) ino: u64,
    pub(crate) lookups: u64,
}

/// `struct fuse_release_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ReleaseIn {
    fh: u64,
    flags: u32,
    release_flags: u32,
    lock_owner: u64,
}

/// `struct fuse_copy_file_range_in`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CopyIn {
    pub(crate) fh_in: u64,
    pub(crate) offset_in: u64,
    pub(crate) ino_out: u64,
    pub(crate) fh_out: u64,
    pub(crate) offset_out: u64,
    pub(crate) len: u64,
    pub(crate) flags: u64,
}

const _: () = {
    assert!(size_of::<Transfer>() == 40);
    assert!(size_of::<SetAttrIn>() == 88);
    assert!(size_of::<OpenIn>() == 8);
    assert!(size_of::<CreateIn>() == 16);
    assert!(size_of::<MknodIn>() == 16);
    assert!(size_of::<MkdirIn>() == 8);
    assert!(size_of::<Rename2In>() == 16);
    assert!(size_of::<FsyncIn>() == 16);
    assert!(size_of::<SetXattrIn>() == 16);
    assert!(size_of::<FallocateIn>() == 32);
    assert!(size_of::<LseekIn>() == 24);
    assert!(size_of::<IoctlIn>() == 32);
    assert!(size_of::<ForgetOne>() == 16);
    assert!(size_of::<ReleaseIn>() == 24);
    assert!(size_of::<CopyIn>() == 56);
};

/// The operation that a request asks for. The header holds the inode and the caller.
#[derive(Debug)]
pub(crate) enum Operation<'a> {
    Lookup {
        name: &'a [u8],
    },
    Forget {
        lookups: u64,
    },
    /// Whole [`ForgetOne`]s.
    BatchForget(&'a [u8]),
    GetAttr,
    StatX,
    SetAttr(SetAttrIn),
    ReadLink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        args: MknodIn,
        name: &'a [u8],
    },
    Mkdir {
        args: MkdirIn,
        name: &'a [u8],
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    Rename {
        name: &'a [u8],
        dir_to: u64,
        name_to: &'a [u8],
        flags: u32,
    },
    Link {
        ino: u64,
        name: &'a [u8],
    },
    Open(OpenIn),
    Create {
        args: CreateIn,
        name: &'a [u8],
    },
    /// O_TMPFILE. The name in the request has no meaning.
    Tmpfile(CreateIn),
    Read(Transfer),
    Write {
        args: Transfer,
        data: &'a [u8],
    },
    StatFs,
    Release {
        fh: u64,
    },
    Fsync(FsyncIn),
    SetXattr {
        args: SetXattrIn,
        name: &'a [u8],
        value: &'a [u8],
    },
    GetXattr {
        size: u32,
        name: &'a [u8],
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: &'a [u8],
    },
    Flush,
    Init(InitIn),
    OpenDir,
    ReadDir(Transfer),
    ReadDirPlus(Transfer),
    ReleaseDir,
    FsyncDir,
    /// A signal has come for the program of a request.
    Interrupt {
        /// The number of the request.
        unique: u64,
    },
    Destroy,
    Ioctl {
        args: IoctlIn,
        data: &'a [u8],
    },
    NotifyReply,
    Fallocate(FallocateIn),
    Lseek(LseekIn),
    CopyFileRange {
        args: CopyIn,
        /// The answer holds 64 bits.
        long: bool,
    },
    /// An operation of a newer kernel, or one that this filesystem does not implement: ENOSYS.
    Other,
}

/// Parses a request's arguments and payload, which follow the header. The device delivers all of them in `rest`.
#[expect(
    clippy::too_many_lines,
    reason = "a table: one entry for each operation"
)]
pub(crate) fn parse<'a>(
    header: &InHeader,
    arguments: &'a [u8],
    rest: &'a [u8],
    agreed: &Agreed,
) -> Result<Operation<'a>> {
    let mut body = Body { arguments, rest };
    Ok(match header.opcode {
        op::LOOKUP => Operation::Lookup { name: body.name()? },
        op::FORGET => Operation::Forget {
            lookups: body.take()?,
        },
        op::BATCH_FORGET => {
            let [count, _dummy] = body.take::<[u32; 2]>()?;
            let forgets = body.all()?;
            if forgets.len() as u64 != u64::from(count) * size_of::<ForgetOne>() as u64 {
                return Err(Malformed(
                    "a batch of forgets has another length than it says",
                ));
            }
            Operation::BatchForget(forgets)
        }
        op::GETATTR => {
            body.take::<[u64; 2]>()?;
            Operation::GetAttr
        }
        op::STATX => {
            body.take::<[u64; 3]>()?;
            Operation::StatX
        }
        op::SETATTR => Operation::SetAttr(body.take()?),
        op::READLINK => Operation::ReadLink,
        op::SYMLINK => Operation::Symlink {
            name: body.first_name()?,
            target: body.text()?,
        },
        op::MKNOD => Operation::Mknod {
            args: body.take()?,
            name: body.name()?,
        },
        op::MKDIR => Operation::Mkdir {
            args: body.take()?,
            name: body.name()?,
        },
        op::UNLINK => Operation::Unlink { name: body.name()? },
        op::RMDIR => Operation::Rmdir { name: body.name()? },
        op::RENAME => {
            let dir_to = body.take()?;
            body.rename(dir_to, 0)?
        }
        op::RENAME2 => {
            let args: Rename2In = body.take()?;
            body.rename(args.dir, args.flags)?
        }
        op::LINK => Operation::Link {
            ino: body.take()?,
            name: body.name()?,
        },
        op::OPEN => Operation::Open(body.take()?),
        op::CREATE => Operation::Create {
            args: body.take()?,
            name: body.name()?,
        },
        op::TMPFILE => Operation::Tmpfile(body.take()?),
        op::READ => Operation::Read(body.take()?),
        op::WRITE => {
            let args: Transfer = body.take()?;
            Operation::Write {
                data: body.data(args.size)?,
                args,
            }
        }
        op::STATFS => Operation::StatFs,
        op::RELEASE => Operation::Release {
            fh: body.take::<ReleaseIn>()?.fh,
        },
        op::FSYNC => Operation::Fsync(body.take()?),
        op::FSYNCDIR => Operation::FsyncDir,
        op::SETXATTR => {
            let args: SetXattrIn = match agreed.long_setxattr() {
                true => body.take()?,
                false => {
                    let [size, flags] = body.take::<[u32; 2]>()?;
                    SetXattrIn {
                        size,
                        flags,
                        kernel_flags: 0,
                        padding: 0,
                    }
                }
            };
            Operation::SetXattr {
                name: body.first_text()?,
                value: body.data(args.size)?,
                args,
            }
        }
        op::GETXATTR => Operation::GetXattr {
            size: body.take::<[u32; 2]>()?[0],
            name: body.text()?,
        },
        op::LISTXATTR => Operation::ListXattr {
            size: body.take::<[u32; 2]>()?[0],
        },
        op::REMOVEXATTR => Operation::RemoveXattr { name: body.text()? },
        op::FLUSH => Operation::Flush,
        op::INIT => Operation::Init(body.init()?),
        op::OPENDIR => Operation::OpenDir,
        op::READDIR => Operation::ReadDir(body.take()?),
        op::READDIRPLUS => Operation::ReadDirPlus(body.take()?),
        op::RELEASEDIR => Operation::ReleaseDir,
        op::INTERRUPT => Operation::Interrupt {
            unique: body.take()?,
        },
        op::DESTROY => Operation::Destroy,
        op::IOCTL => {
            let args: IoctlIn = body.take()?;
            Operation::Ioctl {
                data: body.data(args.in_size)?,
                args,
            }
        }
        op::NOTIFY_REPLY => Operation::NotifyReply,
        op::FALLOCATE => Operation::Fallocate(body.take()?),
        op::LSEEK => Operation::Lseek(body.take()?),
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => Operation::CopyFileRange {
            args: body.take()?,
            long: header.opcode == op::COPY_FILE_RANGE_64,
        },
        _ => Operation::Other,
    })
}

/// Parses a whole message from the device. Returns the header, if there is one, and the operation.
pub(crate) fn parse_message<'a>(
    message: &'a [u8],
    agreed: &Agreed,
) -> (Option<InHeader>, Result<Operation<'a>>) {
    let Ok((header, rest)) = InHeader::read_from_prefix(message) else {
        return (None, Err(Malformed("a message is shorter than a header")));
    };
    if header.len as usize != message.len() {
        let wrong = Malformed("a message has another length than it says");
        return (Some(header), Err(wrong));
    }
    (Some(header), parse(&header, &[], rest, agreed))
}

/// The unparsed rest of a request.
struct Body<'a> {
    /// The first argument, as the ring delivers it. Empty through the device, and for operations without arguments.
    arguments: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    /// Takes a structure from the front.
    fn take<T: FromBytes>(&mut self) -> Result<T> {
        let from = match self.arguments {
            [] => &mut self.rest,
            _ => &mut self.arguments,
        };
        let (value, left) =
            T::read_from_prefix(from).map_err(|_| Malformed("the arguments are too short"))?;
        *from = left;
        Ok(value)
    }

    /// Takes the arguments of INIT, of which older kernels send only the beginning.
    fn init(&mut self) -> Result<InitIn> {
        let given = match self.arguments {
            [] => self.rest,
            arguments => arguments,
        };
        if given.len() < InitIn::SHORT_BYTES {
            return Err(Malformed("the arguments are too short"));
        }
        let mut whole = [0; size_of::<InitIn>()];
        let len = given.len().min(whole.len());
        whole[..len].copy_from_slice(&given[..len]);
        Ok(zerocopy::transmute!(whole))
    }

    /// Takes everything left.
    fn all(&mut self) -> Result<&'a [u8]> {
        match self.arguments {
            [] => Ok(std::mem::take(&mut self.rest)),
            _ => Err(Malformed("the arguments are too long")),
        }
    }

    /// Takes everything left, which must be `size` bytes.
    fn data(&mut self, size: u32) -> Result<&'a [u8]> {
        let data = self.all()?;
        match data.len() == size as usize {
            true => Ok(data),
            false => Err(Malformed(
                "the data have another length than the arguments say",
            )),
        }
    }

    /// Takes a text of at least one byte up to its NUL. More bytes may follow.
    fn first_text(&mut self) -> Result<&'a [u8]> {
        let rest = self.all()?;
        let end = rest.iter().position(|byte| *byte == 0);
        match end {
            None => Err(Malformed("a text does not end")),
            Some(0) => Err(Malformed("a text is empty")),
            Some(end) => {
                self.rest = &rest[end + 1..];
                Ok(&rest[..end])
            }
        }
    }

    /// Takes a text that is everything left.
    fn text(&mut self) -> Result<&'a [u8]> {
        let text = self.first_text()?;
        match self.rest {
            [] => Ok(text),
            _ => Err(Malformed("something follows the text")),
        }
    }

    fn first_name(&mut self) -> Result<&'a [u8]> {
        self.first_text().and_then(name)
    }

    /// Takes a directory entry's name that is everything left.
    fn name(&mut self) -> Result<&'a [u8]> {
        self.text().and_then(name)
    }

    fn rename(mut self, dir_to: u64, flags: u32) -> Result<Operation<'a>> {
        Ok(Operation::Rename {
            name: self.first_name()?,
            dir_to,
            name_to: self.name()?,
            flags,
        })
    }
}

fn name(text: &[u8]) -> Result<&[u8]> {
    match text.contains(&b'/') {
        true => Err(Malformed("a name has a slash in it")),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests;
