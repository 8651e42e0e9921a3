"""What the benchmarks of traces have in common: the flags that name a trace, how it is described, and how failures are told."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeeper.cli.benchmark import traces
from kvkeeper.cli.benchmark.traces import Requests
from kvkeeper.cli.console.problems import EXIT_USAGE, UsageFailure

Run = Callable[[argparse.Namespace], int]


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="Mooncake-format trace; without it: a generated one")
    parser.add_argument("--seed", type=least(0), default=0, help="of the generated trace (default: %(default)s)")


def read_trace(args: argparse.Namespace) -> tuple[str, Requests]:
    """Its name and its requests. Raises UsageFailure."""
    if args.file:
        return str(args.file), traces.read(args.file)
    return f"generated, seed {args.seed}", traces.generate(args.seed)


def described(name: str, requests: Requests) -> dict[str, Any]:
    return {
        "trace": name,
        "requests": len(requests),
        "blocks_asked": sum(map(len, requests)),
        "distinct_blocks": len(set().union(*requests)),
    }


def reported(run: Run) -> Run:
    """run, with a UsageFailure told in one line."""

    def checked(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except UsageFailure as failure:
            print(f"kvkeeper: {failure}", file=sys.stderr)
            return EXIT_USAGE

    return checked


def least(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number of at least this."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if not least <= number <= 2**31 - 1:
            raise argparse.ArgumentTypeError(f"{number} is not {least} to 2^31 - 1")
        return number

    return parse
