"""`kvkeeper completion`: a script for bash, zsh or fish that completes commands and flags, made from the parsers."""

import argparse
import contextlib
import importlib

from kvkeeper.cli.console.problems import EXIT_OK

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("PATH", "FILE", "FILE_OR_JSON", "FILE.gguf", "DIR")  # metavars of arguments that are completed as file names


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a script for one shell. In bash, for this session: source <(kvkeeper completion bash)."
        " For good: kvkeeper completion bash > ~/.local/share/bash-completion/completions/kvkeeper; in zsh > _kvkeeper in a"
        " folder of $fpath; in fish > ~/.config/fish/completions/kvkeeper.fish."
    )
    parser.add_argument("shell", choices=_SHELLS, help="shell that the script is for")


def run(args: argparse.Namespace) -> int:
    import shtab

    from kvkeeper.cli.commands import whole_parser
    from kvkeeper.cli.start import services

    parser, commands = whole_parser()
    for name, package in services.PACKAGES.items():
        with contextlib.suppress(ImportError):  # the client alone is installed
            importlib.import_module(f"{package}.config").SOURCE.add_flags(commands[name])
    for command in commands.values():
        for action in command._actions:
            if action.metavar in _FILES:
                vars(action)["complete"] = shtab.FILE
    print(shtab.complete(parser, args.shell))
    return EXIT_OK
