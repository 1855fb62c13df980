//! Fds of real files with a stand-in for the daemon, which answers as a daemon does and sends real segments. The bytes in shared
//! memory differ from those in the kernel's file, so each byte shows where it came from.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use jericho_shm::{
    Answer, Area, Control, Flags, Granted, HANDSHAKE_BYTES, Key, Reply, Request, SliceMemory,
    SlotInfo, Slots, socket_name,
};
use jericho_sys::handshake::Listener;
use jericho_sys::process::wait_readable;

use super::*;
use crate::{ask, wish};

/// All tests hold it for reading. The test that shares all fds of the process holds it for writing.
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
        let control = Control::create("test", &[(FRAMES, 0)], 1, &[0; 64], instance).unwrap();
        let daemon = Arc::new(Daemon {
            instance,
            control,
            slots: Slots::create("test", 1).unwrap(),
            memory: SliceMemory::create("test", FRAMES, None).unwrap(),
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

    /// Puts those pages into the cache that are not there.
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
        ask::tests::serve(stat.inode, {
            let daemon = daemon.clone();
            move |call| daemon.answer(object, call)
        });
        daemon.control.slot(0).unwrap().set(object, 0, 0);
        daemon.set_size(size);
        daemon.fill(object, 0..pages, b'm');
        opened(file.as_raw_fd(), 0);
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

#[test]
fn hits_come_from_memory_and_misses_from_the_kernel_at_the_right_place() {
    let _apart = APART.read();
    let f = Opened::new(2, 20_000);
    f.file.write_at(b"K", 8192).unwrap();
    assert_eq!(f.read(5000), Some(Ok(vec![b'm'; 5000])));
    let mut out = [0; 100];
    assert_eq!(pread(f.fd(), &mut out, 0), Some(Ok(100)));
    // 3192 bytes hit; the kernel reads the rest.
    let got = f.read(4000).unwrap().unwrap();
    let wanted = [&vec![b'm'; 3192][..], b"K", &vec![b'k'; 807]].concat();
    assert_eq!(got, wanted);
    assert_eq!(f.read(1), Some(Ok(b"k".to_vec())));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(9001)));
    assert_eq!(f.kernel_offset(), 0, "the kernel's offset has not moved");
    // The end of the file is that of shared memory.
    f.daemon.set_size(8000);
    assert_eq!(lseek(f.fd(), -10, SEEK_END), Some(Ok(7990)));
    assert_eq!(f.read(100), Some(Ok(vec![b'm'; 10])));
    assert_eq!(f.read(100), Some(Ok(vec![])));
    assert_eq!(size(f.fd()), Some(8000));
}

#[test]
fn vectored_calls_are_one_call() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    let (mut a, mut b, mut c) = ([0; 10], [0; 0], [0; 5000]);
    let mut parts = [&mut a[..], &mut b, &mut c].map(IoSliceMut::new);
    assert_eq!(readv(f.fd(), &mut parts, None), Some(Ok(5010)));
    assert_eq!(readv(f.fd(), &mut parts, None), Some(Ok(3182)));
    assert_eq!(readv(f.fd(), &mut parts, Some(8190)), Some(Ok(2)));
    let parts = [&b"ab"[..], b"", b"cd"].map(IoSlice::new);
    assert_eq!(writev(f.fd(), &parts, Some(4095)), Some(Ok(4)));
    assert_eq!(lseek(f.fd(), 4094, SEEK_SET), Some(Ok(4094)));
    assert_eq!(f.read(6), Some(Ok(b"mabcdm".to_vec())));
    assert_eq!(writev(f.fd(), &parts, None), Some(Ok(4)));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(4104)));
    let mut kernel = [0; 4];
    f.file.read_at(&mut kernel, 4095).unwrap();
    assert_eq!(&kernel, b"kkkk", "all of it was inline");
}

