"""Pollers: threads that read and write for gRPC beside its own one, so that no connection keeps others waiting.

Without gRPC's event engine (grpc_runtime.py), a thread that reads from a connection stays with it for as long as more bytes are
there, and gRPC for asyncio has one thread for all connections: a client that sends control frames without a pause would stop
all others. With more threads one takes over while others are busy. gRPC has no call for it, so its own thread's work is found,
and done by more: it takes what is complete from one queue, and hands it on under a lock. A gRPC that is built otherwise serves
without them.
"""

import threading

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]

log = structlog.get_logger()

NUM_POLLERS = 16  # connections that may send without a pause while others have their turn


def add_pollers() -> None:
    """The threads live until the process ends. Call it on the loop that serves."""
    cygrpc.init_grpc_aio()  # as a server or a channel does, and never taken back: the threads use what it makes
    own = (getattr(thread, "_target", None) for thread in threading.enumerate())
    queue = getattr(cygrpc, "PollerCompletionQueue", ())
    poll = next((target for target in own if isinstance(getattr(target, "__self__", None), queue)), None)
    if poll is None:
        log.warning("no_pollers", message="this gRPC is built otherwise: a connection that never pauses keeps others waiting")
        return
    for number in range(NUM_POLLERS):
        threading.Thread(target=poll, name=f"grpc-poller-{number}", daemon=True).start()
