use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use jericho_cache::Intent;
use jericho_format::PAGE_BYTES;
use jericho_fs::types::{Kind, ROOT, SetAttr};
use jericho_shm::{Answer, Call, Key, Segments, SlotWord};
use jericho_sim::SimDevice;
use parking_lot::Mutex;

use super::*;
use crate::Mounted;
use crate::kernel_cache::KernelCache;
use crate::simulated::{self, CALLER, READ, WRITE, asker, create, mount, wait_until};
use crate::write_mode::WriteMode;

/// A kernel whose next `drop_pages` blocks if the test has set a channel.
#[derive(Default)]
struct SlowKernel(Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>);

impl KernelCache for SlowKernel {
    fn drop_attributes(&self, _ino: Ino) {}
    fn drop_some_pages(&self, _ino: Ino, _bytes: std::ops::Range<u64>) {}

    fn drop_pages(&self, _ino: Ino) {
        let drop_now = self.0.lock().take();
        if let Some((begun, end)) = drop_now {
            begun.send(()).unwrap();
            assert!(end.recv().is_err(), "the end of the work");
        }
    }
}

/// A volume with one file that a client writes inline, with 16 reserved pages.
pub(in crate::fast) struct Bed {
    pub device: Arc<SimDevice>,
    pub mounted: Arc<Mounted>,
    pub handle: Arc<Handle>,
    pub file: Arc<SlotFile>,
}

impl Bed {
    pub fn new() -> Bed {
        Bed::beside(Arc::new(()))
    }

    fn beside(kernel: Arc<dyn KernelCache>) -> Bed {
        let device = simulated::device();
        let mounted = mount(&device);
        mounted.serve_clients(kernel).unwrap();
        let handle = create(&mounted, b"file");
        let call = |call| {
            let (tx, rx) = mpsc::channel();
            let who = asker();
            mounted.call(&handle, call, who, move |answer: Answer| {
                tx.send(answer).unwrap();
            });
            let answer: Answer = rx.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(answer.status, 0);
            answer
        };
        call(WRITE);
        let reserved = call(Call::Reserve {
            first: 0,
            pages: 16,
            soon: false,
        });
        assert_eq!(reserved.pages, 16);
        let file = mounted.fast.slot_file(handle.file.ino()).unwrap();
        Bed {
            device,
            mounted,
            handle,
            file,
        }
    }

    /// Puts bytes into the cache beyond the end of the file.
    fn fill(&self, pages: u64, byte: u8) {
        let file = &self.handle.file;
        let slice = self.mounted.slice(file.layout().home());
        for page in 0..pages {
            let (tx, rx) = mpsc::channel();
            slice.get(&file.object(), page, 1, Intent::Modify, move |grant| {
                tx.send(grant).unwrap();
            });
            let grant = rx.recv_timeout(Duration::from_secs(60)).unwrap();
            let bytes = [byte; PAGE_BYTES as usize];
            grant.unwrap().write(page, 0, &bytes).unwrap();
        }
    }

    /// Extends the file as a client does.
    pub fn extend(&self, end: u64) {
        let slot = self.mounted.fast.slot(&self.file);
        assert!(slot.extend(slot.size(), end));
    }

    /// Extends the file as a client does that has read the slot's word `seen`. Returns whether the program's write counts as
    /// made.
    fn extend_after(&self, seen: SlotWord, end: u64) -> bool {
        let slot = self.mounted.fast.slot(&self.file);
        let Some(held) = slot.extend_lock().lock(7) else {
            return false;
        };
        let size = slot.size();
        let may = self.mounted.fast.info(&self.file).word() == seen;
        let made = may && slot.extend_lock().is_held(held) && slot.extend(size, end);
        slot.extend_lock().unlock(held);
        made
    }

    /// Closes the last copy of the descriptor. Calls `meanwhile` after the daemon has absorbed the client's changes and before it
    /// forgets that the file is written.
    fn release(&self, meanwhile: impl FnOnce()) {
        let fast = &self.mounted.fast;
        let part = fast.files.part(self.handle.file.ino());
        let files = part.read();
        std::thread::scope(|scope| {
            scope.spawn(|| fast.release(&self.handle));
            wait_until("the release waits for the files", || {
                part.try_read().is_none()
            });
            meanwhile();
            drop(files);
        });
    }

