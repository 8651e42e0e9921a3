"""RedisServer: values in a Valkey or Redis server, or in a cluster of them.

The era is the first question of each batch. In a cluster it lies on one node, and is answered beside the values of others: what
was asked between a clearing's begin and end may count or not, as it may with one server; what is asked later does not.
"""

from collections.abc import Sequence

from ...core.values.copies import TierResult
from .bulk_connection import Received, Refusal
from .redis_link import RedisLink, Reply, Silence, guarded
from .remote_address import RemoteAddress
from .remote_server import ServerError


class RedisServer:
    """What is asked, whatever way it takes."""

    def __init__(self, address: RemoteAddress, link: RedisLink, *, ttl: float) -> None:
        """ttl: seconds that a value lives after it was put there or found."""
        self.facts: dict[str, object] = {"host": address.host, "port": address.port, "tls": address.is_tls}
        self.facts |= {"cluster": True} if address.is_cluster else {}
        self._ttl_ms = max(int(ttl * 1000), 1)
        self._link = link

    def tell_era(self, key: bytes, era: bytes) -> None:
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
        raise ServerError("the era is not told")
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
