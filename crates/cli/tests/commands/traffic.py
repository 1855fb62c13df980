"""Traffic between two hosts. Each command fails if it takes more than a minute.

traffic.py echo ADDRESS COUNT    sends echo requests (ping) until COUNT have been answered, one after the other
traffic.py across ADDRESS FIFO   sends echo requests on a cut link and waits for FIFO; then one is answered, and none of those before
traffic.py receive INTERFACE FILE  makes the file, and then receives frames of several Ethertypes in their order
traffic.py send INTERFACE FILE   sends these frames
traffic.py take ADDRESS FILE     listens at the address and receives a file
traffic.py give ADDRESS FILE     sends a file there
"""

import signal
import socket
import struct
import sys
import time

PORT = 7000
# linux/if_packet.h and linux/if_ether.h
SOL_PACKET = 263
PACKET_AUXDATA = 8
TP_STATUS_VLAN_VALID = 1 << 4
ETH_P_ALL = 3


def request(number):
    """Returns an ICMP echo request."""
    def message(checksum):
        return struct.pack("!BBHHH", 8, 0, checksum, 77, number) + bytes(56)

    words = struct.unpack("!32H", message(0))
    total = sum(words)
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return message(~total & 0xFFFF)


def answered(echo, patience):
    """Returns the number of the next answer, or None if there is none for some time."""
    end = time.monotonic() + patience
    while (rest := end - time.monotonic()) > 0:
        echo.settimeout(rest)
        try:
            packet = echo.recv(4096)
        except TimeoutError:
            return None
        kind, _, _, name, number = struct.unpack("!BBHHH", packet[20:28])
        if (kind, name) == (0, 77):
            return number
    return None


def open_echo(address):
    echo = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    echo.connect((address, 0))
    return echo


def echo(address, count):
    with open_echo(address) as sock:
        number = 0
        while count > 0:
            number += 1
            sock.send(request(number))
            count -= answered(sock, 1) == number


def across(address, fifo):
    with open_echo(address) as sock:
        for number in range(5):
            sock.send(request(number))
        open(fifo, "rb").read()
        number = 5
        while True:
            sock.send(request(number))
            got = answered(sock, 0.1)
            if got is not None:
                assert got >= 5, f"request {got} passed a cut link"
                return
            number += 1


def frames():
    """Returns frames for another host: of Ethertypes that nobody uses, with one and two VLAN tags, of IEEE 802.3, and the longest one."""
    addresses = bytes([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2])
    for kind in ["1234", "88b6", "8100 6005 1234", "88a8 0007 8100 0005 1234", "0032"]:
        yield addresses + bytes.fromhex(kind) + bytes(range(100))
    yield addresses + bytes.fromhex("1234") + bytes(9000)


def with_tag(frame, ancillary):
    """Returns a frame with the VLAN tag that the kernel keeps beside it."""
    for level, kind, data in ancillary:
        if (level, kind) == (SOL_PACKET, PACKET_AUXDATA):
            status, _, _, _, _, tag, ethertype = struct.unpack("=IIIHHHH", data[:20])
            if status & TP_STATUS_VLAN_VALID:
                return frame[:12] + struct.pack("!HH", ethertype, tag) + frame[12:]
    return frame


def open_packet(interface):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    sock.bind((interface, ETH_P_ALL))
    return sock


def receive(interface, path):
    with open_packet(interface) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        open(path, "w").close()
        for expected in frames():
            while True:
                frame, ancillary, _, _ = sock.recvmsg(1 << 16, 256)
                # Others are of ARP and the like.
                if frame[:12] == expected[:12]:
                    break
            assert with_tag(frame, ancillary) == expected, f"{frame[:20].hex()} for {expected[:20].hex()}"


def send(interface, _):
    with open_packet(interface) as sock:
        for frame in frames():
            sock.send(frame)


def take(address, path):
    with socket.create_server((address, PORT)) as server, open(path, "wb") as file:
        connection, _ = server.accept()
        while data := connection.recv(1 << 20):
            file.write(data)


def give(address, path):
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with open(path, "rb") as file:
        connection.sendfile(file)
    connection.close()


signal.alarm(60)
command, address, rest = sys.argv[1:]
match command:
    case "echo":
        echo(address, int(rest))
    case "across":
        across(address, rest)
    case "receive":
        receive(address, rest)
    case "send":
        send(address, rest)
    case "take":
        take(address, rest)
    case "give":
        give(address, rest)
