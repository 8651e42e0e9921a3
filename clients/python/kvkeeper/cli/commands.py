"""Takes the command line apart and runs the command that it names.

Each command is a module of its name, with add_flags and run. Only the module of the named command is imported, because the
imports of the others (grpc, numpy, rich) take longer than a command takes. `cache` and `engine` hand their arguments over to
the services, which know their own flags. Of the other commands only what converts a model imports torch.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import cast

from kvkeeper.cli.console.addresses import set_credentials
from kvkeeper.cli.console.problems import EXIT_FAILED, complain
from kvkeeper.cli.console.usage import Parser, did_you_mean
from kvkeeper.cli.start import services

COMMANDS = {
    "up": "run both services",
    "serve": "run both services, and a front for OpenAI's and Anthropic's clients",
    "http": "serve OpenAI's HTTP from an engine",
    "doctor": "say what on this host would keep the services from starting",
    "convert": "make a folder that an engine serves of a GGUF file",
    "drain": "ask the service at an address to stop, and wait until it has ended",
    "demo": "show what it does, in a minute",
    "generate": "continue a prompt",
    "chat": "talk with the model",
    "hint": "say what is known of the next use of a prompt",
    "explain": "say how much of a prompt is cached, and why not more",
    "status": "show whether both services are up",
    "stats": "show counts of the pool and the engine",
    "misses": "show why tokens were not found in the cache",
    "curve": "show what pools of other sizes would hit",
    "tiers": "show what lies on the device, in the host's memory and on the disk",
    "top": "watch pools and sessions live; q ends",
    "events": "publish what is cached as vLLM's KV events, for routers",
    "requests": "list requests that wait or run",
    "sequences": "list live sequences",
    "bench": "measure the cache on a trace of requests",
    "config": "show the settings of both services, and where each stands",
    "token": "make a token for --auth-tokens",
    "completion": "print a script that completes commands and flags in a shell",
}
_FOLDERS = {
    "start": ("up", "serve", "http", "doctor", "drain", "demo"),
    "models": ("convert",),
    "generation": ("generate", "chat", "hint"),
    "show": ("explain", "status", "stats", "misses", "curve", "tiers", "top", "requests", "sequences", "config"),
    "publishing": ("events",),
    "benchmark": ("bench",),
}
MODULES = {name: f"kvkeeper.cli.{folder}.{name}" for folder, names in _FOLDERS.items() for name in names} | {
    "completion": "kvkeeper.cli.completion",
    "token": "kvkeeper.cli.token",
}


def run(argv: Sequence[str]) -> int:
    """Run one command; its exit code. Usage errors and --help end in argparse's SystemExit (2 and 0)."""
    if argv and argv[0] in services.NAMES:
        return services.run(argv[0], argv[1:])
    args = _parse(argv)
    set_credentials(args)
    from kvkeeper.client import KvkeeperError  # --help and wrong usage do without

    try:
        exit_code = cast(Callable[[argparse.Namespace], int], args.run)(args)
        sys.stdout.flush()
    except KvkeeperError as error:
        from kvkeeper.cli.console.outcome import failure

        return failure(error, args)
    except OSError as error:
        # Commands report unreadable input themselves, so this is an output that cannot be written. The interpreter's last
        # flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader that has left needs no message
            text = f"the output cannot be written: {error.strerror}"
            complain(text, reason="OUTPUT", is_json=getattr(args, "json", False))
        return EXIT_FAILED
    return exit_code


class _Version(argparse.Action):
    """Asks git for the commit only where the version is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvkeeper.cli.console.version import version_text

        print(parser.prog, version_text())
        parser.exit()


def whole_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser with the flags of all commands except the services', which know their own; each command's parser by name."""
    return _parser(COMMANDS)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    is_json = "--json" in argv
    name = next((word for word in argv if not word.startswith("-")), "")
    parser, choices = _parser({name} & COMMANDS.keys())
    parser.is_json = is_json
    if name and name not in choices:
        parser.error(f"there is no command {name!r}{did_you_mean(name, choices)}")
    chosen = choices.get(name, parser)
    chosen.is_json = is_json
    args, other_flags = parser.parse_known_args(argv)
    args.other_flags = other_flags
    if other_flags and not hasattr(args, "takes_other_flags"):
        chosen.unknown(other_flags)
    return args


def _parser(wanted: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser with the flags of the wanted commands; each command's parser by name."""
    parser = Parser(
        prog="kvkeeper",
        description="An LLM serving system whose KV cache lives in a process of its own.",
        epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 a service is down, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and in a checkout the commit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in (services.NAMES | COMMANDS).items():
        if name in wanted:
            module = importlib.import_module(MODULES[name])
            command = commands.add_parser(name, help=text, allow_abbrev=False)
            command.set_defaults(run=module.run, usage_error=command.error)
            module.add_flags(command)
        else:
            commands.add_parser(name, help=text, add_help=False)
    return parser, commands.choices