    pub fn truncate(&self, size: u64) {
        let set = SetAttr {
            size: Some(size),
            ..SetAttr::default()
        };
        let ino = self.handle.file.ino();
        self.mounted.setattr(ino, set, CALLER).unwrap();
    }

    /// Creates a file of `size` bytes that a program reads inline.
    fn granted(&self, name: &[u8], size: u64) -> (Arc<Handle>, Arc<SlotFile>) {
        let handle = create(&self.mounted, name);
        let set = SetAttr {
            size: Some(size),
            ..SetAttr::default()
        };
        let ino = handle.file.ino();
        self.mounted.setattr(ino, set, CALLER).unwrap();
        let file = self.grant(&handle);
        (handle, file)
    }

    /// Creates a file of `size` bytes that had a slot and has none any more.
    fn released(&self, name: &[u8], size: u64) -> Ino {
        let (handle, _) = self.granted(name, size);
        self.mounted.close_file(&handle);
        handle.file.ino()
    }

    /// Creates a file as `released` does, and opens it again.
    fn reopened(&self, name: &[u8], size: u64) -> Arc<Handle> {
        let ino = self.released(name, size);
        self.mounted.open_file(ino, true).unwrap()
    }

    /// Creates a file that no program uses inline, with space for 16 pages.
    fn plain(&self) -> Arc<Handle> {
        self.plain_named(b"plain")
    }

    pub fn plain_named(&self, name: &[u8]) -> Arc<Handle> {
        let handle = create(&self.mounted, name);
        let fs = self.mounted.fs();
        fs.begin_write(&handle.file, 0, 16 * PAGE_BYTES).unwrap();
        handle
    }

    /// Appends through the mount.
    fn append(&self, handle: &Arc<Handle>, data: &[u8]) -> mpsc::Receiver<u32> {
        let mode = WriteMode {
            append: true,
            ..WriteMode::PLAIN
        };
        simulated::write(&self.mounted, handle, 0, data, mode)
    }

    fn grant(&self, handle: &Arc<Handle>) -> Arc<SlotFile> {
        assert_eq!(self.ask(handle, READ).status, 0);
        self.mounted.fast.slot_file(handle.file.ino()).unwrap()
    }

    /// Returns the daemon's answer to an ioctl on the descriptor.
    fn ask(&self, handle: &Arc<Handle>, call: Call) -> Answer {
        self.ask_as(handle, call, asker())
    }

    pub fn ask_as(&self, handle: &Arc<Handle>, call: Call, who: crate::Asker) -> Answer {
        let (tx, rx) = mpsc::channel();
        self.mounted.call(handle, call, who, move |answer| {
            tx.send(answer).unwrap();
        });
        rx.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn size_in_slot(&self, file: &SlotFile) -> u64 {
        self.mounted.fast.slot(file).size().bytes()
    }

    pub fn size(&self) -> u64 {
        self.mounted.getattr(self.handle.file.ino()).unwrap().size
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.mounted.close_file(&self.handle);
        let closed = self.mounted.close();
        // A panic can end all changes of the volume, so that this close fails. A second panic would end the process, and the test
        // could not repeat the case.
        if !std::thread::panicking() {
            closed.unwrap();
        }
    }
}

#[test]
fn the_size_is_that_of_the_last_truncation_while_others_read_it() {
    let bed = Bed::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = bed.size();
                }
            });
        }
        let reserve = || {
            let (tx, rx) = mpsc::channel();
            let call = Call::Reserve {
                first: 1,
                pages: 15,
                soon: false,
            };
            let who = asker();
            bed.mounted
                .call(&bed.handle, call, who, move |answer: Answer| {
                    tx.send(answer.status).unwrap();
                });
            let _ = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        };
        for round in 0..2_000 {
            bed.extend(50_000);
            bed.truncate(100 + round % 7);
            assert_eq!(bed.size(), 100 + round % 7, "round {round}");
            reserve();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_thread_that_still_refers_to_a_freed_slot_changes_no_other_file() {
    let bed = Bed::new();
    let fast = &bed.mounted.fast;
    let (first, stale) = bed.granted(b"first", 100);
    // Two threads find the file before its last descriptor is closed. One of them is in the middle of a truncation.
    let (mut second, mut number) = (None, None);
    let truncated = bed.mounted.fast.resize(first.file.ino(), Some(10), || {
        number = Some(stale.slot);
        bed.mounted.close_file(&first);
        second = Some(bed.granted(b"second", 1 << 20));
        Ok(())
    });
    truncated.unwrap();
    let (second, granted) = second.unwrap();
    bed.mounted.fast.absorb_file(&stale);
    assert_eq!(bed.size_in_slot(&granted), 1 << 20);
    assert_eq!(stale.file.size(), 100);
    // The slot's number is reused once no thread refers to its previous file.
    drop(stale);
    bed.mounted.close_file(&second);
    drop(granted);
    let (third, granted) = bed.granted(b"third", 1);
    let (fourth, also) = bed.granted(b"fourth", 1);
    assert!([granted.slot, also.slot].contains(&number.unwrap()));
    assert!(fast.slot_file(third.file.ino()).is_some());
    for handle in [third, fourth] {
        bed.mounted.close_file(&handle);
    }
}

#[test]
fn a_file_gets_no_slot_in_the_middle_of_a_truncation() {
    let bed = Bed::new();
    let (handle, granted) = bed.granted(b"file to truncate", 1 << 20);
    let ino = handle.file.ino();
    bed.mounted.close_file(&handle);
    drop(granted);
    let handle = bed.mounted.open_file(ino, true).unwrap();
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        let (bed, handle) = (&bed, &handle);
        let granted = bed.mounted.fast.resize(ino, Some(0), || {
            let granted = scope.spawn(move || {
                let granted = bed.grant(handle);
                let _ = tx.send(());
                granted
            });
            // The absence of an answer shows that the request for a slot waits, as it must.
            let _ = rx.recv_timeout(Duration::from_millis(300));
            let set = SetAttr {
                size: Some(0),
                ..SetAttr::default()
            };
            bed.mounted.fs().setattr(ino, set, CALLER)?;
            Ok(granted)
        });
        let granted = granted.unwrap().join().unwrap();
        assert_eq!(bed.size_in_slot(&granted), 0);
    });
    bed.mounted.close_file(&handle);
}

