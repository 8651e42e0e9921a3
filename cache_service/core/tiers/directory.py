"""Directories of a tier asked by name: which content is where, as far as it is known here.

SlotDirectory is of a slab of the pool's own: which slot holds which content, which is evicted next, and which are being read or
written. Rules: a slot is found only under the name that it was stored under, and not before its store has ended; a slot that an
order reads or writes is not used again before the order ends.

RemoteDirectory is of a store that others share: what it was last heard to have. It owns no truth: the store forgets by itself,
and others put blocks there. A name is here because the store said that it has it, or took it; what is found here may be gone by
the time that it is read, and is then forgotten here. The directory is bounded, and forgets what it heard of longest ago.

The TierBlocks that are handed in have what can be found, by the names that clients see. Knows no order's host block.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ..eviction.lru import LruPolicy
from ..index.below_blocks import TierBlocks
from ..values.copies import Content, StoredBlock, TierOrder

_MOST_NAMES = 1 << 16


class Directory(Protocol):
    """What a tier has by name."""

    num_slots: int
    last_number: int  # of a store of an earlier run

    @property
    def may_have_some(self) -> bool:
        """Whether a prompt is worth looking up."""

    def find(self, name: bytes) -> int | None:
        """Where the content can be read, if it can be."""

    def knows(self, name: bytes) -> bool:
        """Whether there is such a block, or will be."""

    def names(self) -> set[bytes]:
        """The names of all blocks that could be read; for audits."""

    def learn(self, contents: Iterable[Content], lost: Iterable[bytes] = ()) -> None:
        """The tier has these now, and not the lost names, or none that leads to them."""

    def use(self, name: bytes) -> bool:
        """Whether there is such a block, or will be; it was of use, so it is evicted later."""

    def begin_store(self, name: bytes) -> int | None:
        """A place for a name that is not known, or None where all are busy."""

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None: ...

    def begin_read(self, order: TierOrder) -> None: ...

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None: ...

    def clear(self) -> None:
        """Nothing is found any more. Busy places are free once their orders end."""

    def stats(self) -> dict[str, int]:
        """By the protocol's names."""

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]:
        """The broken invariants, one sentence each, beside the orders in flight."""


class SlotDirectory:
    """The directory of a slab: slots 1 to num_slots."""

    def __init__(self, blocks: TierBlocks, num_slots: int, stored: Sequence[StoredBlock] = ()) -> None:
        """blocks: of this tier, empty. stored: what earlier runs have left."""
        self.num_slots = num_slots
        self._blocks = blocks
        self.num_evicted = 0
        self.last_number = max((block.number for block in stored), default=0)
        self._names: list[bytes | None] = [None] * (num_slots + 1)
        self._block_names = [b""] * (num_slots + 1)  # of what can be found, as clients see them
        self._of_name: dict[bytes, int] = {}
        self._storing: set[int] = set()
        self._num_reads: dict[int, int] = {}
        self._policy = LruPolicy(num_slots + 1)
        for slot, name, _, block_name, parent, tokens in sorted(stored, key=lambda block: block.number, reverse=True):
            if name not in self._of_name and self._names[slot] is None:  # of two of one name the younger one counts
                self._of_name[name], self._names[slot] = slot, name
                self._block_names[slot] = block_name
                blocks.gain(block_name, parent, tokens)
        self._free = deque(slot for slot in range(1, num_slots + 1) if self._names[slot] is None)
        # Parents were stored before their children as a rule, so the youngest go first into the order, as leaves do.
        numbers = {block.slot: block.number for block in stored}
        oldest_first = sorted(self._of_name.values(), key=numbers.__getitem__)
        self._policy.add(np.array(oldest_first, np.int32))

    @property
    def may_have_some(self) -> bool:
        return bool(self._of_name)

    def find(self, name: bytes) -> int | None:
        """The slot that can be read under this name."""
        slot = self._of_name.get(name)
        return None if slot is None or slot in self._storing else slot

    def knows(self, name: bytes) -> bool:
        return name in self._of_name

    def names(self) -> set[bytes]:
        return {name for name, slot in self._of_name.items() if slot not in self._storing}

    def learn(self, contents: Iterable[Content], lost: Iterable[bytes] = ()) -> None:
        """A slab has what this table says, so there is nothing to learn."""

    def use(self, name: bytes) -> bool:
        slot = self._of_name.get(name)
        if slot is None:
            return False
        if slot not in self._storing and slot not in self._num_reads:
            one = np.array([slot], np.int32)
            self._policy.hit(one)
            self._policy.add(one)
        return True

    def begin_store(self, name: bytes) -> int | None:
        """A slot for a name that is not known, or None where all are busy."""
        if self._free:
            slot = self._free.popleft()
        elif len(self._of_name) <= len(self._storing) + len(self._num_reads):
            return None
        else:
            slot = int(self._policy.take_victims(1)[0])
            evicted = self._names[slot]
            assert evicted is not None, "an evictable slot is stored"
            del self._of_name[evicted]
            self._lose(slot)
            self.num_evicted += 1
        self._of_name[name], self._names[slot] = slot, name
        self._storing.add(slot)
        return slot

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None:
        self._storing.discard(order.slot)
        if is_stored:
            self._policy.add(np.array([order.slot], np.int32))
            self._block_names[order.slot] = order.block_name
            self._blocks.gain(order.block_name, order.parent_block_name, order.tokens)
        else:
            self._release(order.slot)

    def begin_read(self, order: TierOrder) -> None:
        slot = order.slot
        num_before = self._num_reads.get(slot, 0)
        if not num_before:
            self._policy.hit(np.array([slot], np.int32))
        self._num_reads[slot] = num_before + 1

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None:
        slot = order.slot
        self._num_reads[slot] -= 1
        if is_lost and self._of_name.get(order.name) == slot:
            del self._of_name[order.name]
            self._lose(slot)
        if self._num_reads[slot]:
            return
        del self._num_reads[slot]
        if self._of_name.get(order.name) == slot:
            self._policy.add(np.array([slot], np.int32))
        else:
            self._release(slot)

    def clear(self) -> None:
        busy = self._storing | self._num_reads.keys()
        idle = [slot for slot in self._of_name.values() if slot not in busy]
        self._policy.forget_blocks(np.array(idle, np.int32))
        for slot in idle:
            self._names[slot] = None
        self._free.extend(idle)
        self._of_name.clear()
        self._blocks.clear()

    def stats(self) -> dict[str, int]:
        num_busy = len(self._storing) + len(self._num_reads)
        return {
            "num_free_disk_blocks": len(self._free),
            "num_cached_disk_blocks": self.num_slots - len(self._free) - num_busy,
            "num_busy_disk_blocks": num_busy,
            "num_evicted_disk_blocks": self.num_evicted,
        }

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]:
        wrong = list[str]()
        order = self._policy.order()
        live = [blocks[order.stamps.are_live(blocks, stamps)] for blocks, stamps in order.rows]
        evictable = np.concatenate(live).tolist() if live else []
        idle = {slot for slot in self._of_name.values() if slot not in self._storing and slot not in self._num_reads}
        if sorted(evictable) != sorted(idle):
            wrong.append("the slots that can be evicted are not those that are stored and at rest")
        if any(self._names[slot] != name for name, slot in self._of_name.items()):
            wrong.append("a slot has another name than the one that it is found by")
        busy = self._storing | self._num_reads.keys()
        if len(self._free) != len(set(self._free)) or len(self._free) + len(idle) + len(busy) != self.num_slots:
            wrong.append("free, stored and busy slots of the disk do not add up")
        num_reads: dict[int, int] = {}
        for each in reads:
            num_reads[each.slot] = num_reads.get(each.slot, 0) + 1
        if num_reads != self._num_reads:
            wrong.append("slots are read by other loads than those in flight")
        if self._storing != {each.slot for each in stores}:
            wrong.append("slots are written by other stores than those in flight")
        reported = {self._block_names[slot] for slot in self._of_name.values() if slot not in self._storing} - {b""}
        if len(reported) != len(self._blocks) or any(name not in self._blocks for name in reported):
            wrong.append("other blocks are reported than the slab has")
        return wrong

    def _lose(self, slot: int) -> None:
        """What a slot has cannot be found any more."""
        self._blocks.lose(self._block_names[slot])
        self._block_names[slot] = b""

    def _release(self, slot: int) -> None:
        """Frees a slot at rest that is not in the order of eviction."""
        name = self._names[slot]
        if name is not None and self._of_name.get(name) == slot:
            del self._of_name[name]
        self._names[slot] = None
        self._free.append(slot)


