"""What goes wrong, on stderr: a line for people, or with --json an object a line for programs. And the exit codes.

Imports nothing that takes time: it is on the way of every command.
"""

import json
import sys
from collections.abc import Mapping

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOWN = 3
EXIT_INTERRUPTED = 130


class UsageFailure(Exception):
    """What was asked for cannot be done as it was asked; the text is one line for people."""


def complain(
    message: str,
    *,
    reason: str,
    is_json: bool,
    shows_reason: bool = False,
    metadata: Mapping[str, str] | None = None,
    name: str = "kvkeeper",
) -> None:
    """reason is a name of the protocols' ErrorReason or of a gRPC status, USAGE, SERVICE_DOWN, OUTPUT, or what `up` says of its
    services: NOT_STARTED, SERVICE_ENDED.

    shows_reason: people are shown it, too, with the metadata.
    """
    metadata = dict(sorted((metadata or {}).items()))
    if is_json:
        text = json.dumps({"error": {"reason": reason, "message": message, "metadata": metadata}})
    else:
        facts = "".join(f", {key}={value}" for key, value in metadata.items())
        text = f"{name}: {message}" + (f" ({reason}{facts})" if shows_reason else "")
    print(text, file=sys.stderr)


def warn(message: str, *, is_json: bool) -> None:
    """Something that stops nothing."""
    print(json.dumps({"warning": {"message": message}}) if is_json else f"kvkeeper: {message}", file=sys.stderr)
