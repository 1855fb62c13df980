use super::*;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;

/// Returns a ring. Returns `None` and prints the reason if this machine has no io_uring.
fn ring(depth: u32, files: &[BorrowedFd<'_>]) -> Option<Ring> {
    let files: Vec<_> = files.iter().copied().map(Some).collect();
    match Ring::new(depth, &files, Arc::new(Doorbell::new().unwrap())) {
        Ok(ring) => Some(ring),
        Err(error) => {
            eprintln!("SKIPPED: io_uring is refused here: {error}");
            None
        }
    }
}

fn file_of(pages: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    for byte in pages {
        file.write_all(&[*byte; PAGE]).unwrap();
    }
    file
}

fn memory(pages: usize) -> Arc<Mapping> {
    Arc::new(Mapping::create("jericho-ring-test", pages * PAGE, false).unwrap())
}

fn segment(mapping: &Arc<Mapping>, page: usize, pages: usize) -> Segment {
    Segment {
        mapping: Arc::clone(mapping),
        offset: page * PAGE,
        len: pages * PAGE,
    }
}

fn request(operation: Operation, offset_bytes: u64, segments: Vec<Segment>) -> Request {
    Request {
        tag: 7,
        file: 0,
        operation,
        offset_bytes,
        segments,
        done_bytes: 0,
    }
}

fn run(ring: &mut Ring, request: Request) -> Completed {
    ring.push(request).unwrap();
    let mut completed = Vec::new();
    while completed.is_empty() {
        ring.wait(&mut completed, None).unwrap();
    }
    assert_eq!(completed.len(), 1);
    completed.remove(0)
}

fn byte(mapping: &Mapping, offset: usize) -> u8 {
    let mut out = [0];
    mapping.copy_out(offset, &mut out);
    out[0]
}

#[test]
fn transfers_use_the_new_memory_of_a_range_that_was_released() {
    let file = file_of(b"abcd");
    let Some(mut ring) = ring(4, &[file.as_fd()]) else {
        return;
    };
    let mut mapping = Mapping::create("jericho-ring-test", 4 * PAGE, false).unwrap();
    mapping.set_lasting(2 * PAGE);
    let mapping = Arc::new(mapping);
    if let Err(error) = ring.register_buffers(std::slice::from_ref(&mapping)) {
        eprintln!("SKIPPED: buffers cannot be registered here: {error}");
        return;
    }
    // Within the registered part, across its end, and behind it.
    for round in 0..2 {
        for (first, pages) in [(0, 2), (1, 2), (2, 2)] {
            let read = request(Operation::Read, 0, vec![segment(&mapping, first, pages)]);
            run(&mut ring, read).result.unwrap();
            assert_eq!(byte(&mapping, first * PAGE), b'a', "round {round}");
            assert_eq!(byte(&mapping, (first + 1) * PAGE), b'b', "round {round}");
        }
        mapping.copy_in(2 * PAGE, &[b'0' + round; 2 * PAGE]);
        let write = request(Operation::Write, 2 * 4096, vec![segment(&mapping, 2, 2)]);
        run(&mut ring, write).result.unwrap();
        let mut out = [0; 2 * PAGE];
        file.read_exact_at(&mut out, 2 * 4096).unwrap();
        assert_eq!(out, [b'0' + round; 2 * PAGE]);
        mapping.release(2 * PAGE..4 * PAGE).unwrap();
        assert_eq!(byte(&mapping, 3 * PAGE), 0);
    }
}

#[test]
fn segments_are_filled_in_order_and_written_in_order() {
    for registered in [false, true] {
        let file = file_of(b"abcd");
        let Some(mut ring) = ring(4, &[file.as_fd()]) else {
            return;
        };
        let mapping = memory(4);
        if registered {
            ring.register_buffers(&[Arc::clone(&mapping)]).unwrap();
        }
        let segments = vec![segment(&mapping, 3, 1), segment(&mapping, 0, 2)];
        let done = run(&mut ring, request(Operation::Read, PAGE as u64, segments));
        assert_eq!(done.result, Ok(3 * PAGE));
        assert_eq!(done.request.tag, 7);
        assert_eq!(byte(&mapping, 3 * PAGE), b'b');
        assert_eq!(byte(&mapping, 0), b'c');
        assert_eq!(byte(&mapping, PAGE), b'd');
        let done = run(
            &mut ring,
            request(Operation::Write, 0, vec![segment(&mapping, 1, 1)]),
        );
        assert_eq!(done.result, Ok(PAGE));
        assert_eq!(
            run(&mut ring, request(Operation::SyncData, 0, vec![])).result,
            Ok(0)
        );
        let mut first = [0; 2];
        file.read_exact_at(&mut first, PAGE as u64 - 1).unwrap();
        assert_eq!(&first, b"db");
    }
}

#[test]
fn a_short_transfer_reports_its_length_and_can_be_continued() {
    let file = file_of(b"ab");
    let Some(mut ring) = ring(1, &[file.as_fd()]) else {
        return;
    };
    let mapping = memory(3);
    let done = run(
        &mut ring,
        request(Operation::Read, 0, vec![segment(&mapping, 0, 3)]),
    );
    assert_eq!(done.result, Ok(2 * PAGE));
    file.write_at(&[b'c'; PAGE], 2 * PAGE as u64).unwrap();
    let rest = Request {
        done_bytes: 2 * PAGE,
        ..done.request
    };
    assert_eq!(run(&mut ring, rest).result, Ok(PAGE));
    assert_eq!(byte(&mapping, 2 * PAGE), b'c');
}

#[test]
fn an_error_of_the_file_is_the_result_of_its_request() {
    let read_only = File::open("/proc/self/exe").unwrap();
    let Some(mut ring) = ring(1, &[read_only.as_fd()]) else {
        return;
    };
    let done = run(
        &mut ring,
        request(Operation::Write, 0, vec![segment(&memory(1), 0, 1)]),
    );
    assert_eq!(done.result, Err(libc::EBADF));
}

#[test]
fn memory_out_of_bounds_and_unknown_files_are_refused() {
    let file = file_of(b"a");
    let Some(mut ring) = ring(1, &[file.as_fd()]) else {
        return;
    };
    let mapping = memory(1);
    let refused = |ring: &mut Ring, request| {
        matches!(ring.push(request), Err(PushError::Invalid(_))) && ring.in_flight() == 0
    };
    let beyond = vec![segment(&mapping, 0, 2)];
    assert!(refused(&mut ring, request(Operation::Read, 0, beyond)));
    assert!(refused(&mut ring, request(Operation::Read, 0, vec![])));
    let stranger = request(Operation::Read, 0, vec![segment(&mapping, 0, 1)]);
    assert!(refused(
        &mut ring,
        Request {
            file: 1,
            ..stranger
        }
    ));
    let fd = mapping.fd().try_clone_to_owned().unwrap();
    let read_only = Arc::new(Mapping::from_fd(fd, PAGE, false).unwrap());
    let segments = vec![segment(&read_only, 0, 1)];
    assert!(refused(&mut ring, request(Operation::Read, 0, segments)));
}

#[test]
fn a_full_ring_gives_the_request_back() {
    let file = file_of(b"ab");
    let Some(mut ring) = ring(1, &[file.as_fd()]) else {
        return;
    };
    let mapping = memory(1);
    let read = || request(Operation::Read, 0, vec![segment(&mapping, 0, 1)]);
    ring.push(read()).unwrap();
    assert!(matches!(ring.push(read()), Err(PushError::Full(_))));
    let mut completed = Vec::new();
    while ring.in_flight() > 0 {
        ring.wait(&mut completed, None).unwrap();
    }
    ring.push(read()).unwrap();
    assert_eq!(ring.in_flight(), 1);
}

#[test]
fn a_wait_ends_when_the_doorbell_is_rung_before_or_during_it() {
    let Some(mut ring) = ring(1, &[]) else { return };
    let bell = Arc::clone(&ring.doorbell);
    let mut completed = Vec::new();
    bell.ring();
    assert!(ring.wait(&mut completed, None).unwrap());
    // Two threads wake each other in turn. The test hangs if one wake-up is lost.
    let ours = Arc::new(Doorbell::new().unwrap());
    let theirs = Arc::clone(&ours);
    let ringer = std::thread::spawn(move || {
        for _ in 0..10_000 {
            bell.ring();
            while !theirs.sleep(None).unwrap() {}
        }
    });
    for _ in 0..10_000 {
        while !ring.wait(&mut completed, None).unwrap() {}
        ours.ring();
    }
    ringer.join().unwrap();
    assert!(completed.is_empty());
}

#[test]
fn a_wait_ends_after_its_time_limit() {
    let Some(mut ring) = ring(1, &[]) else { return };
    let start = std::time::Instant::now();
    assert!(
        !ring
            .wait(&mut Vec::new(), Some(Duration::from_millis(5)))
            .unwrap()
    );
    assert!(start.elapsed() >= Duration::from_millis(5));
}

#[test]
fn dropping_a_ring_waits_for_its_transfers() {
    let file = file_of(&[b'x'; 64]);
    let Some(mut ring) = ring(64, &[file.as_fd()]) else {
        return;
    };
    let mapping = memory(64);
    for page in 0..64 {
        let segments = vec![segment(&mapping, page, 1)];
        ring.push(request(Operation::Read, (page * PAGE) as u64, segments))
            .unwrap();
    }
    drop(ring);
    assert_eq!(Arc::strong_count(&mapping), 1);
    assert!((0..64).all(|page| byte(&mapping, page * PAGE) == b'x'));
}
