"""RemoteStore: the blocks of one pool in a store of others, as the threads of its tier put them there and fetch them.

Rules: keys are `kvkeeper:1:` and a keyed hash of era and name, so they reveal nothing of a prompt; every batch comes with the
server's era, and what was asked under another one does not count. The era is a random value that all services of one secret and
KV spec share: a clearing draws a new one, and none that was there before comes back, also where the server has lost it. Where
the server itself goes back to an older one, as a replica may that stands in for it, a new one is drawn. A clearing that the
server does not hear leaves this store silent until it does. Errors of the server never leave this file but as results. Every
method may be called in any thread.

A RemoteServer is the place where values lie, whatever that speaks. A value is a header and a block; what is read lies in the
buffers that are handed in only where the result says DONE, and is not believed before its digest was compared. A method that
does not get an answer in time, or another one than it asked for, raises ServerError.

The form of a value: a header of one check, one length and one digest, and then the bytes of a block. The check is keyed, and
covers the key that the value lies under, its length and its digest: so a value that was moved, cut, or put there without the
secret says nothing. The digest (XXH3, 128 bits) finds bytes that changed. Numbers are little-endian.
"""

import hashlib
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ...core.values.copies import TierOrder, TierResult
from ...core.values.kv_spec import KvSpec
from ..arena import ByteArray
from ..disk.slab_form import digest_under
from .remote_address import RemoteSecret


class ServerError(Exception):
    """No answer. The text may name the address, so it is never shown."""


class RemoteServer(Protocol):
    """One server, or one service of several."""

    @property
    def facts(self) -> dict[str, object]:
        """For the log."""

    def set_era(self, key: bytes, era: bytes) -> None:
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
        """No thread is running, but for calls that were given up."""


_MAGIC = b"kvkeeper remote1"
_CHECK_BYTES, _DIGEST_BYTES = 16, 16
_LENGTH = struct.Struct("<Q")
_FIELD_BYTES = _LENGTH.size + _DIGEST_BYTES
HEADER_BYTES = len(_MAGIC) + _CHECK_BYTES + _FIELD_BYTES


class ValueForm:
    """Values of one pool."""

    def __init__(self, key: bytes, block_bytes: int, digest: Callable[[memoryview], bytes]) -> None:
        """key: 1 to 64 bytes, secret."""
        self._key, self._block_bytes, self._digest = key, block_bytes, digest

    def header(self, at: bytes, block: memoryview) -> bytes:
        """What the value of a block that is to lie under the key `at` begins with."""
        fields = _LENGTH.pack(len(block)) + self._digest(block)
        return b"".join((_MAGIC, self._check(at, fields), fields))

    def is_whole(self, at: bytes, header: bytes, block: memoryview) -> bool:
        """Whether these are the header and the block of a value that was put under the key `at`."""
        check, fields = header[len(_MAGIC) : -_FIELD_BYTES], header[-_FIELD_BYTES:]
        if not header.startswith(_MAGIC) or check != self._check(at, fields) or len(header) != HEADER_BYTES:
            return False
        if _LENGTH.unpack_from(fields)[0] != self._block_bytes or len(block) != self._block_bytes:
            return False
        return self._digest(block) == fields[_LENGTH.size :]  # in the memory that it is used from

    def _check(self, at: bytes, fields: bytes) -> bytes:
        return hashlib.blake2b(at + fields, digest_size=_CHECK_BYTES, key=self._key, person=b"value").digest()


_PREFIX = b"kvkeeper:1:"
_ERA_BYTES, _KEY_BYTES = 16, 20
_MOST_GONE = 1024

Answer = TypeVar("Answer")


