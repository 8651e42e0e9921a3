"""RemoteServer: what a remote store asks of the place where values lie, whatever that speaks.

Rules: a value is a header and a block; what is read lies in the buffers that are handed in only where the result says DONE, and
is not believed before its digest was compared. Each batch tells the era that the server was in before it: what was asked under
another one does not count. A method that does not get an answer in time, or another one than it asked for, raises ServerError.
Every method may be called in any thread.
"""

from collections.abc import Sequence
from typing import Protocol

from ...core.values.copies import TierResult


class ServerError(Exception):
    """No answer. The text may name the address, so it is never shown."""


class RemoteServer(Protocol):
    """One server, or one service of several."""

    @property
    def facts(self) -> dict[str, object]:
        """For the log."""

    def tell_era(self, key: bytes, era: bytes) -> None:
        """From now on this is the era."""

    def learn_era(self, key: bytes, era: bytes) -> bytes:
        """The era; the one that is handed in where the server knows none."""

    def use(self, era_key: bytes, places: Sequence[bytes]) -> tuple[bytes | None, list[bool]]:
        """The era, and which places have a value. Where values live for a time, it begins anew."""

    def get(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[memoryview], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        """The era, and for each place DONE, MISSING, DAMAGED (a value of another length) or FAILED."""

    def put(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        """The era, and for each place DONE, FAILED, or CANCELLED where it was not asked to take the value."""

    def delete(self, places: Sequence[bytes]) -> None: ...

    def close(self) -> None:
        """No thread is at work, but for calls that were given up."""
