//! Bytes: which come from memory, and which from the kernel.

use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;

use jericho_shm::SlotInfo;
use jericho_sys::errno;

use super::*;
use crate::access::WRITE_MAX;

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
fn a_writer_that_goes_on_has_pages_reserved_in_growing_steps() {
    let _apart = APART.read();
    let f = Opened::new(0, 0);
    for round in 0..400u32 {
        assert_eq!(write(f.fd(), &[round as u8; 4000]), Some(Ok(4000)));
    }
    assert_eq!(f.daemon.size(), 1_600_000);
    assert_eq!(lseek(f.fd(), 0, SEEK_CUR), Some(Ok(1_600_000)));
    // The first write goes through the kernel. The second continues it, so it has pages reserved.
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
        opened(fd);
        share(fd);
        duplicated(fd, fd);
    }
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
