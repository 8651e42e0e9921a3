"""Commits that stay unpublished for long: the step that meets their bound publishes them, in the middle of its own work."""

from tests.support.worlds.core_pool import B, CorePool

MANY = 256  # commits that may wait


def test_the_step_that_publishes_what_waited_too_long_may_also_give_up_blocks() -> None:
    """What it replaces it tells at once, so it waits no longer than what the same step gives up."""
    pool = CorePool(num_blocks=12, block_size=4)
    pool.create(1, range(4))
    pool.create(2, range(100, 109))
    for sequence_id, num_tokens in ((1, 4), (2, 9)):
        pool.step(starts=[(sequence_id, num_tokens, 0)])
    pool.prefill(3, range(4), session=B)
    twin = pool.table(3, session=B)
    pool.step(publish=False, commits=[(1, 4, []), (2, 9, [])])
    for _ in range(MANY - 1):
        pool.step(publish=False, commits=[(2, 9, [])])
    assert pool.table(1) != twin
    reply = pool.step(lag=1, publish=False, commits=[(2, 9, [])], truncates=[(2, 4)])
    assert pool.table(1) == twin
    assert (reply.update_ids.tolist(), reply.update_block_ids.tolist()) == ([1], twin)
    assert pool.manager.queries.stats().num_fenced_blocks == 3  # the duplicate, and what was cut
    pool.step()
    assert pool.manager.queries.stats().num_fenced_blocks == 0
