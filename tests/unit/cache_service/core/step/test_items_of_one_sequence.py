"""Steps with several items of one sequence, of its children, and of children of a refused fork: all or nothing."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.errors import WrongState
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import ItemResult, SequenceState
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, A


def swapped(pool: TierPool, *sequence_ids: int) -> None:
    for sequence_id in sequence_ids:
        pool.create(sequence_id, range(100 * sequence_id, 100 * sequence_id + 6))
        pool.step(starts=[(sequence_id, ALL, ALL)])
        pool.swap_out(sequence_id)


def everything_comes_back(pool: TierPool) -> None:
    """The sessions end, and no block of either tier is missing."""
    for session in pool.step_ids:
        pool.manager.sessions.close(session, may_still_write=False)
        pool.audit()
    pool.manager.prefixes.clear()
    pool.audit()
    stats, config = pool.manager.queries.stats(), pool.manager.state.config
    assert stats.num_free_blocks == config.num_usable_blocks
    assert stats.num_free_host_blocks == config.num_host_blocks - 1


@pytest.mark.parametrize("ids", [[1], [2, 1], [1, 2]])
@pytest.mark.parametrize("also_in", [False, True])
def test_a_reservation_of_a_swapped_sequence_is_refused_beside_the_same_list_of_commits(ids: list[int], also_in: bool) -> None:
    """What ran before its swap-out may be committed, which is no reason to reserve for it."""
    pool = TierPool()
    swapped(pool, *ids)
    items = {"commits": [(i, 6, []) for i in ids], "reserves": [(i, 7, 7) for i in ids]}
    with pytest.raises(WrongState):
        pool.step(**items, **({"ins": [1]} if also_in else {}))
    assert [pool.counters(i) for i in ids] == [(6, 0, 6)] * len(ids)
    pool.step(commits=items["commits"])
    assert [pool.counters(i) for i in ids] == [(6, 6, 6)] * len(ids)
    for sequence_id in ids:
        reply = pool.step(ins=[sequence_id])
        pool.step(done=pool.run(reply))
        assert pool.state_of(sequence_id) is SequenceState.RUNNING
    everything_comes_back(pool)


def test_one_swapped_sequence_among_many_running_ones_is_seen() -> None:
    pool = TierPool(num_blocks=17)
    pool.prefill(1, range(6))
    swapped(pool, 2)
    with pytest.raises(WrongState) as refused:
        pool.step(commits=[(1, 6, [9]), (2, 6, [])], reserves=[(1, 7, 7), (2, 7, 7)])
    assert refused.value.metadata["sequence_id"] == "2"
    assert pool.counters(1) == (6, 6, 6)


def with_no_slot_for_a_child(**items: object) -> tuple[TierPool, StepReply]:
    """A step that forks where all slots are in use, beside commits and releases that must take effect."""
    pool = TierPool(num_blocks=17, max_sequences=3)
    pool.prefill(1, range(6))
    pool.create(2, range(200, 206))
    pool.step(starts=[(2, ALL, 0)])
    pool.create(3, range(300, 303))
    reply = pool.step(commits=[(2, 6, [])], forks=[(1, 10, 6), (10, 11, 5)], **items)
    assert reply.fork_results.tolist() == [ItemResult.NO_ROOM] * 2
    assert pool.counters(2)[1] == 6
    return pool, reply


@pytest.mark.parametrize(
    ("items", "outs", "ins"),
    [
        ({"outs": [10]}, [ItemResult.NO_ROOM], []),
        ({"ins": [10]}, [], [ItemResult.NO_ROOM]),
        ({"outs": [1, 11, 2], "ins": [10, 11]}, [ItemResult.OK, ItemResult.NO_ROOM, ItemResult.OK], [ItemResult.NO_ROOM] * 2),
        ({"outs": [10], "releases": [3], "truncates": [(10, 2), (2, 6)]}, [ItemResult.NO_ROOM], []),
        ({"truncates": [(11, 1)], "releases": [10]}, [], []),
        ({"outs": [11], "starts": [(3, ALL, ALL)]}, [ItemResult.NO_ROOM], []),
    ],
)
def test_what_names_the_child_of_a_refused_fork_does_nothing(
    items: dict[str, object], outs: list[ItemResult], ins: list[ItemResult]
) -> None:
    pool, reply = with_no_slot_for_a_child(**items)
    assert reply.swap_out_results.tolist() == outs
    assert reply.swap_in_results.tolist() == ins
    pool.step(done=pool.run(reply))
    everything_comes_back(pool)


def test_reservations_of_refused_children_are_refused_beside_those_that_stand() -> None:
    pool, reply = with_no_slot_for_a_child(outs=[10], reserves=[(11, 6, 6), (2, 9, 9), (1, 7, 7)])
    assert reply.reserve_reserved.tolist() == [0, 9, 7]
    assert reply.new_block_item_idx.tolist() == [1]
    assert pool.table(2)[2:] == reply.new_block_ids.tolist()
    everything_comes_back(pool)


def test_without_a_host_tier_the_swap_of_a_refused_child_is_refused_too() -> None:
    pool = TierPool(max_sequences=1, num_host_blocks=0)
    pool.prefill(1, range(6))
    reply = pool.step(forks=[(1, 2, 6)], outs=[2], ins=[2])
    assert reply.swap_out_results.tolist() == reply.swap_in_results.tolist() == [ItemResult.NO_ROOM]


def test_commit_fork_and_swap_of_parent_and_child_in_one_step() -> None:
    pool = TierPool(num_blocks=17)
    pool.create(1, range(6))
    pool.step(starts=[(1, ALL, ALL)])
    written = pool.fill(1)
    reply = pool.step(commits=[(1, 6, [])], forks=[(1, 2, 6), (2, 3, 5)], outs=[1, 2], reserves=[(3, 6, 6)])
    assert len(reply.copy_sources) == 1, "the others hold the block too"
    pool.step(done=pool.run(reply))
    assert [pool.state_of(i) for i in (1, 2, 3)] == [SequenceState.SWAPPED, SequenceState.SWAPPED, SequenceState.RUNNING]
    pool.step(releases=[3])
    pool.step()
    pool.scribble()
    for sequence_id in (1, 2):
        reply = pool.step(ins=[sequence_id])
        pool.step(done=pool.run(reply))
        assert pool.bytes(sequence_id) == written
    everything_comes_back(pool)


def test_ids_are_compared_and_not_only_the_lists() -> None:
    """The same list twice in a step names the same slots, also where sequences came and went before."""
    pool = TierPool(num_blocks=17)
    for sequence_id in (1, 2, 3):
        pool.prefill(sequence_id, range(100 * sequence_id, 100 * sequence_id + 5))
    pool.step(releases=[2])
    reply = pool.step(commits=[(1, 5, [7]), (3, 5, [8])], reserves=[(1, 6, 6), (3, 6, 6)])
    assert reply.reserve_reserved.tolist() == [6, 6]
    assert np.array_equal(pool.manager.queries.tokens(A, 3), [*range(300, 305), 8])
