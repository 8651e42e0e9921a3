"""The rules R1 to R9 of docs/inside/rules.md, each told once by hand.

The machine and the simulation hold the core to all of them at once.
"""

import sys
import tracemalloc
from collections import Counter

import pytest

from kvkeeper.cache_service.core.values.errors import CacheError
from kvkeeper.cache_service.core.values.types import BlockState, StartResult
from tests.support.reference.shadow_memory import Contents, Read, ShadowMemory
from tests.support.worlds.core_pool import ALL, A, B, CorePool, step_batch

EDGES = [n for k in (1, 2, 3) for n in (4 * k - 1, 4 * k, 4 * k + 1)]  # kB - 1, kB, kB + 1 of block size 4


def test_r1_every_block_is_in_exactly_one_state_and_the_sums_match() -> None:
    pool = CorePool(num_blocks=9)
    cached = pool.prefill(1, range(5))[0]
    pool.step(releases=[1])
    fenced = pool.prefill(2, range(10, 14))[0]
    pool.create(3, range(20, 26))
    pool.step(starts=[(3, ALL, 0)])
    pool.step(lag=1, releases=[2])
    pool.create(4, [7], session=B)
    referenced = pool.table(3)[0]
    quarantined = int(pool.step(B, starts=[(4, 1, 0)]).start_block_ids[0])
    pool.manager.sessions.close(B, may_still_write=True)
    pool.audit()
    free = next(block for block in range(1, 9) if pool.state(block) is BlockState.FREE)
    assert [pool.state(block) for block in (0, free, cached, referenced, fenced, quarantined)] == [
        BlockState.NULL, BlockState.FREE, BlockState.CACHED, BlockState.REFERENCED, BlockState.FENCED, BlockState.QUARANTINED,
    ]  # fmt: skip
    stats, found = pool.manager.queries.stats(), Counter(pool.state(block) for block in range(9))
    assert found == {
        BlockState.NULL: 1,
        BlockState.FREE: stats.num_free_blocks,
        BlockState.CACHED: stats.num_cached_blocks,
        BlockState.REFERENCED: stats.num_referenced_blocks,
        BlockState.FENCED: stats.num_fenced_blocks,
        BlockState.QUARANTINED: stats.num_quarantined_blocks,
    }


def test_r1_a_block_is_free_only_when_the_last_table_lets_go() -> None:
    pool = CorePool()
    blocks = pool.prefill(1, range(3))
    pool.step(forks=[(1, 2, 3), (2, 3, 3), (3, 4, 2)])
    for released in (2, 1, 4):
        pool.step(releases=[released])
        assert pool.state(blocks[0]) is BlockState.REFERENCED
    pool.step(releases=[3])
    assert pool.state(blocks[0]) is BlockState.FREE