fn soon(first: u64, pages: u32) -> Call {
    Call::Reserve {
        first,
        pages,
        soon: true,
    }
}

#[test]
fn one_job_reserves_pages_for_a_descriptor_however_often_it_asks() {
    let bed = Bed::new();
    let reading = (bed.mounted)
        .open_file(bed.handle.file.ino(), true)
        .unwrap();
    // The job thread is busy.
    let (go_on, busy) = mpsc::channel::<()>();
    bed.mounted.fast.later(move || {
        let _ = busy.recv();
    });
    let jobs = |handle| Arc::weak_count(handle);
    let refused = bed.ask(&reading, soon(16, 16)).status;
    assert_eq!((refused, jobs(&reading)), (Refusal::ReadOnly as u32, 0));
    for _ in 0..1000 {
        let answer = bed.ask(&bed.handle, soon(16, 16));
        assert_eq!((answer.status, answer.pages), (0, 16));
    }
    // One writer is faster than the job, and another asks for pages elsewhere.
    let answer = bed.ask(&bed.handle, soon(32, 8));
    assert_eq!((answer.status, answer.pages), (0, 8));
    for (first, pages) in [(90, 1), (u64::MAX, 8), (20, 0)] {
        let refused = bed.ask(&bed.handle, soon(first, pages)).status;
        assert_eq!(refused, Refusal::Space as u32, "{pages} from {first}");
    }
    assert_eq!(jobs(&bed.handle), 1);
    drop(go_on);
    let memory = bed.mounted.slice(bed.handle.file.layout().home()).memory();
    let is_there = |page| {
        let key = Key::new(bed.handle.file.object_id(), page);
        memory.lookup(key).is_some()
    };
    wait_until("the pages are reserved", || (16..40).all(is_there));
    assert!(!is_there(40) && !is_there(90));
    bed.mounted.close_file(&reading);
}

#[test]
fn a_mount_without_the_option_refuses_to_move_companions() {
    let bed = Bed::new();
    let call = Call::Companions {
        node: 0,
        always: true,
        owner: 1,
        instance: 1,
    };
    let answer = bed.ask(&bed.handle, call);
    assert_eq!(answer.status, Refusal::Companions as u32);
}

