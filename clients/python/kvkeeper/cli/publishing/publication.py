"""What is published of a pool: the batches, their numbers, and the replay of them.

Rules: a reader that applies the batches in their order has in each medium what the watch reported. A batch that says "all
cleared" begins every watch, so that nothing of an earlier one stays. Numbers only grow: they begin at the microseconds of the
time, so those of the next run are higher, too, as long as its clock was not set back behind this run's. A replay is whole
wherever it begins: of what was published before the oldest batch that is kept, it has the blocks that were left.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.publishing.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, number, sha256_cbor

Batch = tuple[int, bytes]  # its number and its content
_ADDED = (pb.EVENT_KIND_SNAPSHOT, pb.EVENT_KIND_STORED)
_BLOCKS_EACH = 512  # of a batch that has what is left of earlier ones
_GPU = ("GPU", None)  # medium and locality
_PLACES = {pb.TIER_HOST: ("CPU", None), pb.TIER_DISK: ("STORAGE", "LOCAL"), pb.TIER_REMOTE: ("STORAGE", "REMOTE")}


@dataclass(frozen=True, slots=True)
class _Block:
    """hash: all 32 bytes. parent: the part of its parent's hash that events carry; None: it starts a prompt. tokens: LE32."""

    hash: bytes
    parent: int | None
    tokens: bytes
    place: tuple[str, str | None]


class ReportedBlocks:
    """What one watch reported, as vLLM's events."""

    def __init__(
        self, first_parent: bytes = b"", block_size: int = 1, *, salt: str = "", seed: str = "", lora: str = ""
    ) -> None:
        """first_parent: the name that first blocks are behind. salt: of all prompts that are watched; empty: they have none.

        lora: name=path of their adapter, as vLLM has it; empty: they have none.
        """
        self._blocks: dict[bytes, _Block] = {}
        self._first_parent, self._block_size = first_parent, block_size
        name, _, path = lora.partition("=")
        self._none_hash, self._lora_name = sha256_cbor(seed), name or None
        loras = (("lora", name, path),) if lora else ()
        self._keys = (
            loras or None,
            (*loras, *((("cache_salt", salt),) if salt else ())) or None,
        )  # of later, and of first blocks

    def read(self, message: pb.WatchEventsResponse) -> list[Event]:
        """Applies the next message of the watch. Without tokens there are no blocks."""
        place, names = _PLACES.get(message.tier, _GPU), message.block_names
        if message.kind in _ADDED and message.token_ids:
            return self.stored([self._add(message, row, place) for row in range(len(names))])
        if message.kind == pb.EVENT_KIND_REMOVED:
            return _removed([self._blocks.pop(name) for name in names])
        if message.kind == pb.EVENT_KIND_TIER_CHANGED:
            before = {name: block for name in names if (block := self._blocks[name]).place != place}
            self._blocks.update({name: replace(block, place=place) for name, block in before.items()})
            return [*_removed([*before.values()]), *self.stored([self._blocks[name] for name in before])]
        return []

    def parents_first(self) -> list[_Block]:
        """All blocks. For a moment a block may be without its parent, which is removed before it, and may come back."""
        numbers = {number(block.hash) for block in self._blocks.values()}
        behind: dict[int | None, list[_Block]] = {None: []}
        for block in self._blocks.values():
            behind.setdefault(block.parent if block.parent in numbers else None, []).append(block)
        ordered, left = [], behind[None]
        while left:
            ordered.append(left.pop())
            left += behind.get(number(ordered[-1].hash), [])
        return ordered

    def stored(self, blocks: list[_Block]) -> list[Event]:
        """An event for each run of blocks in one place that are one behind the other."""
        pairs = enumerate(pairwise(blocks), 1)
        ends = [row for row, (one, other) in pairs if (other.parent, other.place) != (number(one.hash), one.place)]
        runs = zip([0, *ends], [*ends, len(blocks)], strict=True)
        return [self._stored_run(blocks[start:stop]) for start, stop in runs if start < stop]

    def _add(self, message: pb.WatchEventsResponse, row: int, place: tuple[str, str | None]) -> _Block:
        size, parent_name = 4 * self._block_size, message.parent_names[row]
        tokens = message.token_ids[row * size : (row + 1) * size]
        if parent_name == self._first_parent:
            block = _Block(sha256_cbor((self._none_hash, _ids(tokens), self._keys[1])), None, tokens, place)
        else:
            parent = self._blocks[parent_name].hash
            block = _Block(sha256_cbor((parent, _ids(tokens), self._keys[0])), number(parent), tokens, place)
        self._blocks[message.block_names[row]] = block
        return block

    def _stored_run(self, run: list[_Block]) -> BlockStored:
        ids = _ids(b"".join(block.tokens for block in run))
        untagged = [None if keys is None else tuple(key[1] for key in keys) for keys in self._keys]
        keys = [untagged[block.parent is None] for block in run] if self._keys[1] else None
        medium, locality = run[0].place
        hashes = [number(block.hash) for block in run]
        return BlockStored(hashes, run[0].parent, ids, self._block_size, None, medium, self._lora_name, keys, locality)


