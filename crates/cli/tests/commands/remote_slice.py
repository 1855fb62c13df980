"""Two network namespaces stand in for two hosts: one serves a device, the other mounts a volume with a slice on it. Two links join them; one is bad. Programs work in that slice
while links are cut and the first host loses power: its server is killed, and writes that were not flushed are gone. Then the daemon of the mount
is killed, too. Everything that a program has synced must be there.

With 0 rounds, the first host stays away for longer than --dead-after instead.

Runs inside `unshare -Urnm`. Usage: remote_slice.py JERICHO DIRECTORY SEED ROUNDS
"""

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

JERICHO, DIRECTORY, SEED, ROUNDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANDOM = random.Random(SEED)
DEADLINE_S = 120
# Two links between the hosts.
LINKS = ["0", "1"]
CHILDREN = []


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def started(command, **options):
    child = subprocess.Popen(command, **options)
    CHILDREN.append(child)
    return child


def wait_until(what, is_so):
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, "not in time: " + what
        time.sleep(0.01)


class Host:
    """The host with the device."""

    def __init__(self):
        for one, other in (("i0", "a0"), ("b0", "t0"), ("i1", "t1")):
            run("ip", "link", "add", one, "mtu", "9000", "type", "veth", "peer", "name", other, "mtu", "9000")
        for end in ("a0", "b0"):
            run("ip", "link", "set", end, "up")
        self.space = started(["unshare", "-n", "sleep", "infinity"])
        path = f"/proc/{self.space.pid}/ns/net"
        own = os.readlink("/proc/self/ns/net")
        wait_until("a network namespace", lambda: os.readlink(path) != own)
        self.enter = ["nsenter", "--net=" + path]
        for link in LINKS:
            run("ip", "link", "set", "t" + link, "netns", str(self.space.pid))
            run(*self.enter, "ip", "link", "set", "t" + link, "up")
        self.join()
        # Link 0 is a bad one.
        faults = ["--loss", "1%", "--reorder", "10%", "--duplicate", "10%", "--corrupt", "1%", "--seed", str(SEED)]
        wire = started([JERICHO, "wire", "a0", "b0", *faults], stdout=subprocess.PIPE)
        assert wire.stdout.readline()
        self.log = open("serve.log", "a")
        with open("key", "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as key:
            key.write(run(JERICHO, "key", "new"))
        os.environ["JERICHO_KEY"] = os.path.abspath("key")
        self.server = None

    def serve(self):
        environment = {**os.environ, "JERICHO_VOLATILE": str(RANDOM.randrange(1 << 32))}
        keys = ["--client", "host:key", "--encrypt" if SEED % 2 else "--mac"]
        command = [JERICHO, "serve", "disk", "--name", "data", "--host", "hostb", "--nic", "t0,t1", *keys, "--state", "state"]
        options = {"stdout": subprocess.PIPE, "stderr": self.log, "env": environment, "text": True}
        self.server = started(self.enter + command, **options)
        assert "tyche://hostb/data" in self.server.stdout.readline()

    def lose_power(self):
        # nsenter(1) has become the server.
        self.server.kill()
        self.server.wait()

    def cut(self, links):
        for link in links:
            run("ip", "link", "set", "i" + link, "down")

    def join(self):
        for link in LINKS:
            run("ip", "link", "set", "i" + link, "up")


class Program(threading.Thread):
    """Works until it is told to stop. Keeps an error for the end."""

    def __init__(self, work):
        super().__init__()
        self.work, self.rounds, self.error, self.is_over = work, 0, None, False
        self.start()

    def run(self):
        try:
            while not self.is_over:
                self.work(self.rounds)
                self.rounds += 1
        except BaseException as error:  # The main thread reports it.
            self.error = error

    def end(self):
        self.is_over = True
        self.join(DEADLINE_S)
        assert not self.is_alive(), f"{self.work.__name__} hangs"
        if self.error:
            raise self.error


def record(number):
    return bytes([number % 251]) * (1 + number * 7919 % 9000)


def append(number):
    """Appends a record and syncs it; every third time by fdatasync."""
    with open("mnt/far/log", "ab") as log:
        log.write(record(number))
        log.flush()
        (os.fdatasync if number % 3 == 0 else os.fsync)(log.fileno())


def replace(number):
    """Replaces a file as careful programs do."""
    with open("mnt/far/new", "wb") as new:
        new.write(record(number))
        new.flush()
        os.fsync(new.fileno())
    os.rename("mnt/far/new", "mnt/far/current")
    sync_directory("mnt/far")


def sync_directory(path):
    directory = os.open(path, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def insert(number):
    """Commits a row to SQLite."""
    with sqlite3.connect("mnt/far/rows.db", isolation_level=None) as base:
        base.execute("pragma journal_mode=wal")
        base.execute("pragma synchronous=full")
        base.execute("create table if not exists rows (number integer primary key, text blob)")
        base.execute("insert into rows values (?, ?)", (number, record(number)))
    base.close()


def commit(number):
    """Commits a file to git."""
    with open("mnt/far/git/file", "wb") as file:
        file.write(record(number))
    git("add", "file")
    git("commit", "--quiet", "--message", str(number))
    # git syncs the file of a branch, renames it, and does not sync the directory.
    sync_directory("mnt/far/git/.git/refs/heads")


def git(*arguments):
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.fsync=all", "-c", "gc.auto=0"]
    return run("git", "-C", "mnt/far/git", *who, *arguments)


def check_by_fio(number):
    """Has fio write blocks with a checksum, sync them, and read them again from the device."""
    job = ["--name=verify", "--directory=mnt/far/fio", "--size=4M", "--bs=4k", "--rw=randwrite", "--fsync=16", "--ioengine=psync"]
    run("fio", *job, "--verify=crc32c", "--invalidate=1", f"--randseed={number}")


def near(number):
    """Works in the slice of this host."""
    with open("mnt/near/log", "ab") as log:
        log.write(record(number))
        log.flush()
        os.fsync(log.fileno())


def mount(*options):
    run(JERICHO, "mount", "a.vol", "mnt", "--nic", "i0,i1", "--log", "mount.log", *options)


def daemon():
    stat = run(JERICHO, "stat", "mnt")
    return int(next(line for line in stat.splitlines() if line.startswith("daemon")).split()[2].rstrip(","))


def verify(done):
    expected = b"".join(record(number) for number in range(done["append"]))
    with open("mnt/far/log", "rb") as log:
        found = log.read()
    assert found[: len(expected)] == expected, "a synced record is lost"
    assert len(found) <= len(expected) + len(record(done["append"]))
    with open("mnt/far/current", "rb") as current:
        last = done["replace"]
        assert current.read() in (record(last - 1), record(last)), "a replaced file is lost"
    base = sqlite3.connect("mnt/far/rows.db")
    assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
    rows = base.execute("select number, text from rows order by number").fetchall()
    base.close()
    assert rows[: done["insert"]] == [(number, record(number)) for number in range(done["insert"])], "a row is lost"
    git("fsck", "--strict")
    subjects = git("log", "--format=%s").split()
    assert subjects[::-1][: done["commit"]] == [str(number) for number in range(done["commit"])], "a commit is lost"


def set_up(*options):
    """Makes the volume, and mounts it. Returns the host of its second slice."""
    os.chdir(DIRECTORY)
    run("truncate", "--size", "512M", "disk")
    host = Host()
    host.serve()
    run(JERICHO, "format", "a.vol", "tyche://hostb/data", "--size", "512M", "--nic", "i0,i1")
    os.mkdir("mnt")
    mount(*options)
    for name in ("near", "far"):
        os.mkdir("mnt/" + name)
        with open(f"mnt/{name}/log", "wb"):
            pass
    assert "slice      1" in run(JERICHO, "where", "mnt/far/log")
    assert "slice      0" in run(JERICHO, "where", "mnt/near/log")
    stat = run(JERICHO, "stat", "mnt")
    assert "network   i0: up" in stat and "lock of the protocol" in stat, stat
    return host


def stay_away():
    """The host of a slice is away for longer than requests wait."""
    host = set_up("--dead-after", "2")
    append(0)
    kept = record(0)
    # The host goes away while nothing waits for it.
    time.sleep(1.1)
    host.lose_power()
    # Its slice gets no turn.
    for number in range(4):
        os.mkdir(f"mnt/new{number}")
        assert "slice      0" in run(JERICHO, "where", f"mnt/new{number}")
    try:
        append(1)
        raise AssertionError("an fsync succeeds without the host")
    except OSError as error:
        assert error.errno == errno.EIO, error
    for number in range(20):
        near(number)
    failed = subprocess.run([JERICHO, "umount", "mnt"], capture_output=True, text=True)
    assert failed.returncode == 1 and "stays mounted" in failed.stderr, failed
    run(JERICHO, "umount", "--force", "mnt")
    # Without the host, the volume has its other files.
    mount()
    with open("mnt/near/log", "rb") as log:
        assert log.read() == b"".join(record(number) for number in range(20))
    run(JERICHO, "umount", "mnt")
    host.serve()
    mount()
    with open("mnt/far/log", "rb") as log:
        assert log.read()[: len(kept)] == kept, "a synced record is lost"
    append(2)
    run(JERICHO, "umount", "mnt")
    assert "is sound" in run(JERICHO, "check", "a.vol", "--nic", "i0,i1")
    host.server.terminate()
    host.server.wait()


def main():
    host = set_up()
    os.mkdir("mnt/far/git")
    os.mkdir("mnt/far/fio")
    git("init", "--quiet")
    # git init does not sync all of its files.
    run(JERICHO, "sync", "mnt")
    programs = {work.__name__: Program(work) for work in (append, replace, insert, commit, check_by_fio, near)}
    for number in range(ROUNDS):
        before = {name: program.rounds for name, program in programs.items()}
        # Each program has done something since the last fault.
        wait_until("progress", lambda: all(program.rounds > before[name] or program.error for name, program in programs.items()))
        if number % 2 == 0:
            host.lose_power()
        else:
            # One of the links, or both.
            host.cut(LINKS[: 1 + number % 4 // 2])
        # The other host's slice waits if no link is left, and this one's never does.
        worker = programs["append" if number % 4 == 1 else "near"]
        rounds = worker.rounds
        wait_until("work beside the fault", lambda: worker.rounds > rounds + 3 or worker.error)
        time.sleep(RANDOM.random() * 0.3)
        if number % 2 == 0:
            host.serve()
        else:
            host.join()
    for program in programs.values():
        program.end()
    done = {name: program.rounds for name, program in programs.items()}
    print("rounds", done)
    dead = daemon()
    os.kill(dead, signal.SIGKILL)
    wait_until("the end of the daemon", lambda: not os.path.exists(f"/proc/{dead}"))
    host.lose_power()
    host.serve()
    mount()
    verify(done)
    run(JERICHO, "umount", "mnt")
    assert "is sound" in run(JERICHO, "check", "a.vol", "--data", "--nic", "i0,i1")
    host.server.terminate()
    host.server.wait()


try:
    main() if ROUNDS else stay_away()
finally:
    for child in CHILDREN:
        child.kill()