#[test]
fn an_fd_that_another_process_may_have_keeps_its_offset_in_the_kernel() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    forget(f.fd()); // as if it were inherited
    assert_eq!(f.read(10), None);
    assert_eq!(write(f.fd(), b"x"), None);
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), None);
    let mut out = [0; 4];
    assert_eq!(pread(f.fd(), &mut out, 100), Some(Ok(4)));
    assert_eq!(&out, b"mmmm");
    assert_eq!(pwrite(f.fd(), b"x", 101), Some(Ok(1)));
    assert_eq!(pread(f.fd(), &mut out, 100), Some(Ok(4)));
    assert_eq!(&out, b"mxmm");
}

#[test]
fn sharing_moves_the_offset_to_the_kernel() {
    let _apart = APART.write();
    let (f, unread) = (Opened::new(2, 8192), Opened::new(2, 8192));
    f.read(1234).unwrap().unwrap();
    share_all();
    assert_eq!(f.kernel_offset(), 1234);
    assert_eq!((f.read(1), unread.read(1)), (None, None));
    let mut out = [0; 4];
    assert_eq!(pread(f.fd(), &mut out, 0), Some(Ok(4)), "still inline");
    assert_eq!(&out, b"mmmm");
    let g = Opened::new(2, 8192);
    g.read(77).unwrap().unwrap();
    to_kernel(g.fd(), Reason::Stream);
    assert_eq!(g.kernel_offset(), 77);
    assert_eq!(pread(g.fd(), &mut out, 0), None);
    assert_eq!(size(g.fd()), None);
}

#[test]
fn duplicates_share_their_offset_until_the_last_is_closed() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    // The fd is still unknown when it is duplicated.
    let other = f.file.try_clone().unwrap();
    duplicated(f.fd(), other.as_raw_fd());
    let mut out = [0; 100];
    assert_eq!(read(other.as_raw_fd(), &mut out), Some(Ok(100)));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(100)));
    forget(f.fd());
    assert_eq!(read(other.as_raw_fd(), &mut out), Some(Ok(100)));
    let Some(FdState::Described(open)) = description::state(other.as_raw_fd()) else {
        panic!("the duplicate is not described");
    };
    forget_range(other.as_raw_fd() as u32, other.as_raw_fd() as u32);
    assert_eq!(open.facts(), None, "the description is gone");
    drop(other);
}

#[test]
fn readers_of_one_description_get_each_byte_once() {
    let _apart = APART.read();
    let pages = 200;
    let f = Opened::new(0, pages * 4096);
    f.daemon.fill(f.object, 0..pages, 0);
    let words: Vec<u8> = (0..pages as u32 * 1024)
        .flat_map(|word| word.to_ne_bytes())
        .collect();
    for (page, bytes) in words.chunks(PAGE).enumerate() {
        let key = Key::new(f.object, page as u64);
        f.daemon.memory.write(key, 0, bytes, 1, 0).unwrap();
    }
    let (f, start) = (&f, std::sync::Barrier::new(3));
    let mut seen: Vec<u32> = std::thread::scope(|scope| {
        let threads = [(); 3].map(|()| {
            scope.spawn(|| {
                start.wait();
                let mut seen = vec![];
                loop {
                    let bytes = f.read(40).unwrap().unwrap();
                    if bytes.is_empty() {
                        return seen;
                    }
                    let words = bytes.chunks(4).map(|w| w.try_into().unwrap());
                    seen.extend(words.map(u32::from_ne_bytes));
                }
            })
        });
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..pages as u32 * 1024));
}