class RemoteDirectory:
    """The directory of a shared store, whose places have no number: they are 0."""

    num_slots = last_number = 0

    def __init__(self, blocks: TierBlocks) -> None:
        """blocks: of this tier, empty."""
        self._blocks = blocks
        self._names: dict[bytes, bytes] = {}  # heard of longest ago first; each with the name that clients see, if any
        self._storing: set[bytes] = set()

    @property
    def may_have_some(self) -> bool:
        """Whether a prompt is worth looking up: others may have stored it."""
        return True

    def find(self, name: bytes) -> int | None:
        """0 where the store was heard to have it."""
        return 0 if name in self._names else None

    def knows(self, name: bytes) -> bool:
        return name in self._names or name in self._storing

    def names(self) -> set[bytes]:
        return set(self._names)

    def learn(self, contents: Iterable[Content], lost: Iterable[bytes] = ()) -> None:
        for name in lost:
            self._forget(name)
        for name, block_name, parent, tokens in contents:
            self._names[name] = self._names.pop(name, b"") or block_name
            self._blocks.gain(block_name, parent, tokens)
        while len(self._names) > _MOST_NAMES:
            self._forget(next(iter(self._names)))

    def use(self, name: bytes) -> bool:
        return self.knows(name)

    def begin_store(self, name: bytes) -> int | None:
        self._storing.add(name)
        return 0

    def end_store(self, order: TierOrder, *, is_stored: bool) -> None:
        self._storing.discard(order.name)
        if is_stored:
            self.learn([Content(order.name, order.block_name, order.parent_block_name, order.tokens)])

    def begin_read(self, order: TierOrder) -> None:
        """A store of others keeps or forgets what it likes."""

    def end_read(self, order: TierOrder, *, is_lost: bool) -> None:
        if is_lost:
            self._forget(order.name)

    def clear(self) -> None:
        self._names.clear()
        self._blocks.clear()

    def stats(self) -> dict[str, int]:
        """What the store has is not known here."""
        return {}

    def check(self, reads: Sequence[TierOrder], stores: Sequence[TierOrder]) -> list[str]:
        if self._storing - {each.name for each in stores}:
            return ["a block is being stored by no order"]
        reported = set(self._names.values()) - {b""}
        if len(reported) != len(self._blocks) or any(name not in self._blocks for name in reported):
            return ["other blocks are reported than the store was heard to have"]
        return ["the directory has outgrown its bound"] if len(self._names) > _MOST_NAMES else []

    def _forget(self, name: bytes) -> None:
        block_name = self._names.pop(name, b"")
        if block_name:
            self._blocks.lose(block_name)
