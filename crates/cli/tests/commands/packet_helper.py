"""Uses the program jericho-packet as a hostile caller would. Usage: packet_helper.py PROGRAM, in a network namespace of its own."""

import array
import errno
import os
import socket
import struct
import subprocess
import sys

PROGRAM = sys.argv[1]
OURS, OTHER, ALL = 0x88B5, 0x88B6, 3
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_LOCK_FILTER = 26, 27, 44


def ip(arguments):
    subprocess.run(["ip"] + arguments.split(), check=True)


def run(*arguments, prefix=()):
    """Returns the program's status, its answer, and the descriptors that came with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        status = subprocess.run([*prefix, PROGRAM, *map(str, arguments)], stdin=theirs).returncode
        theirs.close()
        answer, fds, _, _ = socket.recv_fds(ours, 512, 4)
        # Nothing comes after the answer.
        assert ours.recv(512) == b""
        return status, answer, fds


def opened(interface, ethertype=OURS):
    status, answer, fds = run(interface, ethertype, 1 << 20)
    assert (status, answer, len(fds)) == (0, b"\0", 1), (status, answer, fds)
    assert not os.get_blocking(fds[0])
    return socket.socket(fileno=fds[0])


def frame(ethertype, text):
    return b"\xff" * 6 + b"\x02\0\0\0\0\1" + struct.pack("!H", ethertype) + text.ljust(46, b"\0")


def received(one):
    """Returns what frames carry. On a veth pair, a frame has arrived when it was sent."""
    texts = []
    while True:
        try:
            texts.append(one.recv(2048)[14:].rstrip(b"\0"))
        except BlockingIOError:
            return texts


def refused(call):
    try:
        call()
    except PermissionError as error:
        assert error.errno == errno.EPERM
    else:
        raise AssertionError("the filter could be changed")


for name in "ab":
    ip(f"link add t{name} type veth peer name i{name}")
    ip(f"link set t{name} up")
    ip(f"link set i{name} up")

# Frames pass in both directions.
t, i = opened("ta"), opened("ia")
t.send(frame(OURS, b"there"))
i.send(frame(OURS, b"back"))
assert received(i) == [b"there"]
assert received(t) == [b"back"]
assert i.getsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER) == 1

# The socket can be bound to something else, but receives nothing else.
t.send(frame(OTHER, b"before"))
i.bind(("ia", ALL))
t.send(frame(OTHER, b"other"))
t.send(frame(OURS, b"ours"))
assert received(i) == [b"ours"]
i.bind(("ia", OTHER))
t.send(frame(OTHER, b"other"))
assert received(i) == []
far = opened("tb")
i.bind(("ib", OURS))
far.send(frame(OURS, b"ours, elsewhere"))
i.bind(("ib", ALL))
far.send(frame(OTHER, b"other, elsewhere"))
assert received(i) == []
i.bind(("ia", OURS))
t.send(frame(OURS, b"again"))
assert received(i) == [b"again"]

# The filter cannot be replaced or removed.
code = array.array("B", struct.pack("HBBI", 6, 0, 0, 0xFFFFFFFF))
program = struct.pack("HxxxxxxQ", 1, code.buffer_info()[0])
refused(lambda: i.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program))
refused(lambda: i.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0))
refused(lambda: i.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 0))

# Refusals open nothing and say why.
ip("link set tb down")
for arguments, text in [
    (("ia", 0x0800, 8192), "IP"),
    (("ia", 0x0806, 8192), "ARP"),
    (("ia", 0x86DD, 8192), "IPv6"),
    (("ia", 0x8100, 8192), "VLAN"),
    (("ia", 0x88A8, 8192), "VLAN"),
    (("ia", ALL, 8192), "Ethertype"),
    (("ia", "0x88b5", 8192), "Ethertype"),
    (("ia", OURS, 1), "receive buffer"),
    (("../ia", OURS, 8192), "name"),
    (("", OURS, 8192), "name"),
    (("ia", OURS), "three"),
    (("ia", OURS, 8192, "more"), "three"),
    (("nowhere0", OURS, 8192), "nowhere0"),
    (("tb", OURS, 8192), "down"),
    (("lo", OURS, 8192), "lo"),
]:
    status, answer, fds = run(*arguments)
    assert (status, answer[:1], fds) == (1, b"\2", []), (arguments, status, answer)
    assert text in answer.decode(), (arguments, answer)

# It says that it has no capability.
without = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
assert run("ia", OURS, 8192, prefix=without) == (1, b"\1", [])

# Its input must be a socket.
said = subprocess.run([PROGRAM, "ia", str(OURS), "8192"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
assert said.returncode == 2 and b"jericho starts this program" in said.stderr, said
