"""Room in the host tier that is made by forgetting what a block to be demoted hangs below."""

from kvkeeper.cache_service.core.values.sequence_args import Retention
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, B


def test_what_is_forgotten_while_room_is_made_for_it_is_not_demoted() -> None:
    """A window passes the first block, which goes to the only host block; then the second is evicted, and needs that one."""
    pool = TierPool(num_blocks=5, num_host_blocks=2)
    pool.prefill(1, range(8), retention=Retention(0, 8))
    pool.step(reserves=[(1, 12, 12)])
    pool.step(commits=[(1, 12, [8, 9, 10, 11])])
    pool.step()
    assert len(pool.matched(range(8))) == 2
    pool.create(2, range(100, 108), session=B)
    ids = pool.run(pool.step(B, starts=[(2, ALL, ALL)]))
    assert len(ids) == 1
    pool.step(B, done=ids, releases=[2])
    first, second = pool.matched(range(8))
    assert (first, second > 0) == (0, True)  # the parent in the host tier only, the child on the device only
    pool.release(1)
    pool.create(3, range(200, 216), session=B)
    reply = pool.step(B, starts=[(3, ALL, ALL)])
    assert len(reply.start_block_ids) == 4
    assert len(reply.transfer_ids) == 0
    assert pool.matched(range(8)) == []
    assert pool.manager.queries.stats().num_free_host_blocks == 1
