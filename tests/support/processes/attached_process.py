"""A process that maps an arena, as an engine does, to be stopped and killed by tests.

`python attached_process.py PATH TOKEN` prints "attached", then obeys lines on stdin: "write OFFSET VALUE" writes one byte and
prints "written"; "unmap" gives the mapping up and prints "unmapped". Needs nothing but the standard library.
"""

import array
import mmap
import socket
import sys


def attach(path: str, token: str) -> tuple[socket.socket, mmap.mmap]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(token.encode() + b"\n")
    line, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
    if not ancillary:
        raise SystemExit(line.decode())
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    return connection, mmap.mmap(descriptors[0], 0)


def main() -> None:
    connection, memory = attach(sys.argv[1], sys.argv[2])
    print("attached", flush=True)
    for line in sys.stdin:
        if line.startswith("write"):
            _, offset, value = line.split()
            memory[int(offset)] = int(value)
            print("written", flush=True)
        else:
            memory.close()
            connection.close()
            print("unmapped", flush=True)


if __name__ == "__main__":
    main()
