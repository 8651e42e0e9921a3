"""Flags over environment over defaults, into one frozen config.

A service brings a dataclass of settings (see settings.py) that checks its own values; how they are read and told is here. A
wrong value is a ConfigError of one line that names the flag or the variable. Does not look at the machine: whether memory, a
model or an address can be had is found out at start.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from kvkeeper.service.settings import ConfigError, Setting, settings_of

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ConfigSource(Generic[C]):
    """Where a service's config comes from: its dataclass, and what the command line and the environment call it."""

    config: Callable[..., C]
    program: str
    description: str
    environment_prefix: str
    example: str  # what follows the prefix in --help

    def load(self, argv: Sequence[str], environ: Mapping[str, str]) -> C:
        """Raises ConfigError; --help ends in argparse's SystemExit."""
        values: dict[str, Any] = {}
        variables: dict[str, str] = {}  # by the flag that each stands for
        settings = settings_of(self.config)
        for setting in settings:
            variable = self.variable(setting)
            if text := environ.get(variable):
                values[setting.name] = _parsed(variable, setting, text)
                variables[setting.flag] = variable
        given = self._given(argv)
        for setting in settings:
            value = given[setting.name]
            if value is not None:
                values[setting.name] = value if isinstance(value, bool) else _parsed(setting.flag, setting, value)
                variables.pop(setting.flag, None)
        try:
            return self.config(**values)
        except ConfigError as error:  # it knows fields alone: a person who set a variable is told of the variable
            raise ConfigError(re.sub(r"--[a-z-]+", lambda at: variables.get(at[0], at[0]), str(error))) from None

    def variable(self, setting: Setting) -> str:
        """Of the environment."""
        return self.environment_prefix + setting.name.upper()

    def _given(self, argv: Sequence[str]) -> dict[str, Any]:
        """By field, None where it was not given. One line says what is wrong, where argparse would print the usage of all."""
        parser = self._parser()
        try:
            given, others = parser.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error.argument_name}: {error.message} (see {self.program} --help)") from None
        if others:
            wrong = others[0].partition("=")[0]
            if not wrong.startswith("-"):
                raise ConfigError(f"unexpected argument {wrong!r} (see {self.program} --help)")
            near = get_close_matches(wrong, re.findall(r"--[a-z-]+", parser.format_usage()), 1)
            meant = f", did you mean {near[0]}?" if near else f" (see {self.program} --help)"
            raise ConfigError(f"unknown flag {wrong}{meant}")
        return vars(given)

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            epilog=f"Each flag can be given as an environment variable, for example {self.environment_prefix}{self.example}.",
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.add_flags(parser)
        return parser

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """One for each setting."""
        for setting in settings_of(self.config):
            if setting.is_switch:
                parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=None, help=setting.help_text)
            else:
                parser.add_argument(setting.flag, default=None, help=setting.help_text, metavar=setting.name.upper())


def _parsed(source: str, setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        wanted = "a number" if setting.parse in (int, float) else str(error)
        raise ConfigError(f"{source}: {wanted}, not {text!r}") from None