#[test]
fn a_writer_that_goes_on_has_pages_reserved_in_growing_steps() {
    let _apart = APART.read();
    let f = Opened::new(0, 0);
    for round in 0..400u32 {
        assert_eq!(write(f.fd(), &[round as u8; 4000]), Some(Ok(4000)));
    }
    assert_eq!(f.daemon.size(), 1_600_000);
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(1_600_000)));
    // The first write went through the kernel; the second noticed it.
    let reserves = f.daemon.reserves();
    assert!(reserves.len() <= 6, "{reserves:?}");
    assert!(
        reserves.windows(2).all(|w| w[1].1 == w[0].1 * 2),
        "{reserves:?}"
    );
    let mut out = [0; 8000];
    assert_eq!(pread(f.fd(), &mut out, 399 * 4000 - 4000), Some(Ok(8000)));
    assert!(out[..4000].iter().all(|b| *b == 398u32 as u8));
    assert!(out[4000..].iter().all(|b| *b == 399u32 as u8));
}

#[test]
fn appends_inline_and_through_the_kernel_go_to_the_end() {
    let _apart = APART.read();
    let f = Opened::with(2, 4000, true);
    assert_eq!(write(f.fd(), b"one"), Some(Ok(3)));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(4003)));
    assert_eq!(lseek(f.fd(), 5, SEEK_SET), Some(Ok(5)));
    assert_eq!(write(f.fd(), b"two"), Some(Ok(3)));
    assert_eq!(pwrite(f.fd(), b"three", 0), Some(Ok(5)));
    assert_eq!(f.daemon.size(), 4011);
    let mut out = [0; 12];
    assert_eq!(pread(f.fd(), &mut out, 3999), Some(Ok(12)));
    assert_eq!(&out, b"monetwothree");
    // The kernel makes an append that does not go inline.
    let info = f.daemon.control.slot(0).unwrap();
    info.set_flags(SlotInfo::NO_WRITE, 0);
    assert_eq!(write(f.fd(), b"kernel"), Some(Ok(6)));
    assert_eq!(f.file.metadata().unwrap().len(), 4006);
    let mut tail = [0; 6];
    f.file.read_at(&mut tail, 4000).unwrap();
    assert_eq!(&tail, b"kernel");
}

#[test]
fn a_write_that_cannot_be_made_inline_goes_through_the_kernel_as_a_whole() {
    let _apart = APART.read();
    let f = Opened::new(2, 4 * 4096);
    // The third page is not cached.
    assert_eq!(pwrite(f.fd(), &[b'w'; 9000], 4000), Some(Ok(9000)));
    let mut kernel = vec![0; 9002];
    f.file.read_at(&mut kernel, 3999).unwrap();
    assert_eq!(kernel, [&b"k"[..], &[b'w'; 9000], b"k"].concat());
    f.daemon.memory.set_throttled(true);
    assert_eq!(lseek(f.fd(), 100, SEEK_SET), Some(Ok(100)));
    assert_eq!(write(f.fd(), b"xyz"), Some(Ok(3)));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(103)));
    f.file.read_at(&mut kernel[..3], 100).unwrap();
    assert_eq!(&kernel[..3], b"xyz");
}

#[test]
fn a_long_write_is_made_in_several_pieces() {
    let _apart = APART.read();
    let f = Opened::new(0, 0);
    let pages = 600 * 4096;
    f.daemon.fill(f.object, 0..600, 0);
    f.daemon.set_size(pages);
    // The write is longer than one inline write, and its last part is not cached.
    let data: Vec<u8> = (0..WRITE_MAX + 5000).map(|i| (i / 4096) as u8).collect();
    assert_eq!(pwrite(f.fd(), &data, 0), Some(Ok(data.len())));
    assert_eq!(f.file.metadata().unwrap().len(), data.len() as u64);
    let mut out = vec![0; data.len()];
    f.file.read_exact_at(&mut out, 0).unwrap();
    assert!(out == data, "the kernel got it from the start");
}

