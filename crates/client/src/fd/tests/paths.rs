//! What an fd refers to, and whether it goes inline.

use std::os::unix::fs::FileExt;

use super::*;
use crate::descriptors::Facts;
use crate::thread::{self, Doing};

#[test]
fn files_of_other_filesystems_take_the_kernel_path_after_one_check() {
    let _apart = APART.read();
    let (reader, _writer) = std::io::pipe().unwrap();
    let fd = reader.as_raw_fd();
    opened(fd);
    assert_eq!(read(fd, &mut [0; 4]), None);
    assert_eq!(descriptors::state(fd), Some(FdState::Kernel));
    duplicated(fd, 60_000);
    assert_eq!(descriptors::state(60_000), Some(FdState::Kernel));
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
    f.daemon.areas.lock().unwrap().iter().for_each(Area::revoke);
    assert_eq!(f.read(4), None);
    assert_eq!(f.kernel_offset(), 3);
}

#[test]
fn an_fd_that_was_closed_and_reused_unseen_does_not_pass_for_the_old_file() {
    let _apart = APART.read();
    let f = Opened::new(2, 8192);
    f.read(10).unwrap().unwrap();
    // This file's fd becomes the fd of another file's description.
    let Some(FdState::Described(open)) = descriptors::state(f.fd()) else {
        panic!("the fd is not described");
    };
    let other = Facts {
        slot_generation: 77,
        ..open.facts().unwrap()
    };
    let mut identity = open.identity().unwrap();
    identity.inode += 1;
    opened(f.fd());
    let Some(FdState::Unknown { word, .. }) = descriptors::state(f.fd()) else {
        panic!("the fd is not unknown");
    };
    descriptors::describe(f.fd(), word, &other, identity, Some(5000)).unwrap();
    assert_eq!(write(f.fd(), b"x"), None);
    assert!(matches!(
        descriptors::state(f.fd()),
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
    thread::enter(Doing::Writing, |thread| {
        assert_eq!(f.read(10), Some(Ok(vec![b'k'; 10])), "the offset moves on");
        assert_eq!(pread(f.fd(), &mut [0; 4], 0), None);
        // The handler interrupts a write, so its bytes follow those of the write.
        let Some(FdState::Described(open)) = descriptors::state(f.fd()) else {
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
