"""RedisServer: values in a Valkey or Redis server, or in a cluster of them; and RedisLink, how commands get there.

The era is the first question of each batch. In a cluster it lies on one node, and its answer comes beside the values of others:
what was asked between a clearing's begin and end may count or not, as it may with one server; what is asked later does not.

Small things go by the client library (control), batches with blocks by sockets of our own (exchange). A batch may go to several
places, see cluster_link.py: then some commands have answers and others none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from ...core.values.copies import TierResult
from .bulk_connection import Answer, BulkConnections, Part, Received, Refusal
from .remote_address import RemoteAddress, RemoteSecret
from .remote_store import ServerError

T = TypeVar("T")

UNANSWERED = (redis.RedisError, RedisClusterException, OSError, ValueError, IndexError, TypeError)  # what libraries raise


class Silence(NamedTuple):
    """A command without an answer. was_asked: or was it left away, because the node has failed just before."""

    was_asked: bool


Reply = Answer | Refusal | Received | Silence


class RedisLink(Protocol):
    """Every method may be called in any thread, but for close."""

    def control(self) -> Any:
        """The client of the library: redis.Redis, or a RedisCluster. Raises redis.RedisError, OSError."""

    def exchange(self, commands: Sequence[Sequence[Part]], into: Sequence[Sequence[memoryview]] = ()) -> list[Reply]:
        """As BulkConnection.exchange; each command's second word is its key. Raises ServerError."""

    def close(self) -> None:
        """No thread is running."""


class OneServer:
    """Connections are made when they are needed."""

    def __init__(self, address: RemoteAddress, secret: RemoteSecret, timeout: float) -> None:
        """timeout: seconds of one answer."""
        self._bulk = BulkConnections(address.nodes[0], address, secret, timeout)
        self._client = redis.Redis(
            address.host,
            address.port,
            address.db,
            retry=Retry(NoBackoff(), 0),
            **library_options(address, secret, timeout),
        )

    def control(self) -> Any:
        return self._client

    def exchange(self, commands: Sequence[Sequence[Part]], into: Sequence[Sequence[memoryview]] = ()) -> list[Reply]:
        def exchange() -> list[Reply]:
            with self._bulk.one() as connection:
                return list(connection.exchange(commands, into))

        return guarded(exchange)

    def close(self) -> None:
        self._bulk.close()
        guarded(self._client.close)


def library_options(address: RemoteAddress, secret: RemoteSecret, timeout: float) -> dict[str, Any]:
    """What every client of the library is made with."""
    tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": address.ca and str(address.ca)} if address.is_tls else {}
    return {
        "username": secret.user,
        "password": secret.password,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        **tls,
    }


def guarded(ask: Callable[[], T]) -> T:
    """The answer. Raises ServerError where the server refuses, is gone, hangs or speaks something else."""
    try:
        return ask()
    except UNANSWERED as error:
        raise ServerError(str(error)) from None


class RedisServer:
    """What is asked, whatever way it takes."""

    def __init__(self, address: RemoteAddress, link: RedisLink, *, ttl: float) -> None:
        """ttl: seconds that a value lives after it was put there or found."""
        self.facts: dict[str, object] = {"host": address.host, "port": address.port, "tls": address.is_tls}
        self.facts |= {"cluster": True} if address.is_cluster else {}
        self._ttl_ms = max(int(ttl * 1000), 1)
        self._link = link

    def set_era(self, key: bytes, era: bytes) -> None:
        guarded(lambda: self._link.control().set(key, era))

    def learn_era(self, key: bytes, era: bytes) -> bytes:
        guarded(lambda: self._link.control().set(key, era, nx=True))
        found = guarded(lambda: self._link.control().get(key))
        if not isinstance(found, bytes):
            raise ServerError("no era")
        return found

    def use(self, era_key: bytes, places: Sequence[bytes]) -> tuple[bytes | None, list[bool]]:
        ttl = b"%d" % self._ttl_ms
        replies = self._link.exchange([(b"GET", era_key), *((b"PEXPIRE", place, ttl) for place in places)])
        return _era(replies[0]), [reply == 1 for reply in replies[1:]]

    def get(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[memoryview], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        commands = [(b"GET", era_key), *((b"GET", place) for place in places)]
        replies = self._link.exchange(commands, list(zip(headers, blocks, strict=True)))
        return _era(replies[0]), [_got(reply) for reply in replies[1:]]

    def put(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        ttl = b"%d" % self._ttl_ms
        values = zip(places, headers, blocks, strict=True)
        sets = [(b"SET", place, (header, block), b"PX", ttl) for place, header, block in values]
        replies = self._link.exchange([(b"GET", era_key), *sets])
        return _era(replies[0]), [_put(reply) for reply in replies[1:]]

    def delete(self, places: Sequence[bytes]) -> None:
        self._link.exchange([(b"DEL", place) for place in places])

    def close(self) -> None:
        self._link.close()


def _era(reply: Reply) -> bytes | None:
    if isinstance(reply, Refusal | Silence):
        raise ServerError("the era is not known")
    return reply if isinstance(reply, bytes) else None


def _got(reply: Reply) -> TierResult:
    if reply is None or reply == Silence(was_asked=False):
        return TierResult.MISSING
    if isinstance(reply, Refusal | Silence):
        return TierResult.FAILED
    return TierResult.DONE if isinstance(reply, Received) else TierResult.DAMAGED


def _put(reply: Reply) -> TierResult:
    if reply == b"OK":
        return TierResult.DONE
    return TierResult.CANCELLED if reply == Silence(was_asked=False) else TierResult.FAILED
