"""Why tokens were missed: each cause by hand; the machine and the simulation hold the sums to the reference model."""

import pytest

from kvkeeper.cache_service.core.index import miss_counts
from kvkeeper.cache_service.core.index.miss_counts import MissCounts, MissKind
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import EvictionNeed, MatchEnd
from kvkeeper.cache_service.core.values.views import Miss
from tests.support.tiers.tier_pool import TierPool, cached, push_out
from tests.support.worlds.core_pool import ALL, B, CorePool

PROMPT = list(range(9))  # two blocks of four, and one token


def misses(pool: CorePool) -> list[Miss]:
    """But for the ends of prompts, which are always computed."""
    return [miss for miss in pool.manager.queries.stats().misses if miss.cause is not MatchEnd.PARTIAL_BLOCK]


def missed(pool: CorePool, sequence_id: int, tokens: list[int], **args: object) -> dict[str, int]:
    """What a start misses now, by cause."""
    before = {(miss.tenant, miss.cause): miss.num_tokens for miss in misses(pool)}
    max_hit = args.pop("max_hit", ALL)
    pool.create(sequence_id, tokens, **args)
    pool.step(starts=[(sequence_id, ALL, max_hit)])
    found: dict[str, int] = {}
    for miss in misses(pool):
        num_new = miss.num_tokens - before.get((miss.tenant, miss.cause), 0)
        if num_new:
            found[miss.cause.name] = found.get(miss.cause.name, 0) + num_new
    return found


def test_a_prompt_that_never_was_there_and_one_that_was() -> None:
    pool = CorePool(num_blocks=20)
    assert missed(pool, 1, PROMPT) == {"NEVER_STORED": 8}
    assert pool.manager.queries.stats().misses[-1] == Miss("", MatchEnd.PARTIAL_BLOCK, EvictionNeed.NOT_EVICTED, "", 0.0, 1)
    pool.step(commits=[(1, 9, [])], releases=[1])
    assert missed(pool, 2, [*PROMPT[:8], 9]) == {}


def test_what_is_computed_right_now_is_no_news() -> None:
    pool = CorePool(num_blocks=20)
    pool.create(1, [*PROMPT[:8], 50, 51, 52, 53, 54])
    pool.step(starts=[(1, ALL, ALL)])
    assert missed(pool, 2, [*PROMPT[:8], 60, 61, 62, 63, 64]) == {"COMPUTING": 8, "NEVER_STORED": 4}
    assert missed(pool, 3, PROMPT, tenant="other") == {"NEVER_STORED": 8}, "another tenant's sequence is of no use"


@pytest.mark.parametrize("kind", ["cleared", "expired", "evicted"])
def test_what_left_the_cache_left_it_for_a_reason(kind: str) -> None:
    pool = CorePool(num_blocks=20, prefix_ttl=10.0)
    pool.cache(PROMPT)
    if kind == "cleared":
        pool.manager.prefixes.clear()
    elif kind == "expired":
        pool.pass_time(11.0)
    else:
        pool.manager.evictions.evict_count(2)
    assert missed(pool, 2, PROMPT) == {kind.upper(): 8}


def test_what_outlived_its_time_is_expired_before_it_is_evicted() -> None:
    pool = CorePool(num_blocks=20, prefix_ttl=10.0)
    pool.cache(PROMPT)
    pool.manager.state.tick(11.0)
    assert missed(pool, 2, PROMPT) == {"EXPIRED": 8}


def test_an_eviction_is_told_with_the_tenant_that_needed_the_block_and_how_long_ago() -> None:
    pool = CorePool(num_blocks=5)  # four blocks
    pool.cache(PROMPT[:5], tenant="a")
    pool.cache(list(range(100, 113)), tenant="b")  # takes all
    pool.prefill(2, PROMPT[:5], tenant="a")
    evicted = [miss for miss in misses(pool) if miss.cause is MatchEnd.EVICTED]
    assert evicted == [Miss("a", MatchEnd.EVICTED, EvictionNeed.OTHER, "b", 0.25, 4)]
    pool.release(2)
    for first in (200, 300, 400):
        pool.cache(list(range(first, first + 13)), tenant="a")
    pool.prefill(3, PROMPT[:5], tenant="a")
    own = [miss for miss in misses(pool) if miss.need is EvictionNeed.OWN]
    assert own == [Miss("a", MatchEnd.EVICTED, EvictionNeed.OWN, "a", 4.0, 4)]


