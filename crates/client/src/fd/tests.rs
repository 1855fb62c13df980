//! Fds of real files with a stand-in for the daemon, which answers as a daemon does and sends real segments. The bytes in shared
//! memory differ from those in the kernel's file, so each byte shows where it came from.

mod calls;
mod first_calls;
mod offsets;
mod paths;

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use jericho_shm::{
    Answer, Area, Call, Control, Flags, Geometry, HANDSHAKE_BYTES, Key, Refusal, Reply, Request,
    SliceMemory, Slots, socket_name,
};
use jericho_sys::files::{self, Result};
use jericho_sys::handshake::Listener;
use jericho_sys::process::wait_readable;

use super::*;
use crate::descriptors::{self, FdState, SEEK_CUR, SEEK_END, SEEK_SET};
use crate::session::{self, asked, devices};

/// A test that affects the fds or sessions of other tests holds it for writing. All other tests hold it for reading.
static APART: RwLock<()> = RwLock::new(());

const PAGE: usize = 4096;
const FRAMES: u32 = 1024;

/// A volume with one file, and its daemon.
struct Daemon {
    instance: u64,
    control: Control,
    slots: Slots,
    memory: SliceMemory,
    frames_used: AtomicU64,
    calls: Mutex<Vec<Call>>,
    refuse: AtomicBool,
    areas: Mutex<Vec<Area>>,
}

impl Daemon {
    fn new() -> Arc<Daemon> {
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        let count = INSTANCES.fetch_add(1, Ordering::Relaxed);
        let instance = u64::from(std::process::id()) << 16 | count;
        let control = Control::create(
            "test",
            &[(Geometry::for_frames(FRAMES), 0)],
            1,
            &[0; 64],
            instance,
        )
        .unwrap();
        let daemon = Arc::new(Daemon {
            instance,
            control,
            slots: Slots::create("test", 1).unwrap(),
            memory: SliceMemory::create("test", Geometry::for_frames(FRAMES), None).unwrap(),
            frames_used: AtomicU64::new(0),
            calls: Mutex::new(vec![]),
            refuse: AtomicBool::new(false),
            areas: Mutex::new(vec![]),
        });
        let listener = Listener::bind(&socket_name(instance)).unwrap();
        std::thread::spawn({
            let daemon = daemon.clone();
            move || {
                while let Ok(true) = wait_readable(listener.as_fd(), None) {
                    let connection = listener.accept().unwrap().unwrap();
                    wait_readable(connection.as_fd(), None).unwrap();
                    let mut bytes = [0; HANDSHAKE_BYTES];
                    let len = connection.receive_bytes(&mut bytes).unwrap().unwrap();
                    let request = Request::decode(&bytes[..len]).unwrap();
                    daemon.send_segments(&connection, request);
                }
            }
        });
        daemon
    }

    fn send_segments(&self, connection: &jericho_sys::handshake::Connection, request: Request) {
        let own = |mapping: &jericho_sys::memory::Mapping| {
            if request.token != 0 {
                mapping.fd().try_clone_to_owned().unwrap()
            } else {
                mapping.read_only_fd().unwrap()
            }
        };
        let area = Area::create("test", 2).unwrap();
        let mut fds = vec![
            self.control.mapping().read_only_fd().unwrap(),
            own(self.slots.mapping()),
            area.mapping().fd().try_clone_to_owned().unwrap(),
        ];
        fds.extend(self.memory.segments().map(own));
        self.areas.lock().unwrap().push(area);
        let reply = Reply {
            error: 0,
            owner: 2,
            slices: 1,
        };
        // In two messages, as for a volume with many slices.
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        connection.send(&reply.encode(), &fds[..4]).unwrap();
        connection.send(&reply.encode(), &fds[4..]).unwrap();
    }

    fn answer(&self, object: u64, call: Call) -> Answer {
        self.calls.lock().unwrap().push(call);
        if self.refuse.load(Ordering::Relaxed) {
            return Answer::refused(Refusal::Slots);
        }
        let info = self.control.slot(0).unwrap();
        let mut answer = Answer {
            status: 0,
            slot: 0,
            generation: info.word().generation(),
            pages: 0,
            instance: self.instance,
            object,
            token: 1,
        };
        if let Call::Reserve { first, pages, .. } = call {
            self.fill(object, first..first + u64::from(pages), 0);
            answer.pages = pages;
        }
        answer
    }

    /// Adds to the cache those of the pages that are not cached. Fills them with `byte`.
    fn fill(&self, object: u64, pages: std::ops::Range<u64>, byte: u8) {
        for page in pages {
            let key = Key::new(object, page);
            if self.memory.lookup(key).is_some() {
                continue;
            }
            let frame = self.frames_used.fetch_add(1, Ordering::Relaxed) as u32;
            let index = self.memory.insert(key, frame, 0);
            self.memory.copy_in(frame, 0, &[byte; PAGE]).unwrap();
            self.memory.entry(index).publish(Flags::BACKED);
        }
    }

    fn set_size(&self, bytes: u64) {
        self.slots.slot(0).unwrap().set_size(bytes, false);
    }

    fn size(&self) -> u64 {
        self.slots.slot(0).unwrap().size().bytes()
    }

    fn reserves(&self) -> Vec<(u64, u32)> {
        let calls = self.calls.lock().unwrap();
        let of = |call: &Call| match call {
            Call::Reserve { first, pages, .. } => Some((*first, *pages)),
            _ => None,
        };
        calls.iter().filter_map(of).collect()
    }
}

/// An open file of a volume. Dropping it makes the library forget its fd.
struct Opened {
    file: fs::File,
    daemon: Arc<Daemon>,
    object: u64,
}

impl Opened {
    /// Makes a file with `pages` pages of `m` in shared memory, and `size` bytes of `k` in the kernel.
    fn new(pages: u64, size: u64) -> Opened {
        Opened::with(pages, size, false)
    }

    fn with(pages: u64, size: u64, append: bool) -> Opened {
        let daemon = Daemon::new();
        let path = tempfile::NamedTempFile::new().unwrap();
        fs::write(path.path(), vec![b'k'; size as usize]).unwrap();
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).write(true).append(append).open(&path);
        let file = file.unwrap();
        let stat = files::fstat(file.as_raw_fd()).unwrap();
        devices::set_for_tests(stat.device);
        let object = stat.inode % (1 << 29) + 1;
        asked::serve(stat.inode, {
            let daemon = daemon.clone();
            move |call| daemon.answer(object, call)
        });
        daemon.control.slot(0).unwrap().set(object, 0, 0);
        daemon.set_size(size);
        daemon.fill(object, 0..pages, b'm');
        // Another test may have had the same fd.
        descriptors::forget_past(file.as_raw_fd());
        opened(file.as_raw_fd());
        Opened {
            file,
            daemon,
            object,
        }
    }

    fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn kernel_offset(&self) -> i64 {
        files::lseek(self.fd(), 0, SEEK_CUR).unwrap()
    }

    fn read(&self, len: usize) -> Option<Result<Vec<u8>>> {
        let mut out = vec![0; len];
        let n = match read(self.fd(), &mut out)? {
            Ok(n) => n,
            Err(errno) => return Some(Err(errno)),
        };
        out.truncate(n);
        Some(Ok(out))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        forget(self.file.as_raw_fd());
    }
}
