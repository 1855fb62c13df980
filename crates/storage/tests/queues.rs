//! Tests of queues, on io_uring and on threads.

mod support;

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_storage::{
    BLOCK_BYTES, Cause, Completion, Device, Devices, Direction, IoError, OpenOptions, Queue,
    Segment, Transfer, open_device, open_pool_queue, open_queue,
};
use jericho_sys::memory::Mapping;
use support::{
    BLOCK, LoopDevice, SmallFilesystem, bytes_of, directories, file_device, memory, pattern,
    segment,
};

/// Returns an io_uring queue with registered buffers, one without, and a queue on threads.
fn queues(
    devices: &[Arc<dyn Device>],
    buffers: &[Arc<Mapping>],
    depth: u32,
) -> Vec<Box<dyn Queue>> {
    let queues = vec![
        open_queue(devices, buffers, depth).unwrap(),
        open_queue(devices, &[], depth).unwrap(),
        open_pool_queue(devices, depth).unwrap(),
    ];
    if !queues[0].describe().contains("io_uring of depth") {
        eprintln!("SKIPPED: io_uring: {}", queues[0].describe());
    }
    queues
}

fn transfer(tag: u64, direction: Direction, block: u64, segments: Vec<Segment>) -> Transfer {
    Transfer {
        tag,
        device: 0,
        direction,
        offset_bytes: block * BLOCK_BYTES,
        segments,
    }
}

/// Waits for all transfers. Returns their completions in the order of their tags.
fn finish(queue: &mut dyn Queue) -> Vec<Completion> {
    let mut completions = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, None);
    }
    completions.sort_by_key(|completion| completion.tag);
    completions
}

fn one(queue: &mut dyn Queue, transfer: Transfer) -> Result<(), IoError> {
    queue.submit(transfer);
    let mut completions = finish(queue);
    assert_eq!(completions.len(), 1);
    completions.remove(0).result
}

fn scattered_round_trip(device: Arc<dyn Device>) {
    let mapping = memory(64);
    for mut queue in queues(&[Arc::clone(&device)], &[Arc::clone(&mapping)], 4) {
        let queue = queue.as_mut();
        let data = pattern(5, 16);
        mapping.copy_in(0, &data);
        let gathered = vec![segment(&mapping, 8, 8), segment(&mapping, 0, 8)];
        one(queue, transfer(0, Direction::Write, 3, gathered)).unwrap();
        let mut stored = vec![0; 16 * BLOCK];
        device.read_at(3 * BLOCK_BYTES, &mut stored).unwrap();
        assert!(stored[..8 * BLOCK] == data[8 * BLOCK..]);
        assert!(stored[8 * BLOCK..] == data[..8 * BLOCK]);
        let scattered: Vec<_> = [(60, 1), (40, 3), (32, 5), (50, 7)]
            .iter()
            .map(|&(block, blocks)| segment(&mapping, block, blocks))
            .collect();
        one(queue, transfer(0, Direction::Read, 3, scattered)).unwrap();
        assert!(bytes_of(&mapping, 60, 1) == stored[..BLOCK]);
        assert!(bytes_of(&mapping, 40, 3) == stored[BLOCK..4 * BLOCK]);
        assert!(bytes_of(&mapping, 32, 5) == stored[4 * BLOCK..9 * BLOCK]);
        assert!(bytes_of(&mapping, 50, 7) == stored[9 * BLOCK..]);
    }
}