@pytest.mark.parametrize("length", EDGES)
def test_r2_a_table_has_exactly_the_blocks_of_its_reserved_tokens(length: int) -> None:
    pool = CorePool(num_blocks=17)
    pool.create(1, range(length))
    reply = pool.step(starts=[(1, length, 0)])
    assert reply.start_reserved.tolist() == [length]
    assert reply.start_num_blocks.tolist() == [len(pool.table(1))] == [-(-length // 4)]
    pool.step(reserves=[(1, length + 9, length + 9)])
    assert len(pool.table(1)) == -(-(length + 9) // 4)
    pool.step(truncates=[(1, length)])
    assert len(pool.table(1)) == -(-length // 4)
    pool.step(truncates=[(1, 1)])
    assert len(pool.table(1)) == 1


@pytest.mark.parametrize("length", EDGES)
def test_r3_a_fork_and_its_parent_spell_their_tokens_after_both_have_written(length: int) -> None:
    pool, contents, memory = CorePool(num_blocks=17), Contents(), ShadowMemory(17, 4)

    def write(sequence_id: int, tokens: list[int], first: int) -> None:
        for position, content in list(enumerate(contents.spell("", tokens)))[first:]:
            memory.write(memory.slot(pool.table(sequence_id), position), content)

    prompt = list(range(length))
    pool.prefill(1, prompt)
    write(1, prompt, 0)
    pool.step(forks=[(1, 2, length)])
    reply = pool.step(reserves=[(1, length + 1, length + 1), (2, length + 1, length + 1)])
    memory.copy(list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True)))
    assert len(reply.copy_sources) == (length % 4 > 0)
    write(1, [*prompt, 101], length)
    write(2, [*prompt, 102], length)
    for sequence_id, last in ((1, 101), (2, 102)):
        wanted = contents.spell("", [*prompt, last])
        assert memory.check("", [Read(str(sequence_id), pool.table(sequence_id), wanted)]) == []


@pytest.mark.parametrize("length", EDGES)
def test_r4_a_full_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    pool = CorePool(num_blocks=17)
    first = pool.prefill(1, range(length))
    pool.create(2, range(length), session=B)
    reply = pool.step(B, starts=[(2, ALL, ALL)])
    hit = (length - 1) // 4 * 4
    assert reply.start_hits.tolist() == [hit]
    assert pool.table(2, session=B)[: hit // 4] == first[: hit // 4]
    assert reply.start_reserved.tolist() == [length]


def test_r4_a_hit_needs_every_token_before_it() -> None:
    pool = CorePool(num_blocks=17)
    pool.prefill(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(pool.matched([1, 2, 3, 4, 5, 6, 7, 8])) == 2
    assert len(pool.matched([1, 2, 3, 4, 5, 6, 7, 0])) == 1
    assert pool.matched([0, 2, 3, 4, 5, 6, 7, 8]) == []
    assert pool.matched([5, 6, 7, 8]) == []  # the same block of tokens, not behind the same parent


def test_r4_a_tenant_hits_its_own_prefix_and_no_other_tenants() -> None:
    pool = CorePool(num_blocks=17)
    pool.prefill(1, range(9), tenant="red")
    for tenant, hit in (("red", 8), ("blue", 0), ("", 0)):
        pool.create(2, range(9), session=B, tenant=tenant)
        assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [hit]
        pool.step(B, releases=[2])


@pytest.mark.parametrize("truncated", [5, 6, 7])
def test_r5_a_write_into_an_indexed_block_copies_it_first(truncated: int) -> None:
    pool = CorePool()
    before = pool.prefill(1, range(9))
    reply = pool.step(truncates=[(1, truncated)], reserves=[(1, 8, 8)])
    assert reply.copy_sources.tolist() == [before[1]]
    assert reply.update_table_idx.tolist() == [1]
    assert reply.update_block_ids.tolist() == reply.copy_destinations.tolist() == [pool.table(1)[1]]
    assert pool.matched(range(8)) == before[:2]  # the cached content was not touched


def test_r5_of_two_holders_of_a_partial_block_only_the_first_writer_copies() -> None:
    pool = CorePool()
    shared = pool.prefill(1, range(6))[1]
    pool.step(forks=[(1, 2, 6)])
    reply = pool.step(reserves=[(2, 7, 7), (1, 7, 7)])
    assert reply.copy_sources.tolist() == [shared]
    assert reply.update_ids.tolist() == [2]
    assert pool.table(1)[1] == shared


def test_r5_nothing_is_copied_that_cannot_be_written() -> None:
    pool = CorePool()
    pool.prefill(1, range(6))
    pool.step(forks=[(1, 2, 6), (1, 3, 4)])
    assert pool.step(reserves=[(2, 6, 6), (1, 1, 6), (3, 5, 5)]).copy_sources.tolist() == []


def test_r6_nothing_is_shareable_before_it_is_committed() -> None:
    pool = CorePool(num_blocks=17)
    pool.create(1, range(9))
    pool.create(2, range(9), session=B)
    pool.step(starts=[(1, ALL, ALL)])
    assert pool.matched(range(9)) == []
    with pytest.raises(CacheError):  # the step that computes it still runs
        pool.step(lag=1, commits=[(1, 9, [])])
    assert pool.matched(range(9)) == []
    pool.step(commits=[(1, 9, [])])
    assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [8]


def test_r6_what_a_step_drops_waits_for_the_step_before_it() -> None:
    pool = CorePool(num_blocks=2)
    block = pool.prefill(1, range(3))[0]
    pool.create(2, range(3))
    pool.step(reserves=[(1, 4, 4)])
    reply = pool.step(lag=1, releases=[1], starts=[(2, ALL, 0)])
    assert (reply.start_results.tolist(), reply.num_fenced) == ([StartResult.NO_ROOM], 1)
    assert pool.state(block) is BlockState.FENCED
    reply = pool.step(lag=1, starts=[(2, ALL, 0)])  # the one before the release has completed
    assert reply.start_block_ids.tolist() == [block]


def test_r6_another_sessions_release_does_not_lift_a_fence() -> None:
    pool = CorePool(num_blocks=4)
    cached = pool.prefill(1, range(5))[0]
    pool.create(2, range(5), session=B)
    pool.step(B, starts=[(2, ALL, ALL)])
    pool.step(reserves=[(1, 5, 5)])
    pool.step(lag=1, releases=[1])  # the step before it may still read the block
    pool.step(B, releases=[2])
    assert pool.state(cached) is BlockState.FENCED
    assert pool.matched(range(4)) == [cached]  # committed content may be hit while fenced
    pool.manager.steps.complete(A, pool.step_ids[A] - 1)
    assert pool.state(cached) is BlockState.CACHED


def test_r6_a_block_that_another_sessions_step_may_read_is_copied_before_a_write() -> None:
    pool = CorePool()
    block = pool.prefill(1, range(5))[0]
    pool.create(2, range(5), session=B)
    pool.step(B, starts=[(2, ALL, ALL)])
    pool.step(reserves=[(1, 5, 5)])
    pool.step(lag=1, releases=[1])
    pool.manager.prefixes.clear()  # now one table alone holds it
    reply = pool.step(B, truncates=[(2, 3)], reserves=[(2, 4, 4)])
    assert reply.copy_sources.tolist() == [block]


def test_r6_the_source_of_a_copy_waits_for_the_copy() -> None:
    pool = CorePool(num_blocks=4)
    source = pool.prefill(1, range(4))[0]
    pool.step(truncates=[(1, 3)], reserves=[(1, 4, 4)])
    assert pool.state(source) is BlockState.FENCED
    pool.step(lag=1)
    assert pool.state(source) is BlockState.FENCED
    pool.step()
    assert pool.state(source) is BlockState.CACHED


def test_r6_a_block_is_not_shared_while_the_copy_that_fills_it_is_in_flight() -> None:
    pool = CorePool()
    pool.create(1, range(8))
    pool.step(starts=[(1, 8, 0)])
    pool.step(commits=[(1, 6, [])])
    pool.step(forks=[(1, 2, 6)], reserves=[(1, 9, 9)])  # block 1 of sequence 1 is being copied
    pool.step(lag=1, commits=[(1, 8, [])])  # valid: the step that computed it has completed
    assert len(pool.matched(range(8))) == 1
    pool.step(commits=[(1, 8, [])])
    assert pool.matched(range(8)) == pool.table(1)[:2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"releases": [9]}, {"releases": [0]}, {"releases": [-1]}, {"releases": [2**63 - 1]}, {"releases": [1, 1]},
        {"commits": [(1, 10, [])]}, {"commits": [(1, 8, [])]}, {"commits": [(1, -1, [])]}, {"commits": [(9, 1, [])]},
        {"forks": [(1, 2, 10)]}, {"forks": [(1, 1, 2)]}, {"forks": [(1, 0, 2)]}, {"forks": [(3, 4, 1)]},
        {"truncates": [(1, 0)]}, {"truncates": [(3, 1)]}, {"reserves": [(1, 2, 1)]}, {"reserves": [(1, 1, 2**31 - 1)]},
        {"starts": [(1, 1, 1)]}, {"starts": [(3, 0, 1)]}, {"starts": [(3, 1, -1)]}, {"starts": [(3, 1, 1), (3, 1, 1)]},
    ],
)  # fmt: skip
def test_r7_a_refused_step_leaves_no_trace(wrong: dict[str, list[object]]) -> None:
    pool = CorePool()
    pool.prefill(1, range(9))
    pool.create(3, range(3))
    lawful = {"commits": [(1, 9, [7])], "forks": [(1, 5, 9)], "starts": [(3, 1, 1)], "reserves": [(1, 11, 11)]}

    def all_of_it() -> object:
        views = [pool.view(i) for i in (1, 3)]
        return [(v.state, v.num_tokens, v.block_table.tolist()) for v in views], pool.manager.queries.stats()

    before = all_of_it()
    with pytest.raises(CacheError):
        pool.step(**{**lawful, **wrong})
    assert all_of_it() == before
    pool.step(**lawful)  # the id was not used up


def test_r7_a_reservation_that_is_refused_gets_nothing_and_reads_as_refused() -> None:
    pool = CorePool(num_blocks=4)
    pool.prefill(1, range(6))
    pool.step(forks=[(1, 2, 6)], reserves=[(1, 8, 8)])  # copies: the last block is taken
    pool.step(forks=[(1, 3, 6)])
    before = pool.table(1), pool.counters(1)
    reply = pool.step(reserves=[(1, 7, 8)])  # the block it would write is shared again, and there is none to copy to
    assert reply.reserve_reserved[0] < 7
    assert (pool.table(1), pool.counters(1)) == before


def test_r8_a_block_is_cleared_before_it_changes_tenant_and_only_then() -> None:
    pool = CorePool(num_blocks=2)
    for sequence_id, tenant, cleared in ((1, "red", []), (2, "red", []), (3, "blue", [1]), (4, "blue", [])):
        pool.create(sequence_id, [1, 2], tenant=tenant)
        reply = pool.step(starts=[(sequence_id, 2, 0)])
        assert reply.copy_destinations.tolist() == cleared
        assert reply.copy_sources.tolist() == [0] * len(cleared)
        pool.step(releases=[sequence_id])
    assert (pool.manager.queries.stats().num_cleared_blocks, pool.manager.queries.stats().num_tenants) == (1, 2)


@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize("may_still_write", [True, False])
def test_r8_a_block_is_cleared_again_when_the_engine_that_was_to_clear_it_is_gone(
    may_still_write: bool, is_released: bool
) -> None:
    pool = CorePool(num_blocks=2)
    pool.create(1, [1, 2], tenant="red")
    pool.step(starts=[(1, 2, 0)])
    pool.step(releases=[1])
    pool.create(1, [1, 2], tenant="blue", session=B)
    assert pool.step(B, starts=[(1, 2, 0)]).copy_destinations.tolist() == [1]
    if is_released:
        pool.step(B, lag=1, releases=[1])
        assert pool.state(1) is BlockState.FENCED
    pool.manager.sessions.close(B, may_still_write=may_still_write)  # before its engine reported the clear
    pool.manager.sessions.end_quarantine(B)
    pool.create(2, [1, 2], tenant="blue")
    reply = pool.step(starts=[(2, 2, 0)])
    assert (reply.copy_sources.tolist(), reply.copy_destinations.tolist()) == ([0], [1])


def test_r9_a_step_costs_the_same_in_a_pool_a_thousand_times_as_large() -> None:
    def cost(num_blocks: int) -> tuple[int, int]:
        """(calls made, peak bytes taken) by one step of two running sequences."""
        pool = CorePool(num_blocks=num_blocks, block_size=1, max_tokens_per_sequence=64)
        for sequence_id in (1, 2):
            pool.prefill(sequence_id, range(sequence_id, 9))
        batch = step_batch(7, 6, reserves=[(1, 12, 12), (2, 12, 12)], commits=[(1, 8, [])])
        calls = 0

        def count(*event: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        pool.manager.steps.step(A, step_batch(6, 5, reserves=[(1, 11, 11), (2, 11, 11)]))
        sys.setprofile(None)
        tracemalloc.start()
        pool.manager.steps.step(A, batch)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return calls, peak

    small, large = cost(200), cost(200_000)
    assert large[0] == small[0]
    assert large[1] < small[1] + 10_000