#[test]
fn a_file_that_a_stranger_maps_takes_no_slot_and_is_not_accessed_inline_meanwhile() {
    let bed = Bed::new();
    let stranger = crate::Asker {
        uid: 60_000,
        gid: 60_000,
        ..asker()
    };
    let ino = bed.released(b"mapped", 100);
    let open = || bed.mounted.open_file(ino, true).unwrap();
    let in_use = || bed.mounted.fast.in_use.load(Ordering::SeqCst);
    let (before, mappings) = (in_use(), [open(), open()]);
    for mapping in mappings.iter().chain(&mappings) {
        assert_eq!(bed.ask_as(mapping, Call::Mapped, stranger).status, 0);
    }
    assert_eq!(in_use(), before);
    // A program asks for inline access while the file is mapped.
    let program = open();
    assert_eq!(bed.ask(&program, WRITE).status, Refusal::Mapped as u32);
    let [one, other] = mappings;
    bed.mounted.close_file(&one);
    assert_eq!(bed.ask(&program, WRITE).status, Refusal::Mapped as u32);
    bed.mounted.close_file(&other);
    // A refused program is no writer, so this one is the first writer, and is granted writes at once.
    let later = open();
    assert_eq!(bed.ask(&later, WRITE).status, 0);
    assert!(program.file.object().may_write_inline());
    let slot_file = bed.mounted.fast.slot_file(ino).unwrap();
    let flags = bed.mounted.fast.info(&slot_file).word().flags();
    assert_eq!(flags & (SlotInfo::NO_WRITE | SlotInfo::KERNEL), 0);
    drop(slot_file);
    bed.mounted.close_file(&later);
    assert_eq!(in_use(), before);
    assert_eq!(bed.ask(&program, WRITE).status, 0);
    assert!(bed.mounted.fast.mappings.lock().is_empty());
    // Maps a file that has a slot.
    let mapping = open();
    assert_eq!(bed.ask_as(&mapping, Call::Mapped, stranger).status, 0);
    assert_eq!(bed.ask(&program, WRITE).status, Refusal::Mapped as u32);
    assert!(!program.file.object().may_write_inline());
    bed.mounted.close_file(&mapping);
    assert_eq!(bed.ask(&program, WRITE).status, 0);
    bed.mounted.close_file(&program);
}

const SET_ID: SetAttr = SetAttr {
    perm: Some(0o4755),
    uid: None,
    gid: None,
    size: None,
    atime: None,
    mtime: None,
    ctime: None,
    drop_set_id: false,
};

#[test]
fn a_program_that_asked_before_a_chmod_gets_no_inline_writes_after_it() {
    let bed = Bed::new();
    let handle = bed.reopened(b"program", 100);
    let ino = handle.file.ino();
    // The daemon has checked the mode. It continues after a chmod that found no slot.
    assert!(!bed.mounted.fs().has_privileges(ino).unwrap());
    bed.mounted.setattr(ino, SET_ID, CALLER).unwrap();
    let granted = (bed.mounted.fast).grant(&handle.file, &mut handle.grants.lock(), true);
    assert_eq!(granted.err(), Some(Refusal::SetId));
    assert!(bed.mounted.fast.written_file(ino).is_none());
    assert_eq!(bed.ask(&handle, WRITE).status, Refusal::SetId as u32);
    bed.mounted.close_file(&handle);
}

#[test]
fn a_file_gets_no_slot_in_the_middle_of_a_chmod_that_gives_it_set_id_bits() {
    let bed = Bed::new();
    let handle = bed.reopened(b"program", 100);
    let ino = handle.file.ino();
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        let (bed, handle) = (&bed, &handle);
        let asked = bed.mounted.fast.give_privileges(ino, || {
            let asked = scope.spawn(move || {
                let answer = bed.ask(handle, WRITE);
                let _ = tx.send(());
                answer
            });
            // The absence of an answer shows that the thread waits, as it must.
            let _ = rx.recv_timeout(Duration::from_millis(300));
            bed.mounted.fs().setattr(ino, SET_ID, CALLER).unwrap();
            asked
        });
        assert_eq!(asked.join().unwrap().status, Refusal::SetId as u32);
    });
    assert!(bed.mounted.fast.written_file(ino).is_none());
    bed.mounted.close_file(&handle);
}

