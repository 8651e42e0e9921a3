"""Sharing, copy-on-write, fences, eviction (docs/api/protocol.md, section 4), and progress (docs/api/protocol.md, section 5).

Also the hit that a hash collision cannot make.
"""

import pytest

from kvkeeper.cache_service.core.values.types import BlockState, StartResult
from tests.support.reference.told_tables import ToldTables
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32, step_batch

# 4. Sharing


def test_4_the_index_is_a_holder_of_its_own() -> None:
    """One table and the index: a write still copies."""
    pool = CorePool()
    block = pool.prefill(1, range(4))[0]
    reply = pool.step(truncates=[(1, 2)], reserves=[(1, 3, 3)])
    assert reply.copy_sources.tolist() == [block]
    assert pool.manager.queries.stats().num_copies_on_write == 1


def test_4_a_commit_of_known_content_takes_the_indexed_block() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(8))
    pool.create(2, range(8), session=B)
    pool.step(starts=[(1, ALL, ALL)])
    pool.step(B, starts=[(2, ALL, ALL)])
    own = pool.table(2, session=B)
    pool.step(commits=[(1, 8, [])])
    reply = pool.step(B, commits=[(2, 8, [])])
    assert pool.table(2, session=B) == pool.table(1)
    assert reply.update_ids.tolist() == []  # it was answered before its commit was published
    reply = pool.step(B)
    assert (reply.update_table_idx.tolist(), reply.update_block_ids.tolist()) == ([0, 1], pool.table(1))
    assert {pool.state(block) for block in own} == {BlockState.FREE}
    assert pool.manager.queries.stats().num_adopted_blocks == 2


def test_4_a_duplicate_given_up_with_a_step_in_flight_is_fenced() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(4))
    pool.step(starts=[(1, ALL, 0)])
    pool.prefill(2, range(4), session=B)
    duplicate = pool.table(1)[0]
    pool.step(reserves=[(1, 5, 5)])
    pool.step(lag=1, commits=[(1, 4, [])])  # this step, too, was told of the duplicate
    assert pool.state(duplicate) is BlockState.FENCED
    pool.step(lag=1)
    assert pool.state(duplicate) is BlockState.FENCED
    pool.step(lag=1)
    assert pool.state(duplicate) is BlockState.FREE


def test_4_a_fork_of_a_sequence_released_in_the_same_step_is_told_what_it_adopted() -> None:
    """The engine copies the child's table from the parent's, so the parent's replaced entries must reach it."""
    pool = CorePool(num_blocks=9)
    pool.create(1, range(5))
    pool.step(starts=[(1, ALL, 0)])
    known = pool.prefill(2, range(4), session=B)
    reply = pool.step(commits=[(1, 5, [])], forks=[(1, 3, 5)], releases=[1])
    assert (reply.update_ids.tolist(), reply.update_block_ids.tolist()) == ([1], known)
    assert pool.table(3)[:1] == known


def test_4_a_step_that_does_more_than_commit_and_reserve_tells_its_own_duplicates() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(4))
    pool.step(starts=[(1, ALL, 0)])
    known = pool.prefill(2, range(4), session=B)
    duplicate = pool.table(1)[0]
    pool.create(3, [9, 9])
    pool.step(reserves=[(1, 5, 5)], starts=[(3, ALL, 0)])
    reply = pool.step(lag=1, commits=[(1, 4, [])], truncates=[(3, 1)])
    assert (reply.update_ids.tolist(), reply.update_block_ids.tolist()) == ([1], known)
    pool.step(lag=1)
    assert pool.state(duplicate) is BlockState.FREE  # no step that began since was told of it


def test_4_a_step_with_a_start_that_its_commits_do_not_matter_to_tells_its_duplicates_with_the_next_reply() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(4))
    pool.step(starts=[(1, ALL, 0)])
    known = pool.prefill(2, range(4), session=B)
    pool.create(3, [9, 9])
    assert pool.step(commits=[(1, 4, [])], starts=[(3, ALL, 0)]).update_ids.tolist() == []
    reply = pool.step(releases=[3])
    assert (reply.update_ids.tolist(), reply.update_block_ids.tolist()) == ([1], known)


def test_4_table_updates_are_those_before_the_step_s_own_releases_and_truncates() -> None:
    """A fork may copy them; and they are told once."""
    pool = CorePool(num_blocks=17)
    known = pool.prefill(9, range(8), session=B)
    for sequence_id in (1, 2, 3):
        pool.create(sequence_id, range(8))
    pool.step(starts=[(1, ALL, 0), (2, ALL, 0), (3, ALL, 0)])
    pool.step(commits=[(1, 8, []), (2, 8, []), (3, 8, [])])
    reply = pool.step(releases=[1], truncates=[(2, 4)])
    assert reply.update_ids.tolist() == [1, 1, 2, 2, 3, 3]
    assert reply.update_table_idx.tolist() == [0, 1] * 3
    assert reply.update_block_ids.tolist() == known * 3
    assert pool.step().update_ids.tolist() == []


