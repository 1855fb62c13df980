"""More programs wait for a slice whose host is silent than the daemon has threads. Signals still end their calls, and the programs.

Runs inside `unshare -Urnm`. Usage: many_wait.py JERICHO DIRECTORY SEED TRANSPORT
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

from slice_hosts import JERICHO, LINKS, daemon, end_children, mount, run, set_up, started, wait_until

TRANSPORT = sys.argv[4]
DEAD_AFTER_S = 300
# Long before --dead-after. Each report of a signal is served within fractions of a second, also on a machine that is busy.
END_S = 60
# The most threads that serve requests of the device.
THREADS = 512
# The calls that wait, and how many of them begin later than the others.
CALLS = 700
LATE = 50
# Names before and after those that are looked up: the store may have some of them in a page that the daemon has read.
MARGIN = 200
LIBRARY = ctypes.CDLL(None)

# Looks a name up in each of many threads, directly in the C library: Python repeats calls that signals end. Prints a line for each call that a signal has ended.
PROGRAM = """
import ctypes, errno, os, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda *_: None)
c = ctypes.CDLL(None, use_errno=True)
def call(number):
    if c.access(f"names/{number:0200}".encode(), os.F_OK) < 0 and ctypes.get_errno() == errno.EINTR:
        os.write(1, b"interrupted\\n")
first, last = map(int, sys.argv[1:])
threads = [threading.Thread(target=call, args=(number,)) for number in range(first, last)]
threading.stack_size(65536)
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def names_of(tasks):
    names = []
    for task in os.listdir(tasks):
        try:
            with open(f"{tasks}/{task}/comm") as comm:
                names.append(comm.read().strip())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return names


def count(pid, prefix):
    return sum(name.startswith(prefix) for name in names_of(f"/proc/{pid}/task"))


def waiting(pid):
    """Returns the threads of a program that wait for an answer of the mount."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/wchan") as wchan:
                if wchan.read() == "request_wait_answer":
                    found.append(int(task))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def ends(child, what):
    begun = time.monotonic()
    while child.poll() is None:
        assert time.monotonic() - begun < END_S, f"{what} goes on waiting"
        time.sleep(0.01)


def start(first, last):
    child = started([sys.executable, "-I", "-c", PROGRAM, str(first), str(last)], stdout=subprocess.PIPE, text=True, cwd="mnt/far")
    wait_until("calls that wait", lambda: len(waiting(child.pid)) == last - first)
    return child


def main():
    options = ("--dead-after", str(DEAD_AFTER_S), "--transport", TRANSPORT)
    host = set_up(*options)
    os.mkdir("mnt/far/names")
    for number in range(CALLS + 2 * MARGIN):
        with open(f"mnt/far/names/{number:0200}", "w"):
            pass
    run(JERICHO, "umount", "mnt")
    mount(*options)
    os.stat("mnt/far/names")
    served_by = "mount-worker-" if TRANSPORT == "device" else "mount-helper-"
    pid = daemon()
    host.cut(LINKS)
    many = start(MARGIN, MARGIN + CALLS - LATE)
    if TRANSPORT == "device":
        wait_until("all threads of the daemon wait", lambda: count(pid, served_by) == THREADS)
    # These calls have no thread of the daemon.
    late = start(MARGIN + CALLS - LATE, MARGIN + CALLS)
    # A signal ends each call for which it comes, whether a thread serves it or not. Over the ring, most requests wait in the kernel, which ends them only
    # if their program ends.
    for child in (many, late) if TRANSPORT == "device" else ():
        tasks = waiting(child.pid)
        for task in (tasks[1], tasks[-1]):
            assert LIBRARY.tgkill(child.pid, task, signal.SIGUSR1) == 0
        for _ in range(2):
            assert child.stdout.readline() == "interrupted\n", "a call goes on waiting"
    for child in (late, many):
        child.kill()
        ends(child, "a program that was killed")
    assert count(pid, served_by) <= THREADS
    host.join()
    # What nobody waits for is done with, and the threads serve on.
    assert len(os.listdir("mnt/far/names")) == CALLS + 2 * MARGIN
    os.mkdir("mnt/far/new")
    with open("mnt/near/log", "ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())
    run(JERICHO, "umount", "mnt")
    host.server.terminate()
    host.server.wait()


try:
    main()
finally:
    end_children()
