"""Wrong usage in two lines: where the help is, and what is wrong, with a suggestion.

With --json the error is one JSON object, as every other failure.
"""

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn

from kvkeeper.cli.console.problems import EXIT_USAGE, complain


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in two lines, where argparse prints all usage. Subcommands use this class too."""

    is_json = False

    def error(self, message: str) -> NoReturn:
        if not self.is_json:
            self._print_message(f"usage: {self._short_usage()}; all flags: {self.prog} --help\n", None)
        complain(message, reason="USAGE", is_json=self.is_json, name=f"{self.prog}: error")
        raise SystemExit(EXIT_USAGE)

    def unknown(self, words: list[str]) -> NoReturn:
        """Reports words that are no arguments of this command."""
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
        self.error(f"unrecognized arguments: {' '.join(words)}{did_you_mean(flag, self._option_string_actions)}")

    def _short_usage(self) -> str:
        positional = [action.metavar or action.dest for action in self._get_positional_actions()]
        return " ".join([self.prog, *(f"[{name}]" for name in positional), "[flags]"])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word or flag: the known one most like it; empty where none is.

    The dashes of flags are left out of the comparison, because they make all short flags alike.
    """
    by_name = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(word.lstrip("-"), by_name, 1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""
