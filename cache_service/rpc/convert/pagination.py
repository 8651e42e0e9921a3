"""Pages of lists of sequences, in the order of session and sequence id.

A page token says where its page ended, not how many rows came before: sequences that start or end between pages shift nothing.
"""

import base64
import binascii
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...core.values.errors import InvalidField
from ...core.values.types import Int64Array


class Position(NamedTuple):
    """Lists are ordered by it."""

    session_id: str
    sequence_id: int


def page(ids: Iterable[tuple[str, Int64Array]], size: int, token: str) -> tuple[list[Position], str]:
    """At most size positions behind the token's page, and the token of the next page, empty on the last page.

    ids: sessions in order, with the ascending ids of their sequences. Raises InvalidField for a token that came with no page.
    """
    after, rows = _parse_token(token), list[Position]()
    for session_id, own in ids:
        if session_id >= after.session_id and len(rows) <= size:
            start = int(np.searchsorted(own, after.sequence_id, "right")) if session_id == after.session_id else 0
            rows += (Position(session_id, sequence_id) for sequence_id in own[start : start + size + 1].tolist())
    if len(rows) <= size:
        return rows, ""
    return rows[:size], _make_token(rows[size - 1])


def _make_token(end: Position) -> str:
    return base64.urlsafe_b64encode(f"{end.session_id} {end.sequence_id}".encode()).decode()


def _parse_token(token: str) -> Position:
    if not token:
        return Position("", 0)
    try:
        session_id, sequence_id = base64.b64decode(token, altchars=b"-_", validate=True).decode().split(" ")
        return Position(session_id, int(sequence_id))
    except (ValueError, binascii.Error):
        raise InvalidField("page_token is the next_page_token of the page before", field="page_token") from None
