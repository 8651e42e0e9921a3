"""MooncakeServer: values in a Mooncake store: a master that knows where each is, and the memory that its clients give.

Values live until the store makes room for others; there is no time to live. The era is asked before each batch, in a call
of its own. The calls run in another process, see mooncake_link.py; one that takes too long is no answer.
"""

from collections.abc import Sequence

from ...core.values.copies import TierResult
from .mooncake_link import MooncakeLink
from .remote_address import RemoteAddress
from .remote_server import ServerError

_PART_BYTES = 8 << 20
_MISSING, _LARGER = -704, -600  # the library's codes for a key that is not there, and for a value longer than its buffer


class MooncakeServer:
    """A client of one store, which is connected when it is first needed."""

    def __init__(self, address: RemoteAddress, value_bytes: int, *, memory: int, timeout: float) -> None:
        """value_bytes: of a header and a block. memory: bytes that this service gives to the store. timeout: seconds."""
        self.facts: dict[str, object] = {"host": address.host, "port": address.port, "memory": memory}
        self._size = value_bytes
        self._link = MooncakeLink(address, max(_PART_BYTES, value_bytes), memory=memory, timeout=timeout)
        self._most = self._link.part_bytes // value_bytes  # values of one call

    def tell_era(self, key: bytes, era: bytes) -> None:
        if self._link.ask(call="set_small", names=[key.decode()], value=era.hex(), replaces=True) != 0:
            raise ServerError("the era is not taken")

    def learn_era(self, key: bytes, era: bytes) -> bytes:
        self._link.ask(call="set_small", names=[key.decode()], value=era.hex(), replaces=False)
        found = self._era(key)
        if found is None:
            raise ServerError("no era")
        return found

    def use(self, era_key: bytes, places: Sequence[bytes]) -> tuple[bytes | None, list[bool]]:
        era = self._era(era_key)
        codes = self._link.ask(call="are_there", names=[place.decode() for place in places])
        return era, [code == 1 for code in codes]

    def get(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[memoryview], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        era, results, size = self._era(era_key), list[TierResult](), self._size
        for first, names in self._batches(places):
            with self._link.part() as part:
                codes = part.ask(call="get", names=names, size=size)
                results += [_result(code, size) for code in codes]
                for place, (header, block) in enumerate(zip(headers[first:], blocks[first : first + len(names)], strict=False)):
                    value = part.memory[place * size : (place + 1) * size]
                    header[:], block[:] = value[: len(header)], value[len(header) :]
        return era, results

    def put(
        self, era_key: bytes, places: Sequence[bytes], headers: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> tuple[bytes | None, list[TierResult]]:
        era, results, size = self._era(era_key), list[TierResult](), self._size
        for first, names in self._batches(places):
            with self._link.part() as part:
                for place, (header, block) in enumerate(zip(headers[first:], blocks[first : first + len(names)], strict=False)):
                    value = part.memory[place * size : (place + 1) * size]
                    value[: len(header)], value[len(header) :] = header, block
                codes = part.ask(call="put", names=names, size=size)
            results += [TierResult.DONE if code == 0 else TierResult.FAILED for code in codes]
        return era, results

    def delete(self, places: Sequence[bytes]) -> None:
        self._link.ask(call="delete", names=[place.decode() for place in places])

    def close(self) -> None:
        self._link.close()

    def _era(self, key: bytes) -> bytes | None:
        return bytes.fromhex(self._link.ask(call="small", names=[key.decode()])) or None

    def _batches(self, places: Sequence[bytes]) -> list[tuple[int, list[str]]]:
        """As many places as a call moves values, each with the index of its first."""
        names = [place.decode() for place in places]
        return [(first, names[first : first + self._most]) for first in range(0, len(names), self._most)]


def _result(code: int, size: int) -> TierResult:
    if code == size:
        return TierResult.DONE
    if code == _MISSING:
        return TierResult.MISSING
    return TierResult.DAMAGED if code > 0 or code == _LARGER else TierResult.FAILED
