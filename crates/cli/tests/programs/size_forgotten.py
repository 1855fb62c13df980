"""Extends a file inline and closes it, and asks the kernel at once where the file ends. If the daemon made the kernel forget the file's
attributes at that moment, the kernel would ignore an answer that is on its way. Arguments: the file, "library" or "kernel": who asks."""

import os
import subprocess
import sys
import time

ROUNDS = 1000
PIECE = bytes(100)
PIECES = 8


def extend(path):
    """Writes the last pieces inline: the first writes of a descriptor go through the kernel."""
    writer = os.open(path, os.O_RDWR | os.O_TRUNC)
    for _ in range(PIECES):
        os.write(writer, PIECE)
    os.close(writer)


def end(fd, round):
    if round % 2:
        return os.lseek(fd, 0, os.SEEK_END)
    return os.sendfile(null, fd, 0, 2 * PIECES * len(PIECE))


def ask(fd, round):
    found = end(fd, round)
    if found != PIECES * len(PIECE):
        sys.exit(f"round {round}: the file ends at {found}")


def in_library(path, fd):
    # A descriptor that has no slot keeps writers from extending the file inline. These reads give this one a slot.
    for _ in range(20):
        os.pread(fd, 1, 0)
    for round in range(ROUNDS):
        extend(path)
        ask(fd, round)


def await_blocks(path):
    """Waits until the space is free that was reserved for the writer: one page remains."""
    until = time.monotonic() + 60
    while os.stat(path).st_blocks * 512 != 4096:
        if time.monotonic() > until:
            sys.exit(f"{os.stat(path).st_blocks} blocks")


def in_kernel(path):
    library = [*sys.argv[3:], sys.executable, __file__, path, "extend"]
    writer = subprocess.Popen(library, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    for round in range(ROUNDS):
        writer.stdin.write(b"x")
        writer.stdout.read(1)
        if round % 50 == 0:
            await_blocks(path)
            continue
        fd = os.open(path, os.O_RDONLY)
        ask(fd, round)
        os.close(fd)
    writer.stdin.close()
    writer.wait()


null = os.open("/dev/null", os.O_WRONLY)
path, way = sys.argv[1:3]
if way == "library":
    # A descriptor that another program has opened keeps its offset in the kernel.
    fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
    child = [sys.executable, __file__, path, str(fd)]
    sys.exit(subprocess.run(child, pass_fds=[fd]).returncode)
elif way == "kernel":
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    in_kernel(path)
    print("right")
elif way == "extend":
    while sys.stdin.buffer.raw.read(1):
        extend(path)
        os.write(1, b"x")
else:
    in_library(path, int(way))
    print("right")
