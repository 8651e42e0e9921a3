"""A service's log: structlog on stderr, a readable line for people on a terminal, one JSON object a line for programs.

Every line names the service, its process and its version, because `kvkeeper up` shows two services in one stream.
Events are short names with fields. Never in a log: attach tokens, descriptors, prompts, outputs, tenants.
Rule: a call that logs returns, whatever becomes of its line: output.py takes it, and where fields cannot be written, a line has
its event alone. What a process says that a service has started for itself goes through the log of that service.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TextIO

import structlog

from kvkeeper.common.service import VERSION, output
from kvkeeper.common.service.output import QueuedStream

_OWN_FIELDS = frozenset(("level", "event", "timestamp"))  # each line gets them anew


def configure(level: str, service: str, stream: TextIO | None = None) -> None:
    """Configures the log of the whole process, so only a service's main calls it. service: "cache" or "engine"."""
    stream = stream or sys.stderr
    on_terminal = stream.isatty()
    line = _line_maker(
        [
            _speaker(service),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if on_terminal else "iso", utc=not on_terminal),
            *([_readable()] if on_terminal else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]),
        ]
    )
    structlog.configure(
        processors=[line],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    if isinstance(stream, QueuedStream):
        fields = {"event": "log_lines_dropped"}
        stream.dropped_line = lambda num_lines: f"{line(None, 'warning', {**fields, 'num_lines': num_lines})}\n"


def _line_maker(processors: Sequence[structlog.typing.Processor]) -> Callable[[Any, str, structlog.typing.EventDict], str]:
    """A processor that makes the text of an event with these. Where they fail on its fields, the text has the event alone."""

    def run(logger: Any, level: str, event: Any) -> str:
        for processor in processors:
            event = processor(logger, level, event)
        return str(event)

    def line(logger: Any, level: str, event: structlog.typing.EventDict) -> str:
        for fields in (dict(event), {"event": str(event["event"]), "is_told_in_part": True}):
            with suppress(Exception):
                return run(logger, level, fields)
        return str(event["event"])

    return line


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


def pass_on(line: bytes, name: str, **fields: Any) -> None:
    """Logs a line that another process said, one of a log as such. name: of its kind, as "rank"; fields: which one it is."""
    try:
        entry = json.loads(line)
        level, event = entry["level"], entry["event"]
        rest = {field: value for field, value in entry.items() if field not in _OWN_FIELDS}
        speak = getattr(structlog.get_logger(), level if level.upper() in logging.getLevelNamesMapping() else "none")
        speak(event, **{**rest, **fields})
    except (ValueError, TypeError, KeyError, AttributeError):
        structlog.get_logger().warning(f"{name}_said", **fields, line=line.decode(errors="replace").rstrip())


def passing_on(name: str) -> AbstractContextManager[int]:
    """A descriptor for a process of this kind to write to, see output.passing_on: each line is logged."""
    return output.passing_on(name, partial(pass_on, name=name))