#[test]
fn transfers_go_to_a_device_that_is_appended_while_the_queue_is_open() {
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [first, second] = [0, 1].map(|n: usize| file_device(directories[n].path(), 16));
    let mapping = memory(16);
    let data = pattern(9, 4);
    let of = |device: u16, transfer: Transfer| Transfer { device, ..transfer };
    let buffers = [Arc::clone(&mapping)];
    let queue = |kind: usize, devices: &Devices| match kind {
        0 => open_queue(devices, &buffers, 4).unwrap(),
        1 => open_queue(devices, &[], 4).unwrap(),
        _ => open_pool_queue(devices, 4).unwrap(),
    };
    for kind in 0..3 {
        let devices = Devices::from(&[Arc::clone(&first)]);
        let mut queue = queue(kind, &devices);
        let queue = queue.as_mut();
        mapping.copy_in(0, &data);
        let write = |block| transfer(0, Direction::Write, block, vec![segment(&mapping, 0, 4)]);
        let missing = one(queue, of(1, write(0))).unwrap_err();
        assert_eq!(missing.errno(), 22, "{missing}");
        devices.push(Arc::clone(&second));
        one(queue, of(1, write(8))).unwrap();
        one(queue, of(0, write(0))).unwrap();
        let read = transfer(0, Direction::Read, 8, vec![segment(&mapping, 8, 4)]);
        one(queue, of(1, read)).unwrap();
        assert!(bytes_of(&mapping, 8, 4) == data);
        for (device, block) in [(&first, 0), (&second, 8)] {
            let mut stored = vec![0; 4 * BLOCK];
            device.read_at(block * BLOCK_BYTES, &mut stored).unwrap();
            assert!(stored == data);
            device
                .write_at(block * BLOCK_BYTES, &vec![0; 4 * BLOCK])
                .unwrap();
        }
    }
}

#[test]
fn segments_are_gathered_and_scattered_in_order() {
    for directory in directories() {
        scattered_round_trip(file_device(directory.path(), 64));
    }
    if let Some(device) = LoopDevice::new(64) {
        scattered_round_trip(open_device(&device.path, OpenOptions::default()).unwrap());
    }
}

#[test]
fn a_transfer_of_more_segments_than_the_kernel_takes_is_whole() {
    let directory = tempfile::tempdir().unwrap();
    let device = file_device(directory.path(), 2100);
    let mapping = memory(2100);
    let data = pattern(6, 2100);
    for mut queue in queues(&[Arc::clone(&device)], &[], 4) {
        mapping.copy_in(0, &data);
        let backwards = || {
            (0..2100)
                .rev()
                .map(|block| segment(&mapping, block, 1))
                .collect()
        };
        one(
            queue.as_mut(),
            transfer(0, Direction::Write, 0, backwards()),
        )
        .unwrap();
        mapping.zero(0..mapping.len());
        one(queue.as_mut(), transfer(0, Direction::Read, 0, backwards())).unwrap();
        assert!(bytes_of(&mapping, 0, 2100) == data);
    }
}

#[test]
fn more_transfers_than_the_depth_wait_inside_and_all_complete_once() {
    let directory = tempfile::tempdir().unwrap();
    let devices: Vec<_> = ["a", "b"]
        .map(|name| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            file_device(&path, 128)
        })
        .into();
    devices[0].write_at(0, &pattern(7, 128)).unwrap();
    devices[1].write_at(0, &pattern(8, 128)).unwrap();
    let mapping = memory(256);
    for mut queue in queues(&devices, &[Arc::clone(&mapping)], 3) {
        mapping.zero(0..mapping.len());
        for tag in 0..256u64 {
            let segments = vec![segment(&mapping, tag as usize, 1)];
            let device = (tag / 128) as u16;
            queue.submit(Transfer {
                device,
                ..transfer(tag, Direction::Read, tag % 128, segments)
            });
        }
        assert_eq!(queue.in_flight(), 256);
        let completions = finish(queue.as_mut());
        let tags: Vec<_> = completions
            .iter()
            .map(|completion| completion.tag)
            .collect();
        assert_eq!(tags, (0..256).collect::<Vec<_>>());
        assert!(
            completions
                .iter()
                .all(|completion| completion.result.is_ok())
        );
        assert!(bytes_of(&mapping, 0, 128) == pattern(7, 128));
        assert!(bytes_of(&mapping, 128, 128) == pattern(8, 128));
    }
}

