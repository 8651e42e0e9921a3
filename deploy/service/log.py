"""A service's log: structlog on stderr, a readable line for people on a terminal, one JSON object a line for programs.

Every line names the service, its process and its version, because `kvkeeper up` shows two services in one stream.
Events are short names with fields. Never in a log: attach tokens, descriptors, prompts, outputs, tenants.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import structlog

from kvkeeper.service import VERSION


def configure(level: str, service: str, stream: TextIO | None = None) -> None:
    """Configures the log of the whole process, so only a service's main calls it. service: "cache" or "engine"."""
    stream = stream or sys.stderr
    on_terminal = stream.isatty()
    structlog.configure(
        processors=[
            _speaker(service),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if on_terminal else "iso", utc=not on_terminal),
            *([_readable()] if on_terminal else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )


def _speaker(service: str) -> Callable[[Any, str, structlog.typing.EventDict], structlog.typing.EventDict]:
    """Puts the service, its process and its version in front of an event's own fields."""
    pid = os.getpid()

    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"service": service, "pid": pid, "version": VERSION, **event}

    return add


def _readable() -> structlog.dev.ConsoleRenderer:
    """Lines for people with plain tracebacks: the pretty ones show variables, and with them secrets and prompts."""
    colors = not os.environ.get("NO_COLOR")
    return structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback)


def warn_of_tracing(message: str) -> None:
    """Logs a message of the exporter of traces."""
    structlog.get_logger().warning("tracing", message=message)
