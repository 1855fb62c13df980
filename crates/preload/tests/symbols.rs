//! The library hooks exactly the functions that it should.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The functions that the library exists for. If one is missing, the state of a program's fds goes wrong.
const HOOKED: &str = "
    open open64 __open __open64 __open_2 __open64_2 openat openat64 __openat_2 __openat64_2 openat2
    creat creat64 open_by_handle_at mkstemp mkstemp64 mkostemp mkostemp64 mkstemps mkstemps64
    mkostemps mkostemps64 close __close close_range closefrom
    dup dup2 __dup2 dup3 fcntl fcntl64 __fcntl pidfd_getfd login_tty
    read __read __read_chk pread pread64 __pread64 __pread_chk __pread64_chk
    readv preadv preadv64 preadv2 preadv64v2
    write __write pwrite pwrite64 __pwrite64 writev pwritev pwritev64 pwritev2 pwritev64v2
    lseek lseek64 __lseek llseek lockf lockf64 ioctl
    fstat fstat64 __fxstat __fxstat64 fstatat fstatat64 __fxstatat __fxstatat64 statx
    sendfile sendfile64 copy_file_range splice mmap mmap64
    fopen fopen64 _IO_fopen fdopen _IO_fdopen freopen freopen64 fclose _IO_fclose tmpfile tmpfile64
    popen _IO_popen pclose dprintf __dprintf_chk vdprintf __vdprintf_chk
    backtrace_symbols_fd __backtrace_symbols_fd
    fork __fork vfork __vfork _Fork clone __clone forkpty daemon system wordexp
    posix_spawn posix_spawnp pidfd_spawn pidfd_spawnp
    pthread_create thrd_create sched_getaffinity sched_setaffinity pthread_getaffinity_np pthread_setaffinity_np
    execve execv execvp execvpe execl execle execlp fexecve execveat _exit _Exit
    sendmsg sendmmsg __sendmmsg recvmsg recvmmsg sync syncfs fsync fdatasync
    ftruncate ftruncate64 truncate truncate64 fallocate fallocate64 posix_fallocate posix_fallocate64 setrlimit setrlimit64 prlimit prlimit64 syscall";

/// Names of the C library that look like another name of a function above, and are not.
const OTHERS: [&str; 1] = [
    // Unlike _exit, it runs the library's destructor by itself.
    "exit",
];

/// Returns the names that an object exports, with their versions.
fn defined(object: &Path) -> Vec<(String, String)> {
    let mut command = Command::new("nm");
    command.args(["-D", "--defined-only"]).arg(object);
    let output = support::succeed(&mut command);
    let text = String::from_utf8(output.stdout).expect("nm prints text");
    text.lines()
        .filter_map(|line| line.split(' ').nth(2))
        .map(|symbol| {
            let (name, version) = symbol.split_once('@').unwrap_or((symbol, ""));
            (name.to_owned(), version.trim_start_matches('@').to_owned())
        })
        .collect()
}

fn exported() -> BTreeSet<String> {
    defined(&support::library())
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

/// Returns a name without the prefix or suffix of its variants.
fn plain(name: &str) -> String {
    let name = name.trim_start_matches("_IO_").trim_start_matches('_');
    let name = name.strip_suffix("_chk").unwrap_or(name);
    let name = match name.strip_suffix("_2") {
        Some(opens) if opens.starts_with("open") => opens,
        _ => name,
    };
    name.replace("64v2", "2").replace("64", "")
}

#[test]
fn the_library_exports_exactly_the_listed_names() {
    let wanted: BTreeSet<String> = HOOKED.split_whitespace().map(str::to_owned).collect();
    let exported = exported();
    let missing: Vec<_> = wanted.difference(&exported).collect();
    let surplus: Vec<_> = exported.difference(&wanted).collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
    assert!(
        surplus.is_empty(),
        "exported, and not in the list: {surplus:?}"
    );
}

#[test]
fn every_name_of_a_hooked_function_is_hooked() {
    let output = support::succeed(support::compiler().arg("-print-file-name=libc.so.6"));
    let path = String::from_utf8(output.stdout).expect("a path");
    let exported = exported();
    let hooked: BTreeSet<String> = exported.iter().map(|name| plain(name)).collect();
    let library = defined(Path::new(path.trim()));
    assert!(library.len() > 1000, "{path} is no C library");
    // Programs cannot call the names that are private to the C library's own parts.
    let left_out: BTreeSet<_> = library
        .iter()
        .filter(|(_, version)| version != "GLIBC_PRIVATE")
        .map(|(name, _)| name)
        .filter(|name| hooked.contains(&plain(name)) && !exported.contains(*name))
        .filter(|name| !OTHERS.contains(&name.as_str()))
        .collect();
    assert!(left_out.is_empty(), "not hooked: {left_out:?}");
}
