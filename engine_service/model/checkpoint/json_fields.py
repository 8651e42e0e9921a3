"""Typed fields of a config.json. A field of another type raises a ModelConfigError that names it."""

from collections.abc import Mapping
from typing import Any, Final

from .errors import ModelConfigError

CONFIG_FILE: Final = "config.json"


def count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; a missing or null one is `default`, or refused."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise bad(key, f"must be a positive integer, is {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise bad(key, f"must be a positive number, is {value!r}")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad(key, f"must be true or false, is {value!r}")
    return bool(value)


def bad(key: str, problem: str) -> ModelConfigError:
    return ModelConfigError(CONFIG_FILE, f"{key} {problem}")