class RemoteStore:
    """One pool's."""

    def __init__(self, server: RemoteServer, secret: RemoteSecret, spec: KvSpec) -> None:
        self.block_bytes = self.slot_bytes = spec.stored_bytes
        self.name_key = secret.derive(b"names", spec.stored_key)
        self.facts = server.facts
        self._server = server
        self._key = secret.derive(b"keys", spec.stored_key)
        self._era_key = _PREFIX + b"era:" + secret.derive(b"era", spec.stored_key)[:_KEY_BYTES].hex().encode()
        self._form = ValueForm(
            secret.derive(b"values", spec.stored_key), spec.stored_bytes, digest_under(int.from_bytes(self._key[:8], "little"))
        )
        self._era: bytes | None = None  # as the server said last
        self._last_era = b""
        self._gone: deque[bytes] = deque(maxlen=_MOST_GONE)  # eras that another one has followed
        self._num_clearings = self._num_known = 0  # asked for, and known to the server; the former is the loop's alone
        self._asking = threading.Lock()  # for the era; the loop never takes it

    def begin_clearing(self) -> None:
        """From now on nothing is asked before the server knows of a new era."""
        self._num_clearings += 1

    def write_era(self, era: int) -> bool:
        """Sends the server a new era, if it does not know it yet. Returns whether it knows."""
        return _guarded(self._settled_era) is not None

    def ask(self, names: Sequence[bytes]) -> int | None:
        """How many of the first names are there, which live anew; None where the server gives no answer."""

        def ask() -> int:
            era = self._settled_era()
            current, are_there = self._server.use(self._era_key, [self._at(era, name) for name in names])
            if not self._is_still(era, current):
                return 0
            return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))

        return _guarded(ask)

    def read(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Fills hosts [num_host_blocks, block_bytes] as the orders say. A block without the result DONE holds anything."""

        def read() -> list[TierResult]:
            era = self._settled_era()
            places = [self._at(era, order.name) for order in orders]
            headers = [memoryview(bytearray(HEADER_BYTES)) for _ in orders]
            blocks = [memoryview(hosts[order.host]) for order in orders]
            current, results = self._server.get(self._era_key, places, headers, blocks)
            if not self._is_still(era, current):
                return [TierResult.MISSING] * len(orders)
            for at, result in enumerate(results):
                if result is TierResult.DONE and not self._form.is_whole(places[at], bytes(headers[at]), blocks[at]):
                    results[at] = TierResult.DAMAGED
            damaged = [place for place, result in zip(places, results, strict=True) if result is TierResult.DAMAGED]
            if damaged:
                _guarded(lambda: self._server.delete(damaged))
            return results

        return _guarded(read) or [TierResult.FAILED] * len(orders)

    def write(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Puts hosts [num_host_blocks, block_bytes] there as the orders say. Returns a result for each."""

        def write() -> list[TierResult]:
            era = self._settled_era()
            places = [self._at(era, order.name) for order in orders]
            blocks = [memoryview(hosts[order.host]) for order in orders]
            headers = [self._form.header(place, block) for place, block in zip(places, blocks, strict=True)]
            current, results = self._server.put(self._era_key, places, headers, blocks)
            return results if self._is_still(era, current) else [TierResult.CANCELLED] * len(orders)

        return _guarded(write) or [TierResult.FAILED] * len(orders)

    def close(self) -> None:
        """No thread may be running."""
        _guarded(self._server.close)

    def _at(self, era: bytes, name: bytes) -> bytes:
        return _PREFIX + hashlib.blake2b(era + name, digest_size=_KEY_BYTES, key=self._key, person=b"at").hexdigest().encode()

    def _settled_era(self) -> bytes:
        """The era that the server knows, drawn if it knows none, or if the pool was cleared. Raises ServerError."""
        with self._asking:
            era, num_clearings = self._era, self._num_clearings
            if num_clearings != self._num_known:
                era = secrets.token_bytes(_ERA_BYTES)
                self._server.set_era(self._era_key, era)
            elif era is None:
                era = self._server.learn_era(self._era_key, secrets.token_bytes(_ERA_BYTES))
                if len(era) != _ERA_BYTES:
                    raise ServerError("no era")
                if era in self._gone:
                    era = secrets.token_bytes(_ERA_BYTES)
                    self._server.set_era(self._era_key, era)
            if era != self._last_era:
                self._gone.append(self._last_era)
                self._last_era = era
            self._era, self._num_known = era, num_clearings
            return era

    def _is_still(self, era: bytes, current: bytes | None) -> bool:
        """Whether what was asked in this era counts, now that the server has named the one that it is in."""
        if current != era:
            with self._asking:
                if self._era == era:
                    self._era = None
            return False
        return self._era == era and self._num_clearings == self._num_known


def _guarded(ask: Callable[[], Answer]) -> Answer | None:
    """The answer, or None where the server refuses, is gone, hangs or speaks something else."""
    try:
        return ask()
    except ServerError:
        return None
