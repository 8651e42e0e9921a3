"""Reading a JSON object from a model folder, with every way it can be wrong as a typed error."""

import json
from pathlib import Path
from typing import Any

from .errors import ModelConfigError, ModelFileMissingError


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    Raises:
        ModelFileMissingError: no such file.
        ModelConfigError: unreadable, not JSON, or not an object.
    """
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileMissingError(str(path)) from None
    except OSError as error:
        raise ModelConfigError(path.name, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelConfigError(path.name, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(path.name, f"must hold an object, holds {type(parsed).__name__}")
    return parsed
