"""attack.py NAME MOST: attacks the socket NAME, on which programs ask for a volume's segments, as another user.

Connects until standard input ends, but at most MOST times. In turn, it sends nothing, random bytes, or descriptors.
"""
import array, os, select, socket, sys

name, most = "\0" + sys.argv[1], int(sys.argv[2])
# A pipe without data, a file, and a socket.
descriptors = [os.pipe()[0], os.open("/dev/null", os.O_RDONLY), socket.socketpair()[0].fileno()]
silent, attempts, refused, taken = [], 0, 0, 0


def connect():
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    connection.connect(name)
    return connection


while attempts < most and not select.select([sys.stdin], [], [], 0)[0]:
    attempts += 1
    try:
        connection = connect()
        if attempts % 3 == 0:
            silent.append(connection)
            if len(silent) > 200:
                silent.pop(0).close()
        elif attempts % 3 == 1:
            connection.send(os.urandom(1 + attempts % 64))
            silent.append(connection)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            connection.sendmsg([b"JRCHhand" + bytes(24)], [rights])
            silent.append(connection)
        taken += 1
    except OSError:
        refused += 1
    if attempts == 30:
        print("attacking", flush=True)
print(attempts, "attempts,", refused, "refused", flush=True)
