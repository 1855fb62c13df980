"""Makes each call in a thread of its own while the daemon is stopped, and prints the calls that do not fail with ENOTCONN.

Usage: dead.py ROOT MARKS. ROOT/N/file and ROOT/N/other belong to call N."""

import ctypes
import errno
import os
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.lseek.restype = ctypes.c_long
libc.fopen.restype = ctypes.c_void_p
for name in ("pread", "pwrite", "sendfile", "copy_file_range"):
    getattr(libc, name).restype = ctypes.c_ssize_t

HOLE_AT = 1 << 20
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_STATX_FORCE_SYNC = 0x2000
SEEK_DATA = 3


def long(number):
    return ctypes.c_long(number)


def statx(dir, path, flags):
    room = ctypes.create_string_buffer(256)
    return libc.statx(dir, path, flags | AT_STATX_FORCE_SYNC, 0xFFF, room)


def fopen(fd, path, to):
    return 0 if libc.fopen(path + b".new", b"w") else -1


def posix_fallocate(fd, path, to):
    result = libc.posix_fallocate(fd, long(0), long(2 * HOLE_AT))
    if result == 0:
        return 0
    ctypes.set_errno(result)
    return -1


# `fd` is open on the call's first file. `path` names its other file, and `to` is open on that.
CALLS = {
    "pread": lambda fd, path, to: libc.pread(fd, ctypes.create_string_buffer(8), long(8), long(HOLE_AT)),
    "pwrite": lambda fd, path, to: libc.pwrite(fd, b"data", long(4), long(HOLE_AT)),
    "fsync": lambda fd, path, to: libc.fsync(fd),
    "fdatasync": lambda fd, path, to: libc.fdatasync(fd),
    "ftruncate": lambda fd, path, to: libc.ftruncate(fd, long(77)),
    "fallocate": lambda fd, path, to: libc.fallocate(fd, 0, long(0), long(2 * HOLE_AT)),
    "posix_fallocate": posix_fallocate,
    "lseek": lambda fd, path, to: libc.lseek(fd, long(1), SEEK_DATA),
    "sendfile": lambda fd, path, to: libc.sendfile(to, fd, None, long(10)),
    "copy_file_range": lambda fd, path, to: libc.copy_file_range(fd, None, to, None, long(10), 0),
    "statx of a descriptor": lambda fd, path, to: statx(fd, b"", AT_EMPTY_PATH),
    "statx of a path": lambda fd, path, to: statx(AT_FDCWD, path, 0),
    "open": lambda fd, path, to: libc.open(path, os.O_WRONLY | os.O_TRUNC),
    "creat": lambda fd, path, to: libc.creat(path + b".new", 0o600),
    "truncate": lambda fd, path, to: libc.truncate(path, long(77)),
    "fopen": fopen,
}


def make(number, name, root, marks, answers):
    dir = os.path.join(root, str(number))
    fd = os.open(os.path.join(dir, "file"), os.O_RDWR)
    path = os.path.join(dir, "other")
    to = os.open(path, os.O_RDWR)
    open(os.path.join(marks, f"ready{number}"), "w").close()
    while not os.path.exists(os.path.join(marks, "stopped")):
        time.sleep(0.002)
    result = CALLS[name](fd, path.encode(), to)
    answers[name] = errno.errorcode.get(ctypes.get_errno()) if result < 0 else result


def main():
    root, marks = sys.argv[1:]
    answers = {}
    threads = [threading.Thread(target=make, args=(n, name, root, marks, answers)) for n, name in enumerate(CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = {name: answers.get(name) for name in CALLS if answers.get(name) != "ENOTCONN"}
    if other:
        sys.exit(f"not ENOTCONN: {other}")


if len(sys.argv) == 1:
    print(len(CALLS))
else:
    main()
