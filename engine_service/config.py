"""Configuration of the engine service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a
ConfigError of one line that names the flag. Does not look at the machine: whether a model can be loaded or an address
be had is found out at start.
"""

import argparse
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "KVKEEPER_ENGINE_"
HASH_TOY = "hash-toy"  # value of --model for the toy whose output proves its cache; for tests
DEMO_MODEL = Path(__file__).parent / "demo_model"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un less its final zero
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(ValueError):
    """The service was asked for something it refuses to start with. One line, names the flag."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    model: str = str(DEMO_MODEL)
    cache: str = "127.0.0.1:7410"
    listen: str = "127.0.0.1:7411"
    token_budget: int = 2048
    max_sequences: int = 256
    chunk_size: int = 512
    block_size: int = 16
    max_tokens_per_sequence: int | None = None
    max_waiting: int = 1000
    dtype: str = "auto"
    threads: int | None = None
    lease_ms: int = 10_000
    reconnect_timeout: float = 20.0
    drain_timeout: float = 5.0
    reflection: bool = True
    progress: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model: a folder with config.json, weights and tokenizer.json")
        for name in ("cache", "listen"):
            check_address(_flag(name), getattr(self, name))
        _check_range("token_budget", self.token_budget, 1, 1 << 20)
        _check_range("max_sequences", self.max_sequences, 1, 1 << 14)
        _check_range("chunk_size", self.chunk_size, 1, 1 << 20)
        _check_range("block_size", self.block_size, 1, 1024)
        if self.max_tokens_per_sequence is not None:
            _check_range("max_tokens_per_sequence", self.max_tokens_per_sequence, 2, 1 << 22)
        _check_range("max_waiting", self.max_waiting, 1, 1 << 20)
        if self.threads is not None:
            _check_range("threads", self.threads, 1, 1024)
        _check_range("lease_ms", self.lease_ms, 500, 60_000)
        _check_range("reconnect_timeout", self.reconnect_timeout, 0, 3600)
        _check_range("drain_timeout", self.drain_timeout, 0, 3600)
        for name, allowed in (("dtype", _DTYPES), ("log_level", _LOG_LEVELS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{_flag(name)}: one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @property
    def socket_path(self) -> Path | None:
        """Where the service listens when that is a Unix socket."""
        return Path(self.listen.removeprefix("unix:")) if self.listen.startswith("unix:") else None


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Flags over KVKEEPER_ENGINE_* over defaults. Raises ConfigError; --help and unknown flags end in SystemExit."""
    values: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        if text := environ.get(ENVIRONMENT_PREFIX + name.upper()):
            values[name] = _parsed(ENVIRONMENT_PREFIX + name.upper(), parse, text)
    for name, given in vars(_parser().parse_args(argv)).items():
        if given is not None:
            values[name] = given if isinstance(given, bool) else _parsed(_flag(name), _PARSERS[name], given)
    return EngineConfig(**values)


def check_address(flag: str, address: str) -> None:
    """Until there are credentials, whoever can reach an address is trusted: so loopback or a Unix socket only."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{flag}: the path of a Unix socket is absolute, as in unix:/run/kvkeeper.sock")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"{flag}: the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{flag}: host:port or unix:/path, not {address!r}")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        raise ConfigError(f"{flag}: a loopback IP address or localhost, not the name {host!r}") from None
    if not is_loopback:
        raise ConfigError(f"{flag}: only loopback addresses and Unix sockets without credentials, not {address!r}")


def _switch(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false", "on", "off"):
        raise ValueError("on or off")
    return text.lower() in ("1", "true", "on")


_PARSERS: dict[str, Any] = {
    "model": str,
    "cache": str,
    "listen": str,
    "token_budget": int,
    "max_sequences": int,
    "chunk_size": int,
    "block_size": int,
    "max_tokens_per_sequence": int,
    "max_waiting": int,
    "dtype": str,
    "threads": int,
    "lease_ms": int,
    "reconnect_timeout": float,
    "drain_timeout": float,
    "reflection": _switch,
    "progress": _switch,
    "log_level": str,
}

_HELP = {
    "model": "folder of a Hugging Face model (default: the embedded demo model)",
    "cache": "address of the cache service",
    "listen": "loopback host:port, or unix:/path",
    "token_budget": "most tokens computed in a step",
    "max_sequences": "most sequences in a step",
    "chunk_size": "most prompt tokens of one sequence in a step",
    "block_size": "tokens per block; engines share KV only where it is equal",
    "max_tokens_per_sequence": "most tokens of a sequence (default: what the model and the pool allow)",
    "max_waiting": "most waiting sequences; a request beyond them is refused",
    "dtype": "what the model computes in: " + ", ".join(_DTYPES) + "; auto is float32 on a CPU",
    "threads": "threads of the forward pass (default: torch's)",
    "lease_ms": "lease of the session on the cache service, milliseconds",
    "reconnect_timeout": "seconds that requests are kept while the cache service is away",
    "drain_timeout": "seconds that running requests have to end once the service is asked to stop",
    "reflection": "answer gRPC server reflection",
    "progress": "show a progress bar while weights are loaded",
    "log_level": ", ".join(_LOG_LEVELS),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvkeeper engine",
        description="The engine service: schedules requests and runs the model on the cache service's memory.",
        epilog=f"Each flag can be given as an environment variable, for example {ENVIRONMENT_PREFIX}TOKEN_BUDGET=512.",
        allow_abbrev=False,
    )
    for item in fields(EngineConfig):
        text = _HELP[item.name]
        if item.type is bool:
            parser.add_argument(_flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            if item.name != "model" and item.default is not None:
                text += f" (default: {item.default})"
            parser.add_argument(_flag(item.name), default=None, help=text, metavar=item.name.upper())
    return parser


def _parsed(source: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        wanted = "a number" if parse in (int, float) else str(error)
        raise ConfigError(f"{source}: {wanted}, not {text!r}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{_flag(name)}: {low} to {high}, not {value}")
