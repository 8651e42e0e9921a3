"""PlainReader: asks for the plain tokens of many requests at once, so that a token costs the one who writes it no call.

It reads slots of UnreadTokens that were given to requests, in place of the reader that each of them would have. Pure.
"""

from collections.abc import Callable
from typing import Any

from .plain_columns import NO_COLUMNS, PlainColumns
from .unread_tokens import UnreadSlot, UnreadTokens


class PlainReader:
    """Reads the plain tokens of many requests at once. tell_more: called when there is something, once until take."""

    def __init__(self, tell_more: Callable[[], None]) -> None:
        self.tell_more = tell_more
        self._all: UnreadTokens[Any] | None = None  # of the requests, which are one engine's

    def join(self, slot: UnreadSlot, number: int) -> None:
        """Read this slot, too, until it is taken back."""
        self._all = slot.join(self, number)

    def take(self) -> PlainColumns:
        """The unread tokens of all requests, which are read with that."""
        return NO_COLUMNS if self._all is None else self._all.take_of(self)

    def close(self) -> None:
        """Read no more."""
        if self._all is not None:
            self._all.leave(self)