#[test]
fn the_kernel_reports_wrong_offsets_and_buffers() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    assert_eq!(f.read(0), Some(Ok(vec![])));
    let mut out = [0; 4];
    assert_eq!(pread(f.fd(), &mut out, -1), None);
    assert_eq!(pread(f.fd(), &mut [], 0), None);
    assert_eq!(pwrite(f.fd(), b"", 0), None);
    assert_eq!(pwrite(f.fd(), b"x", -1), None);
    assert_eq!(write(f.fd(), b""), Some(Ok(0)));
    assert_eq!(lseek(f.fd(), -1, SEEK_SET), Some(Err(errno::EINVAL)));
    assert_eq!(lseek(f.fd(), -1, SEEK_CUR), Some(Err(errno::EINVAL)));
    assert_eq!(lseek(f.fd(), -9000, SEEK_END), Some(Err(errno::EINVAL)));
    assert_eq!(lseek(f.fd(), 0, 99), Some(Err(errno::EINVAL)));
    assert_eq!(lseek(f.fd(), 10, SEEK_CUR), Some(Ok(10)));
    // Beyond the largest offset of the library, the kernel keeps the offset.
    let far = files::lseek(f.fd(), 1 << 60, SEEK_SET);
    files::lseek(f.fd(), 0, SEEK_SET).unwrap();
    assert_eq!(lseek(f.fd(), 1 << 60, SEEK_SET), Some(far));
    if far.is_ok() {
        assert_eq!(lseek(f.fd(), 0, SEEK_CUR), None);
        assert_eq!(f.kernel_offset(), 1 << 60);
    } else {
        assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(10)));
    }
    for fd in [-1, 70_000, i32::MAX, i32::MIN] {
        assert_eq!(read(fd, &mut out), None);
        forget(fd);
        opened(fd, 0);
        share(fd);
        duplicated(fd, fd);
    }
}

#[test]
fn files_of_other_filesystems_take_the_kernel_path_after_one_check() {
    let _apart = APART.read();
    let (reader, _writer) = std::io::pipe().unwrap();
    let fd = reader.as_raw_fd();
    opened(fd, 0);
    assert_eq!(read(fd, &mut [0; 4]), None);
    assert_eq!(description::state(fd), Some(FdState::Kernel));
    duplicated(fd, 60_000);
    assert_eq!(description::state(60_000), Some(FdState::Kernel));
    forget(60_000);
    forget(fd);
}

#[test]
fn after_a_refusal_all_calls_go_to_the_kernel() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    f.daemon.refuse.store(true, Ordering::Relaxed);
    assert_eq!(f.read(4), None);
    assert_eq!(pread(f.fd(), &mut [0; 4], 0), None);
    assert_eq!(
        f.daemon.calls.lock().unwrap().len(),
        1,
        "the library asks once"
    );
}

#[test]
fn the_library_asks_again_for_a_slot_that_was_taken_back() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    f.read(10).unwrap().unwrap();
    let info = f.daemon.control.slot(0).unwrap();
    info.set(0, 0, 0);
    info.set(f.object, 0, 0);
    assert_eq!(f.read(4), Some(Ok(b"mmmm".to_vec())));
    // The daemon does not give the slot again, so the kernel continues at this offset.
    info.set(0, 0, 0);
    f.daemon.refuse.store(true, Ordering::Relaxed);
    assert_eq!(f.read(4), None);
    assert_eq!(f.kernel_offset(), 14);
    assert_eq!(pread(f.fd(), &mut [0; 4], 0), None);
}

#[test]
fn a_session_of_a_described_fd_serves_wishes() {
    let _apart = APART.write();
    let f = Opened::new(2, 8192);
    f.read(10).unwrap().unwrap();
    let device = files::fstat(f.fd()).unwrap().device;
    let instance = || session::of_device(device).map(|session| session.instance);
    assert_eq!(instance(), Some(f.daemon.instance));
    // A new session looks like this before a file of the mount is found to be its daemon's.
    session::of_device(device).unwrap().serves(0);
    assert_ne!(instance(), Some(f.daemon.instance));
    let info = f.daemon.control.slot(0).unwrap();
    info.set(0, 0, 0);
    info.set(f.object, 0, 0);
    assert_eq!(f.read(4), Some(Ok(b"mmmm".to_vec())));
    assert_eq!(instance(), Some(f.daemon.instance));
}

