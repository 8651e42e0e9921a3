"""Which believed blocks are compared with their digests, and which of them differ."""

import numpy as np

from kvkeeper.cache_service.core.index.index_record import Slots
from kvkeeper.cache_service.core.index.kept_tree import find_damaged
from kvkeeper.cache_service.core.values.kept_index import UInt64Array, Verification
from kvkeeper.cache_service.core.values.types import Int32Array, Tier
from tests.support.worlds.core_pool import int32


class Memory:
    """Of each tier: a block's digest is its number and the tier's, where nothing is damaged."""

    def __init__(self, damaged: dict[Tier, set[int]] | None = None) -> None:
        self.read: list[tuple[Tier, int]] = []
        self._damaged = damaged or {}

    def digest(self, tier: Tier, blocks: Int32Array) -> UInt64Array:
        self.read += [(tier, block) for block in blocks.tolist()]
        bad = self._damaged.get(tier, set())
        return np.array([100 * tier + block + 1000 * (block in bad) for block in blocks.tolist()], np.uint64)


def slots(tier: Tier, blocks: list[int], without: tuple[int, ...] = ()) -> tuple[Tier, Slots]:
    digests = np.array([0 if block in without else 100 * tier + block for block in blocks], np.uint64)
    names = np.array(blocks, np.int64)
    return tier, Slots(int32(blocks), names, names, int32([[block] for block in blocks]), digests)


TIERS = [slots(Tier.DEVICE, list(range(1, 41))), slots(Tier.HOST, list(range(1, 21)))]


def found(memory: Memory, num_sampled: int, seed: int = 0) -> tuple[int, list[list[int]]]:
    damage = find_damaged(TIERS, Verification(memory.digest, num_sampled, seed))
    assert len(set(memory.read)) == len(memory.read) == damage.num_compared, "each once"
    return damage.num_compared, [blocks.tolist() for blocks in damage.blocks]


def test_a_sample_of_both_tiers_is_enough_where_it_is_right() -> None:
    memory = Memory()
    assert found(memory, 30) == (30, [[], []])
    assert {tier for tier, _ in memory.read} == {Tier.DEVICE, Tier.HOST}
    assert found(Memory(), 0) == (60, [[], []])
    assert found(Memory(), 1000) == (60, [[], []])


def test_other_starts_look_at_other_blocks() -> None:
    reads = [Memory() for _ in range(20)]
    for seed, memory in enumerate(reads):
        found(memory, 6, seed)
    assert len({tuple(memory.read) for memory in reads}) == 20
    assert len({block for memory in reads for block in memory.read}) > 40


def test_one_that_differs_has_all_compared() -> None:
    damaged = {Tier.DEVICE: {3, 7, *range(20, 41)}, Tier.HOST: {5}}
    num_compared, blocks = found(Memory(damaged), 10)
    assert num_compared == 60
    assert [set(of_tier) for of_tier in blocks] == [damaged[Tier.DEVICE], damaged[Tier.HOST]]


def test_a_row_without_a_digest_is_not_compared() -> None:
    memory = Memory({Tier.DEVICE: {2}})
    damage = find_damaged([slots(Tier.DEVICE, [1, 2, 3], without=(2,))], Verification(memory.digest, 0, 0))
    assert (damage.num_compared, damage.num_blocks, memory.read) == (2, 0, [(Tier.DEVICE, 1), (Tier.DEVICE, 3)])
