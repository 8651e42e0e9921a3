"""RemoteStore: the blocks of one pool in a store of others, as the threads of its tier put them there and fetch them.

Rules: keys are `kvkeeper:1:` and a keyed hash of era and name, so they tell nothing of a prompt; every batch comes with the
server's era, and what was asked under another one does not count. The era is a random value that all services of one secret and
KV spec share: a clearing draws a new one, and none that was there before comes back, also where the server has lost it. Where
the server itself goes back to an older one, as a replica may that stands in for it, a new one is drawn. A clearing that the
server does not hear leaves this store silent until it does. Errors of the server never leave this file but as results. Every
method may be called in any thread.
"""

import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...core.values.copies import TierOrder, TierResult
from ...core.values.kv_spec import KvSpec
from ..arena import ByteArray
from ..disk.digests import digest_under
from .remote_server import RemoteServer, ServerError
from .secret import RemoteSecret
from .value_form import HEADER_BYTES, ValueForm

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
        self._num_clearings = self._num_told = 0  # asked for, and known to the server; the former is the loop's alone
        self._asking = threading.Lock()  # for the era; the loop never takes it

    def begin_clearing(self) -> None:
        """From now on nothing is asked before the server knows of a new era."""
        self._num_clearings += 1

    def write_era(self, era: int) -> bool:
        """Tells the server of a new era, if it does not know it yet. Whether it knows."""
        return _guarded(self._settled_era) is not None

    def ask(self, names: Sequence[bytes]) -> int | None:
        """How many of the first names are there, which live anew; None where the server gives no answer."""

        def ask() -> int:
            era = self._settled_era()
            told, are_there = self._server.use(self._era_key, [self._at(era, name) for name in names])
            if not self._is_still(era, told):
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
            told, results = self._server.get(self._era_key, places, headers, blocks)
            if not self._is_still(era, told):
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
        """Puts hosts [num_host_blocks, block_bytes] there as the orders say. Answers a result for each."""

        def write() -> list[TierResult]:
            era = self._settled_era()
            places = [self._at(era, order.name) for order in orders]
            blocks = [memoryview(hosts[order.host]) for order in orders]
            headers = [self._form.header(place, block) for place, block in zip(places, blocks, strict=True)]
            told, results = self._server.put(self._era_key, places, headers, blocks)
            return results if self._is_still(era, told) else [TierResult.CANCELLED] * len(orders)

        return _guarded(write) or [TierResult.FAILED] * len(orders)

    def close(self) -> None:
        """No thread may be at work."""
        _guarded(self._server.close)

    def _at(self, era: bytes, name: bytes) -> bytes:
        return _PREFIX + hashlib.blake2b(era + name, digest_size=_KEY_BYTES, key=self._key, person=b"at").hexdigest().encode()

    def _settled_era(self) -> bytes:
        """The era that the server knows, drawn if it knows none, or if the pool was cleared. Raises ServerError."""
        with self._asking:
            era, num_clearings = self._era, self._num_clearings
            if num_clearings != self._num_told:
                era = secrets.token_bytes(_ERA_BYTES)
                self._server.tell_era(self._era_key, era)
            elif era is None:
                era = self._server.learn_era(self._era_key, secrets.token_bytes(_ERA_BYTES))
                if len(era) != _ERA_BYTES:
                    raise ServerError("no era")
                if era in self._gone:
                    era = secrets.token_bytes(_ERA_BYTES)
                    self._server.tell_era(self._era_key, era)
            if era != self._last_era:
                self._gone.append(self._last_era)
                self._last_era = era
            self._era, self._num_told = era, num_clearings
            return era

    def _is_still(self, era: bytes, told: bytes | None) -> bool:
        """Whether what was asked in this era counts, now that the server has told the one that it is in."""
        if told != era:
            with self._asking:
                if self._era == era:
                    self._era = None
            return False
        return self._era == era and self._num_clearings == self._num_told


def _guarded(ask: Callable[[], Answer]) -> Answer | None:
    """The answer, or None where the server refuses, is gone, hangs or speaks something else."""
    try:
        return ask()
    except ServerError:
        return None