#[test]
fn a_writer_without_a_new_slot_moves_its_offset_to_the_kernel() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    assert_eq!(write(f.fd(), b"abc"), Some(Ok(3)));
    f.daemon.control.slot(0).unwrap().set(0, 0, 0);
    f.daemon.refuse.store(true, Ordering::Relaxed);
    assert_eq!(write(f.fd(), b"def"), None);
    assert_eq!(f.kernel_offset(), 3);
}

#[test]
fn a_revoked_client_continues_through_the_kernel() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    assert_eq!(write(f.fd(), b"abc"), Some(Ok(3)));
    f.daemon
        .areas
        .lock()
        .unwrap()
        .iter()
        .for_each(Area::cut_off);
    assert_eq!(f.read(4), None);
    assert_eq!(f.kernel_offset(), 3);
}

#[test]
fn an_fd_that_was_closed_and_reused_unseen_does_not_pass_for_the_old_file() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    f.read(10).unwrap().unwrap();
    // This file's fd becomes the fd of another file's description.
    let Some(FdState::Described(open)) = description::state(f.fd()) else {
        panic!("the fd is not described");
    };
    let other = Facts {
        slot_generation: 77,
        ..open.facts().unwrap()
    };
    let mut identity = open.identity().unwrap();
    identity.inode += 1;
    opened(f.fd(), 0);
    let Some(FdState::Unknown { word, .. }) = description::state(f.fd()) else {
        panic!("the fd is not unknown");
    };
    description::describe(f.fd(), word, &other, identity, Some(5000)).unwrap();
    assert_eq!(write(f.fd(), b"x"), None);
    assert!(matches!(
        description::state(f.fd()),
        Some(FdState::Unknown { opened: false, .. })
    ));
    // Another call finds the same state: a file with its offset in the kernel.
    assert_eq!(f.read(4), None);
    assert_eq!(pread(f.fd(), &mut [0; 4], 0), Some(Ok(4)));
}

#[test]
fn a_handler_that_interrupts_a_call_goes_to_the_kernel() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    reentrancy::enter(reentrancy::Doing::Writing, |thread| {
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])), "the offset moves on");
        assert_eq!(pread(f.fd(), &mut [0; 4], 0), None);
        // The handler interrupts a write, so its bytes follow those of the write.
        let Some(FdState::Described(open)) = description::state(f.fd()) else {
            panic!("the fd is not described");
        };
        let act = |at| {
            assert_eq!(at, 20);
            assert_eq!(write(f.fd(), b"handler"), Some(Ok(7)));
        };
        with_offset(thread, &open, 10, act, |(), at, behind| at + 10 + behind).unwrap();
    })
    .unwrap();
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(37)));
    let mut kernel = [0; 9];
    f.file.read_at(&mut kernel, 29).unwrap();
    assert_eq!(&kernel, b"khandlerk");
}

#[test]
fn a_thread_that_writes_while_another_closes_the_fd_finds_the_offset_in_the_kernel() {
    let _apart = APART.read();
    has_threads();
    for range in [false, true] {
        let f = Opened::new(2, 8192);
        assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
        match range {
            false => closing(f.fd()).has_closed(),
            true => closing_range(f.fd() as u32, f.fd() as u32),
        }
        // The fd is not closed yet.
        assert_eq!(f.kernel_offset(), 10);
    }
}

/// Returns a file from which 10 bytes were read, and a duplicate of its fd.
fn read_and_duplicated() -> (Opened, fs::File) {
    let f = Opened::new(2, 8192);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    let copy = f.file.try_clone().unwrap();
    duplicated(f.fd(), copy.as_raw_fd());
    (f, copy)
}

