"""Whether a start is told that its prefix is being computed: by which sequences, for how long, and how often at most."""

import pytest

from kvkeeper.cache_service.core.values.types import Executor, SequenceState, SessionId, StartResult
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32, step_batch

STARTED, COMPUTING, NO_ROOM = StartResult.STARTED, StartResult.COMPUTING, StartResult.NO_ROOM


def waiting_start(pool: CorePool, sequence_id: int, *, may_wait: int = 1, max_hit: int = ALL) -> tuple[int, int]:
    """(result, hit) of a start in session B."""
    step_id = pool.step_ids[B] = pool.step_ids[B] + 1
    batch = step_batch(step_id, step_id - 1, starts=[(sequence_id, ALL, max_hit)])
    reply = pool.manager.steps.step(B, batch._replace(start_may_wait=int32([may_wait])))
    pool.audit()
    return int(reply.start_results[0]), int(reply.start_hits[0])


@pytest.mark.parametrize(
    ("granted", "prompt", "length"),
    [
        (12, range(12), 8),  # a token is left to compute
        (12, range(13), 12),
        (9, range(13), 8),  # as far as the running step goes
        (3, range(13), 0),
        (12, [0, 1, 2, 3, 4, 5, 6, 99, 8], 4),
        (12, [99, *range(1, 12)], 0),
    ],
)
def test_computing_tells_how_long_the_prefix_will_be(granted: int, prompt: list[int], length: int) -> None:
    pool = CorePool(num_blocks=17)
    pool.create(1, range(12))
    pool.step(starts=[(1, granted, ALL)])
    pool.create(2, list(prompt), session=B)
    assert waiting_start(pool, 2) == ((COMPUTING, length) if length else (STARTED, 0))
    if length:
        assert pool.manager.queries.stats().num_computing_answers == 1
        pool.step(commits=[(1, granted, [])])
        assert waiting_start(pool, 2) == (STARTED, length)


def test_computing_is_not_told_to_a_start_that_may_not_wait_wants_no_hit_or_is_of_another_tenant() -> None:
    for args in ({"may_wait": 0}, {"max_hit": 0}):
        pool = CorePool(num_blocks=17)
        pool.create(1, range(12))
        pool.step(starts=[(1, 12, ALL)])
        pool.create(2, range(12), session=B)
        assert waiting_start(pool, 2, **args)[0] == STARTED
    pool.create(3, range(12), session=B, tenant="other")
    assert waiting_start(pool, 3)[0] == STARTED


def answers_of(pool: CorePool, most: int) -> int:
    """How many times a waiting start of B is told COMPUTING before it goes on; at most so many are looked at."""
    for count in range(most):
        if waiting_start(pool, 2)[0] != COMPUTING:
            return count
    return most


def with_a_rival(*, granted: int = 12, reclaim_at_once: int = 10**9) -> CorePool:
    """A runs a sequence that was granted slots for the prefix which B's sequence 2 wants."""
    pool = CorePool(num_blocks=17)
    pool.manager.reclaim.at_once = reclaim_at_once
    pool.create(1, range(12))
    pool.step(starts=[(1, granted, ALL)])
    pool.create(2, range(12), session=B)
    return pool


def test_a_sequence_of_a_session_that_steps_on_without_committing_is_not_waited_for() -> None:
    """By the second step after it, what a step computed has completed and could have been committed."""
    pool = with_a_rival()
    for lag in (1, 1):
        assert waiting_start(pool, 2) == (COMPUTING, 8)
        pool.step(lag=lag)
    assert waiting_start(pool, 2) == (STARTED, 0)


def test_one_that_computes_chunk_by_chunk_is_waited_for_however_long_that_takes() -> None:
    pool = CorePool(num_blocks=129)
    pool.create(1, range(400))
    pool.step(starts=[(1, 4, ALL)])
    pool.create(2, range(400), session=B)
    for computed in range(4, 396, 4):
        for _ in range(3):
            assert waiting_start(pool, 2) == (COMPUTING, computed)
        pool.step(commits=[(1, computed, [])], reserves=[(1, 1, computed + 4)])
    assert pool.manager.queries.stats().num_computing_answers > 200


def test_the_answers_of_one_start_are_bounded_where_the_others_session_idles() -> None:
    pool = with_a_rival()
    assert 0 < answers_of(pool, 2000) <= 64
    assert pool.view(2, session=B).state is SequenceState.RUNNING
    assert pool.manager.queries.stats().num_computing_answers <= 64


