"""A process on a session's arena or step lane, as an engine in any language could be, to be stopped and killed by tests.

`python attached_process.py PATH TOKEN [STEP PART...]`: PART what it asks the attach socket for, STEP a StepRequest in hex for
its lane; without them it maps the arena. It prints "attached", then obeys lines on stdin and says when each is done. "write
OFFSET VALUE" writes one byte of the arena, "unmap" gives the mapping up. "send" sends the step, "read" waits for its answer,
"send-and-die" kills the process when the step is sent. It keeps all that it has. Needs nothing but the standard library.
"""

import mmap
import os
import signal
import socket
import sys


def attach(path: str, token: str, parts: list[str]) -> tuple[socket.socket, list[int]]:
    """The connection that tells of the process's end, and the descriptors of the parts."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(" ".join([token, *parts]).encode() + b"\n")
    line, descriptors, _, _ = socket.recv_fds(connection, 4096, 4)
    if not descriptors:
        raise SystemExit(line.decode())
    return connection, descriptors


def step(lane: socket.socket, raw: bytes, line: str) -> str:
    """Obeys a line about the lane."""
    if line == "read":
        if lane.recv(1 << 20)[:1] != b"\2":
            raise SystemExit("no StepResponse")
        return "stepped"
    lane.send(b"\1" + raw)
    if line == "send-and-die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "sent"


def main() -> None:
    path, token, *of_lane = sys.argv[1:]
    connection, descriptors = attach(path, token, of_lane[1:])
    lane = socket.socket(fileno=descriptors[-1]) if of_lane else None
    memory = None if of_lane else mmap.mmap(descriptors[0], 0)
    print("attached", flush=True)
    for line in sys.stdin:
        if lane is not None:
            print(step(lane, bytes.fromhex(of_lane[0]), line.strip()), flush=True)
        elif line.startswith("write"):
            _, offset, value = line.split()
            memory[int(offset)] = int(value)  # type: ignore[index]
            print("written", flush=True)
        else:
            memory.close()  # type: ignore[union-attr]
            connection.close()
            print("unmapped", flush=True)


if __name__ == "__main__":
    main()
