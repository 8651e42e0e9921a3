"""Reading a JSON object from a model folder, with every way it can be wrong as a typed error."""

import json
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
        parsed = json.loads(content)
    except FileNotFoundError:
        raise ModelFileMissingError(str(path)) from None
    except OSError as error:
        raise ModelConfigError(path.name, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelConfigError(path.name, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(path.name, f"must hold an object, holds {type(parsed).__name__}")
    return parsed
