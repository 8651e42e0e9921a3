"""RemoteStore: the blocks of one pool in a Valkey or Redis server, as the threads of its tier put them there and fetch them.

Rules: keys are `kvkeeper:1:` and a keyed hash of era and name, so they tell nothing of a prompt; every batch begins with the
question for the era, and what was asked under another one does not count. The era is a random value of the server that all
services of one secret and KV spec share: a clearing draws a new one, and none that was there before comes back, also where the
server has lost it. A clearing that the server does not hear leaves this store silent until it does. Errors of the server never
leave this file but as results, because their texts may name the address. A client library asks and tells; blocks themselves
travel between arena and socket, see bulk_connection.py. Every method may be called in any thread.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...core.values.copies import TierOrder, TierResult
from ...core.values.kv_spec import KvSpec
from ..arena import ByteArray
from ..disk.digests import digest_under
from .bulk_connection import BulkConnections, Part, Received, Refusal
from .remote_address import RemoteAddress
from .secret import RemoteSecret
from .value_form import HEADER_BYTES, ValueForm

_PREFIX = b"kvkeeper:1:"
_ERA_BYTES, _KEY_BYTES = 16, 20

Answer = TypeVar("Answer")


class RemoteStore:
    """One pool's. Connections are made when they are needed."""

    def __init__(self, address: RemoteAddress, secret: RemoteSecret, spec: KvSpec, *, ttl: float, timeout: float) -> None:
        """ttl: seconds that a value lives after it was put there or found. timeout: seconds of one answer of the server."""
        self.block_bytes = self.slot_bytes = spec.stored_bytes
        self.name_key = secret.derive(b"names", spec.key)
        self.facts = {"host": address.host, "port": address.port, "tls": address.is_tls}
        self._ttl_ms = max(int(ttl * 1000), 1)
        self._key = secret.derive(b"keys", spec.key)
        self._era_key = _PREFIX + b"era:" + secret.derive(b"era", spec.key)[:_KEY_BYTES].hex().encode()
        self._form = ValueForm(
            secret.derive(b"values", spec.key), spec.stored_bytes, digest_under(int.from_bytes(self._key[:8], "little"))
        )
        self._era: bytes | None = None  # as the server said last
        self._num_clearings = self._num_told = 0  # asked for, and known to the server; the former is the loop's alone
        self._asking = threading.Lock()  # for the era; the loop never takes it
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": address.ca and str(address.ca)} if address.is_tls else {}
        self._bulk = BulkConnections(address, secret, timeout)
        self._client = redis.Redis(
            address.host,
            address.port,
            address.db,
            username=secret.user,
            password=secret.password,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **tls,
        )

    def begin_clearing(self) -> None:
        """From now on nothing is asked before the server knows of a new era."""
        self._num_clearings += 1

    def write_era(self, era: int) -> bool:
        """Tells the server of a new era, if it does not know it yet. Whether it knows."""
        return self._guarded(self._settled_era) is not None

    def ask(self, names: Sequence[bytes]) -> int | None:
        """How many of the first names are there, which live anew; None where the server gives no answer."""

        def ask() -> int:
            era = self._settled_era()
            answers = self._run(era, [("PEXPIRE", self._at(era, name), self._ttl_ms) for name in names])
            if answers is None or any(isinstance(each, redis.RedisError) for each in answers):
                return 0
            return next((at for at, is_there in enumerate(answers) if is_there != 1), len(answers))

        return self._guarded(ask)

    def read(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Fills hosts [num_host_blocks, block_bytes] as the orders say. A block without the result DONE holds anything."""

        def read() -> list[TierResult]:
            era = self._settled_era()
            places = [self._at(era, order.name) for order in orders]
            headers = [memoryview(bytearray(HEADER_BYTES)) for _ in orders]
            blocks = [memoryview(hosts[order.host]) for order in orders]
            values = self._run_bulk(era, [(b"GET", place) for place in places], list(zip(headers, blocks, strict=True)))
            if values is None:
                return [TierResult.MISSING] * len(orders)
            each = zip(places, values, headers, blocks, strict=True)
            results = [self._result(place, value, bytes(header), block) for place, value, header, block in each]
            damaged = [place for place, result in zip(places, results, strict=True) if result is TierResult.DAMAGED]
            if damaged:
                self._guarded(lambda: self._client.delete(*damaged))
            return results

        return self._guarded(read) or [TierResult.FAILED] * len(orders)

    def write(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]:
        """Puts hosts [num_host_blocks, block_bytes] there as the orders say. Answers a result for each."""

        def write() -> list[TierResult]:
            era = self._settled_era()
            places = [self._at(era, order.name) for order in orders]
            sets = []
            for place, order in zip(places, orders, strict=True):
                block = memoryview(hosts[order.host])
                sets.append((b"SET", place, (self._form.header(place, block), block), b"PX", b"%d" % self._ttl_ms))
            answers = self._run_bulk(era, sets)
            if answers is None:
                return [TierResult.CANCELLED] * len(orders)
            return [TierResult.DONE if each == b"OK" else TierResult.FAILED for each in answers]

        return self._guarded(write) or [TierResult.FAILED] * len(orders)

    def close(self) -> None:
        """No thread may be at work."""
        self._bulk.close()
        self._guarded(self._client.close)

    def _at(self, era: bytes, name: bytes) -> bytes:
        return _PREFIX + hashlib.blake2b(era + name, digest_size=_KEY_BYTES, key=self._key, person=b"at").hexdigest().encode()

    def _result(self, at: bytes, answer: object, header: bytes, block: memoryview) -> TierResult:
        if answer is None:
            return TierResult.MISSING
        if isinstance(answer, Refusal):
            return TierResult.FAILED
        is_it = isinstance(answer, Received) and self._form.is_whole(at, header, block)
        return TierResult.DONE if is_it else TierResult.DAMAGED

    def _settled_era(self) -> bytes:
        """The era that the server knows, drawn if it knows none, or if the pool was cleared. Raises RedisError."""
        with self._asking:
            era, num_clearings = self._era, self._num_clearings
            if num_clearings != self._num_told:
                era = secrets.token_bytes(_ERA_BYTES)
                self._client.set(self._era_key, era)
            elif era is None:
                self._client.set(self._era_key, secrets.token_bytes(_ERA_BYTES), nx=True)
                found = self._client.get(self._era_key)
                if not isinstance(found, bytes) or len(found) != _ERA_BYTES:
                    raise redis.ResponseError("no era")
                era = found
            self._era, self._num_told = era, num_clearings
            return era

    def _run(self, era: bytes, commands: list[tuple[Any, ...]]) -> list[Any] | None:
        """The answers of the commands, in order; None where the server is in another era by now. Raises RedisError."""
        batch = self._client.pipeline(transaction=False)
        for command in (("GET", self._era_key), *commands):
            batch.execute_command(*command)
        answers = batch.execute(raise_on_error=False)
        if isinstance(answers[0], redis.RedisError):
            raise answers[0]
        return answers[1:] if self._is_still(era, answers[0]) else None

    def _run_bulk(
        self, era: bytes, commands: Sequence[tuple[Part, ...]], into: Sequence[Sequence[memoryview]] = ()
    ) -> list[object] | None:
        """The same for values of blocks, which are received into the buffers. Raises OSError, ValueError."""
        with self._bulk.one() as connection:
            answers = connection.exchange([(b"GET", self._era_key), *commands], into)
        if isinstance(answers[0], Refusal):
            raise ConnectionRefusedError("the server does not tell its era")
        return list(answers[1:]) if self._is_still(era, answers[0]) else None

    def _is_still(self, era: bytes, told: object) -> bool:
        """Whether what was asked in this era counts, now that the server has told the one that it is in."""
        if told != era:
            with self._asking:
                if self._era == era:
                    self._era = None
            return False
        return self._era == era and self._num_clearings == self._num_told

    def _guarded(self, ask: Callable[[], Answer]) -> Answer | None:
        """The answer, or None where the server refuses, is gone, hangs or speaks something else."""
        try:
            return ask()
        except (redis.RedisError, OSError, ValueError, IndexError, TypeError):
            return None
