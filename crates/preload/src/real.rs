//! The C library's own functions, behind the hooks.
//!
//! dlsym(RTLD_NEXT) finds each function once. The constructor looks all of them up. If another library's constructor calls a
//! function earlier, that call looks the function up. Two threads may look up the same address at once with the same result, so no
//! lock is needed.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{
    FILE, cpu_set_t, iovec, mmsghdr, mode_t, msghdr, off_t, pid_t, pthread_attr_t, pthread_t,
    rlimit, size_t, ssize_t, timespec,
};

use crate::errno;

/// A function of the C library.
pub struct Symbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    /// Makes a symbol of a name that ends with a zero byte. Another name does not compile, because all symbols are constants.
    const fn new(name: &'static str) -> Symbol {
        Symbol {
            name: match CStr::from_bytes_with_nul(name.as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("not a C string"),
            },
            address: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Returns the function's address; null when this C library does not have it.
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        if known.is_null() { self.find() } else { known }
    }

    /// Returns the function's address if it was looked up already; otherwise null.
    pub fn known(&self) -> *mut c_void {
        self.address.load(Relaxed)
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // A failed lookup leaves a message that the program would take for one of its own. dlsym may change errno even when it
        // succeeds.
        let found = errno::kept(|| {
            // SAFETY: `name` ends with a zero byte; RTLD_NEXT searches the libraries after this one.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            if found.is_null() {
                // SAFETY: dlerror takes no arguments; the returned message is not read.
                unsafe { libc::dlerror() };
            }
            found
        });
        self.address.store(found, Relaxed);
        found
    }
}

/// The result of a function that this C library lacks, after errno was set to ENOSYS.
trait Missing {
    const ANSWER: Self;
}

impl Missing for c_int {
    const ANSWER: c_int = -1;
}
impl Missing for c_long {
    const ANSWER: c_long = -1;
}
impl Missing for ssize_t {
    const ANSWER: ssize_t = -1;
}
impl Missing for () {
    const ANSWER: () = ();
}
impl<T> Missing for *mut T {
    const ANSWER: *mut T = std::ptr::null_mut();
}

macro_rules! real {
    (
        $(fn $name:ident($($argument:ident: $type:ty),*) $(-> $answer:ty)?;)*
        variadic $($variadic:ident),*;
    ) => {
        #[allow(non_upper_case_globals)]
        pub mod symbol {
            use super::Symbol;
            $(pub static $name: Symbol = Symbol::new(concat!(stringify!($name), "\0"));)*
            $(pub static $variadic: Symbol = Symbol::new(concat!(stringify!($variadic), "\0"));)*
            pub static ALL: &[&Symbol] = &[$(&$name,)* $(&$variadic),*];
        }

        $(
            /// The C library's function of this name.
            ///
            /// # Safety
            /// As for the C library's function.
            #[allow(non_snake_case)]
            #[inline]
            pub unsafe fn $name($($argument: $type),*) $(-> $answer)? {
                let address = symbol::$name.address();
                if address.is_null() {
                    errno::set(libc::ENOSYS);
                    return Missing::ANSWER;
                }
                // SAFETY: dlsym found it under the name of a C function with these arguments. The ABI lets a cancelled thread
                // unwind through here; these frames own nothing.
                unsafe {
                    let function: unsafe extern "C-unwind" fn($($type),*) $(-> $answer)? =
                        std::mem::transmute(address);
                    function($($argument),*)
                }
            }
        )*
    };
}

