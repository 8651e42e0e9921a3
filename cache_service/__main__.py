"""`kvkeeper cache`, or `python -m cache_service`: runs a cache service until SIGTERM or SIGINT.

Exit codes: 0 stopped when asked, 1 could not start, 2 wrong configuration. Nothing is printed on stdout; the log says "ready"
with the address, and so does grpc.health.v1.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: what goes wrong is told in one line, by us

from cache_service import log
from cache_service.config import CacheConfig, ConfigError, load_config
from cache_service.server import StartError, start_server


def main(argv: Sequence[str] | None = None) -> int:
    """argv without the program's name."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"kvkeeper cache: {error}", file=sys.stderr)
        return 2
    log.configure(config.log_level)
    try:
        asyncio.run(_serve(config))
    except StartError as error:
        print(f"kvkeeper cache: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: CacheConfig) -> None:
    """A first signal drains, a second one stops at once."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    server = await start_server(config)
    gc.freeze()  # what stands now stays: a collection that looked at all of it would be in some step's way
    await asked.wait()
    asked.clear()
    draining, again = asyncio.create_task(server.drain()), asyncio.create_task(asked.wait())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)
    await server.stop()


if __name__ == "__main__":
    sys.exit(main())
