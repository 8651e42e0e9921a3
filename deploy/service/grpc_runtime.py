"""The settings of gRPC's own runtime that the services start with, and its threads. Imports no grpc, which reads them once.

Chosen by measurement: with the event engine of grpcio 1.80 and later each message costs several wake-ups of threads. Without it
a streamed echo takes 0.7 of the time, and less of the processor. A test says when the installed grpcio is another one than was
measured, or no longer knows the names. A user's own environment wins.

Without it, a thread that reads from a connection stays with it for as long as more bytes are there, and gRPC for asyncio has
one thread for all connections: a client that sends control frames without a pause would stop all others. So there are more
threads, one of which takes over while others are busy.
"""

import threading
from collections.abc import MutableMapping

NUM_POLLERS = 16  # connections that may send without a pause while others have their turn
MEASURED_VERSION = "1.85"
EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def choose(environ: MutableMapping[str, str]) -> None:
    """Sets what is not set yet. Call it before grpc makes its first channel or server."""
    environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)


def add_pollers() -> None:
    """Has further threads read and write for gRPC until the process ends. Call it on the loop that serves."""
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    cygrpc.init_grpc_aio()  # as a server or a channel does, and never taken back: the threads use what it makes
    own = (getattr(thread, "_target", None) for thread in threading.enumerate())
    poll = next(target for target in own if isinstance(getattr(target, "__self__", None), cygrpc.PollerCompletionQueue))
    for number in range(NUM_POLLERS):
        threading.Thread(target=poll, name=f"grpc-poller-{number}", daemon=True).start()
