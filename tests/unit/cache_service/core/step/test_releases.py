"""The blocks that a step releases serve its own starts and reservations, and its answer counts them."""

from tests.support.worlds.core_pool import ALL, A, CorePool, step_batch


def pool_of_two(num_blocks: int) -> CorePool:
    """Sequence 1 has 4 blocks, of which 3 are full; sequence 2 has one block, which is full."""
    pool = CorePool(num_blocks=num_blocks)
    pool.prefill(1, range(14))
    pool.prefill(2, range(100, 104))
    return pool


def test_the_answer_counts_the_released_blocks() -> None:
    pool = pool_of_two(num_blocks=13)  # 7 are free
    reply = pool.step(releases=[1], commits=[(2, 4, [5])], reserves=[(2, 5, 5)])
    assert (reply.num_free, reply.num_evictable) == (7, 3), "the block that was not full is free"


def test_where_free_blocks_are_short_the_step_gets_the_released_ones() -> None:
    pool = pool_of_two(num_blocks=6)  # none is free
    reply = pool.step(releases=[1], commits=[(2, 4, [5])], reserves=[(2, 5, 5)])
    assert reply.reserve_reserved.tolist() == [5]
    assert (reply.num_free, reply.num_evictable) == (0, 3)


def test_a_start_does_not_wait_for_a_sequence_that_its_step_releases() -> None:
    """It computes the prompt of the start, and will not commit it any more."""
    pool = CorePool(num_blocks=33)
    pool.create(1, range(14))
    pool.step(starts=[(1, ALL, ALL)])
    pool.create(2, range(14))
    batch = step_batch(2, 1, releases=[1], starts=[(2, ALL, ALL)])
    reply = pool.manager.steps.step(A, batch._replace(start_may_wait=batch.start_max_hit // ALL))
    assert reply.start_reserved.tolist() == [14]


def test_what_a_sequence_commits_in_the_step_that_releases_it_stays_cached() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, range(8))
    pool.step(starts=[(1, ALL, ALL)])
    reply = pool.step(commits=[(1, 8, [])], releases=[1])
    assert reply.num_evictable == 2, "both are in the index when the blocks are given back"
    assert len(pool.matched(range(8))) == 2
