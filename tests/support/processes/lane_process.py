"""A process that makes one step over a step lane, as an engine in any language could, to be stopped and killed by tests.

`python lane_process.py PATH TOKEN STEP PART...`: STEP is a StepRequest in hex, PART what it asks the attach socket for. It
prints "stepped" and keeps all that it has. Needs nothing but the standard library.
"""

import signal
import socket
import sys


def main() -> None:
    path, token, step, *parts = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(" ".join([token, *parts]).encode() + b"\n")
    line, descriptors, _, _ = socket.recv_fds(connection, 4096, 4)
    if not descriptors:
        raise SystemExit(line.decode())
    lane = socket.socket(fileno=descriptors[-1])
    lane.send(b"\1" + bytes.fromhex(step))
    if lane.recv(1 << 20)[:1] != b"\2":
        raise SystemExit("no StepResponse")
    print("stepped", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