#[test]
fn a_file_without_set_id_bits_is_written_inline_again_through_its_next_slot() {
    let bed = Bed::new();
    let (handle, granted) = bed.granted(b"program", 0);
    let ino = handle.file.ino();
    // A handle that is open through the kernel keeps the file but not its slot.
    let other = bed.mounted.open_file(ino, true).unwrap();
    assert_eq!(bed.ask(&handle, WRITE).status, 0);
    bed.mounted.setattr(ino, SET_ID, CALLER).unwrap();
    bed.mounted.close_file(&handle);
    drop(granted);
    bed.mounted.fs().drop_privileges(ino, true).unwrap();
    assert_eq!(bed.ask(&other, WRITE).status, 0);
    assert!(other.file.object().may_write_inline());
    bed.mounted.close_file(&other);
}

#[test]
fn an_interrupted_extension_is_cleared_when_both_descriptors_are_closed_at_once() {
    // Each round takes a second, the longest time a lock may be held.
    for _ in 0..3 {
        let bed = Bed::new();
        let other = bed.mounted.open_file(bed.handle.file.ino(), true).unwrap();
        let mut grants = other.grants.lock();
        let both = bed.mounted.fast.grant(&other.file, &mut grants, true);
        assert!(!both.unwrap().1);
        drop(grants);
        let slot = bed.mounted.fast.slot(&bed.file);
        let _dead = slot.extend_lock().try_lock(7).unwrap();
        std::thread::scope(|scope| {
            for handle in [&other, &bed.handle] {
                scope.spawn(|| bed.mounted.fast.release(handle));
            }
        });
        assert!(slot.extend_lock().try_lock(8).is_some());
        bed.mounted.fs().close_file(&other.file);
    }
}

#[test]
fn a_file_that_clients_extended_is_whole_after_it_replaced_another() {
    let bed = Bed::new();
    let fs = bed.mounted.fs();
    fs.mknod(ROOT, b"old", Kind::File, 0o644, 0, CALLER)
        .unwrap();
    bed.fill(13, 7);
    bed.extend(50_000);
    bed.mounted
        .rename((ROOT, b"file"), (ROOT, b"old"), 0)
        .unwrap();
    let (tx, rx) = mpsc::channel();
    fs.fsync_dir(ROOT, Box::new(move |result| tx.send(result).unwrap()));
    rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    // Mounts the state that a power cut would leave now.
    let after = mount(&Arc::new(bed.device.crash(1)));
    let attr = after.lookup(ROOT, b"old").unwrap();
    assert_eq!(attr.size, 50_000);
    let handle = after.open_file(attr.ino, false).unwrap();
    let (tx, rx) = mpsc::channel();
    after.read(&handle, 0, 50_000, false, vec![], move |read, buffer| {
        tx.send((read.unwrap(), buffer)).unwrap();
    });
    let (len, found) = rx.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(found[..len] == vec![7; 50_000]);
    after.close_file(&handle);
    after.close().unwrap();
}

#[test]
fn a_read_that_may_not_wait_is_returned_while_a_writer_holds_its_words() {
    let bed = Bed::new();
    bed.extend(50_000);
    let slot = bed.mounted.fast.slot(&bed.file);
    let held = slot.lock_range(Segments::of(0, 50_000), 7).unwrap();
    let (tx, rx) = mpsc::channel();
    let reply = {
        let tx = tx.clone();
        move |read: jericho_fs::Result<usize>, _: Vec<u8>| tx.send(read.unwrap()).unwrap()
    };
    let left = (bed.mounted).try_read(&bed.handle, 0, 40_000, false, vec![], reply);
    let (buffer, reply) = left.expect("the words are held");
    assert!(rx.try_recv().is_err());
    assert!(slot.holds(&held, 0), "the read takes no word away");
    // A page's latch is enough for a read within the page.
    let within = {
        let tx = tx.clone();
        move |read: jericho_fs::Result<usize>, _: Vec<u8>| tx.send(read.unwrap()).unwrap()
    };
    assert!(
        (bed.mounted)
            .try_read(&bed.handle, 0, 4_000, false, vec![], within)
            .is_none()
    );
    let limit = Duration::from_secs(60);
    assert_eq!(rx.recv_timeout(limit).unwrap(), 4_000);
    // A read for the kernel's page cache is returned, too, even within one page.
    let cached = |_: jericho_fs::Result<usize>, _: Vec<u8>| ();
    let left = (bed.mounted).try_read(&bed.handle, 0, 4_000, true, vec![], cached);
    assert!(left.is_some());
    slot.unlock_range(&held);
    (bed.mounted).read(&bed.handle, 0, 40_000, false, buffer, reply);
    assert_eq!(rx.recv_timeout(limit).unwrap(), 40_000);
}

