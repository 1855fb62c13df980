//! Requests that make and remove files in different slices share no cache line that one of them writes.
//!
//! Two threads serve the kernel's messages, one after the other, as two workers do: each has a channel of its own and uses files of a slice of
//! its own. `jericho_sim::lines` tells how their accesses are recorded. The kernel is missing here, and so is a worker's request cell in its crew.

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};

use jericho_daemon::Mounted;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, ROOT};
use jericho_sim::lines::{announce, record, trace};
use jericho_storage::{Device, DiscardEffect, Layer, open_device};
use jericho_volume::{FormatOptions, OpenMode, Volume};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use zerocopy::IntoBytes;

use super::serve_one;
use crate::filesystem::Jericho;
use crate::open::tests::options_of;
use crate::protocol::answer::CreateOut;
use crate::protocol::init::Agreed;
use crate::protocol::request::CreateIn;
use crate::protocol::{InHeader, OutHeader, op};
use crate::reply::OwnChannel;

/// Repetitions before the recorded ones: then each thread's own memory has grown to its size.
const WARM_UP: usize = 20;
const RECORDED: usize = 6;

/// The environment variable with the directory of the devices.
const DIR: &str = "JERICHO_LINES_DIR";

/// A device for which a slice has threads and no io_uring: valgrind stops all threads while one waits for io_uring.
struct Plain(Arc<dyn Device>);

impl Layer for Plain {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::Nothing
    }
}

fn paths(dir: &Path) -> [PathBuf; 2] {
    ["one", "two"].map(|name| dir.join(name))
}

fn devices(dir: &Path) -> [Arc<dyn Device>; 2] {
    paths(dir).map(|path| {
        let device = open_device(&path, jericho_storage::OpenOptions::default());
        Arc::new(Plain(device.unwrap())) as Arc<dyn Device>
    })
}

/// Makes a volume of two slices, each on a device of its own.
fn prepare(dir: &Path) {
    for path in paths(dir) {
        File::create(path).unwrap().set_len(72 << 20).unwrap();
    }
    let options = FormatOptions {
        slices: Some(2),
        has_stores: Some(true),
        ..FormatOptions::default()
    };
    format_devices(&devices(dir), &paths(dir), &options).unwrap();
}

fn open(dir: &Path) -> Arc<Mounted> {
    let devices = devices(dir);
    let volume = Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE).unwrap();
    let options = options_of(PathBuf::from("simulated"));
    Mounted::open_volume(volume, &options).unwrap()
}

/// A worker, and the kernel's end of its channel.
struct Worker {
    filesystem: Jericho,
    channel: OwnChannel,
    kernel: OwnedFd,
}

impl Worker {
    fn new(filesystem: &Jericho) -> Worker {
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
        let pair = socketpair(family, SocketType::SEQPACKET, flags, None);
        let (kernel, channel) = pair.unwrap();
        Worker {
            filesystem: filesystem.clone(),
            channel: Arc::new(Arc::new(channel)),
            kernel,
        }
    }

    /// Serves a message. Returns the first bytes of the answer's body. Panics if the answer is another errno.
    fn serve(&self, opcode: u32, nodeid: Ino, body: &[&[u8]], errno: i32) -> [u8; 256] {
        let mut message = [0; 256];
        let mut len = size_of::<InHeader>();
        for part in body {
            message[len..len + part.len()].copy_from_slice(part);
            len += part.len();
        }
        let header = InHeader {
            len: len as u32,
            opcode,
            unique: 1,
            nodeid,
            ..InHeader::default()
        };
        message[..size_of::<InHeader>()].copy_from_slice(header.as_bytes());
        serve_one(&self.channel, &self.filesystem, &message[..len]);
        let mut answer = [0; 256];
        if header.wants_reply() {
            rustix::io::read(&self.kernel, &mut answer).unwrap();
            let error = i32::from_ne_bytes(answer[4..8].try_into().unwrap());
            assert_eq!(-error, errno, "opcode {opcode}");
        }
        answer
    }

    /// Makes, closes and removes a file, as the kernel does for a program.
    fn make_and_remove(&self, dir: Ino, name: &str) {
        let name = &[name.as_bytes(), b"\0"].concat()[..];
        let create = CreateIn {
            flags: (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32,
            mode: 0o644,
            umask: 0o022,
            open_flags: 0,
        };
        self.serve(op::LOOKUP, dir, &[name], 0);
        let made = self.serve(op::CREATE, dir, &[create.as_bytes(), name], 0);
        let word = |at: usize| u64::from_ne_bytes(made[at..at + 8].try_into().unwrap());
        let body = size_of::<OutHeader>();
        let (ino, fh) = (
            word(body),
            word(body + std::mem::offset_of!(CreateOut, open)),
        );
        let (fh, rest) = (fh.as_bytes(), [0; 16]);
        self.serve(op::GETATTR, ino, &[&[0; 16]], 0);
        self.serve(op::FLUSH, ino, &[fh, &rest], libc::ENOSYS);
        self.serve(op::RELEASE, ino, &[fh, &rest], 0);
        self.serve(op::UNLINK, dir, &[name], 0);
        self.serve(op::FORGET, ino, &[1_u64.as_bytes()], 0);
    }
}

/// What runs under valgrind.
#[test]
#[ignore = "run by the other test, under valgrind"]
fn requests_that_are_recorded() {
    let dir = std::env::var_os(DIR).unwrap();
    let filesystem = Jericho::new(open(Path::new(&dir)), Agreed::all());
    announce();
    let barrier = &Barrier::new(2);
    std::thread::scope(|scope| {
        for (index, name) in [b"x", b"y"].into_iter().enumerate() {
            let filesystem = &filesystem;
            scope.spawn(move || {
                for turn in 0..2 {
                    if turn == index {
                        let fs = filesystem.mounted.fs();
                        // The inode is in memory that this thread has allocated.
                        let (uid, gid, umask) = (0, 0, 0);
                        let caller = Caller { uid, gid, umask };
                        let dir = fs.mkdir(ROOT, name, 0o755, caller).unwrap().ino;
                        assert_eq!((dir >> 40) as usize, index, "the slice");
                        let worker = Worker::new(filesystem);
                        let run = |from: usize, count| {
                            (from..from + count)
                                .for_each(|i| worker.make_and_remove(dir, &format!("f{i}")));
                        };
                        run(0, WARM_UP);
                        record(|| run(WARM_UP, RECORDED));
                    }
                    barrier.wait();
                }
            });
        }
    });
    // The trace is slow, so nothing more happens.
    std::process::exit(0);
}

#[test]
fn requests_for_files_in_two_slices_share_no_cache_line_that_one_of_them_writes() {
    // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
    let program = std::env::current_exe().unwrap();
    let dir = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    prepare(dir.path());
    let variables = [(DIR, dir.path().as_os_str())];
    let records = trace("device::lines::requests_that_are_recorded", &variables);
    let [first, second] = &records[..] else {
        panic!("{} records", records.len());
    };
    // Else the trace is not that of requests.
    assert!(first.written() > 2 * RECORDED && second.written() > 2 * RECORDED);
    let shared = first.shared_with(second, &[]);
    assert!(shared.is_empty(), "{}", shared.join("\n"));
}