#[test]
fn a_thread_that_writes_while_another_closes_the_fd_uses_the_offset_of_its_duplicates() {
    let _apart = APART.read();
    has_threads();
    let (f, copy) = read_and_duplicated();
    let fd = copy.as_raw_fd();
    let closing = closing(fd);
    // The fd is not closed yet.
    assert_eq!(write(fd, b"between"), Some(Ok(7)));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(17)));
    assert_eq!(f.kernel_offset(), 0, "the kernel's offset stays");
    // Now the fd is closed, and may have been reused.
    drop(copy);
    assert_eq!(write(fd, b"after"), None);
    closing.has_closed();
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(17)));
    let Some(FdState::Described(open)) = description::state(f.fd()) else {
        panic!("the fd is not described");
    };
    assert!(open.description().has_one_fd());
}

#[test]
fn an_fd_that_another_thread_got_during_the_close_is_that_threads() {
    let _apart = APART.read();
    has_threads();
    let (f, copy) = read_and_duplicated();
    let fd = copy.as_raw_fd();
    for _ in 0..3 {
        let closing = closing(fd);
        duplicated(f.fd(), fd);
        closing.has_closed();
        assert!(matches!(
            description::state(fd),
            Some(FdState::Described(_))
        ));
    }
    forget(fd);
    let Some(FdState::Described(open)) = description::state(f.fd()) else {
        panic!("the fd is not described");
    };
    assert!(open.description().has_one_fd());
}

#[test]
fn changed_flags_take_effect() {
    let _apart = APART.read();
    let f = Opened::new(2, 4000);
    assert_eq!(write(f.fd(), b"a"), Some(Ok(1)));
    files::set_append(f.fd()).unwrap();
    flags_changed(f.fd());
    assert_eq!(write(f.fd(), b"b"), Some(Ok(1)));
    assert_eq!(f.daemon.size(), 4001);
}

#[test]
fn a_mapped_file_takes_the_kernel_path() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    f.read(9).unwrap().unwrap();
    assert_eq!(mapped(f.fd()), Ok(()));
    assert_eq!(f.daemon.calls.lock().unwrap().last(), Some(&Call::Mapped));
    assert_eq!((f.read(1), f.kernel_offset()), (None, 9));
    let (pipe, _) = std::io::pipe().unwrap();
    assert_eq!(mapped(pipe.as_raw_fd()), Ok(()));
}

#[test]
fn a_sequential_reader_prefetches_only_pages_that_are_not_cached() {
    let _apart = APART.read();
    let f = Opened::new(100, 400 * 4096);
    for _ in 0..30 {
        f.read(4096).unwrap().unwrap();
    }
    let asked = || {
        let calls = f.daemon.calls.lock().unwrap();
        let of = |call: &Call| match call {
            Call::ReadAhead { first, pages } => Some((*first, *pages)),
            _ => None,
        };
        calls.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(asked(), [], "all pages are cached");
    for _ in 30..190 {
        f.read(4096).unwrap().unwrap();
    }
    let asked = asked();
    let ends = asked.iter().map(|(first, pages)| first + u64::from(*pages));
    assert!(ends.max() >= Some(190), "{asked:?}");
}

/// Counts the cost of this thread's calls, as outside of tests, and makes the process worth attaching.
struct Counting;

impl Counting {
    fn new() -> Counting {
        early::tests::ARE_COUNTED.set(true);
        early::tests::worth_attaching();
        Counting
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        early::tests::ARE_COUNTED.set(false);
    }
}

#[test]
fn a_file_of_few_calls_costs_the_daemon_nothing_and_one_of_many_becomes_fast() {
    let _apart = APART.read();
    let _counting = Counting::new();
    let f = Opened::new(2, 8192);
    for n in 0..4 {
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])), "the kernel's bytes");
        assert_eq!(f.kernel_offset(), 10 * (n + 1));
    }
    assert!(f.daemon.calls.lock().unwrap().is_empty());
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])), "from memory");
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(50)));
    assert_eq!(f.kernel_offset(), 40, "the kernel's offset stays");
}