def test_4_a_told_entry_that_is_cut_again_may_name_the_destination_of_a_copy() -> None:
    """So what a copy-on-write is, and when an update takes effect, is told by its place in the list and not by its block."""
    pool = CorePool(num_blocks=6)
    pool.prefill(9, range(8), session=B)
    pool.create(1, range(8))
    pool.step(starts=[(1, ALL, 0)])
    pool.prefill(2, range(50, 53))
    known = pool.table(9, session=B)
    pool.release(9, session=B)
    told = ToldTables(4)
    told.tables = {1: pool.table(1), 2: pool.table(2)}
    items = {"commits": [(1, 8, [])], "forks": [(2, 3, 3)], "truncates": [(1, 4)], "reserves": [(1, 9, 12), (3, 4, 4)]}
    reply = pool.step(**items)
    assert reply.update_ids.tolist() == [1, 1, 3]
    assert reply.update_block_ids.tolist() == [*known, known[1]]
    assert reply.copy_destinations.tolist() == known[1:], "or it is not the case that is meant"
    told.apply(step_batch(0, 0, **items), reply)
    assert told.tables == {sequence_id: pool.table(sequence_id) for sequence_id in (1, 2, 3)}


def test_4_three_commits_of_the_same_new_content_in_one_step_share_one_block() -> None:
    pool = CorePool(num_blocks=9)
    for sequence_id in (1, 2, 3):
        pool.create(sequence_id, range(4))
    pool.step(starts=[(1, ALL, 0), (2, ALL, 0), (3, ALL, 0)])
    pool.step(commits=[(1, 4, []), (2, 4, []), (3, 4, [])])
    shared = pool.table(1)
    assert pool.table(2) == pool.table(3) == shared
    assert pool.manager.queries.stats().num_shared_blocks == 1
    pool.step(releases=[1, 3])
    assert pool.state(shared[0]) is BlockState.REFERENCED
    pool.step(releases=[2])
    assert pool.state(shared[0]) is BlockState.CACHED


def test_4_the_same_tokens_behind_another_parent_are_other_content() -> None:
    pool = CorePool(num_blocks=9)
    first = pool.prefill(1, [1, 1, 1, 1, 5, 5, 5, 5])
    second = pool.prefill(2, [2, 2, 2, 2, 5, 5, 5, 5])
    assert not set(first) & set(second)


def test_4_indexed_content_is_evicted_only_when_not_fenced() -> None:
    pool = CorePool(num_blocks=3)
    pool.prefill(1, range(8))
    pool.step(reserves=[(1, 8, 8)])
    pool.step(lag=1, releases=[1])
    assert pool.manager.evictions.evict_blocks(2) == 0
    pool.step()
    assert pool.manager.evictions.evict_blocks(2) == 2
    pool.audit()


def test_4_leaves_are_evicted_before_parents_and_the_least_recently_used_first() -> None:
    pool = CorePool(num_blocks=9)
    old, new = pool.prefill(1, range(12)), pool.prefill(2, range(20, 32))
    pool.step(releases=[1])
    pool.step(releases=[2])
    pool.create(3, range(9))
    pool.step(starts=[(3, 1, ALL)])
    pool.step(releases=[3])  # the first two of the old ones were used again
    order = [old[2], new[2], new[1], new[0], old[1], old[0]]
    for count, block in enumerate(order, start=3):
        assert pool.manager.evictions.evict_blocks(count) == 1
        assert pool.state(block) is BlockState.FREE
        pool.audit()


def test_4_a_prefix_in_use_is_not_evicted_for_what_comes_after_it() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(8))
    pool.prefill(2, range(20, 28))
    pool.step(releases=[2])
    assert pool.step(reserves=[(1, 16, 16)]).reserve_reserved.tolist() == [16]
    assert pool.matched(range(8)) == pool.table(1)[:2]
    assert pool.matched(range(20, 28)) == []


