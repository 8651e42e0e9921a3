"""One declaration per setting: a field of a service's config that carries its help, its unit and what its value may be.

Owns that declaration, and the checks that services share. Flags, environment variables, `--help`, checks at start and
docs/operate/configuration.md are derived from it. Does not read the command line or the environment: see config.py.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from kvkeeper.common.service.sizes import parse_amount, parse_size, size

LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_PORT = 65535
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un less its final zero


class ConfigError(ValueError):
    """The service was asked for something it refuses to start with. One line, names the flag or the variable."""


@dataclass(frozen=True, slots=True)
class Check:
    """The values that are allowed: in words, and as a function that says why a value is refused, or None where it is not.

    parse: of a text, where the type of the setting is not enough.
    """

    words: str
    refusal: Callable[[Any], str | None]
    unit: str = ""
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a service's config, as everything outside the config sees it."""

    name: str
    is_switch: bool
    default: Any
    default_text: str  # empty: help says nothing of a default
    parse: Callable[[str], Any]  # raises ValueError
    group: str
    help: str
    example: str
    choices: tuple[str, ...]
    details: str
    check: Check | None

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def help_text(self) -> str:
        """For --help: with an example, choices and the default."""
        text = self.help
        if self.choices:
            text += f": {', '.join(self.choices)}"
        if self.example:
            text += f", for example {self.example}"
        return f"{text} (default: {self.default_text})" if self.default_text else text

    def shown(self, value: Any) -> str:
        """A value as it is written."""
        return _shown(value, self.parse) or str(value)

    @property
    def values(self) -> str:
        """The allowed values, in words, with the unit."""
        if self.is_switch or self.check is None:
            return "on or off" if self.is_switch else ""
        return f"{self.check.words} {self.check.unit}".strip()


def setting(
    default: Any,
    help: str,
    *,
    group: str,
    check: Check | None = None,
    example: str = "",
    choices: Collection[str] = (),
    default_text: str | None = None,
    parse: Callable[[str], Any] | None = None,
    details: str = "",
) -> Any:
    """A field of a config's dataclass. None is never checked.

    default: a value, or a function that makes it. default_text: of a default that its value does not explain. parse: where
    neither the check nor the type of the field says it; raises ValueError. details: what the reference adds to the help.
    """
    declared = {
        "group": group,
        "help": help,
        "check": one_of(choices) if choices else check,
        "example": example,
        "choices": tuple(choices),
        "default_text": default_text,
        "parse": parse or (check and check.parse),
        "details": details,
    }
    if callable(default):
        return field(default_factory=default, metadata=declared)
    return field(default=default, metadata=declared)


@cache
def list_settings(config: Any) -> tuple[Setting, ...]:
    """The settings of a config's dataclass, whose fields `setting` has made: its own in their order, then those of its base."""
    found = []
    for item in sorted(fields(config), key=lambda item: item.name not in config.__annotations__):
        declared = dict(item.metadata)
        parse = declared.pop("parse") or _get_parser(item.type)
        text = declared.pop("default_text")
        if text is None:
            text = _shown(item.default, parse)
        found.append(Setting(item.name, item.type is bool, item.default, text, parse, **declared))
    return tuple(found)


def check_settings(config: Any) -> None:
    """Each value of a config against its own check. Raises ConfigError."""
    for one in list_settings(config.__class__):
        value = getattr(config, one.name)
        if one.check is not None and value is not None and (reason := one.check.refusal(value)):
            raise ConfigError(f"{one.flag}: {reason}")


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def parse_switch(text: str) -> bool:
    """Raises ValueError."""
    if text.lower() not in ("1", "0", "true", "false", "on", "off"):
        raise ValueError("on or off")
    return text.lower() in ("1", "true", "on")


def must_be(words: str, holds: Callable[[Any], bool], shown: Callable[[Any], str] = repr, **more: Any) -> Check:
    """A check whose refusal names the wanted and the given value."""
    return Check(words, lambda value: None if holds(value) else f"{words}, not {shown(value)}", **more)


def between(low: float, high: float, unit: str = "") -> Check:
    return must_be(f"{low} to {high}", lambda value: low <= value <= high, unit=unit)


