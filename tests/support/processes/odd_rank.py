"""A rank that does as a test says, without a model: `python -m tests.support.processes.odd_rank DESCRIPTOR PARENT FOLDER`.

Its config names what it does: a code to end with once it is set up, or silence, or a signal that it sends to itself, or a fault
of its device that it tells before it ends. Else it answers whatever it is told, and with `failed` as a step's transfer orders
that failed.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

from kvkeeper.engine_service.ranks.messages import Answer, Kind, Pipe, PipeEnded, encode_fault, encode_ids

PARTED = 70  # as rank_process


def main() -> None:
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    _, body = pipe.receive()
    config = json.loads(body)["config"]
    for line in config.get("says", ()):
        print(line, file=sys.stderr, flush=True)
    if "code" in config:
        os._exit(config["code"])
    _fail(pipe, Kind.SET_UP, config)
    pipe.send(Answer.DONE)
    try:
        while True:
            kind, _ = pipe.receive()
            _fail(pipe, kind, config)
            if kind == config.get("silent_at"):
                signal.pause()
            if kind == config.get("killed_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == config.get("parts_at"):
                os._exit(PARTED)
            if kind == config.get("refused_at"):
                pipe.send(Answer.REFUSED, json.dumps({"code": "ABORTED", "reason": "A_TEST", "message": "no"}).encode())
            elif kind in (Kind.FORWARD, Kind.REPLAY, Kind.SYNCHRONIZE):
                pipe.send(Answer.DONE, encode_ids(config.get("failed", [])))
            elif kind not in (Kind.TRANSFERS, Kind.COPIES):
                pipe.send(Answer.DONE)
    except PipeEnded:
        pass


def _fail(pipe: Pipe, kind: int, config: dict[str, Any]) -> None:
    """Tell the fault, and end, where it is time; or hang in the end, as a process may on a lost device."""
    if kind == config.get("faults_at"):
        pipe.send(config.get("answer", Answer.LOST), encode_fault(config["fault"], config.get("sizes", ""), "cuda:1"))
        if config.get("hangs"):
            signal.pause()
        os._exit(1)


if __name__ == "__main__":
    main()
