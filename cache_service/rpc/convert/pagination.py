"""Pages of lists of sequences, in the order of session and sequence id.

A page token says where its page ended, not how many rows came before: sequences that start or end between pages shift nothing.
"""

import base64
import binascii
import itertools
from collections.abc import Iterator

from ...core.values.errors import InvalidField
from ...core.values.views import SequenceView

Position = tuple[str, int]  # session id, sequence id


def position(view: SequenceView) -> Position:
    """Lists are ordered by it."""
    return view.session_id, view.sequence_id


def page(views: Iterator[SequenceView], size: int, token: str) -> tuple[list[SequenceView], str]:
    """At most size of the ordered views behind the token's page, and the token of the next page, empty on the last page.

    Raises InvalidField for a token that no page answered.
    """
    after = _position_of(token)
    rows = list(itertools.islice((view for view in views if position(view) > after), size + 1))
    if len(rows) <= size:
        return rows, ""
    return rows[:size], _token_of(rows[size - 1])


def _token_of(view: SequenceView) -> str:
    return base64.urlsafe_b64encode(f"{view.session_id} {view.sequence_id}".encode()).decode()


def _position_of(token: str) -> Position:
    if not token:
        return "", 0
    try:
        session_id, sequence_id = base64.b64decode(token, altchars=b"-_", validate=True).decode().split(" ")
        return session_id, int(sequence_id)
    except (ValueError, binascii.Error):
        raise InvalidField("page_token is the next_page_token of the page before", field="page_token") from None
