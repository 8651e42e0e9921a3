"""What a service replied, as JSON for scripts, or as a table for people."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvkeeper.cli.console.tables import table

M = TypeVar("M", bound=Message)


def as_json(message: Message) -> dict[str, Any]:
    """Every field by its name in the protocol, zeros included.

    Unlike protobuf's own JSON, 64-bit integers are numbers: ids and counters of the protocol fit in 53 bits.
    """
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def print_list(
    name: str, messages: Sequence[M], headers: Sequence[str], row: Callable[[M], Sequence[object]], *, is_json: bool
) -> None:
    """name: of the list, in the plural. row: gives the cells of a message, in the order of the headers."""
    if is_json:
        print(json.dumps({name: [as_json(message) for message in messages]}))
    elif messages:
        print(table(headers, [row(message) for message in messages]))
    else:
        print(f"no live {name}")


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)  # of texts and numbers
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return as_json(value)
    return field.enum_type.values_by_number[value].name if field.enum_type else value
