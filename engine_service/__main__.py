"""`kvkeeper engine`, or `python -m kvkeeper.engine_service`: runs an engine service until SIGTERM or SIGINT.

Exit codes: 0 stopped when asked, 1 could not start, 2 wrong configuration, 75 a device is lost to one of its processes. Nothing
is printed on stdout; once there is a session, the log says "ready" with the address, and grpc.health.v1 says SERVING.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: the service itself reports each failure in one line

from kvkeeper.common.service.process import LOST, ServiceLost, run, stop_signals, wait_for_first

from .config import SOURCE, EngineConfig
from .preflight import check_kernel, check_start

log = structlog.get_logger()

if TYPE_CHECKING:
    from .server import RunningServer

# The forward pass runs in a thread beside the loop. By default the one that holds the interpreter may keep it for 5 ms, a third
# of a small model's step. Measured in turns, 16 requests on two busy cores: 3 % more tokens a second; 0.2 ms gains less.
_SWITCH_INTERVAL_S = 0.001
_REST_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until it is stopped. argv: without the program's name. The exit code."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    code = run("kvkeeper engine", SOURCE.load, _serve, argv, _check)
    if code == LOST:
        end_at_once(code)
    return code


def _check(config: EngineConfig) -> None:
    check_kernel(config)
    check_start(config)


def end_at_once(code: int) -> None:
    """End the process as it is: what libraries would give back to a lost device at its end could end it otherwise, or never."""
    sys.stderr.flush()
    os._exit(code)


def _serve(config: EngineConfig) -> Coroutine[Any, Any, None]:
    log.info("starting", doing="importing torch")
    from .server import start_server  # torch takes seconds to load: a wrong flag is refused before

    return _until_stopped(partial(start_server, config))


async def _until_stopped(start: "Callable[[], Coroutine[Any, Any, RunningServer]]") -> None:
    """A first signal drains, a second one stops at once."""
    from kvkeeper.common.service.pollers import add_pollers  # loads grpc, as the server did

    add_pollers()
    signalled = stop_signals()
    server = await start()
    try:
        await wait_for_first(signalled.wait(), server.wait_ready())
        gc.freeze()  # 300,000 objects of the libraries stay: a collection that looked at them would stop all streams for 150 ms
        await wait_for_first(signalled.wait(), server.wait_end())
        signalled.clear()
        await wait_for_first(signalled.wait(), server.drain())
    except ServiceLost:
        await server.stop()
        # gRPC's own tasks of calls that were cut off end by themselves; cancelled, each says so on the terminal.
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=_REST_S)
        raise
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
