//! The first calls on an fd, and wishes.

use jericho_shm::Granted;

use super::*;
use crate::fd::early::{self, CallKind, CallPath};

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

/// Reads from a file that `f`'s fd refers to from now on, until a byte comes from memory. Returns the number of reads.
fn reads_until_fast(f: &Opened) -> usize {
    opened(f.fd());
    files::lseek(f.fd(), 0, SEEK_SET).unwrap();
    (1..10)
        .find(|_| f.read(10) == Some(Ok(vec![b'm'; 10])))
        .expect("the fd becomes fast")
}

#[test]
fn an_fd_whose_last_two_files_became_fast_needs_no_further_calls_for_a_while() {
    let _apart = APART.read();
    let _counting = Counting::new();
    let f = Opened::new(2, 8192);
    for round in 0..3 {
        assert_eq!(
            [reads_until_fast(&f), reads_until_fast(&f)],
            [5, 5],
            "{round}"
        );
        for _ in 0..16 {
            assert_eq!(reads_until_fast(&f), 1);
        }
        // This file has to prove it again, and so does the one after it, because it does not.
        opened(f.fd());
        for _ in 0..4 {
            assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])));
        }
    }
    // Files of few calls between the others.
    for _ in 0..4 {
        assert_eq!(reads_until_fast(&f), 5);
        opened(f.fd());
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])));
    }
    // After two files that become fast at their fifth read, 16 do so at their first. Each 17th has to make five reads again.
    for _ in 0..2 {
        assert_eq!(reads_until_fast(&f), 5);
    }
    for n in 1..=50 {
        let expected = if n % 17 == 0 { 5 } else { 1 };
        assert_eq!(reads_until_fast(&f), expected, "file {n}");
    }
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
        opened(f.fd());
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
    descriptors::opened(FD);
    let mut words = std::collections::HashSet::new();
    for _ in 0..10_000 {
        let Some(FdState::Unknown { opened: true, word }) = descriptors::state(FD) else {
            break;
        };
        assert!(
            words.insert(word),
            "an offset that was read before fits again"
        );
        assert!(descriptors::count_call(FD, word, 1, true, false));
        descriptors::call_ended(FD, word, 0);
    }
    let now = descriptors::state(FD);
    assert!(matches!(now, Some(FdState::Unknown { opened: false, .. })));
    descriptors::forget(FD);
}

#[test]
fn an_fd_does_not_become_fast_during_a_call_on_it() {
    let _apart = APART.read();
    let _counting = Counting::new();
    let f = Opened::new(2, 8192);
    let CallPath::Counted(call) = early::begin(f.fd(), CallKind::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    for _ in 0..10 {
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])));
    }
    drop(call);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(110)));
    // The end of a call that began before the fd was reused changes nothing.
    opened(f.fd());
    let CallPath::Counted(old) = early::begin(f.fd(), CallKind::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    opened(f.fd());
    let CallPath::Counted(new) = early::begin(f.fd(), CallKind::Write(10), true) else {
        panic!("the first call is made in the ordinary way");
    };
    drop(old);
    let Some(FdState::Unknown { word, .. }) = descriptors::state(f.fd()) else {
        panic!("the fd is not unknown");
    };
    assert!(descriptors::is_in_use(word));
    drop(new);
}

/// Returns a file to whose daemon this process has attached, with an fd that counts as just opened: its next read or write
/// leaves a wish. The caller runs while no other test does.
fn wishing() -> Opened {
    wish::tests::ARE_LEFT.set(false);
    let f = Opened::new(2, 8192);
    assert_eq!(f.read(10), Some(Ok(vec![b'm'; 10])));
    opened(f.fd());
    // A slot that a wish is granted has another object here than the answer to a request.
    let object = f.object + 1;
    f.daemon.control.slot(0).unwrap().set(object, 0, 0);
    f.daemon.fill(object, 0..2, b'w');
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
    match early::begin(f.fd(), CallKind::Read, moves) {
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
        assert!(!size_limit::is_limited());
        // A limit beyond all writes of the tests.
        set_limit("1099511627776");
        if by_wish {
            let call = begin_with_wish(&f, true);
            grant(&f);
            drop(call);
        } else {
            f.read(10).unwrap().unwrap();
        }
        let is_seen = size_limit::is_limited();
        set_limit("unlimited");
        size_limit_changed();
        let number = descriptors::state(f.fd());
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
    opened(f.fd());
    drop(call);
    assert!(matches!(
        descriptors::state(f.fd()),
        Some(FdState::Unknown { .. })
    ));
    let call = begin_with_wish(&f, true);
    grant(&f);
    let CallPath::Counted(other) = early::begin(f.fd(), CallKind::Read, true) else {
        panic!("another call moves the offset");
    };
    drop(call);
    assert!(matches!(
        descriptors::state(f.fd()),
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
