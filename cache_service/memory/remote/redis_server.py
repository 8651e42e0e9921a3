"""RedisServer: values in a Valkey or Redis server.

A client library asks and tells; blocks themselves travel between arena and socket, see bulk_connection.py. The era is the first
question of each batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...core.values.copies import TierResult
from .bulk_connection import BulkConnections, Received, Refusal
from .remote_address import RemoteAddress
from .remote_server import ServerError
from .secret import RemoteSecret

T = TypeVar("T")


class RedisServer:
    """Connections are made when they are needed."""

    def __init__(self, address: RemoteAddress, secret: RemoteSecret, *, ttl: float, timeout: float) -> None:
        """ttl: seconds that a value lives after it was put there or found. timeout: seconds of one answer."""
        self.facts: dict[str, object] = {"host": address.host, "port": address.port, "tls": address.is_tls}
        self._ttl_ms = max(int(ttl * 1000), 1)
        self._bulk = BulkConnections(address, secret, timeout)
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": address.ca and str(address.ca)} if address.is_tls else {}
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

    def tell_era(self, key: bytes, era: bytes) -> None:
        _guarded(lambda: self._client.set(key, era))

    def learn_era(self, key: bytes, era: bytes) -> bytes:
        _guarded(lambda: self._client.set(key, era, nx=True))
        found = _guarded(lambda: self._client.get(key))
        if not isinstance(found, bytes):
            raise ServerError("no era")
        return found

    def use(self, era_key: bytes, places: Sequence[bytes]) -> tuple[bytes | None, list[bool]]:
        batch = self._client.pipeline(transaction=False)
        batch.execute_command("GET", era_key)
        for place in places:
            batch.execute_command("PEXPIRE", place, self._ttl_ms)
        answers = _guarded(lambda: batch.execute(raise_on_error=False))
        return _era(answers[0]), [answer == 1 for answer in answers[1:]]

    def get(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[memoryview], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        commands = [(b"GET", era_key), *((b"GET", place) for place in places)]
        buffers = list(zip(headers, blocks, strict=True))
        answers = _guarded(lambda: self._exchange(commands, buffers))
        return _era(answers[0]), [_result(answer) for answer in answers[1:]]

    def put(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[bool]]:
        ttl = b"%d" % self._ttl_ms
        values = zip(places, headers, blocks, strict=True)
        sets = [(b"SET", place, (header, block), b"PX", ttl) for place, header, block in values]
        answers = _guarded(lambda: self._exchange([(b"GET", era_key), *sets], ()))
        return _era(answers[0]), [answer == b"OK" for answer in answers[1:]]

    def delete(self, places: Sequence[bytes]) -> None:
        _guarded(lambda: self._client.delete(*places))

    def close(self) -> None:
        self._bulk.close()
        _guarded(self._client.close)

    def _exchange(self, commands: Sequence[Any], into: Sequence[Sequence[memoryview]]) -> list[Any]:
        with self._bulk.one() as connection:
            return list(connection.exchange(commands, into))


def _era(answer: object) -> bytes | None:
    if isinstance(answer, redis.RedisError | Refusal):
        raise ServerError("the era is not told")
    return answer if isinstance(answer, bytes) else None


def _result(answer: object) -> TierResult:
    if answer is None:
        return TierResult.MISSING
    if isinstance(answer, Refusal):
        return TierResult.FAILED
    return TierResult.DONE if isinstance(answer, Received) else TierResult.DAMAGED


def _guarded(ask: Callable[[], T]) -> T:
    """The answer. Raises ServerError where the server refuses, is gone, hangs or speaks something else."""
    try:
        return ask()
    except (redis.RedisError, OSError, ValueError, IndexError, TypeError) as error:
        raise ServerError(str(error)) from None