def test_what_left_after_a_look_up_makes_what_it_missed_no_older() -> None:
    pool = CorePool(num_blocks=5)
    pool.cache(PROMPT[:5])
    pool.manager.evictions.evict_count(1)
    pool.prefill(2, PROMPT[:5])
    pool.release(2)
    for first in range(100, 1000, 100):
        pool.cache(list(range(first, first + 13)))
    (evicted,) = [miss for miss in misses(pool) if miss.cause is MatchEnd.EVICTED]
    assert evicted.within_turnovers == 0.25


def test_what_a_call_evicts_is_evicted_for_no_tenant() -> None:
    pool = CorePool(num_blocks=9)
    pool.cache(PROMPT, tenant="a")
    pool.manager.evictions.evict_count(2)
    pool.prefill(2, PROMPT, tenant="a")
    assert [miss[2:] for miss in misses(pool) if miss.cause is MatchEnd.EVICTED] == [(EvictionNeed.NO_TENANT, "", 0.25, 8)]


def test_a_prompt_that_another_tenant_has_cached() -> None:
    pool = CorePool(num_blocks=30)
    pool.cache(PROMPT, tenant="a")
    assert missed(pool, 2, [*PROMPT, 20, 21, 22, 23], tenant="b") == {"OTHER_TENANT": 8, "NEVER_STORED": 4}
    pool.step(commits=[(2, 13, [])], releases=[2])
    assert missed(pool, 3, [*PROMPT, 20, 21, 22, 23], tenant="b") == {}


def test_what_may_not_be_hit_is_not_blamed_on_the_cache() -> None:
    pool = CorePool(num_blocks=30, min_prefix_tokens=8)
    pool.cache([*PROMPT, 9, 10, 11, 12])
    assert missed(pool, 2, PROMPT[:5]) == {"BELOW_MINIMUM": 4}
    assert missed(pool, 3, [*PROMPT, 9, 10, 11, 12], max_hit=8) == {"NOT_ASKED": 4}
    assert missed(pool, 4, [*PROMPT, 9, 10, 11, 12], retention=Retention(4, 4)) == {"BEHIND_A_HOLE": 4}


def test_a_load_counts_as_loading_and_then_as_found_or_not_loaded() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, range(12))
    push_out(pool, 12)
    for sequence_id, ok in ((2, True), (3, False)):
        pool.create(sequence_id, range(12))
        loads = pool.step(starts=[(sequence_id, ALL, ALL)])
        ids = pool.run(loads)
        assert {miss.cause.name for miss in misses(pool)} >= {"LOADING"}
        pool.step(**({"done": ids} if ok else {"failed": ids}))
        found = {miss.cause.name: miss.num_tokens for miss in misses(pool)}
        assert "LOADING" not in found and ("NOT_LOADED" in found) is not ok
        pool.release(sequence_id)
        push_out(pool, 12)


def test_a_load_that_is_not_waited_for_was_not_loaded() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, range(12))
    push_out(pool, 12)
    pool.create(2, range(12))
    ids = pool.run(pool.step(starts=[(2, ALL, ALL)]))
    pool.step(releases=[2])
    assert {miss.cause.name: miss.num_tokens for miss in misses(pool)} == {"NEVER_STORED": 8, "NOT_LOADED": 8}
    pool.step(done=ids)


def test_a_copy_that_is_on_its_way_to_the_host_was_not_loaded() -> None:
    pool = TierPool(num_blocks=7)
    cached(pool, 1, range(12))
    ids = push_out(pool, 24, report=False)
    pool.create(7, range(9), session=B)
    pool.step(B, starts=[(7, ALL, ALL)])
    assert {miss.cause.name: miss.num_tokens for miss in misses(pool)} == {"NEVER_STORED": 8, "NOT_LOADED": 8}
    pool.step(B, done=ids)


def test_of_many_tenants_the_last_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_counts, "_MOST_KINDS", 2)
    counts = MissCounts(CorePool().manager.state.index.eviction_log, 4, 100)
    for root in (-1, -2, -3, -4):
        counts.add(4, MissKind(root, MatchEnd.EVICTED, EvictionNeed.OTHER, by=-9))
    others = MissKind(miss_counts.OTHERS, MatchEnd.EVICTED, EvictionNeed.OTHER, by=miss_counts.OTHERS)
    assert counts.counts()[others] == 8
    assert counts.num_tokens() == 16


def test_much_that_is_missed_is_counted_after_replies_and_in_bounds() -> None:
    pool = CorePool(num_blocks=9, num_host_blocks=0)
    for number in range(140):
        pool.cache([number] * 9)
        assert len(pool.manager.state.misses._noted) < 64
    assert sum(miss.num_tokens for miss in misses(pool)) == 140 * 8
