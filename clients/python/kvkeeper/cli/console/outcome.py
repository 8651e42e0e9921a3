"""How a failed call is reported: one line, which says what to do where the user can do something, and the exit code."""

import argparse

import grpc

from kvkeeper.cli.console.problems import EXIT_DOWN, EXIT_FAILED, complain
from kvkeeper.client import CallOptions, KvkeeperError

# A user waits: an answer or an error at once, no repeats.
OPTIONS = CallOptions(timeout_s=10.0, retry_s=0.0)

_MORE_TIME = "; --timeout-ms gives it more"


def failure(error: KvkeeperError, args: argparse.Namespace) -> int:
    """Reports the error on stderr. Returns the exit code."""
    is_json = getattr(args, "json", False)
    if error.service_down:
        complain(error.message, reason="SERVICE_DOWN", is_json=is_json)
        return EXIT_DOWN
    if error.reason == "CACHE_SERVICE_DOWN":
        text = "the engine service is up, but its cache service does not answer; start it with `kvkeeper cache`"
        complain(text, reason=error.reason, is_json=is_json)
        return EXIT_DOWN
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.reason:
        address = getattr(args, args.asks)
        text = f"the {args.asks} service at {address} takes too long to answer; is it stuck?"
        complain(text, reason=error.code.name, is_json=is_json)
        return EXIT_DOWN
    reason = error.reason or error.code.name
    text = (error.message or reason) + (_MORE_TIME if error.reason == "TIMED_OUT" else "")
    complain(text, reason=reason, is_json=is_json, shows_reason=True, metadata=error.metadata)
    return EXIT_FAILED