// Variadic functions (open, fcntl, ioctl, the end of clone) are called with all arguments that they may take, as integers of one
// register each. On x86-64 and aarch64 Linux, a variadic integer or pointer argument is passed exactly as a named one, and the
// function ignores an extra one.
real! {
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn openat2(dir: c_int, path: *const c_char, how: *const c_void, size: size_t) -> c_int;
    fn __open_2(path: *const c_char, flags: c_int) -> c_int;
    fn __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    fn creat(path: *const c_char, mode: mode_t) -> c_int;
    fn open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int;
    fn mkstemp(template: *mut c_char) -> c_int;
    fn mkostemp(template: *mut c_char, flags: c_int) -> c_int;
    fn mkstemps(template: *mut c_char, suffix: c_int) -> c_int;
    fn mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn closefrom(first: c_int);
    fn dup(fd: c_int) -> c_int;
    fn dup2(old: c_int, new: c_int) -> c_int;
    fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
    fn ioctl(fd: c_int, request: usize, argument: usize) -> c_int;
    fn lockf(fd: c_int, command: c_int, length: off_t) -> c_int;
    fn pidfd_getfd(process: c_int, target: c_int, flags: c_uint) -> c_int;
    fn login_tty(fd: c_int) -> c_int;

    fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t;
    fn __read_chk(fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t;
    fn pread(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t;
    fn __pread_chk(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t, room: size_t) -> ssize_t;
    fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    fn preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    fn preadv2(fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn write(fd: c_int, data: *const c_void, count: size_t) -> ssize_t;
    fn pwrite(fd: c_int, data: *const c_void, count: size_t, offset: off_t) -> ssize_t;
    fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    fn pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    fn pwritev2(fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;

    fn lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t;
    fn fstat(fd: c_int, out: *mut libc::stat) -> c_int;
    fn __fxstat(version: c_int, fd: c_int, out: *mut libc::stat) -> c_int;
    fn fstatat(dir: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int;
    fn __fxstatat(version: c_int, dir: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int;
    fn statx(dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut libc::statx) -> c_int;

    fn sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn copy_file_range(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, count: size_t, flags: c_uint) -> ssize_t;
    fn splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, count: size_t, flags: c_uint) -> ssize_t;
    fn mmap(at: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void;

    fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE;
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    fn freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE;
    fn fclose(file: *mut FILE) -> c_int;
    fn tmpfile() -> *mut FILE;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    fn pclose(file: *mut FILE) -> c_int;
    fn fileno(file: *mut FILE) -> c_int;
    fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    fn backtrace_symbols_fd(frames: *const *mut c_void, count: c_int, fd: c_int);

    fn fork() -> pid_t;
    fn _Fork() -> pid_t;
    fn forkpty(master: *mut c_int, name: *mut c_char, terminal: *const c_void, window: *const c_void) -> pid_t;
    fn daemon(keep_dir: c_int, keep_streams: c_int) -> c_int;
    fn system(command: *const c_char) -> c_int;
    fn wordexp(words: *const c_char, out: *mut c_void, flags: c_int) -> c_int;
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fn pidfd_spawn(pidfd: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fn pidfd_spawnp(pidfd: *mut c_int, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fn execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int;
    fn execvp(file: *const c_char, arguments: *const *const c_char) -> c_int;
    fn execvpe(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    fn fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    fn execveat(dir: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int;
    fn _exit(status: c_int);

    fn sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn sendmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    fn recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn recvmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;

    fn pthread_create(thread: *mut pthread_t, attributes: *const pthread_attr_t, start: *const c_void, argument: *mut c_void) -> c_int;
    fn thrd_create(thread: *mut c_void, start: *const c_void, argument: *mut c_void) -> c_int;
    fn sched_getaffinity(pid: pid_t, size: size_t, cpus: *mut cpu_set_t) -> c_int;
    fn sched_setaffinity(pid: pid_t, size: size_t, cpus: *const cpu_set_t) -> c_int;
    fn pthread_getaffinity_np(thread: pthread_t, size: size_t, cpus: *mut cpu_set_t) -> c_int;
    fn pthread_setaffinity_np(thread: pthread_t, size: size_t, cpus: *const cpu_set_t) -> c_int;

    fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int;
    fn prlimit(pid: pid_t, resource: c_uint, limit: *const rlimit, old: *mut rlimit) -> c_int;

    fn sync();
    fn syncfs(fd: c_int) -> c_int;
    fn fsync(fd: c_int) -> c_int;
    fn fdatasync(fd: c_int) -> c_int;
    fn ftruncate(fd: c_int, length: off_t) -> c_int;
    fn truncate(path: *const c_char, length: off_t) -> c_int;
    fn fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int;
    fn posix_fallocate(fd: c_int, offset: off_t, length: off_t) -> c_int;

    fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;

    variadic dprintf, __dprintf_chk, clone, execl, execle, execlp;
}

/// Looks all functions up.
pub fn find_all() {
    for symbol in symbol::ALL {
        symbol.address();
    }
}