#[test]
fn an_invalid_transfer_completes_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let device = file_device(directory.path(), 8);
    let mapping = memory(8);
    let fd = mapping.fd().try_clone_to_owned().unwrap();
    let read_only_memory = Arc::new(Mapping::from_fd(fd, 8 * BLOCK, false).unwrap());
    let (einval, efault) = (Cause::Errno(22), Cause::Errno(14));
    for mut queue in queues(&[device], &[], 4) {
        let queue = queue.as_mut();
        let whole = || vec![segment(&mapping, 0, 8)];
        let error = one(queue, transfer(0, Direction::Read, 1, whole())).unwrap_err();
        assert_eq!((error.cause, error.offset_bytes), (einval, BLOCK_BYTES));
        let stranger = Transfer {
            device: 1,
            ..transfer(0, Direction::Read, 0, whole())
        };
        let error = one(queue, stranger).unwrap_err();
        assert!(
            error.to_string().contains("device number 1 of 1"),
            "{error}"
        );
        let beyond = vec![Segment {
            offset: BLOCK,
            ..segment(&mapping, 0, 8)
        }];
        let error = one(queue, transfer(0, Direction::Read, 0, beyond)).unwrap_err();
        assert_eq!(error.cause, efault);
        let odd = vec![Segment {
            offset: 512,
            ..segment(&mapping, 0, 1)
        }];
        let error = one(queue, transfer(0, Direction::Read, 0, odd)).unwrap_err();
        assert_eq!(error.cause, einval);
        let forbidden = vec![segment(&read_only_memory, 0, 1)];
        let error = one(queue, transfer(0, Direction::Read, 0, forbidden.clone())).unwrap_err();
        assert_eq!(error.cause, efault);
        one(queue, transfer(0, Direction::Write, 0, forbidden)).unwrap();
        one(queue, transfer(0, Direction::Read, 0, vec![])).unwrap();
    }
}

#[test]
fn writes_to_a_read_only_device_complete_with_erofs() {
    let directory = tempfile::tempdir().unwrap();
    drop(file_device(directory.path(), 8));
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let device = open_device(&directory.path().join("volume"), options).unwrap();
    for mut queue in queues(&[device], &[], 4) {
        let segments = vec![segment(&memory(1), 0, 1)];
        let error = one(queue.as_mut(), transfer(0, Direction::Write, 0, segments)).unwrap_err();
        assert_eq!(error.cause, Cause::Errno(30));
    }
}

#[test]
fn a_truncated_device_completes_short_and_reports_the_bytes_done() {
    for directory in directories() {
        let device = file_device(directory.path(), 8);
        let path = directory.path().join("volume");
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        let mapping = memory(8);
        for end in [3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 100] {
            file.set_len(end).unwrap();
            let mut queue = open_queue(&[Arc::clone(&device)], &[], 4).unwrap();
            let segments = vec![segment(&mapping, 4, 2), segment(&mapping, 0, 2)];
            let error = one(queue.as_mut(), transfer(0, Direction::Read, 1, segments)).unwrap_err();
            assert_eq!(
                error.cause,
                Cause::Short {
                    done_bytes: end - BLOCK_BYTES
                },
                "{error}"
            );
        }
    }
}

#[test]
fn a_full_filesystem_completes_with_enospc_at_the_first_offset_without_space() {
    let Some(filesystem) = SmallFilesystem::new(16) else {
        return;
    };
    let mapping = memory(64);
    mapping.copy_in(0, &pattern(9, 64));
    let device = file_device(filesystem.path(), 64);
    for mut queue in queues(&[device], &[], 4) {
        let segments = vec![segment(&mapping, 0, 64)];
        let error = one(queue.as_mut(), transfer(0, Direction::Write, 0, segments)).unwrap_err();
        assert_eq!(error.cause, Cause::Errno(28), "{error}");
        assert_eq!(error.offset_bytes + error.length_bytes, 64 * BLOCK_BYTES);
    }
}

