"""Reading a JSON object from a model folder, and typed fields of its config.json; every way they can be wrong is an error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .errors import ModelConfigError, ModelFileMissingError

POINTER_SAID: Final = "is a pointer of git-lfs, not the file itself; `git lfs pull` in its folder fetches that"
_POINTER: Final = b"version https://git-lfs"


def is_pointer(content: bytes) -> bool:
    """Whether a file that begins so only stands for another one, as a clone has it without git-lfs."""
    return content.startswith(_POINTER)


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    Raises:
        ModelFileMissingError: no such file.
        ModelConfigError: unreadable, not JSON, or not an object.
    """
    try:
        content = path.read_bytes()
        if is_pointer(content):
            raise ModelConfigError(path.name, POINTER_SAID)
        parsed = json.loads(content, object_hook=_number)
    except FileNotFoundError:
        raise ModelFileMissingError(str(path)) from None
    except OSError as error:
        raise ModelConfigError(path.name, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelConfigError(path.name, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(path.name, f"must hold an object, holds {type(parsed).__name__}")
    return parsed


def _number(found: dict[str, Any]) -> object:
    """A number that JSON cannot say, as the transformers library writes it."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


CONFIG_FILE: Final = "config.json"


def count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; a missing or null one is `default`, or refused."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise bad(key, f"must be a positive integer below 2**31, is {value!r}")
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