def size_between(low: int, high: int) -> Check:
    return must_be(f"{size(low)} to {size(high)}", lambda value: low <= value <= high, size, parse=parse_size)


def one_of(choices: Collection[str]) -> Check:
    return must_be(f"one of {', '.join(choices)}", lambda value: value in choices)


DEVICE = must_be("cpu, cuda or cuda:N", lambda value: re.fullmatch(r"cpu|cuda(:\d{1,3})?", value) is not None)


def is_local(address: str) -> bool:
    """Whether only programs of this host reach an address, which has the right form."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _form_refusal(address: str, wanted: str, *, is_name_ok: bool) -> str | None:
    """is_name_ok: of a host, as clients have it; a service listens at an IP address."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/"):
            return f"the path of a Unix socket is absolute, as in unix:/run/kvkeeper.sock, not {address!r}"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            return f"the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes"
        return None
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,9}", port):
        return f"{wanted}, not {address!r}"
    if int(port) > _MAX_PORT:
        return f"a port is at most {_MAX_PORT}, not {port}"
    if host == "localhost" or (is_name_ok and re.fullmatch(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host)):
        return None
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"an IP address or localhost, not the name {host!r}"
    return None


def _local_refusal(address: str, wanted: str) -> str | None:
    refusal = _form_refusal(address, wanted, is_name_ok=False)
    return refusal or (
        None if is_local(address) else f"only loopback addresses are served without credentials, not {address!r}"
    )


def _metrics_address_refusal(address: str) -> str | None:
    wanted = "host:port such as 127.0.0.1:7412"
    if address.startswith("unix:"):
        return f"{wanted}, not {address!r}"
    return _local_refusal(address, wanted) if address else None


def _holder_address_refusal(address: str) -> str | None:
    wanted = "unix:/path"
    return _local_refusal(address, wanted) if address.startswith("unix:") else f"{wanted}, not {address!r}"


def _health_address_refusal(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    refusal = f"an IP address and a port such as 0.0.0.0:7413, not {address!r}"
    if not address:
        return None
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > _MAX_PORT:
        return refusal
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        return refusal
    return None


_ADDRESS_WORDS = "host:port, or unix:/path"
_ADDRESS_EXAMPLE = "host:port such as 127.0.0.1:7410, or unix:/path"
# The form alone; kvkeeper.common.trust.settings says which of them need TLS and credentials.
LISTEN_ADDRESS = Check(_ADDRESS_WORDS, lambda address: _form_refusal(address, _ADDRESS_EXAMPLE, is_name_ok=False))
TARGET_ADDRESS = Check(_ADDRESS_WORDS, lambda address: _form_refusal(address, _ADDRESS_EXAMPLE, is_name_ok=True))
HOLDER_ADDRESS = Check("unix:/path", _holder_address_refusal)
OPTIONAL_HOLDER_ADDRESS = Check("unix:/path, or empty", lambda address: _holder_address_refusal(address) if address else None)
# A Unix socket speaks no HTTP to Prometheus.
METRICS_ADDRESS = Check("host:port, or empty", _metrics_address_refusal)
HEALTH_ADDRESS = Check("host:port, or empty", _health_address_refusal)
TRACE_ENDPOINT = Check(
    "a URL, or empty",
    lambda url: (
        f"a URL such as http://127.0.0.1:4318/v1/traces, not {url!r}"
        if url and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url)
        else None
    ),
)


def listen_setting(default: str) -> Any:
    return setting(
        default,
        "host:port, or unix:/path",
        group="Addresses",
        check=LISTEN_ADDRESS,
        details="An address that other hosts reach needs --tls-cert, and --auth-tokens or --tls-client-ca.",
    )


def log_level_setting() -> Any:
    return setting("info", "least severe messages that are logged", group="Watching", choices=LOG_LEVELS)


def _get_parser(kind: Any) -> Callable[[str], Any]:
    """By the type of a field; None beside it is what no text stands for."""
    if isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    parsers: dict[Any, Callable[[str], Any]] = {str: str, int: int, float: float, bool: parse_switch, Path: Path}
    return parsers[kind]


def _shown(value: Any, parse: Callable[[str], Any]) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if parse in (parse_size, parse_amount):
        return size(value).replace(" ", "") if value else "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int | str) else ""
