"""Row 10: swap is bit-exact on every tier. Sequences and cached blocks walk between device and host memory at random.

The memory of both tiers is bytes that only the transfers of the core touch; every sequence that is on the device must read
what was written to it, byte for byte, however often its blocks moved, and so must every prefix that is hit. Row 32 on both
tiers is the same walk seen from the other side: what a sequence is granted holds no word of another tenant.
"""

import random
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId, TransferKind
from tests.soak.row import Counts
from tests.soak.toy_engine import contents
from tests.support.worlds.core_pool import int32

_EVENTS = 250
_SLOT_WORDS = 4
_SESSION = SessionId("walker")
_TENANTS = ("red", "blue")


@dataclass
class _Walker:
    """One sequence: its tokens have K and V up to the end, and it is on the device or not."""

    sequence_id: SequenceId
    tokens: list[int]
    tenant: str
    is_out: bool = False


class _Tiers:
    """A pool of one session, and the memory of its two tiers, [blocks, block_size, words] each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 3, 4])
        config = PoolConfig(
            num_blocks=rng.choice([6, 10, 20]),
            block_size=self.size,
            max_sequences=8,
            max_tokens_per_sequence=5 * self.size + 1,
            watermark=0.0,
            eviction_policy=rng.choice(["lru", "adaptive"]),
            num_host_blocks=rng.choice([6, 12, 40]),
        )
        self.config = config
        self.manager = PoolManager(config)
        self.manager.sessions.open(_SESSION, Executor.CACHE)
        self.device = np.zeros((config.num_blocks, self.size, _SLOT_WORDS), np.int64)
        self.host = np.zeros((config.num_host_blocks, self.size, _SLOT_WORDS), np.int64)
        self.written: dict[str, set[int]] = {tenant: {0} for tenant in _TENANTS}
        self.num_foreign = 0  # blocks granted that had held another tenant's words
        self.walkers: list[_Walker] = []
        self.num_out = self.num_in = 0
        self._next_id = 0

    def transfer(self, copies: Copies) -> None:
        """What the service does before it answers: transfers, then copies."""
        columns = (copies.transfer_kinds, copies.transfer_sources, copies.transfer_destinations)
        for kind, source, destination in zip(*(column.tolist() for column in columns), strict=True):
            if kind == TransferKind.SWAP_OUT:
                self.host[destination] = self.device[source]
                self.num_out += 1
            else:
                self.device[destination] = self.host[source]
                self.num_in += 1
        for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True):
            self.device[destination] = self.device[source]

    def start(self) -> None:
        """A new sequence of known or new tokens; what it hits it reads, from whichever tier."""
        length = max(1, self.rng.randint(1, 4) * self.size + self.rng.choice([-1, 0, 1]))
        tokens = [self.rng.randrange(2) for _ in range(length)]
        if self.walkers and self.rng.random() < 0.6:
            old = self.rng.choice(self.walkers).tokens
            tokens = (old + tokens)[:length]
        self._next_id += 1
        walker = _Walker(SequenceId(self._next_id), tokens, self.rng.choice(_TENANTS))
        if len(self.walkers) == self.config.max_sequences:
            return
        self.manager.creation.create(_SESSION, SequenceArgs(walker.sequence_id, int32(tokens), scope=walker.tenant))
        self.walkers.append(walker)
        before = self.device.copy()
        try:
            self.transfer(self.manager.one_item.extend(_SESSION, walker.sequence_id, length, look_up=True))
        except CacheError:
            self.end(walker)
            return
        view = self.manager.queries.view(_SESSION, walker.sequence_id)
        hit = view.num_hit_tokens
        self.check(walker, hit)
        for block in view.block_table[hit // self.size :].tolist():
            own = self.written[walker.tenant]
            assert set(self.device[block].flat) <= own, f"tenant {walker.tenant} was given another one's words"
            self.num_foreign += not set(before[block].flat) <= own
        self.write(walker, hit)

    def write(self, walker: _Walker, first: int) -> None:
        table = self.manager.queries.view(_SESSION, walker.sequence_id).block_table.tolist()
        wanted = slots_of(walker)
        self.written[walker.tenant].update(wanted.flat)
        for position in range(first, len(walker.tokens)):
            self.device[table[position // self.size], position % self.size] = wanted[position]
        length = len(walker.tokens)
        self.manager.one_item.commit(_SESSION, walker.sequence_id, length, length, int32([]))
        self.manager.maintenance.publish_pending()

    def check(self, walker: _Walker, length: int) -> None:
        table = self.manager.queries.view(_SESSION, walker.sequence_id).block_table
        found = self.device[table].reshape(-1, _SLOT_WORDS)[:length]
        assert found.tobytes() == slots_of(walker)[:length].tobytes(), f"sequence {walker.sequence_id} reads other bytes"

    def swap(self, walker: _Walker) -> None:
        """To the other tier, if it has room."""
        call = self.manager.one_item.swap_in if walker.is_out else self.manager.one_item.swap_out
        try:
            self.transfer(call(_SESSION, walker.sequence_id))
        except CacheError:
            return
        walker.is_out = not walker.is_out

    def end(self, walker: _Walker) -> None:
        self.walkers.remove(walker)
        self.manager.one_item.release(_SESSION, walker.sequence_id)

    def evict(self) -> None:
        """Cached blocks go to the host tier, as far as it has room."""
        with self.manager.evictions.demoting(_SESSION) as moved:
            self.manager.evictions.evict_blocks(self.rng.randint(1, self.config.num_blocks))
        self.transfer(moved.copies)


def slots_of(walker: _Walker) -> np.ndarray:
    """[tokens, words] what its slots hold: the chained hash of tenant and prefix, and words made of it."""
    words = np.arange(_SLOT_WORDS, dtype=np.int64) * 0x5851F42D
    return np.array(contents(walker.tenant, walker.tokens), np.int64)[:, None] ^ words


def run(seed: int) -> Counts:
    """Counts blocks that came back from the host tier; the fault is a block that left the device."""
    tiers = _walk(random.Random(seed))
    return Counts(tiers.num_in, tiers.num_out)


def residue(seed: int) -> Counts:
    """Counts blocks that changed their tenant while they held the words of another, which is the fault."""
    tiers = _walk(random.Random(seed))
    return Counts(tiers.num_foreign, tiers.num_foreign)


def _walk(rng: random.Random) -> _Tiers:
    tiers = _Tiers(rng)
    for _ in range(_EVENTS):
        event = rng.random()
        if not tiers.walkers or event < 0.3:
            tiers.start()
        elif event < 0.7:
            tiers.swap(rng.choice(tiers.walkers))
        elif event < 0.8:
            tiers.evict()
        else:
            tiers.end(rng.choice(tiers.walkers))
        for walker in tiers.walkers:
            if not walker.is_out:
                tiers.check(walker, len(walker.tokens))
        assert tiers.manager.queries.check_invariants() == []
    return tiers