#[test]
fn a_write_that_extends_the_file_while_its_last_descriptor_is_closed_is_refused_or_counts() {
    let bed = Bed::new();
    let fast = &bed.mounted.fast;
    let word = fast.info(&bed.file).word();
    let mut made = false;
    bed.release(|| made = bed.extend_after(word, 50_000));
    assert!(!made || bed.size() == 50_000, "the size is lost");
    // The same write is refused after the release, when the daemon reads the size no more.
    assert!(!bed.extend_after(word, 50_000));
}

#[test]
fn attributes_that_were_read_before_the_last_writer_closed_the_file_are_not_kept() {
    let bed = Bed::new();
    let ino = bed.handle.file.ino();
    let before = bed.mounted.moment();
    bed.mounted.close_file(&bed.handle);
    assert!(!bed.mounted.attributes_may_be_kept(ino, before));
    // Those that are read afterwards are kept once the reserved space is free.
    let may_be_kept = || {
        let now = bed.mounted.moment();
        bed.mounted.attributes_may_be_kept(ino, now)
    };
    wait_until("the file has settled", may_be_kept);
    let settling = bed.mounted.fast.settling.begin(ino);
    assert!(!may_be_kept());
    let before = bed.mounted.moment();
    bed.mounted.fast.has_settled(settling);
    assert!(!bed.mounted.attributes_may_be_kept(ino, before));
    assert!(may_be_kept());
}

#[test]
fn a_file_counts_as_written_until_the_times_of_its_last_write_are_set() {
    let bed = Bed::new();
    let absorbing = bed.file.absorbing.read();
    std::thread::scope(|scope| {
        scope.spawn(|| bed.mounted.close_file(&bed.handle));
        wait_until("the release waits for the thread that absorbs", || {
            bed.file.absorbing.try_read().is_none()
        });
        assert!(bed.file.is_written());
        drop(absorbing);
    });
    assert!(!bed.file.is_written());
}

#[test]
fn a_posted_grant_of_writes_has_no_effect_after_the_last_writer_has_closed_the_file() {
    let bed = Bed::new();
    let fast = &bed.mounted.fast;
    let reader = (bed.mounted)
        .open_file(bed.handle.file.ino(), false)
        .unwrap();
    bed.grant(&reader);
    bed.release(|| fast.grant_writes(&bed.file));
    fast.grant_writes(&bed.file);
    let flags = || fast.info(&bed.file).word().flags();
    assert_ne!(flags() & SlotInfo::NO_WRITE, 0);
    // The next writer uses the reserved pages.
    let writer = (bed.mounted)
        .open_file(bed.handle.file.ino(), true)
        .unwrap();
    let first = (fast.grant(&writer.file, &mut writer.grants.lock(), true)).unwrap();
    assert!(first.1);
    // The grant waits for the bed's own write, which may not have ended yet.
    let (tx, ended) = mpsc::channel();
    writer
        .file
        .after_writings(move || tx.send(()).expect("the test waits"));
    ended.recv_timeout(Duration::from_secs(60)).unwrap();
    fast.grant_writes(&bed.file);
    assert_eq!(flags() & SlotInfo::NO_WRITE, 0);
    for handle in [reader, writer] {
        bed.mounted.close_file(&handle);
    }
}

#[test]
fn no_client_writes_inline_beside_a_write_of_the_mount_that_began_earlier() {
    let bed = Bed::new();
    let (fast, handle) = (&bed.mounted.fast, bed.plain());
    let limit = Duration::from_secs(60);
    // The write has to wait for its page.
    let (tx, rx) = mpsc::channel();
    let object = handle.file.object();
    let slice = bed.mounted.slice(handle.file.layout().home());
    slice.get(&object, 0, 1, Intent::Overwrite, move |page| {
        tx.send(page).unwrap();
    });
    let mut page = rx.recv_timeout(limit).unwrap().unwrap();
    let written = bed.append(&handle, b"record");
    assert!(written.try_recv().is_err());
    let (tx, answer) = mpsc::channel();
    (bed.mounted).call(&handle, WRITE, asker(), move |answer: Answer| {
        tx.send(answer).unwrap();
    });
    let slot_file = fast.slot_file(handle.file.ino()).unwrap();
    let withheld = || fast.info(&slot_file).word().flags() & SlotInfo::NO_WRITE != 0;
    // The job thread has finished what was posted so far.
    let (tx, rx) = mpsc::channel();
    fast.later(move || tx.send(()).unwrap());
    rx.recv_timeout(limit).unwrap();
    assert!(answer.try_recv().is_err() && withheld());
    // Writes of other programs through the kernel do not grant inline writes either.
    fast.grant_writes(&slot_file);
    assert!(withheld());
    page.write(0, 0, &[0; PAGE_BYTES as usize]).unwrap();
    drop(page);
    assert_eq!(written.recv_timeout(limit).unwrap(), 6);
    assert_eq!(answer.recv_timeout(limit).unwrap().status, 0);
    assert!(!withheld());
    assert_eq!(bed.size_in_slot(&slot_file), 6);
    bed.mounted.close_file(&handle);
}