class Publication:
    """Numbers batches, and keeps the newest of them with what they are of: a message, or a watch that begins."""

    def __init__(self, most_kept: int, started: float) -> None:
        """most_kept: batches for replay. started: seconds since the epoch."""
        self._next_number, self._most_kept = int(started * 1e6), most_kept
        self._kept: deque[tuple[Batch, pb.WatchEventsResponse | ReportedBlocks]] = deque()
        self._reported = self._left = ReportedBlocks()  # now, and before the oldest batch that is kept

    def begin(self, first_parent: bytes = b"", block_size: int = 1, **names: str) -> Batch:
        """The batch that begins a watch, or ends the last one. Arguments: ReportedBlocks's."""
        self._reported = ReportedBlocks(first_parent, block_size, **names)
        return self._add([AllBlocksCleared()], ReportedBlocks(first_parent, block_size, **names))

    def publish(self, message: pb.WatchEventsResponse) -> Batch | None:
        """The batch of the next message of the watch, if it says something of blocks."""
        events = self._reported.read(message)
        return self._add(events, message) if events else None

    def replay(self, first_number: int) -> Iterator[Batch]:
        """The batches from this number on. If it is older than all that are kept, the first of them says "all cleared"."""
        oldest = self._kept[0][0][0] if self._kept else 0
        if first_number < oldest:  # what earlier batches left, under the last of their numbers: there may be but one of them
            left = self._left.parents_first()
            each = max(_BLOCKS_EACH, -(-len(left) // min(oldest - first_number, self._most_kept)))
            pieces = [self._left.stored(left[start : start + each]) for start in range(0, max(len(left), 1), each)]
            pieces[0].insert(0, AllBlocksCleared())
            yield from enumerate(map(_encode, pieces), oldest - len(pieces))
        yield from (batch for batch, _ in self._kept if batch[0] >= first_number)

    def _add(self, events: list[Event], source: pb.WatchEventsResponse | ReportedBlocks) -> Batch:
        batch = self._next_number, _encode(events)
        self._next_number += 1
        self._kept.append((batch, source))
        if len(self._kept) > self._most_kept:
            _, source = self._kept.popleft()
            if isinstance(source, ReportedBlocks):
                self._left = source
            else:
                self._left.read(source)
        return batch


def _encode(events: list[Event]) -> bytes:
    return msgspec.msgpack.encode((time.time(), events, 0))


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return ids


def _removed(blocks: list[_Block]) -> list[Event]:
    """An event for each place."""
    places = dict.fromkeys(block.place for block in blocks)
    return [BlockRemoved([number(block.hash) for block in blocks if block.place == place], *place) for place in places]
