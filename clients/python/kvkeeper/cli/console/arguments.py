"""Functions for argparse's `type`: each checks the text of a flag, and its error says what the flag takes."""

import argparse
import json
from pathlib import Path
from typing import Any

_MAX_STOP_BYTES = 256  # the protocol's


def whole(text: str, bits: int = 32) -> int:
    """A number that fits the message; the service checks its range."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number, not {text!r}") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise argparse.ArgumentTypeError(f"{text} is beyond {bits} bits")
    return number


def seed(text: str) -> int:
    return whole(text, bits=64)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number, not {text!r}") from None


def utf8(text: str) -> str:
    """Arguments are bytes. Python turns those that are not UTF-8 into surrogates, which no message can hold."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError("not UTF-8 text")
    return text


def filled(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a text of 1 byte or more, not an empty one")
    return utf8(text)


def stop_text(text: str) -> str:
    num_bytes = len(utf8(text).encode())
    if not 1 <= num_bytes <= _MAX_STOP_BYTES:
        raise argparse.ArgumentTypeError(f"a text of 1 to {_MAX_STOP_BYTES} bytes, not of {num_bytes}")
    return text


def pair(text: str) -> tuple[str, str]:
    key, equals, value = utf8(text).partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"KEY=VALUE, not {text!r}")
    return key, value


def bias(text: str) -> tuple[int, float]:
    token_id, amount = pair(text)
    return _token_id(token_id), number(amount)


def token_list(text: str) -> list[int]:
    return [_token_id(part) for part in text.split(",")]


def _token_id(text: str) -> int:
    if (token_id := whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"a token id of 0 or more, not {text!r}")
    return token_id


def json_schema(text: str) -> str:
    """The text of the file of this name, or the schema itself, which begins with a brace or is true or false."""
    return _json_text(text, is_itself=text.lstrip().startswith("{") or text.strip() in ("true", "false"))


def json_list(text: str) -> list[Any]:
    return list(_json_value(text, list))


def json_object(text: str) -> dict[str, Any]:
    return dict(_json_value(text, dict))


def _json_value(text: str, kind: type) -> Any:
    """The value of the file of this name, or of the text itself, which begins with a brace or a bracket."""
    value = json.loads(_json_text(text, is_itself=text.lstrip().startswith(("{", "["))))
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError("a JSON list is needed" if kind is list else "a JSON object is needed")
    return value


def _json_text(text: str, *, is_itself: bool) -> str:
    schema = utf8(text)
    if not is_itself:
        try:
            schema = Path(text).read_bytes().decode()
        except OSError as error:
            raise argparse.ArgumentTypeError(
                f"the file {text!r} cannot be read: {error.strerror}; JSON itself begins with a brace"
            ) from None
        except UnicodeDecodeError:
            raise argparse.ArgumentTypeError(f"the file {text!r} is not UTF-8 text") from None
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        )
        raise argparse.ArgumentTypeError(f"not JSON: {reason}") from None
    return schema
