"""Flags over environment over a file over defaults, into one frozen config.

A service brings a dataclass of settings (see settings.py) that checks its own values; how they are read and shown is here. A
wrong value is a ConfigError of one line that names the flag or the variable. Does not look at the machine: whether memory, a
model or an address can be had is found out at start.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvkeeper.common.service.config_file import read_table
from kvkeeper.common.service.settings import ConfigError, Setting, list_settings

C = TypeVar("C")

_FILE_HELP = "TOML file with settings of both services in tables [cache] and [engine]; flags and variables come before it"


@dataclass(slots=True)
class _Given:
    """What was given, by the name of a setting: values, and where each stands."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def put(self, setting: Setting, place: str, value: str | bool) -> None:
        """Raises ConfigError."""
        self.values[setting.name] = value if isinstance(value, bool) else _parsed(place, setting, value)
        self.places[setting.name] = place


@dataclass(frozen=True, slots=True)
class Origin:
    """A setting as it applies: its value, and where that stands; empty: it is the default."""

    setting: Setting
    value: Any
    place: str

    @property
    def text(self) -> str:
        """The value as a person writes it."""
        return self.setting.default_text if not self.place else self.setting.shown(self.value)


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
        return self._checked(self._collect(argv, environ))

    def origins(self, argv: Sequence[str], environ: Mapping[str, str]) -> list[Origin]:
        """Every setting as it would apply. Raises as load does."""
        given = self._collect(argv, environ)
        config = self._checked(given)
        return [
            Origin(each, getattr(config, each.name), given.places.get(each.name, "")) for each in list_settings(self.config)
        ]

    def variable(self, setting: Setting) -> str:
        """The variable of the environment that gives the setting."""
        return self.environment_prefix + setting.name.upper()

    def _collect(self, argv: Sequence[str], environ: Mapping[str, str]) -> _Given:
        """What was given, where a later place comes before an earlier one."""
        found, settings, flags = _Given(), list_settings(self.config), self._given(argv)
        if file := flags["config"] or environ.get(self.environment_prefix + "CONFIG"):
            table = read_table(Path(file), self.program.split()[-1], settings)
            for setting in settings:
                if setting.name in table:
                    found.put(setting, *table[setting.name])
        for setting in settings:
            if text := environ.get(self.variable(setting)):
                found.put(setting, self.variable(setting), text)
        for setting in settings:
            if (value := flags[setting.name]) is not None:
                found.put(setting, setting.flag, value)
        return found

    def _checked(self, given: _Given) -> C:
        places = {setting.flag: given.places.get(setting.name, setting.flag) for setting in list_settings(self.config)}
        try:
            return self.config(**given.values)
        except ConfigError as error:  # it knows fields alone: a person who set a variable sees the variable
            raise ConfigError(re.sub(r"--[a-z-]+", lambda at: places.get(at[0], at[0]), str(error))) from None

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
            near = get_close_matches(wrong.lstrip("-"), re.findall(r"--([a-z-]+)", parser.format_usage()), 1)
            meant = f", did you mean --{near[0]}?" if near else f" (see {self.program} --help)"
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
        """One for the file, and one for each setting."""
        parser.add_argument("--config", default=None, help=_FILE_HELP, metavar="FILE")
        for setting in list_settings(self.config):
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
