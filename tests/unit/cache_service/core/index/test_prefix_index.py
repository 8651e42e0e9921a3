"""The index and the pool below the manager: cases that steps hardly reach, and that must hold all the same.

The ancestors of a held block are held too, except under retention, so an eviction rarely takes a parent before its descendants.
"""

import numpy as np
import pytest

from kvkeeper.cache_service.core.blocks.block_pool import BlockPool
from kvkeeper.cache_service.core.index import roots
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import BlockState, Executor, Int32Array, MatchEnd, SequenceId, SessionId
from tests.support.worlds.core_pool import CorePool, int32


def family() -> tuple[PrefixIndex, dict[str, int]]:
    """Block size 1; a tree of one parent with three children of two children each. Returns the nodes by their path."""
    index = PrefixIndex(num_blocks=16, block_size=1)
    nodes = {"": index.root("tenant")}
    paths = ("p", "pa", "pb", "pc", "pax", "pay", "pbx", "pby", "pcx", "pcy", "q")
    for block, path in enumerate(paths, start=1):
        (node,) = index.insert_run(nodes[path[:-1]], int32([ord(path[-1])]), int32([block])).tolist()
        nodes[path] = node
    assert not any(index.check())
    return index, nodes


def blocks_of(index: PrefixIndex, nodes: dict[str, int], *paths: str) -> list[int]:
    return [int(index.block_of_node[nodes[path]]) for path in paths]


def test_forgetting_a_node_forgets_all_nodes_below_and_no_others() -> None:
    index, nodes = family()
    below = blocks_of(index, nodes, "pbx", "pby")
    lost = index.forget_blocks(int32(blocks_of(index, nodes, "pb")))
    assert sorted(lost.tolist()) == below
    assert not any(index.check())
    assert len(index) == 8
    lost = index.forget_blocks(int32(blocks_of(index, nodes, "p")))
    assert len(lost) == 6
    assert not any(index.check())
    assert len(index) == 1


def test_forgetting_a_node_and_its_descendant_at_once_names_no_block_twice() -> None:
    index, nodes = family()
    for order in (("pa", "pay"), ("pcy", "pc")):
        victims = blocks_of(index, nodes, *order)
        lost = index.forget_blocks(int32(victims)).tolist()
        assert len(lost) == 1
        assert not set(lost) & set(victims)
        assert not any(index.check())


def test_a_node_number_used_again_has_none_of_its_old_relatives() -> None:
    index, nodes = family()
    index.forget_blocks(int32(blocks_of(index, nodes, "p")))
    index.insert_run(index.root("tenant"), int32([1, 2, 3]), int32([1, 2, 3]))
    assert not any(index.check())
    assert index.match(index.root("tenant"), int32([ord("p"), ord("a")]), 2).tolist() == []
    assert index.block_of_node[index.match(index.root("tenant"), int32([1, 2, 3]), 3)].tolist() == [1, 2, 3]


def test_siblings_published_together_are_linked_to_each_other_and_to_earlier_ones() -> None:
    index, nodes = family()
    parents = int32([nodes["q"], index.root("tenant"), nodes["p"], nodes["q"], index.root("tenant"), nodes["q"]])
    index.forget_blocks(int32(blocks_of(index, nodes, "pbx", "pby", "pcx", "pcy")))
    blocks = [block for block in range(1, 16) if not index.node_of_block[block]][:6]
    new = index.insert_each(parents, int32([[1], [2], [3], [4], [5], [6]]), int32(blocks)).tolist()
    assert not any(index.check())
    assert set(index.links.children(nodes["q"], 9)) == {new[0], new[3], new[5]}
    assert set(index.links.children(nodes["p"], 9)) == {new[2], nodes["pa"], nodes["pb"], nodes["pc"]}
    assert set(index.links.children(index.root("tenant"), 9)) == {new[1], new[4], nodes["p"], nodes["q"]}
    for node in (new[3], new[0], new[1]):
        index.forget_blocks(int32([index.block_of_node[node]]))
        assert not any(index.check())
    assert index.links.children(nodes["q"], 9) == [new[5]]


def test_an_unknown_tenant_finds_nothing_and_is_not_remembered() -> None:
    index, _ = family()
    assert index.match(index.find_root("unknown"), int32([ord("p")]), 1).tolist() == []
    assert len(index.roots) == 1


def test_blocks_that_lose_their_entry_with_a_victim_come_free_at_once() -> None:
    def forget(victims: Int32Array, _: MatchEnd) -> Int32Array:
        return int32([3]) if 1 in victims else int32([])

    pool = BlockPool(PoolConfig(num_blocks=5, block_size=1), PrefixIndex(5, 1), forget)
    blocks = pool.allocate(4)
    pool.mark_indexed(int32([1, 2, 3]))
    pool.drop_references(blocks[[0, 1, 2]], fenced=False)
    assert (len(pool.free), pool.num_evictable) == (0, 3)
    pool.evict(1)
    assert (len(pool.free), pool.num_evictable) == (2, 1)
    assert sorted(pool.free.ids().tolist()) == [1, 3]
    assert pool.state(3) is BlockState.FREE


def test_a_sequence_that_lost_its_entries_with_a_parent_publishes_again_from_its_first_block() -> None:
    pool = CorePool()
    held = pool.prefill(1, range(8))
    state = pool.manager.state
    lost = state.publisher.forget_blocks(int32(held[:1]), MatchEnd.EVICTED)
    state.pool.unindex(int32([held[0], *lost]))
    pool.audit()
    assert lost.tolist() == held[1:]
    assert pool.matched(range(8)) == []
    pool.step(commits=[(1, 8, [])])
    assert pool.matched(range(8)) == held


def test_a_stack_of_free_blocks_gives_each_once() -> None:
    pool = BlockPool(PoolConfig(num_blocks=9, block_size=1), PrefixIndex(9, 1), lambda victims, _: victims[:0])
    rng, held = np.random.default_rng(1), int32([])
    for _ in range(500):
        count = int(rng.integers(0, pool.num_available + 1))
        held = np.concatenate([held, pool.allocate(count)])
        assert len(set(held.tolist()) | {0}) == len(held) + 1
        rng.shuffle(held)
        cut = int(rng.integers(0, len(held) + 1))
        pool.drop_references(held[:cut], fenced=False)
        held = held[cut:]
    assert pool.num_referenced == len(held)


def test_tenants_are_bounded_because_their_roots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "MAX_TENANTS", 2)
    pool = PoolManager(PoolConfig(num_blocks=9, block_size=2))
    session = SessionId("a")
    pool.sessions.open(session, Executor.ENGINE)
    for idx, tenant in enumerate(("", "x", "x", "")):
        pool.creation.create(session, SequenceArgs(SequenceId(idx + 1), np.array([1], np.int32), scope=tenant))
    with pytest.raises(InvalidField, match="too many tenants"):
        pool.creation.create(session, SequenceArgs(SequenceId(9), np.array([1], np.int32), scope="y"))
    assert pool.queries.check_invariants() == []
