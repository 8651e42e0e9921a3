"""Several groups of layers over two tiers: swaps and hits by hand, and bugs that the simulation of both tiers has to catch."""

from collections.abc import Iterable

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.node_blocks import NodeBlocks
from kvkeeper.cache_service.core.inspection.explain import in_words
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.sequence_swap import SequenceSwapper
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, Int32Array, SequenceId, SequenceState, SessionId, TransferKind
from tests.support.reference.read_spans import make_spans
from tests.support.slices import scaled, todays
from tests.support.tiers.tier_engine import TierCounts
from tests.support.tiers.tier_simulation import NUM_EVENTS, TierSimulation
from tests.support.worlds.core_pool import compute

A = SessionId("a")
WINDOWS = (0, 5)  # of two groups, with blocks of 2 tokens


def pool(num_blocks: int = 41, num_host_blocks: int = 41, spans: tuple[ReadSpan, ...] = make_spans(*WINDOWS)) -> PoolManager:
    config = PoolConfig(num_blocks, 2, num_host_blocks=num_host_blocks, group_spans=spans, watermark=0.0)
    manager = PoolManager(config)
    manager.sessions.open(A, Executor.CACHE)
    return manager


def create(manager: PoolManager, sequence_id: int, tokens: list[int]) -> None:
    manager.creation.create(A, SequenceArgs(SequenceId(sequence_id), np.array(tokens, np.int32)))


def tables(manager: PoolManager, sequence_id: int) -> list[list[int]]:
    view = manager.queries.view(A, sequence_id)
    return [view.block_table.tolist(), *(table.tolist() for table in view.group_tables)]


def evict_all(manager: PoolManager) -> None:
    with manager.evictions.demoting(A):
        manager.evictions.evict_blocks(manager.state.config.num_usable_blocks)
    assert manager.queries.check_invariants() == []


def test_a_swap_moves_what_each_group_has_and_holes_stay_holes() -> None:
    manager = pool()
    compute(manager, A, 1, list(range(11)))
    before = tables(manager, 1)
    assert before[1][:3] == [0, 0, 0]  # token 11 reads from token 7 on
    out = manager.one_item.swap_out(A, 1)
    assert sorted(out.transfer_sources.tolist()) == sorted(block for table in before for block in table if block)
    assert manager.queries.stats().num_held_host_blocks == 6 + 3
    evict_all(manager)
    back = manager.one_item.swap_in(A, 1)
    assert back.transfer_kinds.tolist() == [TransferKind.SWAP_IN] * 9
    after = tables(manager, 1)
    assert [[bool(block) for block in table] for table in after] == [[bool(block) for block in table] for table in before]
    assert manager.queries.check_invariants() == []


def test_a_swap_moves_the_states_that_there_are_and_a_hit_loads_the_last_alone() -> None:
    manager = pool(spans=(*make_spans(0), state_span(2)))
    compute(manager, A, 1, list(range(11)))
    assert [bool(block) for block in tables(manager, 1)[1]] == [False, True] * 3
    out = manager.one_item.swap_out(A, 1)
    assert len(out.transfer_sources) == manager.queries.stats().num_held_host_blocks == 6 + 3
    evict_all(manager)
    back = manager.one_item.swap_in(A, 1)
    assert len(back.transfer_kinds) == 9
    assert [bool(block) for block in tables(manager, 1)[1]] == [False, True] * 3
    assert manager.queries.check_invariants() == []
    manager.one_item.release(A, 1)
    evict_all(manager)
    create(manager, 2, [*range(10), 99])
    copies = manager.one_item.extend(A, 2, 11, look_up=True)
    assert manager.queries.view(A, 2).num_hit_tokens == 8
    assert len(copies.transfer_kinds) == 4 + 1
    assert [bool(block) for block in tables(manager, 2)[1]] == [False, False, False, True, False, True]
    assert manager.queries.check_invariants() == []


def test_a_hit_on_host_blocks_loads_all_of_the_full_group_and_the_last_window() -> None:
    manager = pool()
    compute(manager, A, 1, list(range(11)))
    manager.one_item.release(A, 1)
    evict_all(manager)
    assert manager.queries.stats().num_cached_blocks == 0
    create(manager, 2, [*range(10), 99])
    copies = manager.one_item.extend(A, 2, 11, look_up=True)
    assert manager.queries.view(A, 2).num_hit_tokens == 10
    assert len(copies.transfer_kinds) == 5 + 2  # in the window of 5 the token 10 reads from token 6 on
    assert [table.count(0) for table in tables(manager, 2)] == [0, 3]
    assert manager.queries.check_invariants() == []


