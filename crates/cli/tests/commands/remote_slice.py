"""Two network namespaces stand in for two hosts: one serves a device, the other mounts a volume with a slice on it. Two links join them; one is bad. Programs work in that slice
while links are cut and the first host loses power: its server is killed, and writes that were not flushed are gone. Then the daemon of the mount
is killed, too. Everything that a program has synced must be there.

With 0 rounds, the first host stays away for longer than --dead-after instead.

Runs inside `unshare -Urnm`. Usage: remote_slice.py JERICHO DIRECTORY SEED ROUNDS
"""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

from slice_hosts import DEADLINE_S, JERICHO, LINKS, RANDOM, daemon, end_children, mount, run, set_up, wait_until

ROUNDS = int(sys.argv[4])


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


def far_error():
    """Returns why a file in the slice of the other host cannot be opened; None if it can."""
    try:
        with open("mnt/far/log", "rb"):
            return None
    except OSError as error:
        return error.errno


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
    assert far_error() == errno.ENODEV
    assert "is missing" in run(JERICHO, "stat", "mnt")
    # The slice comes back with the host, without a mount.
    host.serve()
    wait_until("the slice of the host", lambda: far_error() is None)
    stat = run(JERICHO, "stat", "mnt")
    assert "is missing" not in stat and "network   i0: up" in stat, stat
    with open("mnt/far/log", "rb") as log:
        found = log.read()
        assert found[: len(kept)] == kept, "a synced record is lost"
    append(2)
    os.mkdir("mnt/far/new")
    os.rename("mnt/far/new", "mnt/near/moved")
    sync_directory("mnt/near")
    dead = daemon()
    os.kill(dead, signal.SIGKILL)
    wait_until("the end of the daemon", lambda: not os.path.exists(f"/proc/{dead}"))
    host.lose_power()
    host.serve()
    mount()
    with open("mnt/far/log", "rb") as log:
        assert log.read() == found + record(2), "a record that was synced after the return is lost"
    assert os.listdir("mnt/near/moved") == []
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
    end_children()
