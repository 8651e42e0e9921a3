"""Takes the command line apart and runs the command that it names.

`cache` and `engine` hand their arguments over to the services, which know their own flags; nothing else here imports a
service, or torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import cast

from kvkeeper.cli import bench, demo, explain, generate, requests, sequences, services, stats, status, top, up
from kvkeeper.cli.outcome import EXIT_FAILED, failure
from kvkeeper.client import KvkeeperError

_COMMANDS = (up, demo, generate, explain, status, stats, top, requests, sequences, bench)


def run(argv: Sequence[str]) -> int:
    """Run one command; its exit code. Usage errors and --help end in argparse's SystemExit (2 and 0)."""
    if argv and argv[0] in services.NAMES:
        return services.run(argv[0], argv[1:])
    args = _parse(argv)
    try:
        exit_code = cast(Callable[[argparse.Namespace], int], args.run)(args)
        sys.stdout.flush()
    except KvkeeperError as error:
        return failure(error, args)
    except OSError as error:
        # Commands say themselves what they cannot read: here it is the output that cannot be written. The
        # interpreter's last flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whoever read our output has left, which needs no words
            print(f"kvkeeper: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args, other_flags = parser.parse_known_args(argv)
    args.other_flags = other_flags
    if other_flags and not hasattr(args, "takes_other_flags"):
        parser.error(f"unrecognized arguments: {' '.join(other_flags)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvkeeper",
        description="An LLM serving system whose KV cache lives in a process of its own.",
        epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 a service is down, 130 interrupted.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in services.NAMES.items():
        commands.add_parser(name, help=text, add_help=False)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
