"""A walk over the prefix tree takes each node once, after all below it, however much is taken at a time."""

import random

import pytest

from kvkeeper.cache_service.core.index.leaf_walk import LeafWalk
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import Int32Array, MatchEnd
from tests.support.worlds.core_pool import int32

NUM_BLOCKS = 200


def tree(seed: int) -> PrefixIndex:
    """Two tenants, with long chains and wide families."""
    rng, index, block = random.Random(seed), PrefixIndex(NUM_BLOCKS, 1), 1
    while block < NUM_BLOCKS - 40:
        length = rng.choice([1, 2, 30])
        tokens = int32([rng.randrange(4) for _ in range(length)])
        index.insert_run(index.root(rng.choice("ab")), tokens, int32(range(block, block + length)))
        block += length
    return index


def forget(index: PrefixIndex, nodes: Int32Array) -> None:
    index.forget_nodes(nodes, MatchEnd.CLEARED)
    assert not any(index.check())


@pytest.mark.parametrize("most", [1, 2, 7, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_forgetting_what_is_taken_forgets_no_other_and_at_last_everything(seed: int, most: int) -> None:
    index = tree(seed)
    walk = LeafWalk(index)
    while not walk.is_over:
        nodes, before = walk.take_nodes(most), len(index)
        assert len(nodes) <= most
        forget(index, nodes)
        assert before - len(index) == len(nodes) == len(set(nodes.tolist()))
    assert not len(index)


@pytest.mark.parametrize("seed", range(20))
def test_what_others_forget_meanwhile_is_passed_over(seed: int) -> None:
    index, rng = tree(seed), random.Random(seed)
    walk, num_lost = LeafWalk(index), 0
    while not walk.is_over:
        forget(index, walk.take_nodes(rng.choice([1, 5, 20])))
        used = index.block_of_node.nonzero()[0]
        if len(used):
            before = len(index)
            forget(index, int32([rng.choice(used.tolist())]))
            num_lost += before - len(index)
    assert not len(index)
    assert num_lost > 5