#[test]
fn a_wait_ends_when_woken_and_when_its_time_is_over() {
    let directory = tempfile::tempdir().unwrap();
    for mut queue in queues(&[file_device(directory.path(), 8)], &[], 4) {
        let mut completions = Vec::new();
        let waker = queue.waker();
        waker.wake();
        queue.wait(&mut completions, None);
        let start = Instant::now();
        queue.wait(&mut completions, Some(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(20));
        queue.wait(&mut completions, Some(Duration::ZERO));
        assert!(completions.is_empty());
    }
}

/// Hangs when a wake-up is lost.
#[test]
fn no_wake_up_is_lost_while_transfers_complete() {
    let directory = tempfile::tempdir().unwrap();
    let mapping = memory(8);
    for mut queue in queues(&[file_device(directory.path(), 8)], &[], 4) {
        let waker = queue.waker();
        let (sender, receiver) = std::sync::mpsc::sync_channel::<u64>(1);
        let producer = std::thread::spawn(move || {
            for number in 0..5_000 {
                sender.send(number).unwrap();
                waker.wake();
            }
        });
        let (mut received, mut completed) = (0, 0);
        let mut completions = Vec::new();
        while received < 5_000 {
            queue.wait(&mut completions, None);
            completed += completions.drain(..).count();
            while let Ok(number) = receiver.try_recv() {
                assert_eq!(number, received);
                received += 1;
                if number % 4 == 0 {
                    let segments = vec![segment(&mapping, 0, 1)];
                    queue.submit(transfer(number, Direction::Read, 0, segments));
                }
            }
        }
        producer.join().unwrap();
        completed += finish(queue.as_mut()).len();
        assert_eq!(completed, 1_250);
    }
}

#[test]
fn an_idle_waiter_uses_no_cpu() {
    let directory = tempfile::tempdir().unwrap();
    for mut queue in queues(&[file_device(directory.path(), 8)], &[], 4) {
        let before = cpu_ticks_of_this_thread();
        queue.wait(&mut Vec::new(), Some(Duration::from_millis(300)));
        // A tick is 10 ms: a waiter that spins takes 30 of them.
        assert!(cpu_ticks_of_this_thread() - before <= 2);
    }
}

fn cpu_ticks_of_this_thread() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn an_idle_queue_may_move_between_threads_and_keeps_its_waker() {
    let directory = tempfile::tempdir().unwrap();
    let mapping = memory(8);
    let device = file_device(directory.path(), 8);
    for mut queue in queues(&[device], &[Arc::clone(&mapping)], 4) {
        let waker = queue.waker();
        let read = || transfer(1, Direction::Read, 0, vec![segment(&mapping, 0, 1)]);
        one(queue.as_mut(), read()).unwrap();
        let read = read();
        std::thread::spawn(move || {
            one(queue.as_mut(), read).unwrap();
            waker.wake();
            queue.wait(&mut Vec::new(), None);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn dropping_a_queue_waits_for_transfers_that_the_device_has_begun() {
    let directory = tempfile::tempdir().unwrap();
    let mapping = memory(64);
    let device = file_device(directory.path(), 64);
    for mut queue in queues(&[device], &[Arc::clone(&mapping)], 16) {
        for block in 0..64 {
            let segments = vec![segment(&mapping, block, 1)];
            queue.submit(transfer(0, Direction::Read, block as u64, segments));
        }
        queue.wait(&mut Vec::new(), Some(Duration::ZERO));
    }
    assert_eq!(Arc::strong_count(&mapping), 1);
}

/// A device that has only the blocking calls, and panics.
struct Broken;

impl Device for Broken {
    fn name(&self) -> Arc<str> {
        "broken".into()
    }
    fn size_bytes(&self) -> u64 {
        BLOCK_BYTES
    }
    fn home_node(&self) -> Option<u32> {
        None
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), IoError> {
        panic!("a bug in a device")
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        Ok(())
    }
    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), IoError> {
        Ok(())
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn describe(&self) -> String {
        "broken".to_string()
    }
}

#[test]
fn a_device_that_panics_fails_its_transfer_and_no_other() {
    let mapping = memory(1);
    let mut queue = open_queue(&[Arc::new(Broken) as Arc<dyn Device>], &[], 1).unwrap();
    assert!(
        queue
            .describe()
            .contains("broken supports only blocking calls"),
        "{}",
        queue.describe()
    );
    let segments = || vec![segment(&mapping, 0, 1)];
    let error = one(queue.as_mut(), transfer(0, Direction::Read, 0, segments())).unwrap_err();
    assert_eq!(error.errno(), 5);
    one(queue.as_mut(), transfer(0, Direction::Write, 0, segments())).unwrap();
}

/// A device whose writes complete only when the test reads the other end of a pipe.
struct Delayed {
    pipe: std::io::PipeWriter,
    needs_stable_writes: bool,
}

impl Device for Delayed {
    fn name(&self) -> Arc<str> {
        "delayed".into()
    }
    fn size_bytes(&self) -> u64 {
        64 * BLOCK_BYTES
    }
    fn home_node(&self) -> Option<u32> {
        None
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), IoError> {
        unreachable!("nothing is read")
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        unreachable!("all writes are queued")
    }
    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), IoError> {
        Ok(())
    }
    fn needs_stable_writes(&self) -> bool {
        self.needs_stable_writes
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pipe.as_fd())
    }
    fn describe(&self) -> String {
        "delayed".to_string()
    }
}

/// Changes memory while writes from it wait in the kernel. Returns the bytes of each write that reached the device.
fn change_in_flight(needs_stable_writes: bool, writes: usize) -> Option<Vec<Vec<u8>>> {
    let (mut reader, mut pipe) = std::io::pipe().unwrap();
    // Fills the pipe so that nothing more goes in until the test reads.
    let full = [0xff; 64 << 10];
    pipe.write_all(&full).unwrap();
    let device = Arc::new(Delayed {
        pipe,
        needs_stable_writes,
    });
    let mapping = memory(writes);
    let mut queue = open_queue(&[device as Arc<dyn Device>], &[Arc::clone(&mapping)], 4).unwrap();
    if !queue.describe().contains("io_uring of depth") {
        eprintln!("SKIPPED: io_uring: {}", queue.describe());
        return None;
    }
    for block in 0..writes {
        mapping.copy_in(block * BLOCK, &[1; BLOCK]);
        let segments = vec![segment(&mapping, block, 1)];
        queue.submit(transfer(0, Direction::Write, block as u64, segments));
    }
    let mut completions = Vec::new();
    queue.wait(&mut completions, Some(Duration::ZERO));
    assert!(completions.is_empty(), "the pipe is full");
    mapping.copy_in(0, &vec![2; writes * BLOCK]);
    reader.read_exact(&mut full.to_vec()).unwrap();
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, None);
    }
    assert!(
        completions
            .iter()
            .all(|completion| completion.result.is_ok())
    );
    drop(queue);
    let mut written = Vec::new();
    reader.read_to_end(&mut written).unwrap();
    Some(written.chunks(BLOCK).map(<[u8]>::to_vec).collect())
}

#[test]
fn a_device_that_needs_stable_writes_never_sees_bytes_change_during_a_write() {
    const WRITES: usize = 4;
    let Some(stable) = change_in_flight(true, WRITES) else {
        return;
    };
    assert_eq!(stable, vec![vec![1; BLOCK]; WRITES]);
    // Shows that the test detects a changed byte.
    let others = change_in_flight(false, WRITES).unwrap();
    assert!(others.contains(&vec![2; BLOCK]));
}

#[test]
fn more_writes_than_there_are_copies_reach_a_device_that_needs_stable_writes() {
    const WRITES: usize = 40;
    let (mut reader, pipe) = std::io::pipe().unwrap();
    let device = Arc::new(Delayed {
        pipe,
        needs_stable_writes: true,
    });
    let mapping = memory(WRITES);
    let mut queue = open_queue(&[device as Arc<dyn Device>], &[], 64).unwrap();
    if !queue.describe().contains("io_uring of depth") {
        eprintln!("SKIPPED: io_uring: {}", queue.describe());
        return;
    }
    let device = std::thread::spawn(move || {
        let mut written = Vec::new();
        reader.read_to_end(&mut written).unwrap();
        written
    });
    for block in 0..WRITES {
        mapping.copy_in(block * BLOCK, &[block as u8; BLOCK]);
        let segments = vec![segment(&mapping, block, 1)];
        queue.submit(transfer(0, Direction::Write, block as u64, segments));
    }
    let completions = finish(queue.as_mut());
    assert_eq!(completions.len(), WRITES);
    assert!(
        completions
            .iter()
            .all(|completion| completion.result.is_ok())
    );
    drop(queue);
    let mut written: Vec<u8> = device.join().unwrap().chunks(BLOCK).map(|b| b[0]).collect();
    written.sort_unstable();
    assert_eq!(written, (0..WRITES as u8).collect::<Vec<_>>());
}

#[test]
fn a_device_needs_stable_writes_if_its_queue_says_so() {
    let Some(device) = LoopDevice::new(64) else {
        return;
    };
    let name = device.path.file_name().unwrap().to_str().unwrap();
    let setting = format!("/sys/block/{name}/queue/stable_writes");
    for (text, expected) in [("1", true), ("0", false)] {
        if let Err(error) = std::fs::write(&setting, text) {
            eprintln!("SKIPPED: cannot set {setting}: {error}");
            return;
        }
        let opened = open_device(&device.path, OpenOptions::default()).unwrap();
        assert_eq!(opened.needs_stable_writes(), expected);
        assert_eq!(opened.describe().contains("writes from copies"), expected);
    }
}
