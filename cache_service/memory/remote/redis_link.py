"""RedisLink: how commands reach a Valkey or Redis server; and OneServer, the way to one that is alone.

Small things go by the client library (control), batches with blocks by sockets of our own (exchange). A batch may go to several
places, see cluster_link.py: then some commands have answers and others none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from .bulk_connection import Answer, BulkConnections, Part, Received, Refusal
from .remote_address import RemoteAddress
from .remote_server import ServerError
from .secret import RemoteSecret

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
        """No thread is at work."""


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
