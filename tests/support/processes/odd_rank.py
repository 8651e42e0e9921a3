"""A rank that does as a test says, without a model: `python -m tests.support.processes.odd_rank DESCRIPTOR PARENT FOLDER`.

Its config names what it does: a code to end with once it is set up, or silence, or a signal that it sends to itself. Else it
answers whatever it is told, and with `failed` as a step's transfer orders that failed.
"""

import json
import os
import signal
import socket
import sys

from kvkeeper.engine_service.ranks.failures import PipeEnded
from kvkeeper.engine_service.ranks.messages import Answer, Kind, encode_ids
from kvkeeper.engine_service.ranks.pipe import Pipe

PARTED = 70  # as rank_process


def main() -> None:
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    _, body = pipe.receive()
    config = json.loads(body)["config"]
    for line in config.get("says", ()):
        print(line, file=sys.stderr, flush=True)
    if "code" in config:
        os._exit(config["code"])
    pipe.send(Answer.DONE)
    try:
        while True:
            kind, _ = pipe.receive()
            if kind == config.get("silent_at"):
                signal.pause()
            if kind == config.get("killed_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == config.get("refused_at"):
                pipe.send(Answer.REFUSED, json.dumps({"code": "ABORTED", "reason": "A_TEST", "message": "no"}).encode())
            elif kind in (Kind.FORWARD, Kind.SYNCHRONIZE):
                pipe.send(Answer.DONE, encode_ids(config.get("failed", [])))
            elif kind not in (Kind.TRANSFERS, Kind.COPIES):
                pipe.send(Answer.DONE)
    except PipeEnded:
        pass


if __name__ == "__main__":
    main()
