"""Two network namespaces stand in for two hosts: one serves a device, the other mounts a volume with a slice on it. Two links join them; one is bad. Programs work in that slice
while links are cut and the first host loses power: its server is killed, and writes that were not flushed are gone. Then the daemon of the mount
is killed, too. Everything that a program has synced must be there.

With 0 rounds, the first host stays away for longer than --dead-after instead. With -N rounds, it does so N times while the programs work: they try again
what fails, and its slice comes back without a mount.

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


# Set while programs may fail: the host is away, or was when a program began its present round.
MAY_FAIL = threading.Event()


class Program(threading.Thread):
    """Works until it is told to stop. Keeps an error for the end. Tries again what fails while the host of its slice is away."""

    def __init__(self, work):
        super().__init__()
        self.work, self.rounds, self.error, self.is_over = work, 0, None, False
        self.start()

    def run(self):
        try:
            while not self.is_over:
                may_fail = MAY_FAIL.is_set()
                try:
                    self.work(self.rounds)
                except Exception:
                    if self.work is near or not (may_fail or MAY_FAIL.is_set()):
                        raise
                    time.sleep(0.05)
                    continue
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
        append_to(log.fileno(), number)


def append_to(log, number):
    before = sum(len(record(one)) for one in range(number))
    if os.fstat(log).st_size > before:
        # A failed attempt has left it.
        os.ftruncate(log, before)
    assert os.write(log, record(number)) == len(record(number))
    (os.fdatasync if number % 3 == 0 else os.fsync)(log)


def append_open(number, logs=[]):
    """Does the same with a descriptor that stays open."""
    logs or logs.append(os.open("mnt/far/open", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    append_to(logs[0], number)


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
    base = sqlite3.connect("mnt/far/rows.db", isolation_level=None)
    try:
        base.execute("pragma journal_mode=wal")
        base.execute("pragma synchronous=full")
        base.execute("create table if not exists rows (number integer primary key, text blob)")
        base.execute("insert or replace into rows values (?, ?)", (number, record(number)))
    finally:
        base.close()


def commit(number):
    """Commits a file to git."""
    for path, _, names in os.walk("mnt/far/git/.git"):
        for name in names:
            if name.endswith(".lock"):
                # Of a command that has failed.
                os.remove(os.path.join(path, name))
    with open("mnt/far/git/file", "wb") as file:
        file.write(record(number))
    git("add", "file")
    # A command that has failed may have committed.
    if number == 0 or git("log", "-1", "--format=%s").strip() != str(number):
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
    verify_log("mnt/far/log", done["append"])
    if "append_open" in done:
        verify_log("mnt/far/open", done["append_open"])
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


def verify_log(path, count):
    expected = b"".join(record(number) for number in range(count))
    with open(path, "rb") as log:
        found = log.read()
    assert found[: len(expected)] == expected, f"a synced record of {path} is lost"
    assert len(found) <= len(expected) + len(record(count))


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


def refuses_changes():
    return "takes NO CHANGES until its host answers" in run(JERICHO, "stat", "mnt")


def come_back():
    """The host of a slice is away for longer than requests wait, and comes back while programs work in the slice."""
    host = set_up("--dead-after", "2")
    programs = begin(append, append_open, replace, insert, commit, check_by_fio, near)
    for number in range(-ROUNDS):
        progress(programs)
        MAY_FAIL.set()
        if number % 2 == 0:
            host.lose_power()
        else:
            host.cut(LINKS)
        wait_until("the end of the slice's changes", refuses_changes)
        far = {name: program.rounds for name, program in programs.items() if name != "near"}
        progress({"near": programs["near"]})
        # Each may just have ended a round.
        assert all(programs[name].rounds <= rounds + 1 for name, rounds in far.items()), "a program goes on without the host"
        if number % 2 == 0:
            host.serve()
        else:
            host.join()
        wait_until("the return of the slice", lambda: not refuses_changes())
        # Each program may learn once more, by a sync, of what failed before.
        progress(programs)
        MAY_FAIL.clear()
    progress(programs)
    end(host, programs)


def begin(*works):
    os.mkdir("mnt/far/git")
    os.mkdir("mnt/far/fio")
    git("init", "--quiet")
    # git init does not sync all of its files.
    run(JERICHO, "sync", "mnt")
    return {work.__name__: Program(work) for work in works}


def progress(programs):
    """Waits until each program has ended a round that it has begun from now on."""
    before = {name: program.rounds for name, program in programs.items()}
    wait_until("progress", lambda: all(program.rounds > before[name] + 1 or program.error for name, program in programs.items()))


def main():
    host = set_up()
    programs = begin(append, replace, insert, commit, check_by_fio, near)
    for number in range(ROUNDS):
        # Each program has done something since the last fault.
        progress(programs)
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
    end(host, programs)


def end(host, programs):
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
    main() if ROUNDS > 0 else come_back() if ROUNDS < 0 else stay_away()
finally:
    end_children()
