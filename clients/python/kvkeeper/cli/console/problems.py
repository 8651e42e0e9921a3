"""Errors and warnings on stderr: a line for people, or with --json an object per line for programs. And the exit codes.

Imports nothing that takes time, because every command imports it.
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
    """The command cannot be done with these arguments; the text is one line for people."""


def complain(
    message: str,
    *,
    reason: str,
    is_json: bool,
    shows_reason: bool = False,
    metadata: Mapping[str, str] | None = None,
    name: str = "kvkeeper",
) -> None:
    """Reports an error.

    reason: a name of the protocols' ErrorReason or of a gRPC status, USAGE, SERVICE_DOWN, OUTPUT, or of `up` and `demo`
    NOT_STARTED, SERVICE_ENDED. shows_reason: the line for people has the reason and the metadata too.
    """
    metadata = dict(sorted((metadata or {}).items()))
    if is_json:
        text = json.dumps({"error": {"reason": reason, "message": message, "metadata": metadata}})
    else:
        facts = "".join(f", {key}={value}" for key, value in metadata.items())
        text = f"{name}: {message}" + (f" ({reason}{facts})" if shows_reason else "")
    print(text, file=sys.stderr)


def warn(message: str, *, is_json: bool) -> None:
    """Reports something that does not stop the command."""
    print(json.dumps({"warning": {"message": message}}) if is_json else f"kvkeeper: {message}", file=sys.stderr)
