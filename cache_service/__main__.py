"""`kvkeeper cache`, or `python -m kvkeeper.cache_service`: runs a cache service until SIGTERM or SIGINT.

Exit codes: 0 stopped when asked, 1 could not start, 2 wrong configuration. Nothing is printed on stdout; the log says "ready"
with the address, and so does grpc.health.v1.
"""

import gc
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: this program reports an error in one line of its own
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy loads, which would start threads for products of matrices

from kvkeeper.common.service.process import run, stop_signals, wait_for_first

from .config import SOURCE, CacheConfig
from .preflight import check_kernel, check_start


def main(argv: Sequence[str] | None = None) -> int:
    """argv without the program's name."""
    return run("kvkeeper cache", SOURCE.load, _serve, argv, _check)


def _check(config: CacheConfig) -> None:
    check_kernel(config)
    check_start(config)


async def _serve(config: CacheConfig) -> None:
    """A first signal drains, a second one stops at once."""
    gc.disable()  # until it serves: what a start makes stays, and looking through it takes a tenth of the start
    from kvkeeper.common.service.pollers import (
        add_pollers,  # after the checks, so that a wrong address is reported without loading grpc
    )

    from .server import start_server, take_over

    add_pollers()
    asked = stop_signals()
    try:
        if config.take_over:
            await take_over(config)
        server = await start_server(config, owns_process=True)
        gc.freeze()  # these objects stay: a collection that looked at all of them would delay a step
    finally:
        gc.enable()
    try:
        await asked.wait()
        asked.clear()
        await wait_for_first(asked.wait(), server.drain())
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