#[test]
fn a_write_of_the_mount_notices_the_first_inline_writer_of_its_file() {
    let bed = Bed::new();
    let (fast, handle) = (&bed.mounted.fast, bed.plain());
    // Makes the write wait after it has checked for inline writers.
    let other = handle.file.writing();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let fs = bed.mounted.fs();
            fs.release_reserved(&handle.file, || false).unwrap();
        });
        wait_until("other writers have to wait", || {
            handle.file.try_writing().is_none()
        });
        let (tx, rx) = mpsc::channel();
        let writer = scope.spawn({
            let (bed, handle) = (&bed, &handle);
            move || {
                tx.send(std::fs::read_link("/proc/thread-self").unwrap())
                    .unwrap();
                let written = bed.append(handle, b"record");
                assert_eq!(written.recv_timeout(Duration::from_secs(60)).unwrap(), 6);
            }
        });
        let thread = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        let syscall = PathBuf::from("/proc").join(thread).join("syscall");
        let futex = format!("{} ", libc::SYS_futex);
        wait_until("the writer waits", || {
            std::fs::read_to_string(&syscall).is_ok_and(|line| line.starts_with(&futex))
        });
        let granted = fast.grant(&handle.file, &mut handle.grants.lock(), true);
        let (slot_file, first) = granted.unwrap();
        assert!(first);
        let held = fast.slot(&slot_file).extend_lock().try_lock(7).unwrap();
        drop(other);
        writer.join().unwrap();
        // The thread waited for the lock and then took it away.
        assert!(!fast.slot(&slot_file).extend_lock().is_held(held));
    });
    bed.mounted.close_file(&handle);
}

#[test]
fn the_first_writer_waits_for_the_kernels_pages_only_if_there_may_be_some() {
    let bed = Bed::new();
    let limit = Duration::from_secs(60);
    let ask = |handle: &Arc<Handle>| {
        let (tx, answer) = mpsc::channel();
        (bed.mounted).call(handle, WRITE, asker(), move |answer: Answer| {
            tx.send(answer).unwrap();
        });
        answer
    };
    let may_write = |handle: &Arc<Handle>| {
        let slot_file = bed.mounted.fast.slot_file(handle.file.ino()).unwrap();
        let flags = bed.mounted.fast.info(&slot_file).word().flags();
        flags & SlotInfo::NO_WRITE == 0
    };
    // The thread that drops pages is busy.
    let (work, over) = mpsc::channel::<()>();
    (bed.mounted.fast).later(move || assert!(over.recv().is_err(), "the end of the work"));
    let new = bed.plain();
    assert_eq!(ask(&new).recv_timeout(limit).unwrap().status, 0);
    assert!(may_write(&new));
    let mapped = bed.plain_named(b"mapped");
    let (tx, rx) = mpsc::channel();
    let reply = move |read: jericho_fs::Result<usize>, _: Vec<u8>| tx.send(read).unwrap();
    (bed.mounted).read(&mapped, 0, 4096, true, vec![], reply);
    rx.recv_timeout(limit).unwrap().unwrap();
    let answer = ask(&mapped);
    assert!(answer.try_recv().is_err() && !may_write(&mapped));
    drop(work);
    assert_eq!(answer.recv_timeout(limit).unwrap().status, 0);
    assert!(may_write(&mapped));
    // The pages were dropped.
    assert!(!mapped.file.kernel_may_have_pages());
    for handle in [new, mapped] {
        bed.mounted.close_file(&handle);
    }
}

