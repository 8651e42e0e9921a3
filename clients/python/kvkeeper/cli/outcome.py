"""How a command ends: exit codes, and one line for whatever went wrong."""

import argparse
import sys

import grpc

from kvkeeper.client import CallOptions, KvkeeperError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOWN = 3
EXIT_INTERRUPTED = 130

# People wait at the other end: an answer or a reason, no repeats.
OPTIONS = CallOptions(timeout_s=10.0, retry_s=0.0)


class UsageFailure(Exception):
    """What was asked for cannot be done as it was asked; the text is one line for people."""


def down_line(service: str, address: str) -> str:
    """What to start. service is "cache" or "engine"."""
    return (
        f"kvkeeper: the {service} service does not answer at {address};"
        f" start it with `kvkeeper {service}`, or both services with `kvkeeper up`"
    )


def failure(error: KvkeeperError, args: argparse.Namespace) -> int:
    """Say on stderr what went wrong; the exit code."""
    if error.service_down:
        print(down_line(args.asks, getattr(args, args.asks)), file=sys.stderr)
        return EXIT_DOWN
    if error.reason == "CACHE_SERVICE_DOWN":
        print(
            "kvkeeper: the engine service is up, but its cache service does not answer; start it with `kvkeeper cache`",
            file=sys.stderr,
        )
        return EXIT_DOWN
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.reason:
        address = getattr(args, args.asks)
        print(f"kvkeeper: the {args.asks} service at {address} takes too long to answer; is it stuck?", file=sys.stderr)
        return EXIT_DOWN
    facts = "".join(f", {name}={value}" for name, value in sorted(error.metadata.items()))
    reason = error.reason or error.code.name
    print(f"kvkeeper: {error.message or reason} ({reason}{facts})", file=sys.stderr)
    return EXIT_FAILED
