"""Reads and writes one file in all ways. Reads commands from standard input and prints the bytes that each read found."""
import ctypes
import mmap
import os
import sys

SIZE = 20_000
PIECE = 1_000
path, beside, on_mount, flags = sys.argv[1:]
fd = os.open(path, os.O_RDWR if flags == "write" else os.O_RDONLY)
outs = {name: os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for name in (beside, on_mount)}
mapped = None


def drained(copy, name):
    """Returns the bytes that calls of `copy(offset, count)` put into the file `name`."""
    os.ftruncate(outs[name], 0)
    os.lseek(outs[name], 0, os.SEEK_SET)
    done = 0
    while done < SIZE:
        got = copy(done, SIZE - done)
        if got == 0:
            break
        done += got
    return os.pread(outs[name], 2 * SIZE, 0)


def spliced():
    r, w = os.pipe()
    found = b""
    while len(found) < SIZE:
        got = os.splice(fd, w, SIZE - len(found), offset_src=len(found))
        if got == 0:
            break
        found += os.read(r, got)
    os.close(r)
    os.close(w)
    return found


def mapping(kept):
    global mapped
    if not kept:
        with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as new:
            return new[:]
    mapped = mapped or mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    return mapped[:]


def piece_of(copy, at, name):
    """Returns the bytes that one call of `copy` puts into the file `name`."""
    os.ftruncate(outs[name], 0)
    os.lseek(outs[name], 0, os.SEEK_SET)
    return os.pread(outs[name], copy(at), 0)


def piece_spliced(at):
    r, w = os.pipe()
    found = os.read(r, PIECE) if os.splice(fd, w, PIECE, offset_src=at) else b""
    os.close(r)
    os.close(w)
    return found


def piece_mapped(at):
    """Reads a piece through the mapping. SIGBUS ends the program if the kernel knows a shorter file."""
    global mapped
    if mapped is None:
        # The mapping is longer than the file. mmap.mmap refuses that, and asks for the file's size, which must not happen here.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        mapped = libc.mmap(None, 1 << 24, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    return ctypes.string_at(mapped + at, PIECE)


# No call here asks for the file's size.
PIECES = {
    "sendfile": lambda at: piece_of(lambda at: os.sendfile(outs[beside], fd, at, PIECE), at, beside),
    "splice": piece_spliced,
    "copy_file_range": lambda at: piece_of(
        lambda at: os.copy_file_range(fd, outs[on_mount], PIECE, offset_src=at, offset_dst=0), at, on_mount
    ),
    "mmap": piece_mapped,
}

WAYS = {
    "pread": lambda: os.pread(fd, 2 * SIZE, 0),
    "sendfile": lambda: drained(lambda at, count: os.sendfile(outs[beside], fd, at, count), beside),
    "splice": spliced,
    "copy_file_range": lambda: drained(
        lambda at, count: os.copy_file_range(fd, outs[on_mount], count, offset_src=at, offset_dst=at), on_mount
    ),
    "mmap": lambda: mapping(False),
    "kept_mmap": lambda: mapping(True),
}

for line in sys.stdin:
    what, *value = line.split()
    if what == "write":
        data = bytes([int(value[0])]) * SIZE
        assert os.pwrite(fd, data, 0) == SIZE
        print("ok", flush=True)
    elif what == "put":
        assert os.pwrite(fd, bytes([int(value[0])]) * PIECE, int(value[1])) == PIECE
        print("ok", flush=True)
    elif what == "size":
        print(os.fstat(fd).st_size, flush=True)
    elif what == "piece":
        found = PIECES[value[0]](int(value[1]))
        print(len(found), *sorted(set(found)), flush=True)
    else:
        found = WAYS[what]()
        print(len(found), *sorted(set(found)), flush=True)
