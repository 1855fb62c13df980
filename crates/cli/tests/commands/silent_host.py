"""Programs wait for a slice whose host is silent. Signals end their calls, or the programs, and a call that was ended has changed nothing. The slice of
this host goes on meanwhile.

Runs inside `unshare -Urnm`. Usage: silent_host.py JERICHO DIRECTORY SEED TRANSPORT
"""

import os
import signal
import subprocess
import sys
import time

from slice_hosts import JERICHO, LINKS, end_children, mount, run, set_up, started, wait_until

TRANSPORT = sys.argv[4]
# A signal ends a call within this time, long before --dead-after would.
END_S = 2
DEAD_AFTER_S = 100
MIB = 1 << 20
# Where a process waits for an answer of the mount, or for a page.
WAITS = ("request_wait_answer", "folio_wait_bit_common")

# Performs a call in the far slice. Says how it has ended, if the program lives so long.
PROGRAM = """
import mmap, os, signal, sys
class Interrupted(Exception): pass
def handler(*_): raise Interrupted
def overwrite(name):
    file = os.open(name, os.O_WRONLY)
    os.lseek(file, 100, 0)
    os.write(file, b"new")
def append(name, flags=0):
    file = os.open(name, os.O_WRONLY | os.O_APPEND | flags)
    os.write(file, b"more")
    print("written", flush=True)
    return file
def fault(name):
    with open(name, "rb") as file:
        mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)[0]
signal.signal(signal.SIGUSR1, handler)
try:
    exec(sys.argv[1])
    print("done")
except Interrupted:
    print("interrupted")
"""
# The names are not in memory, so that the calls need the device.
CALLS = [
    "os.read(os.open('read', os.O_RDONLY), 100)",
    "overwrite('overwrite')",
    "os.fsync(append('synced ROUND'))",
    "os.stat('a/stat')",
    "os.open('b/open', os.O_RDONLY)",
    "os.listdir('c')",
    "os.open('d/new', os.O_CREAT | os.O_WRONLY)",
    "os.mkdir('e/new')",
    "os.unlink('f/old')",
    "os.rename('g/old', 'g/new')",
    "os.chmod('h/old', 0)",
]
ROUNDS = 3
SYNCED = [f"synced {number}" for number in range(ROUNDS)]
FILES = ["read", "overwrite", "fault", *SYNCED]
NAMES = ("a/stat", "b/open", "c/file", "d/file", "e/file", "f/old", "g/old", "h/old")


def waits(child):
    """Returns whether a process waits for the mount at several moments."""
    for _ in range(5):
        with open(f"/proc/{child.pid}/wchan") as wchan:
            if wchan.read() not in WAITS:
                return False
        time.sleep(0.01)
    return True


def append(name):
    with open(name, "ab") as file:
        file.write(b"more")
        file.flush()
        os.fsync(file.fileno())


def make_files():
    for name in FILES:
        with open("mnt/far/" + name, "wb") as file:
            file.write(b"o" * MIB)
    for name in NAMES:
        directory = "mnt/far/" + os.path.dirname(name)
        os.mkdir(directory)
        # The store has the file and the directory in different pages.
        for number in range(200):
            with open("mnt/far/" + name if number == 100 else f"{directory}/{number:0200}", "w"):
                pass


def end(calls, sent, prefix):
    """Ends programs that wait in these calls, by a signal. Returns how each has ended, and what it printed."""
    command = [*prefix, sys.executable, "-I", "-c", PROGRAM]
    children = [started([*command, call], stdout=subprocess.PIPE, text=True, cwd="mnt/far") for call in calls]
    for call, child in zip(calls, children):
        if "append" in call:
            # The call to wait for is the sync.
            assert child.stdout.readline() == "written\n", call
        wait_until("a call that waits: " + call, lambda: child.poll() is not None or waits(child))
        assert child.poll() is None, (call, "does not wait", child.stdout.read())
    for child in children:
        child.send_signal(sent)
    until = time.monotonic() + END_S
    for call, child in zip(calls, children):
        try:
            child.wait(until - time.monotonic())
        except subprocess.TimeoutExpired:
            raise AssertionError((call, sent, "goes on waiting")) from None
    return [(child.returncode, child.stdout.read().strip()) for child in children]


def near(number):
    begun = time.monotonic()
    append("mnt/near/log")
    os.mkdir(f"mnt/near/{number}")
    took = time.monotonic() - begun
    assert took < END_S, f"this host's slice has waited for {took} s"


def short_names(directory):
    return sorted(name for name in os.listdir("mnt/far/" + directory) if len(name) < 200)


def main():
    options = ("--dead-after", str(DEAD_AFTER_S), "--transport", TRANSPORT)
    host = set_up(*options)
    make_files()
    run(JERICHO, "umount", "mnt")
    mount(*options)
    # The kernel knows these, and not those in the directories.
    for name in FILES:
        os.stat("mnt/far/" + name)
    # A lookup that waits would keep later operations on the names in far waiting, too.
    for name in NAMES:
        os.stat("mnt/far/" + os.path.dirname(name))
    # The first open and the first write read metadata of the file.
    opened = [open("mnt/far/" + name, "rb") for name in ("read", "overwrite", *SYNCED)]
    for name in ("overwrite", *SYNCED):
        append("mnt/far/" + name)
    append("mnt/near/log")
    host.cut(LINKS)
    under_run = [JERICHO, "run", "--"] if TRANSPORT == "device" else []
    rounds = ((signal.SIGUSR1, []), (signal.SIGKILL, []), (signal.SIGUSR1, under_run))
    for number, (sent, prefix) in enumerate(rounds):
        expected = (0, "interrupted") if sent == signal.SIGUSR1 else (-sent, "")
        ended = end([call.replace("ROUND", str(number)) for call in CALLS], sent, prefix)
        assert ended == [expected] * len(CALLS), (sent, prefix, dict(zip(CALLS, ended)))
        near(number)
    # A page fault ends with its program only.
    for sent in (signal.SIGTERM, signal.SIGKILL):
        assert end(["fault('fault')"], sent, []) == [(-sent, "")]
    host.join()
    for file in opened:
        file.close()
    # Each call of a name is answered, and none of those that were ended has an effect now or later.
    unchanged = {"d": ["file"], "e": ["file"], "f": ["old"], "g": ["old"], "h": ["old"]}
    assert {directory: short_names(directory) for directory in unchanged} == unchanged
    assert os.stat("mnt/far/h/old").st_mode & 0o777
    os.mkdir("mnt/far/e/new")
    for name in SYNCED:
        with open("mnt/far/" + name, "rb") as file:
            os.fsync(file.fileno())
            # The write before the sync was complete.
            rest = file.read()[MIB:]
            assert rest == b"more" * 2, (name, rest)
    run(JERICHO, "umount", "mnt")
    mount(*options)
    with open("mnt/far/overwrite", "rb") as file:
        assert file.read() == b"o" * MIB + b"more", "a write that was ended has changed the file"
    assert short_names("e") == ["file", "new"]
    run(JERICHO, "umount", "mnt")
    assert "is sound" in run(JERICHO, "check", "a.vol", "--data", "--nic", "i0,i1")
    host.server.terminate()
    host.server.wait()


try:
    main()
finally:
    end_children()
