"""What goes over the holder's socket: one packet each way, a JSON object, and a descriptor beside it where one is handed over.

| client sends | holder answers |
|---|---|
| `{"call": "put", "name": N, "num_bytes": B}` and a descriptor | `{}` |
| `{"call": "get", "name": N}` | `{"num_bytes": B}` and the descriptor |
| `{"call": "list"}` | `{"held": {N: B, ...}}` |
| `{"call": "drop", "name": N}` | `{}` |

A refusal is `{"error": REASON}`. The reasons are names of capital letters, and show no name of a descriptor.
"""

import json
import re
from dataclasses import dataclass

MAX_REQUEST_BYTES = 512
MAX_HELD = 256
MAX_ANSWER_BYTES = MAX_HELD * 128
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_BYTES = 1 << 62


class HoldRefused(Exception):
    """The holder does not do it. The text is the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call of a client. num_bytes: of the memory, with `put`; else 0."""

    call: str
    name: str = ""
    num_bytes: int = 0

    def encode(self) -> bytes:
        fields: dict[str, object] = {"call": self.call}
        if self.call != "list":
            fields["name"] = self.name
        if self.call == "put":
            fields["num_bytes"] = self.num_bytes
        return json.dumps(fields).encode()


def decode_request(packet: bytes) -> Request:
    """Raises HoldRefused."""
    fields = _object(packet, MAX_REQUEST_BYTES)
    match fields:
        case {"call": "list", **others} if not others:
            return Request("list")
        case {"call": ("get" | "drop") as call, "name": str() as name, **others} if not others and is_name(name):
            return Request(call, name)
        case {"call": "put", "name": str() as name, "num_bytes": int() as num_bytes, **others} if not others and is_name(name):
            if is_size(num_bytes):
                return Request("put", name, num_bytes)
    raise HoldRefused("BAD_REQUEST")


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_size(num_bytes: object) -> bool:
    return type(num_bytes) is int and 0 < num_bytes < _MOST_BYTES


def decode_answer(packet: bytes) -> dict[str, object]:
    """Raises HoldRefused with the holder's reason, or BAD_ANSWER."""
    try:
        fields = _object(packet, MAX_ANSWER_BYTES)
    except HoldRefused:
        raise HoldRefused("BAD_ANSWER") from None
    if "error" in fields:
        reason = fields["error"]
        raise HoldRefused(reason if isinstance(reason, str) and re.fullmatch(r"[A-Z_]{1,40}", reason) else "BAD_ANSWER")
    return fields


def _object(packet: bytes, most_bytes: int) -> dict[str, object]:
    try:
        fields = json.loads(packet) if len(packet) <= most_bytes else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise HoldRefused("BAD_REQUEST")
    return fields
