"""Explanations and single blocks on a pool with a host tier."""

import numpy as np

from kvkeeper.cache_service.core.inspection.explain import Explanation, in_words
from kvkeeper.cache_service.core.values.types import BlockState, MatchEnd, TransferKind
from kvkeeper.cache_service.core.values.views import BlockView
from tests.support.tiers.tier_pool import TierPool, cached, push_out
from tests.support.worlds.core_pool import ALL, B, int32

PROMPT = range(12)


def explain(pool: TierPool, tokens: range = PROMPT) -> Explanation:
    return pool.manager.queries.explain_match("", int32(tokens))


def test_what_is_in_the_host_tier_only_is_matched_and_told() -> None:
    pool = TierPool(num_blocks=4, num_host_blocks=9)
    cached(pool, 1, PROMPT)
    assert explain(pool).num_host == 0
    push_out(pool, 12)
    found = explain(pool)
    assert (found.num_matched, found.num_host, found.num_hit, found.end) == (12, 12, 8, MatchEnd.COMPLETE)
    assert "12 of them in the host tier only" in in_words(found)
    pool.create(2, PROMPT)
    pool.step(done=pool.run(pool.step(starts=[(2, ALL, ALL)])))
    found = explain(pool)
    assert (found.num_matched, found.num_host) == (12, 4)  # the hit was promoted


def test_a_copy_on_its_way_is_where_a_match_ends() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, PROMPT)
    ids = push_out(pool, 12, report=False)
    found = explain(pool)
    assert (found.num_matched, found.num_common, found.end, found.seconds_ago) == (0, 0, MatchEnd.EVICTED, None)
    assert "on its way to the host tier" in in_words(found)
    pool.step(B, done=ids)
    assert explain(pool).num_matched == 12


def test_what_left_the_host_tier_too_was_evicted() -> None:
    pool = TierPool(num_blocks=4, num_host_blocks=2)  # room for one copy
    cached(pool, 1, PROMPT)
    push_out(pool, 12)
    found = explain(pool)
    assert found.num_matched < 12
    assert (found.end, found.seconds_ago) == (MatchEnd.EVICTED, 0.0)


def test_a_block_shows_its_orders_and_its_copy() -> None:
    pool = TierPool(num_blocks=4, num_host_blocks=9)
    blocks = pool.prefill(1, PROMPT)

    def views() -> list[BlockView]:
        return [pool.manager.queries.block_view(block) for block in blocks]

    assert all((view.num_transfers, view.has_host_copy) == (0, False) for view in views())
    reply = pool.step(outs=[1])
    assert np.all(reply.transfer_kinds == TransferKind.SWAP_OUT)
    assert [view.num_transfers for view in views()] == [1, 1, 1]
    pool.step(done=pool.run(reply))
    pool.step()
    assert all((view.state, view.num_transfers, view.has_host_copy) == (BlockState.CACHED, 0, True) for view in views())