#[test]
fn long_calls_are_worth_more_and_calls_with_offsets_count_too() {
    let _apart = APART.read();
    let _counting = Counting::new();
    let f = Opened::new(100, 400 << 10);
    assert_eq!(write(f.fd(), &[b'w'; 300 << 10]), Some(Ok(300 << 10)));
    assert_eq!(f.kernel_offset(), 0);
    // A large buffer does not make a small read expensive.
    let f = Opened::new(100, 400 << 10);
    assert_eq!(f.read(300 << 10), Some(Ok(vec![b'k'; 300 << 10])));
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    let f = Opened::new(2, 8192);
    f.read(300 << 10).unwrap().unwrap();
    assert_eq!(f.read(300 << 10), Some(Ok(vec![])));
    assert!(f.daemon.calls.lock().unwrap().is_empty());
    let f = Opened::new(2, 8192);
    for _ in 0..2 {
        assert_eq!(pread(f.fd(), &mut [0; 10], 0), None);
        assert_eq!(pwrite(f.fd(), b"x", 0), None);
    }
    assert!(f.daemon.calls.lock().unwrap().is_empty());
    assert_eq!(pread(f.fd(), &mut [0; 10], 0), Some(Ok(10)));
}

#[test]
fn an_fd_that_becomes_fast_while_threads_read_gives_each_byte_once() {
    let _apart = APART.read();
    let f = Opened::new(4, 4 * PAGE as u64);
    for _ in 0..300 {
        files::lseek(f.fd(), 0, SEEK_SET).unwrap();
        opened(f.fd(), 0);
        let read_all = || {
            let _counting = Counting::new();
            let mut total = 0;
            while let Some(Ok(bytes)) = f.read(64) {
                if bytes.is_empty() {
                    return total;
                }
                total += bytes.len();
            }
            panic!("a read failed");
        };
        let total: usize = std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(read_all));
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(total, 4 * PAGE);
        assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(4 * PAGE as i64)));
    }
}

#[test]
fn calls_never_restore_an_earlier_word_of_an_fd() {
    // No file has this fd.
    const FD: i32 = 60_000;
    let _apart = APART.read();
    description::opened(FD);
    let mut words = std::collections::HashSet::new();
    for _ in 0..10_000 {
        let Some(FdState::Unknown { opened: true, word }) = description::state(FD) else {
            break;
        };
        assert!(
            words.insert(word),
            "an offset that was read before fits again"
        );
        assert!(description::count_call(FD, word, 1, true, false));
        description::call_ended(FD, word, 0);
    }
    let now = description::state(FD);
    assert!(matches!(now, Some(FdState::Unknown { opened: false, .. })));
    description::forget(FD);
}

