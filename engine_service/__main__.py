"""`kvkeeper engine`, or `python -m engine_service`: runs an engine service until SIGTERM or SIGINT.

Exit codes: 0 stopped when asked, 1 could not start, 2 wrong configuration. Nothing is printed on stdout; the log says
"ready" with the address once there is a session, and so does grpc.health.v1.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: what goes wrong is told in one line, by us

from engine_service import log
from engine_service.config import ConfigError, EngineConfig, load_config


def main(argv: Sequence[str] | None = None) -> int:
    """argv without the program's name."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"kvkeeper engine: {error}", file=sys.stderr)
        return 2
    log.configure(config.log_level)
    from engine_service.server import StartError  # torch takes seconds to load, which a wrong flag need not wait for

    try:
        asyncio.run(_serve(config))
    except StartError as error:
        print(f"kvkeeper engine: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: EngineConfig) -> None:
    """A first signal drains, a second one stops at once."""
    from engine_service.server import start_server

    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    server = await start_server(config)
    try:
        await _first_of(asked.wait(), server.wait_end())
        asked.clear()
        await _first_of(asked.wait(), server.drain())
    finally:
        await server.stop()


async def _first_of(*waits: object) -> None:
    """Until one of them ends; raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


if __name__ == "__main__":
    sys.exit(main())
