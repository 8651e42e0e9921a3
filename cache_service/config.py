"""Configuration of the cache service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a ConfigError of
one line that names the flag. Does not look at the machine: whether memory or an address can be had is found out at start.
"""

import argparse
import ipaddress
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cache_service.errors import InvalidField
from cache_service.eviction import make_policy

ENVIRONMENT_PREFIX = "KVKEEPER_CACHE_"
MIB = 1 << 20
MAX_POOL_BLOCKS = 1 << 20  # bounds what the core's arrays may take, however small a block is
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un less its final zero
_MAX_RUNTIME_DIR_BYTES = MAX_SOCKET_PATH_BYTES - len("/attach-0123456789abcdef.sock")
_MAX_TOKEN_SLOTS = 1 << 28  # of all sequences together: the core keeps their ids in one array
_LOG_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}


class ConfigError(ValueError):
    """The service was asked for something it refuses to start with. One line, names the flag."""


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvkeeper" if base else Path(tempfile.gettempdir()) / f"kvkeeper-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    listen: str = "127.0.0.1:7410"  # loopback host:port, or unix:/path
    runtime_dir: Path = field(default_factory=_default_runtime_dir)  # of the attach socket; made with mode 0700
    pool_memory: int = 256 * MIB  # bytes of each pool, reserved at start; without effect where num_blocks is given
    num_pools: int = 2
    num_blocks: int | None = None  # blocks of each pool, null block included, reserved when its first session opens
    max_sequences: int = 256
    max_tokens_per_sequence: int = 4096
    max_sessions: int = 64
    eviction_policy: str = "adaptive"
    prefix_caching: bool = True
    reflection: bool = True
    drain_timeout: float = 3.0  # seconds that live sessions have to close once the service is asked to stop
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_listen(self.listen)
        if len(os.fsencode(self.runtime_dir)) > _MAX_RUNTIME_DIR_BYTES:
            raise ConfigError(f"--runtime-dir: a path of at most {_MAX_RUNTIME_DIR_BYTES} bytes, for the sockets in it")
        _check_range("pool_memory", self.pool_memory, 64 << 10, 1 << 46)
        _check_range("num_pools", self.num_pools, 1, 64)
        if self.num_blocks is not None:
            _check_range("num_blocks", self.num_blocks, 2, MAX_POOL_BLOCKS)
        _check_range("max_sequences", self.max_sequences, 1, 1 << 16)
        _check_range("max_tokens_per_sequence", self.max_tokens_per_sequence, 1, 1 << 22)
        if self.max_sequences * self.max_tokens_per_sequence > _MAX_TOKEN_SLOTS:
            raise ConfigError(f"--max-sequences times --max-tokens-per-sequence is at most {_MAX_TOKEN_SLOTS}")
        _check_range("max_sessions", self.max_sessions, 1, 4096)
        _check_range("drain_timeout", self.drain_timeout, 0, 3600)
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"--log-level: one of {', '.join(_LOG_LEVELS)}, not {self.log_level!r}")
        try:
            make_policy(self.eviction_policy, 2, lambda blocks: blocks > 0)
        except InvalidField as error:
            raise ConfigError(f"--eviction-policy: one of {error.metadata['limit']}, not {self.eviction_policy!r}") from None

    @property
    def socket_path(self) -> Path | None:
        """Where the service listens when that is a Unix socket."""
        return Path(self.listen.removeprefix("unix:")) if self.listen.startswith("unix:") else None


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> CacheConfig:
    """Flags over KVKEEPER_CACHE_* over defaults. Raises ConfigError; --help and unknown flags end in argparse's SystemExit."""
    values: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        text = environ.get(ENVIRONMENT_PREFIX + name.upper())
        if text:
            values[name] = _parsed(ENVIRONMENT_PREFIX + name.upper(), parse, text)
    for name, text in vars(_parser().parse_args(argv)).items():
        if text is not None:
            values[name] = text if isinstance(text, bool) else _parsed(_flag(name), _PARSERS[name], text)
    return CacheConfig(**values)


def parse_size(text: str) -> int:
    """Bytes of "256MiB", "2GiB" or a plain number. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,20}) ?([KMGT]iB|B|)", text)
    if match is None:
        raise ValueError("a number of bytes such as 268435456, 256MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def _parse_switch(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false", "on", "off"):
        raise ValueError("on or off")
    return text.lower() in ("1", "true", "on")


_PARSERS: dict[str, Any] = {
    "listen": str,
    "runtime_dir": Path,
    "pool_memory": parse_size,
    "num_pools": int,
    "num_blocks": int,
    "max_sequences": int,
    "max_tokens_per_sequence": int,
    "max_sessions": int,
    "eviction_policy": str,
    "prefix_caching": _parse_switch,
    "reflection": _parse_switch,
    "drain_timeout": float,
    "log_level": str,
}

_HELP = {
    "listen": "loopback host:port, or unix:/path",
    "runtime_dir": "folder of the attach socket (default: $XDG_RUNTIME_DIR/kvkeeper, or a private temporary one)",
    "pool_memory": "memory of each pool, reserved at start, for example 256MiB",
    "num_pools": "most pools, that is KV specs, at once",
    "num_blocks": "blocks of each pool instead of --pool-memory, reserved when its first session opens",
    "max_sequences": "most live sequences of a pool",
    "max_tokens_per_sequence": "most tokens of a sequence",
    "max_sessions": "most live sessions",
    "eviction_policy": "which cached block is forgotten first",
    "prefix_caching": "share committed prefixes between sequences",
    "reflection": "answer gRPC server reflection",
    "drain_timeout": "seconds that live sessions have to close once the service is asked to stop",
    "log_level": ", ".join(_LOG_LEVELS),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvkeeper cache",
        description="The cache service: owns the KV cache's memory and block tables.",
        epilog=f"Each flag can be given as an environment variable, for example {ENVIRONMENT_PREFIX}POOL_MEMORY=1GiB.",
        allow_abbrev=False,
    )
    for item in fields(CacheConfig):
        text = _HELP[item.name]
        if isinstance(item.default, int | float | str):
            text += f" (default: {_shown(item.name, item.default)})"
        if item.type is bool:
            parser.add_argument(_flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(_flag(item.name), default=None, help=text, metavar=item.name.upper())
    return parser


def _parsed(source: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        wanted = "a number" if parse in (int, float) else str(error)
        raise ConfigError(f"{source}: {wanted}, not {text!r}") from None


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value // MIB}MiB" if name == "pool_memory" else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{_flag(name)}: {low} to {high}, not {value}")


def _check_listen(listen: str) -> None:
    """Until there are credentials, whoever can reach the address is trusted: so loopback or a Unix socket only."""
    if listen.startswith("unix:"):
        path = listen.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"--listen: the path of a Unix socket is absolute, as in unix:/run/kvkeeper.sock, not {listen!r}")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"--listen: the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return
    host, _, port = listen.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"--listen: host:port or unix:/path, not {listen!r}")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        raise ConfigError(f"--listen: a loopback IP address or localhost, not the name {host!r}") from None
    if not is_loopback:
        raise ConfigError(f"--listen: only loopback addresses and Unix sockets are served without credentials, not {listen!r}")
