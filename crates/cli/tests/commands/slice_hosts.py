"""Two network namespaces stand in for two hosts: one serves a device, the other mounts a volume with a slice on it. Two links join them.

Used by scripts that run inside `unshare -Urnm`, as SCRIPT JERICHO DIRECTORY SEED ...
"""

import os
import random
import signal
import subprocess
import sys
import time

JERICHO, DIRECTORY, SEED = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANDOM = random.Random(SEED)
DEADLINE_S = 120
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


def mount(*options):
    run(JERICHO, "mount", "a.vol", "mnt", "--nic", "i0,i1", "--log", "mount.log", *options)


def daemon():
    stat = run(JERICHO, "stat", "mnt")
    return int(next(line for line in stat.splitlines() if line.startswith("daemon")).split()[2].rstrip(","))


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
    top = run(JERICHO, "top", "mnt", "--once")
    assert any("tyche://hostb/data" in line and " i0 " in line and " up " in line for line in top.splitlines()), top
    return host


def end_children():
    for child in CHILDREN:
        child.kill()
