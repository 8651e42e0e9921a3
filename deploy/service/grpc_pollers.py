"""Further threads that read and write for gRPC for asyncio, which has one for all connections of a process.

Without the event engine (grpc_runtime.py), a thread that reads from a connection stays with it for as long as more bytes are
there: a client that sends control frames without a pause would stop all others. So there are more threads, one of which takes
over while others are busy.
"""

import threading

from grpc._cython import cygrpc  # type: ignore[attr-defined]

NUM_POLLERS = 16  # connections that may send without a pause while others have their turn


def add_pollers() -> None:
    """Has further threads read and write for gRPC until the process ends. Call it on the loop that serves."""
    cygrpc.init_grpc_aio()  # as a server or a channel does, and never taken back: the threads use what it makes
    own = (getattr(thread, "_target", None) for thread in threading.enumerate())
    poll = next(target for target in own if isinstance(getattr(target, "__self__", None), cygrpc.PollerCompletionQueue))
    for number in range(NUM_POLLERS):
        threading.Thread(target=poll, name=f"grpc-poller-{number}", daemon=True).start()
