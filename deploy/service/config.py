"""Flags over environment over defaults, into one frozen config.

A service brings a dataclass that checks its own values, and a parser and a help text for each field; how they are read and told
is here. A wrong value is a ConfigError of one line that names the flag or the variable. Does not look at the machine: whether
memory, a model or an address can be had is found out at start.
"""

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, cast

from kvkeeper.service.sizes import size

C = TypeVar("C")

LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_PORT = 65535
_METRICS_ADDRESS = "host:port such as 127.0.0.1:7412"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un less its final zero


class ConfigError(ValueError):
    """The service was asked for something it refuses to start with. One line, names the flag or the variable."""


@dataclass(frozen=True, slots=True)
class ConfigSource(Generic[C]):
    """Where a service's config comes from. parsers and help have an entry for each field of the config's dataclass."""

    config: Callable[..., C]
    program: str
    description: str
    environment_prefix: str
    example: str  # what follows the prefix in --help
    parsers: Mapping[str, Callable[[str], Any]]
    help: Mapping[str, str]

    def load(self, argv: Sequence[str], environ: Mapping[str, str]) -> C:
        """Raises ConfigError; --help ends in argparse's SystemExit."""
        values: dict[str, Any] = {}
        variables: dict[str, str] = {}  # by the flag that each stands for
        for name in self.parsers:
            variable = self.environment_prefix + name.upper()
            if text := environ.get(variable):
                values[name] = self._parsed(variable, name, text)
                variables[flag(name)] = variable
        for name, given in self._given(argv).items():
            if given is not None:
                values[name] = given if isinstance(given, bool) else self._parsed(flag(name), name, given)
                variables.pop(flag(name), None)
        try:
            return self.config(**values)
        except ConfigError as error:  # it knows fields alone: whoever set a variable is told of the variable
            raise ConfigError(re.sub(r"--[a-z-]+", lambda at: variables.get(at[0], at[0]), str(error))) from None

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

    def _parsed(self, source: str, name: str, text: str) -> Any:
        parse = self.parsers[name]
        try:
            return parse(text)
        except ValueError as error:
            wanted = "a number" if parse in (int, float) else str(error)
            raise ConfigError(f"{source}: {wanted}, not {text!r}") from None

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            epilog=f"Each flag can be given as an environment variable, for example {self.environment_prefix}{self.example}.",
            allow_abbrev=False,
            exit_on_error=False,
        )
        for item in fields(cast(Any, self.config)):
            text = self.help[item.name]
            if isinstance(item.default, int | float | str) and "(default:" not in text:
                text += f" (default: {_shown(item.default)})"
            if item.type is bool:
                parser.add_argument(flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
            else:
                parser.add_argument(flag(item.name), default=None, help=text, metavar=item.name.upper())
        return parser


def parse_switch(text: str) -> bool:
    """Raises ValueError."""
    if text.lower() not in ("1", "0", "true", "false", "on", "off"):
        raise ValueError("on or off")
    return text.lower() in ("1", "true", "on")


def flag(name: str) -> str:
    """Of a field."""
    return "--" + name.replace("_", "-")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError."""
    if not low <= value <= high:
        raise ConfigError(f"{flag(name)}: {low} to {high}, not {value}")


def check_size(name: str, num_bytes: int, low: int, high: int) -> None:
    """Raises ConfigError."""
    if not low <= num_bytes <= high:
        raise ConfigError(f"{flag(name)}: {size(low)} to {size(high)}, not {size(num_bytes)}")


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raises ConfigError."""
    if value not in allowed:
        raise ConfigError(f"{flag(name)}: one of {', '.join(allowed)}, not {value!r}")


def check_address(name: str, address: str, wanted: str = "host:port such as 127.0.0.1:7410, or unix:/path") -> None:
    """Until there are credentials, whoever can reach an address is trusted: so loopback or a Unix socket only.

    Raises ConfigError, which says what is wanted where the form is wrong.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(
                f"{flag(name)}: the path of a Unix socket is absolute, as in unix:/run/kvkeeper.sock, not {address!r}"
            )
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"{flag(name)}: the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,9}", port):
        raise ConfigError(f"{flag(name)}: {wanted}, not {address!r}")
    if int(port) > _MAX_PORT:
        raise ConfigError(f"{flag(name)}: a port is at most {_MAX_PORT}, not {port}")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        raise ConfigError(f"{flag(name)}: a loopback IP address or localhost, not the name {host!r}") from None
    if not is_loopback:
        raise ConfigError(
            f"{flag(name)}: only loopback addresses and Unix sockets are served without credentials, not {address!r}"
        )


def check_metrics_address(address: str) -> None:
    """Empty, or loopback and a port: a Unix socket speaks no HTTP to Prometheus. Raises ConfigError."""
    if address.startswith("unix:"):
        raise ConfigError(f"--metrics-listen: {_METRICS_ADDRESS}, not {address!r}")
    if address:
        check_address("metrics_listen", address, _METRICS_ADDRESS)


def check_trace_endpoint(url: str) -> None:
    """Empty, or where a collector takes spans by HTTP. Raises ConfigError."""
    if url and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ConfigError(f"--trace-endpoint: a URL such as http://127.0.0.1:4318/v1/traces, not {url!r}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