def test_a_hit_ends_where_a_window_has_gone_from_both_tiers() -> None:
    manager = pool(num_host_blocks=4)  # the first group's first three at most come there
    compute(manager, A, 1, list(range(11)))
    manager.one_item.release(A, 1)
    evict_all(manager)
    create(manager, 2, [*range(10), 99])
    copies = manager.one_item.extend(A, 2, 11, look_up=True)
    hit = manager.queries.view(A, 2).num_hit_tokens
    assert hit < 10
    assert len(copies.transfer_kinds) >= hit // 2
    assert manager.queries.view(A, 2).state is SequenceState.RUNNING
    assert manager.queries.check_invariants() == []


def test_an_explanation_names_the_group_whose_window_ends_a_hit() -> None:
    manager = pool(num_host_blocks=0)
    compute(manager, A, 1, list(range(11)))
    manager.one_item.release(A, 1)
    index = manager.state.index
    nodes = index.match(index.find_root(""), np.arange(11, dtype=np.int32), 5)
    manager.state.pool.expire(index.held.group_blocks[0][nodes[3:4]])
    assert manager.queries.check_invariants() == []
    found = manager.queries.explain_match("", np.array([*range(10), 99], np.int32))
    assert (found.num_matched, found.num_hit, found.short_group) == (10, 6, 1)
    assert "Group 1 of the layers lacks what its window reads" in in_words(found)


def test_statistics_tell_what_each_group_holds() -> None:
    manager = pool()
    assert PoolManager(PoolConfig(9, 2)).queries.group_stats() == []
    compute(manager, A, 1, list(range(11)))
    assert [tuple(group) for group in manager.queries.group_stats()] == [(0, 6, 0), (5, 3, 3)]


def _run(seeds: Iterable[int], *, has_tail: bool = False, has_states: bool = False) -> TierCounts:
    """Seeds of pools with several groups."""
    sums = TierCounts()
    for seed in seeds:
        simulation = TierSimulation(seed, may_have_tail=has_tail)
        world = simulation.world
        if len(world.spans) > 1 and world.has_tail >= has_tail and bool(world.states) == has_states:
            for _ in range(NUM_EVENTS):
                simulation.tick()
            sums.add(simulation.finish())
    return sums


def test_a_hit_that_reads_before_what_either_tier_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def usable(self: NodeBlocks, nodes: Int32Array, is_filling: object = None) -> Int32Array:
        return nodes

    monkeypatch.setattr(NodeBlocks, "usable", usable)
    with pytest.raises(AssertionError):
        _run(range(1, 40))


def test_a_hit_on_a_copy_that_is_still_being_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NodeBlocks.usable

    def usable(self: NodeBlocks, nodes: Int32Array, is_filling: np.ndarray | None = None) -> Int32Array:
        return real(self, nodes, None if is_filling is None else np.zeros_like(is_filling))

    monkeypatch.setattr(NodeBlocks, "usable", usable)
    with pytest.raises(AssertionError):
        _run(range(88, 200))  # none before shows it


def test_a_load_that_failed_behind_the_first_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SequenceSwapper._num_left

    def num_left(self: SequenceSwapper, slot: int, num_hits: int, failed: list[int]) -> int:
        return real(self, slot, num_hits, [place for place in failed if place < num_hits])

    monkeypatch.setattr(SequenceSwapper, "_num_left", num_left)
    with pytest.raises(AssertionError):
        _run(range(47, 400))  # none before shows it


_STATE_SEEDS = [seed for seed in range(1, 100) if seed % 10 in (4, 6)]  # whose pools have states


def test_a_hit_whose_last_state_is_in_no_tier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeBlocks, "usable", lambda self, nodes, is_filling=None: nodes)
    with pytest.raises(AssertionError):
        _run(_STATE_SEEDS, has_states=True)


_TAIL_SEEDS = [seed for seed in range(1, 240) if seed % 20 in (10, 11, 18)]  # whose pools have one


def test_tails_swap_with_their_sequences_and_hits_of_either_tier_do_without() -> None:
    counts = _run(todays(_TAIL_SEEDS, scaled(len(_TAIL_SEEDS), 3)), has_tail=True)
    assert min(counts.grouped_hits, counts.tail_gaps, counts.tail_unwritten, counts.promoted) > scaled(20, 6), counts
    assert counts.tail_swaps > scaled(10, 6), counts


def test_a_page_of_a_tail_that_comes_back_from_the_host_as_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: pages come back one entry too early."""
    real = SequenceSwapper._present

    def present(self: SequenceSwapper, owner: object, slot: int) -> object:
        hosts, size = self.host.tables[slot], len(self.host.tables[slot]) // self._sequences.num_groups
        if self._index.held.has_tail and size > 1:
            hosts[size : 2 * size] = np.roll(hosts[size : 2 * size], -1)
        return real(self, owner, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(SequenceSwapper, "_present", present)
    with pytest.raises(AssertionError):
        _run(_TAIL_SEEDS, has_tail=True)
