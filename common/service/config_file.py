"""A file of settings in TOML: one table for each service, keys named as the flags are.

    [cache]
    pool-memory = "8GiB"

    [engine]
    model = "/models/llama"
    fair-share = true

Owns which texts of the file become values; what a value may be is the setting's own (settings.py). Whatever is wrong with the
file is a ConfigError of one line that names the file, the table and the key.
"""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvkeeper.common.service.settings import ConfigError, Setting

TABLES = ("cache", "engine", "hold")


def read_table(path: Path, table: str, settings: Sequence[Setting]) -> dict[str, tuple[str, str | bool]]:
    """By the name of a setting, where its value stands and its text; a switch's value as it is. Raises ConfigError."""
    tables = _tables(path)
    known = {setting.flag.removeprefix("--"): setting for setting in settings}
    found: dict[str, tuple[str, str | bool]] = {}
    for key, value in tables.get(table, {}).items():
        where = f"{path}: [{table}] {key}"
        setting = known.get(key)
        if setting is None:
            raise ConfigError(f"{where}: there is no such setting{_meant(key, known)}")
        found[setting.name] = where, _text(where, setting, value)
    return found


def read_addresses(path: Path) -> dict[str, str]:
    """By table, the address at which that service is to listen, where the file says so. Raises ConfigError."""
    return {name: str(table["listen"]) for name, table in _tables(path).items() if "listen" in table}


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} stands in no table; write it under [cache] or [engine]")
        if name not in TABLES:
            raise ConfigError(f"{path}: [{name}]: there is no such table{_meant(name, TABLES)}")
    return tables


def _text(where: str, setting: Setting, value: object) -> str | bool:
    """Raises ConfigError where the value has another type than the setting."""
    if setting.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: true or false, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: a number or a text, not {_kind(value)}")
    return str(value)


def _kind(value: object) -> str:
    return {bool: str(value).lower(), list: "a list", dict: "a table"}.get(type(value), "a date")


def _meant(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f", did you mean {near[0]}?" if near else ""
