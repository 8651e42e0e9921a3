"""A service as a process: it runs until SIGTERM or SIGINT.

Exit codes: 0 stopped when asked, 1 could not start, 2 wrong configuration; the last two with one line on stderr. LOST where a
service that served cannot go on in this process. Imports no grpc, so that a wrong flag is reported at once.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvkeeper.common.service import VERSION, grpc_runtime, log, output
from kvkeeper.common.service.config import ConfigError
from kvkeeper.common.service.threads import find_shortage
from kvkeeper.common.tracing.exporting import TracingUnavailable, export_spans

LOST = 75  # EX_TEMPFAIL of sysexits.h: another process may fare better, so a supervisor starts one


class StartError(Exception):
    """The service cannot run as configured. One line, which names the flag or the address."""


class ServiceLost(Exception):
    """A service that served cannot go on in this process, but may in another one. Its log has said why."""


class Config(Protocol):
    """The part of a service's config that its process needs."""

    @property
    def log_level(self) -> str: ...
    @property
    def trace_endpoint(self) -> str: ...


C = TypeVar("C", bound=Config)


def run(
    program: str,
    load: Callable[[Sequence[str], Mapping[str, str]], C],
    serve: Callable[[C], Coroutine[Any, Any, None]],
    argv: Sequence[str] | None,
    check: Callable[[C], None],
) -> int:
    """The exit code. argv is without the program's name; None: that of this process.

    check raises StartError for errors that can be found before serve imports and loads, which takes seconds.
    """
    with output.queued():
        return _run(program, load, serve, sys.argv[1:] if argv is None else argv, check)


def _run(
    program: str,
    load: Callable[[Sequence[str], Mapping[str, str]], C],
    serve: Callable[[C], Coroutine[Any, Any, None]],
    argv: Sequence[str],
    check: Callable[[C], None],
) -> int:
    try:
        config = load(argv, os.environ)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    grpc_runtime.choose(os.environ)
    log.configure(config.log_level, program.rpartition(" ")[2])
    stop_export: Callable[[], None] = _nothing
    try:
        check(config)
        if config.trace_endpoint:
            stop_export = export_spans(config.trace_endpoint, program.replace(" ", "-"), VERSION, log.warn_of_tracing)
        asyncio.run(serve(config))
    except TracingUnavailable as error:
        print(f"{program}: --trace-endpoint: {error}", file=sys.stderr)
        return 1
    except StartError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except ServiceLost:
        return LOST
    except (RuntimeError, OSError) as error:
        if (short := find_shortage(error)) is None:
            raise
        print(f"{program}: {short.text}", file=sys.stderr)
        return 1
    finally:
        stop_export()
    return 0


def _nothing() -> None:
    pass


def stop_signals() -> asyncio.Event:
    """Set by each SIGTERM and SIGINT from now on."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked


async def wait_for_first(*waits: Awaitable[object]) -> None:
    """Waits until one of them ends; raises its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
