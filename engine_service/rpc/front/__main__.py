"""`python -m kvkeeper.engine_service.rpc.front DESCRIPTOR`: one front, on the end of a lane that its engine gave it.

It ends with its engine, whose lane it reads; signals of a terminal or of a service manager are for the engine.
"""

import asyncio
import gc
import os
import signal
import socket
import sys

from kvkeeper.common.service import grpc_runtime, output

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: the service itself reports each failure in one line
grpc_runtime.choose(os.environ)

from kvkeeper.common.service.pollers import add_pollers  # noqa: E402 - grpc reads its settings once, when it is loaded

from .server import Front  # noqa: E402

_REST_S = 0.5


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with output.queued():
        asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))


async def _run(end: socket.socket) -> None:
    add_pollers()
    gc.freeze()
    await Front().run(end)
    # gRPC's own tasks of calls that were cut off end by themselves; cancelled, each says so on the terminal.
    if rest := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(rest, timeout=_REST_S)


if __name__ == "__main__":
    main()
