"""A process with a step lane, as an engine in any language could have one, to be stopped and killed by tests.

`python lane_process.py PATH TOKEN STEP PART...`: STEP is a StepRequest in hex, PART what it asks the attach socket for. It
prints "attached", then obeys lines on stdin: "send" sends the step and prints "sent"; "read" waits for the answer and prints
"stepped"; "send-and-die" kills itself when the step is sent. It keeps all that it has. Needs nothing but the standard library.
"""

import os
import signal
import socket
import sys


def attach(path: str, token: str, parts: list[str]) -> tuple[socket.socket, socket.socket]:
    """The connection that tells of the process's end, and the lane."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(" ".join([token, *parts]).encode() + b"\n")
    line, descriptors, _, _ = socket.recv_fds(connection, 4096, 4)
    if not descriptors:
        raise SystemExit(line.decode())
    return connection, socket.socket(fileno=descriptors[-1])


def main() -> None:
    path, token, step, *parts = sys.argv[1:]
    _connection, lane = attach(path, token, parts)
    print("attached", flush=True)
    for line in sys.stdin:
        if line == "read\n":
            if lane.recv(1 << 20)[:1] != b"\2":
                raise SystemExit("no StepResponse")
            print("stepped", flush=True)
            continue
        lane.send(b"\1" + bytes.fromhex(step))
        if line == "send-and-die\n":
            os.kill(os.getpid(), signal.SIGKILL)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
