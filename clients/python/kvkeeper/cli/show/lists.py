"""print_list: messages that a service lists, as a table for people or as JSON for programs."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kvkeeper.cli.console.as_json import as_json
from kvkeeper.cli.console.tables import table

M = TypeVar("M", bound=Message)


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
