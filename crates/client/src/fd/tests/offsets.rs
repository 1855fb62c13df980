//! The offset of a description.

use super::*;

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
    let Some(FdState::Described(open)) = descriptors::state(other.as_raw_fd()) else {
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
        f.daemon.memory.write_own(key, 0, bytes, 1, 0).unwrap();
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
    let Some(FdState::Described(open)) = descriptors::state(f.fd()) else {
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
            descriptors::state(fd),
            Some(FdState::Described(_))
        ));
    }
    forget(fd);
    let Some(FdState::Described(open)) = descriptors::state(f.fd()) else {
        panic!("the fd is not described");
    };
    assert!(open.description().has_one_fd());
}
