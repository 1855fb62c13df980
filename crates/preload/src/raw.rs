//! syscall(2): a program that bypasses the C library's functions but uses its `syscall`.
//!
//! A system call changes fds as the function of that name does, so the hook calls that function. All other numbers go to the
//! kernel. (The kernel reads six arguments, and the C library passes six on, even if the caller gave fewer.)

use std::ffi::{c_int, c_long, c_uint};

use crate::{
    copy, exec, fds, fork, limits, map, memory, messages, offset, open, real, sync, threads,
    transfer, vectors,
};

exports! {
    syscall as syscall:
        (number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
}

unsafe fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let fd = a as c_int;
    // SAFETY: the kernel's arguments of each call are those of the function, in the same order, except where noted.
    unsafe {
        match number {
            libc::SYS_read => transfer::read(fd, b as _, c) as c_long,
            libc::SYS_pread64 => transfer::pread(fd, b as _, c, d as _) as c_long,
            libc::SYS_write => transfer::write(fd, b as _, c) as c_long,
            libc::SYS_pwrite64 => transfer::pwrite(fd, b as _, c, d as _) as c_long,
            libc::SYS_readv => vectors::readv(fd, b as _, c as _) as c_long,
            libc::SYS_writev => vectors::writev(fd, b as _, c as _) as c_long,
            // The offset comes in two halves. On 64 bits, the first half has all of it.
            libc::SYS_preadv => vectors::preadv(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_pwritev => vectors::pwritev(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_preadv2 => vectors::preadv2(fd, b as _, c as _, d as _, f as _) as c_long,
            libc::SYS_pwritev2 => vectors::pwritev2(fd, b as _, c as _, d as _, f as _) as c_long,
            libc::SYS_lseek => offset::lseek(fd, b as _, c as _) as c_long,
            libc::SYS_ioctl => offset::ioctl(fd, b, c).into(),
            libc::SYS_sendfile => copy::sendfile(fd, b as _, c as _, d) as c_long,
            libc::SYS_splice => copy::splice(fd, b as _, c as _, d as _, e, f as _) as c_long,
            libc::SYS_copy_file_range => {
                copy::copy_file_range(fd, b as _, c as _, d as _, e, f as _) as c_long
            }
            libc::SYS_mmap => map::mmap(a as _, b, c as _, d as _, e as _, f as _) as c_long,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => open::open(a as _, b as _, c as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_creat => open::creat(a as _, b as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => fds::dup2(fd, b as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_fork | libc::SYS_vfork => fork::fork().into(),
            libc::SYS_openat => open::openat(fd, b as _, c as _, d as _).into(),
            libc::SYS_openat2 => open::openat2(fd, b as _, c as _, d).into(),
            libc::SYS_close => open::close(fd).into(),
            libc::SYS_close_range => open::close_range(a as c_uint, b as _, c as _).into(),
            libc::SYS_dup => fds::dup(fd).into(),
            libc::SYS_dup3 => fds::dup3(fd, b as _, c as _).into(),
            libc::SYS_fcntl => fds::fcntl(fd, b as _, c).into(),
            libc::SYS_sendmsg => messages::sendmsg(fd, b as _, c as _) as c_long,
            libc::SYS_recvmsg => messages::recvmsg(fd, b as _, c as _) as c_long,
            libc::SYS_setrlimit => limits::setrlimit(a as _, b as _).into(),
            libc::SYS_prlimit64 => limits::prlimit(a as _, b as _, c as _, d as _).into(),
            libc::SYS_sync => {
                sync::sync_all();
                0
            }
            libc::SYS_syncfs => sync::syncfs(fd).into(),
            libc::SYS_fsync => sync::fsync(fd).into(),
            libc::SYS_fdatasync => sync::fdatasync(fd).into(),
            libc::SYS_ftruncate => sync::ftruncate(fd, b as _).into(),
            libc::SYS_truncate => sync::truncate(a as _, b as _).into(),
            libc::SYS_fallocate => sync::fallocate(fd, b as _, c as _, d as _).into(),
            libc::SYS_execve => exec::execve(a as _, b as _, c as _).into(),
            libc::SYS_execveat => exec::execveat(fd, b as _, c as _, d as _, e as _).into(),
            // The functions of these names return something else than the calls.
            libc::SYS_sched_getaffinity | libc::SYS_sched_setaffinity => {
                threads::release();
                real::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_clone => {
                fork::before_raw_clone(a as _);
                real::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_clone3 => {
                // The call takes a struct that begins with the flags.
                if b >= size_of::<u64>() && memory::is_readable_one(a as *const u64) {
                    fork::before_raw_clone((a as *const u64).read_unaligned());
                }
                real::syscall(number, a, b, c, d, e, f)
            }
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