def test_the_bound_is_each_start_s_own_and_counts_anew_with_what_has_come() -> None:
    pool = with_a_rival(granted=8)
    num_first = answers_of(pool, 60)
    pool.step(commits=[(1, 4, [])], reserves=[(1, 1, 12)])
    assert (num_first, waiting_start(pool, 2)) == (60, (COMPUTING, 8))
    assert answers_of(pool, 2000) == 63
    pool.create(3, range(12), session=B)
    assert waiting_start(pool, 3)[0] == COMPUTING


def test_without_room_the_start_that_waited_long_enough_asks_for_blocks() -> None:
    pool = CorePool(num_blocks=4)
    pool.create(1, range(12))
    pool.step(starts=[(1, 12, ALL)])
    pool.create(2, range(12), session=B)
    answers_of(pool, 2000)
    assert waiting_start(pool, 2)[0] == NO_ROOM
    assert pool.manager.queries.stats().num_claimed_blocks > 0


def test_what_was_committed_before_the_index_was_cleared_is_published_again() -> None:
    """It may never be committed further: a list of a beam search rests, for one."""
    pool = with_a_rival()
    pool.step(commits=[(1, 12, [])])
    assert pool.manager.prefixes.clear().num_forgotten_blocks == 3
    pool.step(B, starts=[(2, ALL, ALL)])
    assert pool.view(2, session=B).num_hit_tokens == 8
    assert pool.table(2, session=B)[:2] == pool.table(1)[:2]


@pytest.mark.parametrize("clears", [False, True])
def test_committed_blocks_that_wait_for_a_copy_are_waited_for_also_after_a_clear(clears: bool) -> None:
    pool = CorePool(num_blocks=17)
    pool.create(1, range(12))
    pool.step(starts=[(1, 8, ALL)])
    pool.step(commits=[(1, 7, [])], forks=[(1, 3, 7)], reserves=[(1, 8, 8)])  # copies the block that it wrote to the end
    pool.step(lag=1, commits=[(1, 8, [])])
    if clears:
        pool.manager.prefixes.clear()
    pool.create(2, range(9), session=B)
    for _ in range(3):
        assert waiting_start(pool, 2) == (COMPUTING, 8)
    pool.step()
    assert waiting_start(pool, 2) == (STARTED, 8)


def test_a_sequence_of_a_session_that_ended_is_not_waited_for() -> None:
    """It is given back in slices, and runs until its turn comes."""
    pool = with_a_rival(reclaim_at_once=0)
    assert waiting_start(pool, 2) == (COMPUTING, 8)
    pool.manager.sessions.close(A, may_still_write=False)
    del pool.step_ids[A]
    assert pool.manager.queries.stats().num_running_sequences == 1, "it is still there"
    assert waiting_start(pool, 2) == (STARTED, 0)


def test_one_item_calls_tell_no_steps_so_what_they_granted_counts_until_the_bound() -> None:
    pool, session = CorePool(num_blocks=17), SessionId("c")
    pool.manager.sessions.open(session, Executor.CACHE)
    for sequence_id in (1, 5):
        pool.create(sequence_id, range(12), session=session, tenant="" if sequence_id == 1 else "other")
        pool.manager.one_item.extend(session, sequence_id, 12, look_up=True)
    for length in (1, 2, 3):
        pool.manager.one_item.commit(session, 5, length, 12, int32([]))
    pool.create(2, range(12), session=B)
    assert answers_of(pool, 2000) == 64


def test_starts_of_one_step_wait_for_those_before_them() -> None:
    pool = CorePool(num_blocks=33)
    prompts = {1: range(12), 2: range(12), 3: range(50, 62), 4: [*range(4), *range(90, 98)], 5: range(50, 56), 6: range(12)}
    for sequence_id, prompt in prompts.items():
        pool.create(sequence_id, list(prompt), tenant="other" if sequence_id == 6 else "")
    batch = step_batch(1, 0, starts=[(sequence_id, ALL, ALL) for sequence_id in prompts])
    reply = pool.manager.steps.step(A, batch._replace(start_may_wait=int32([1] * len(prompts))))
    assert reply.start_results.tolist() == [STARTED, COMPUTING, STARTED, COMPUTING, COMPUTING, STARTED]
    assert reply.start_hits.tolist() == [0, 8, 0, 4, 4, 0]
    pool.audit()