#[test]
fn no_client_writes_inline_while_the_kernel_drops_its_pages_for_an_earlier_writer() {
    let kernel = Arc::new(SlowKernel::default());
    let bed = Bed::beside(kernel.clone());
    let (fast, limit) = (&bed.mounted.fast, Duration::from_secs(60));
    let first = bed.plain();
    assert_eq!(bed.ask(&first, WRITE).status, 0);
    let (tx, rx) = mpsc::channel();
    let reply = move |read: jericho_fs::Result<usize>, _: Vec<u8>| tx.send(read).unwrap();
    (bed.mounted).read(&first, 0, 4096, true, vec![], reply);
    rx.recv_timeout(limit).unwrap().unwrap();
    // Writes through the kernel make it drop its pages. The file is closed meanwhile.
    let (begun, dropping) = mpsc::channel();
    let (go_on, end) = mpsc::channel();
    *kernel.0.lock() = Some((begun, end));
    let slot_file = fast.slot_file(first.file.ino()).unwrap();
    wait_until("the pages are dropped", || {
        bed.mounted.fast.wrote_by_kernel(&slot_file);
        dropping.try_recv().is_ok()
    });
    bed.mounted.close_file(&first);
    let next = bed.mounted.open_file(first.file.ino(), true).unwrap();
    let (tx, answer) = mpsc::channel();
    (bed.mounted).call(&next, WRITE, asker(), move |answer: Answer| {
        tx.send(answer).unwrap();
    });
    let slot_file = fast.slot_file(next.file.ino()).unwrap();
    let withheld = || fast.info(&slot_file).word().flags() & SlotInfo::NO_WRITE != 0;
    assert!(answer.try_recv().is_err() && withheld());
    drop(go_on);
    assert_eq!(answer.recv_timeout(limit).unwrap().status, 0);
    assert!(!withheld() && !next.file.kernel_may_have_pages());
    bed.mounted.close_file(&next);
}

#[test]
fn data_that_a_new_writer_appends_is_kept_when_the_last_writers_space_is_released() {
    let bed = Bed::new();
    let (fast, limit) = (&bed.mounted.fast, Duration::from_secs(60));
    let next = (bed.mounted)
        .open_file(bed.handle.file.ino(), true)
        .unwrap();
    // The thread that releases the space is busy.
    let (work, over) = mpsc::channel::<()>();
    fast.later(move || assert!(over.recv().is_err(), "the end of the work"));
    fast.release(&bed.handle);
    assert_eq!(bed.ask(&next, WRITE).status, 0);
    let reserve = Call::Reserve {
        first: 0,
        pages: 16,
        soon: false,
    };
    assert_eq!(bed.ask(&next, reserve).pages, 16);
    bed.fill(13, 7);
    let slot_file = fast.slot_file(next.file.ino()).unwrap();
    let slot = fast.slot(&slot_file);
    assert!(slot.extend(slot.size(), 50_000));
    drop(work);
    let (tx, rx) = mpsc::channel();
    fast.later(move || tx.send(()).unwrap());
    rx.recv_timeout(limit).unwrap();
    assert_eq!(bed.size(), 50_000);
    let (tx, rx) = mpsc::channel();
    (bed.mounted).read(&next, 0, 50_000, false, vec![], move |read, buffer| {
        tx.send((read.unwrap(), buffer)).unwrap();
    });
    let (len, found) = rx.recv_timeout(limit).unwrap();
    assert!(found[..len] == vec![7; 50_000]);
    bed.mounted.close_file(&next);
}

#[test]
fn a_file_may_get_a_slot_while_a_request_waits_for_space_for_it() {
    let bed = Bed::new();
    let (fs, handle) = (bed.mounted.fs(), bed.plain());
    let other = bed.plain_named(b"other");
    simulated::fill(&bed.mounted, &other);
    // The removed file is still open, so its space may become free later, and a request waits for it.
    fs.unlink(ROOT, b"other").unwrap();
    fs.set_space_patience(Duration::from_secs(3600));
    let (tx, rx) = mpsc::channel();
    let reply = move |result| tx.send(result).unwrap();
    (bed.mounted).fallocate(&handle, 0, 1 << 20, 1 << 20, reply);
    wait_until("the fallocate waits", || fs.space_waits() > 0);
    let changing = bed.mounted.fast.changing.contains(handle.file.ino());
    assert!(!changing, "a request for a slot has to wait");
    bed.mounted.close_file(&other);
    fs.forget(other.file.ino(), 1);
    rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    bed.mounted.close_file(&handle);
}
