"""Reads and writes one file in all ways, as it is told by standard input, and says what it found."""
import mmap
import os
import sys

SIZE = 20_000
path, beside, on_mount, flags = sys.argv[1:]
fd = os.open(path, os.O_RDWR if flags == "write" else os.O_RDONLY)
outs = {name: os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for name in (beside, on_mount)}
mapped = None


def drained(copy, name):
    """What `copy(offset, count)` has put into a file."""
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
    else:
        found = WAYS[what]()
        print(len(found), *sorted(set(found)), flush=True)