#[test]
fn an_fd_does_not_become_fast_during_a_call_on_it() {
    let _apart = APART.read();
    let _counting = Counting::new();
    let f = Opened::new(2, 8192);
    let CallPath::Counted(call) = early::begin(f.fd(), Access::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    for _ in 0..10 {
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])));
    }
    drop(call);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(110)));
    // The end of a call that began before the fd was reused changes nothing.
    opened(f.fd(), 0);
    let CallPath::Counted(old) = early::begin(f.fd(), Access::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    opened(f.fd(), 0);
    let CallPath::Counted(new) = early::begin(f.fd(), Access::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    drop(old);
    let Some(FdState::Unknown { word, .. }) = description::state(f.fd()) else {
        panic!("the fd is not unknown");
    };
    assert!(description::is_in_use(word));
    drop(new);
}

/// Returns a file to whose daemon this process has attached, with a word that makes its fd worth a slot. No other test runs at
/// the same time.
fn wishing() -> Opened {
    wish::tests::ARE_LEFT.set(false);
    let f = Opened::new(2, 8192);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    opened(f.fd(), 0);
    // The object of a wish is the inode.
    let inode = files::fstat(f.fd()).unwrap().inode;
    f.daemon.control.slot(0).unwrap().set(inode, 0, 0);
    f.daemon.fill(inode, 0..2, b'w');
    wish::tests::ARE_LEFT.set(true);
    f.daemon.calls.lock().unwrap().clear();
    f
}

/// Answers the wish that this thread has left for the file.
fn grant(f: &Opened) {
    let areas = f.daemon.areas.lock().unwrap();
    let inode = files::fstat(f.fd()).unwrap().inode;
    let words = areas.last().unwrap().wishing(0);
    let left = words.take(inode).expect("a wish was left");
    let granted = Granted {
        slot: 0,
        generation: f.daemon.control.slot(0).unwrap().word().generation(),
        reserved_to: 0,
    };
    words.grant(left, granted);
}

fn begin_with_wish(f: &Opened, moves: bool) -> early::Counted {
    match early::begin(f.fd(), Access::Read, moves) {
        CallPath::Counted(call) => call,
        _ => panic!("the library makes the call that leaves a wish"),
    }
}

#[test]
fn an_answered_wish_makes_the_fd_fast_without_a_request() {
    let _apart = APART.write();
    for moves in [true, false] {
        let f = wishing();
        let call = begin_with_wish(&f, moves);
        grant(&f);
        drop(call);
        assert_eq!(f.read(10), Some(Ok(vec![b'w'; 10])));
        assert!(f.daemon.calls.lock().unwrap().is_empty());
    }
}

#[test]
fn a_limit_set_by_another_process_is_noticed_when_the_next_fd_becomes_fast() {
    let _apart = APART.write();
    let set_limit = |limit: &str| {
        let pid = std::process::id().to_string();
        let mut command = std::process::Command::new("prlimit");
        let done = command.args(["--pid", &pid, &format!("--fsize={limit}:")]);
        assert!(done.status().unwrap().success(), "prlimit(1)");
    };
    for by_wish in [false, true] {
        let f = match by_wish {
            false => Opened::new(2, 8192),
            true => wishing(),
        };
        assert!(!SIZE_LIMITED.load(Relaxed));
        // A limit beyond all writes of the tests.
        set_limit("1099511627776");
        if by_wish {
            let call = begin_with_wish(&f, true);
            grant(&f);
            drop(call);
        } else {
            f.read(10).unwrap().unwrap();
        }
        let is_seen = SIZE_LIMITED.load(Relaxed);
        set_limit("unlimited");
        size_limit_changed();
        let number = description::state(f.fd());
        assert!(matches!(number, Some(FdState::Described(_))));
        assert!(is_seen, "by a wish: {by_wish}");
    }
}

#[test]
fn a_wish_without_an_answer_is_followed_by_a_request() {
    let _apart = APART.write();
    let f = wishing();
    drop(begin_with_wish(&f, true));
    // This daemon answers with another object.
    f.daemon.control.slot(0).unwrap().set(f.object, 0, 0);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    let calls = f.daemon.calls.lock().unwrap();
    assert!(
        matches!(
            calls[..],
            [Call::Fast {
                thread: Some(_),
                ..
            }]
        ),
        "{calls:?}"
    );
}

#[test]
fn an_answer_is_not_used_for_an_fd_that_was_reused_or_is_in_use() {
    let _apart = APART.write();
    let f = wishing();
    let call = begin_with_wish(&f, true);
    grant(&f);
    opened(f.fd(), 0);
    drop(call);
    assert!(matches!(
        description::state(f.fd()),
        Some(FdState::Unknown { .. })
    ));
    let call = begin_with_wish(&f, true);
    grant(&f);
    let CallPath::Counted(other) = early::begin(f.fd(), Access::Read, true) else {
        panic!("another call moves the offset");
    };
    drop(call);
    assert!(matches!(
        description::state(f.fd()),
        Some(FdState::Unknown { .. })
    ));
    drop(other);
}

#[test]
fn a_seek_leaves_no_wish() {
    let _apart = APART.write();
    let f = wishing();
    assert_eq!(lseek(f.fd(), 10, SEEK_SET), Some(Ok(10)));
    drop(begin_with_wish(&f, true));
}
