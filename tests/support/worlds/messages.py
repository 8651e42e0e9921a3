"""Messages of the cache protocol as docs/api/protocol.md shows them: JSON, with the columns of a step as lists of numbers.

Owns the form and nothing else: a column of sequence ids or transfer ids holds int64, every other one int32; session, epoch and
attach token, which differ from run to run, are written $S, $E and $T.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message

from kvkeeper.cache.v1 import cache_service_pb2 as pb

_INT64_COLUMN = re.compile(r"(sequence|parent|child|transfer)_ids$")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of the example: its request, and the answer, or a refusal as (code, reason, metadata)."""

    method: str
    request: str
    answer: str
    refusal: tuple[str, str, str] | None


def exchanges(text: str) -> list[Exchange]:
    """What a page shows: lines `-> Method {..}` each followed by `<- {..}` or `<- CODE REASON {..}`."""
    found: list[Exchange] = []
    for method, request, told in re.findall(r"^-> (\w+) (.*)\n<- (.*)$", text, re.MULTILINE):
        refused = re.fullmatch(r"([A-Z_]+) ([A-Z_]+) (\{.*\})", told)
        found.append(Exchange(method, request, told, (refused[1], refused[2], refused[3]) if refused else None))
    return found


def parse(method: str, shown: dict[str, Any]) -> Message:
    """The request of these JSON fields. Raises ParseError for a field that the message does not have."""
    message: Message = getattr(pb, f"{method}Request")()
    columns = {name: value for name, value in shown.items() if _is_column(message, name)}
    json_format.ParseDict({name: value for name, value in shown.items() if name not in columns}, message)
    for name, values in columns.items():
        setattr(message, name, np.array(values, "<i8" if _INT64_COLUMN.search(name) else "<i4").tobytes())
    return message


def show(message: Message) -> dict[str, Any]:
    """The same form back: fields that are set, columns as lists, 64-bit numbers as numbers."""
    shown: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.type == field.TYPE_BYTES:
            shown[field.name] = np.frombuffer(value, "<i8" if _INT64_COLUMN.search(field.name) else "<i4").tolist()
        elif field.type == field.TYPE_MESSAGE and not isinstance(value, Message):
            shown[field.name] = [show(item) for item in value]
        elif field.type == field.TYPE_MESSAGE:
            shown[field.name] = show(value)
        elif field.enum_type is not None:
            shown[field.name] = field.enum_type.values_by_number[value].name
        else:
            shown[field.name] = value if isinstance(value, str | int | float | bool) else list(value)
    return shown


def differences(shown: object, told: object, where: str = "answer") -> list[str]:
    """Where what a page shows is not what was told; fields that the page leaves out are not compared."""
    if isinstance(shown, dict) and isinstance(told, dict):
        return [d for key, value in shown.items() for d in differences(value, told.get(key), f"{where}.{key}")]
    return [] if shown == told else [f"{where}: the page shows {json.dumps(shown)}, the service answers {json.dumps(told)}"]


def _is_column(message: Message, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name.get(name)
    return field is not None and field.type == field.TYPE_BYTES