def test_4_forgetting_the_index_unindexes_blocks_that_are_held() -> None:
    pool = CorePool(num_blocks=9)
    held = pool.prefill(1, range(9))
    pool.prefill(2, range(20, 28))
    pool.step(releases=[2])
    result = pool.manager.prefixes.clear()
    assert (result.num_freed_blocks, result.num_forgotten_blocks) == (2, 4)
    pool.audit()
    assert pool.matched(range(9)) == []
    assert pool.table(1) == held
    pool.step(releases=[1])  # what ran is published anew, as if it had just been committed
    assert pool.matched(range(9)) == held[:2]
    assert [pool.state(block) for block in held] == [BlockState.CACHED, BlockState.CACHED, BlockState.FREE]
    assert pool.manager.prefixes.clear() == (2, 2)
    assert pool.manager.prefixes.clear() == (0, 0)
    assert {pool.state(block) for block in held} == {BlockState.FREE}


def test_4_after_forgetting_a_sequence_is_published_from_its_first_block_again() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(8))
    pool.manager.prefixes.clear()
    newer = pool.prefill(2, range(4), session=B)
    pool.step(reserves=[(1, 12, 12)])
    pool.step(commits=[(1, 12, [8, 9, 10, 11])])
    assert pool.table(1)[0] == newer[0]  # what was published meanwhile is adopted
    assert pool.matched(range(12)) == pool.table(1)


def test_4_without_prefix_caching_nothing_is_found_and_nothing_stays() -> None:
    pool = CorePool(prefix_caching=False)
    blocks = pool.prefill(1, range(8))
    pool.create(2, range(9), session=B)
    assert pool.step(B, starts=[(2, ALL, ALL)]).start_hits.tolist() == [0]
    pool.step(releases=[1])
    assert {pool.state(block) for block in blocks} == {BlockState.FREE}


# 5. Progress


@pytest.mark.parametrize(("watermark", "num_started"), [(0.0, 7), (0.3, 5), (0.6, 3)])
def test_5_the_watermark_keeps_blocks_free_for_those_that_run(watermark: float, num_started: int) -> None:
    pool = CorePool(num_blocks=8, watermark=watermark)
    for sequence_id in range(1, 9):
        pool.create(sequence_id, [sequence_id])
    results = pool.step(starts=[(i, 1, 0) for i in range(1, 9)]).start_results.tolist()
    assert results == [StartResult.STARTED] * num_started + [StartResult.NO_ROOM] * (8 - num_started)
    assert pool.step(reserves=[(1, 1, 28)]).reserve_reserved.tolist() == [4 * (8 - num_started)]


def test_5_the_watermark_is_nothing_when_nothing_runs() -> None:
    pool = CorePool(num_blocks=8, watermark=0.9)
    pool.create(1, range(28))
    assert pool.step(starts=[(1, ALL, 0)]).start_reserved.tolist() == [28]


def test_5_an_admission_answer_is_what_a_start_then_gets() -> None:
    for held in range(8):
        for prompt_len in (3, 4, 5, 8, 9, 13):
            pool = CorePool(num_blocks=9, watermark=0.2)
            pool.prefill(1, range(9))
            pool.step(releases=[1])
            if held:
                pool.create(2, range(50, 50 + 4 * held))
                pool.step(starts=[(2, ALL, 0)])
            answer = pool.manager.admission.check("", int32(range(prompt_len)), 0, 0)
            pool.create(3, range(prompt_len), session=B)
            reply = pool.step(B, starts=[(3, ALL, ALL)])
            assert answer.can_now == (reply.start_reserved.tolist() == [prompt_len]), (held, prompt_len)
            if answer.can_now:
                assert answer.num_hit_tokens == reply.start_hits[0]
                assert answer.num_required_blocks == reply.start_num_blocks[0] - reply.start_hits[0] // 4


def test_5_never_is_never_and_later_is_not_now() -> None:
    pool = CorePool(num_blocks=5)
    assert not pool.manager.admission.check("", None, 17, 0).can_ever
    assert not pool.manager.admission.check("", None, 8, 9).can_ever
    answer = pool.manager.admission.check("", None, 16, 0)
    assert (answer.can_ever, answer.can_now, answer.limit_tokens) == (True, True, 16)
    pool.prefill(1, range(3))
    answer = pool.manager.admission.check("", None, 16, 0)
    assert (answer.can_ever, answer.can_now, answer.num_required_blocks, answer.num_available_blocks) == (True, False, 4, 3)
    assert pool.manager.queries.stats().num_sessions == len((A, B))


def test_a_start_hits_what_a_sequence_behind_its_match_has_committed() -> None:
    pool, tokens = CorePool(num_blocks=40), list(range(20))
    pool.prefill(1, tokens[:12])
    pool.create(2, [*tokens, 98])
    pool.step(starts=[(2, ALL, 0)], publish=False)
    pool.step(commits=[(2, 20, [])], publish=False)  # five blocks, of which others have published three
    pool.create(3, [*tokens, 99])
    assert pool.step(starts=[(3, ALL, ALL)]).start_hits.tolist() == [20]
