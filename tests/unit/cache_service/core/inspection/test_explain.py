"""Why a match ends where it ends: each end comes out exactly where it is so, and another tenant's content shows in none."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.index import eviction_log
from kvkeeper.cache_service.core.index.eviction_log import EvictionLog
from kvkeeper.cache_service.core.inspection.explain import Explanation, in_words
from kvkeeper.cache_service.core.values.clock import Clock
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import MatchEnd
from tests.support.worlds.core_pool import A, B, CorePool, int32

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # two blocks of four, and one token


def explain(world: CorePool, tokens: list[int], tenant: str = "") -> Explanation:
    return world.manager.queries.explain_match(tenant, int32(tokens))


def cached(num_blocks: int = 9, **config: object) -> CorePool:
    """A pool in which the prompt's two blocks are cached and nothing runs."""
    world = CorePool(num_blocks=num_blocks, block_size=4, **config)
    world.prefill(1, PROMPT)
    world.release(1)
    return world


@pytest.mark.parametrize(
    ("num_tokens", "matched", "hit", "end"),
    [
        (3, 0, 0, MatchEnd.PARTIAL_BLOCK),
        (4, 4, 0, MatchEnd.COMPLETE),
        (5, 4, 4, MatchEnd.PARTIAL_BLOCK),
        (7, 4, 4, MatchEnd.PARTIAL_BLOCK),
        (8, 8, 4, MatchEnd.COMPLETE),
        (9, 8, 8, MatchEnd.PARTIAL_BLOCK),
    ],
)
def test_what_is_cached_ends_complete_or_with_less_than_a_block(num_tokens: int, matched: int, hit: int, end: MatchEnd) -> None:
    found = explain(cached(), PROMPT[:num_tokens])
    assert (found.num_matched, found.num_hit, found.end) == (matched, hit, end)
    assert found.num_common == (num_tokens - matched if num_tokens < 8 else 0)  # the tail is the start of a cached block
    assert found.seconds_ago is None


def test_other_tokens_were_never_stored_and_the_nearest_block_says_how_near_they_are() -> None:
    world = cached()
    for tokens, matched, common in (
        ([1, 2, 3, 0], 0, 3),
        ([9, 2, 3, 4], 0, 0),
        ([*PROMPT[:4], 5, 6, 0, 0, 0], 4, 2),
        ([*PROMPT[:8], 9, 9, 9, 9], 8, 0),
    ):
        found = explain(world, tokens)
        assert (found.num_matched, found.num_common, found.end) == (matched, common, MatchEnd.NEVER_STORED), tokens
    world.prefill(2, [*PROMPT[:4], 5, 6, 7, 0, 0], session=B)
    assert explain(world, [*PROMPT[:4], 5, 6, 7, 1, 0]).num_common == 3  # the nearest of two


@pytest.mark.parametrize("min_prefix_tokens", [0, 4, 5, 8, 9])
def test_a_hit_is_what_a_start_takes(min_prefix_tokens: int) -> None:
    world = cached(min_prefix_tokens=min_prefix_tokens)
    for num_tokens in range(1, 10):
        found = explain(world, PROMPT[:num_tokens])
        world.create(7, PROMPT[:num_tokens])
        reply = world.step(A, starts=[(7, 100, 100)])
        assert found.num_hit == reply.start_hits[0]
        world.release(7)


def test_more_tokens_than_a_sequence_can_have_are_explained_too() -> None:
    world = CorePool(block_size=4, max_tokens_per_sequence=8)
    world.prefill(1, PROMPT[:8])
    for num_more in (4, 5, 400):
        found = explain(world, [*PROMPT[:8], *[0] * num_more])
        assert (found.num_matched, found.num_hit, found.end) == (8, 8, MatchEnd.NEVER_STORED)


def test_a_prompt_with_stored_logits_is_a_hit_whole() -> None:
    world = CorePool(block_size=4, logits_memory=100)
    world.prefill(1, PROMPT)
    assert explain(world, PROMPT[:8]).num_hit == 4
    world.manager.prefixes.store_logits(A, 1, 8, np.zeros(3, "<f4").tobytes())
    world.create(2, PROMPT[:8])
    assert [explain(world, PROMPT[:num_tokens]).num_hit for num_tokens in (7, 8, 9)] == [4, 8, 8]
    assert world.step(A, starts=[(2, 100, 100)]).start_hits.tolist() == [8]


def test_a_block_that_was_evicted_is_told_from_one_that_was_cleared_and_when() -> None:
    world = cached(num_blocks=4)
    world.manager.state.tick(10.0)
    world.manager.evictions.evict_blocks(2)
    world.manager.state.tick(12.5)
    found = explain(world, PROMPT)
    assert (found.num_matched, found.end, found.seconds_ago) == (4, MatchEnd.EVICTED, 2.5)
    assert explain(world, [*PROMPT[:4], 5, 6, 7, 0]).end is MatchEnd.NEVER_STORED
    world.manager.prefixes.clear()
    found = explain(world, PROMPT)
    assert (found.num_matched, found.end, found.seconds_ago) == (0, MatchEnd.CLEARED, 0.0)


def test_a_block_that_outlived_its_time_is_told_as_such() -> None:
    world = cached(prefix_ttl=5.0)
    world.manager.state.tick(20.0)
    world.manager.maintenance.do_due_work()
    world.manager.state.tick(21.0)
    found = explain(world, PROMPT)
    assert (found.num_matched, found.end, found.seconds_ago) == (0, MatchEnd.EXPIRED, 1.0)


def test_what_went_is_known_again_under_a_parent_of_another_number() -> None:
    world = cached()
    world.prefill(2, [7] * 9)  # takes numbers of its own
    world.manager.prefixes.clear()
    world.step(A, releases=[2])
    world.prefill(3, [0, 0, 0, 0, 0])
    world.prefill(4, [*PROMPT[:4], 0])  # the first block of the prompt again, under another number
    found = explain(world, PROMPT)
    assert (found.num_matched, found.end) == (4, MatchEnd.CLEARED)
    # The same tokens behind another parent never went, and were never there.
    assert explain(world, [0, 0, 0, 0, *PROMPT[4:8]]).end is MatchEnd.NEVER_STORED


def test_a_sequence_that_computes_the_next_block_is_seen_until_it_has_committed() -> None:
    world = cached(num_blocks=20)
    longer = [*PROMPT[:8], 10, 11, 12, 13, 14]
    world.create(2, longer, session=B)
    assert explain(world, longer).end is MatchEnd.NEVER_STORED  # it waits; no sequence computes it
    world.step(B, starts=[(2, 100, 100)])
    assert explain(world, longer).end is MatchEnd.COMPUTING
    assert explain(world, [*longer[:8], 10, 11, 12, 0]).end is MatchEnd.NEVER_STORED
    world.prefill(3, [0] * 9)
    assert explain(world, [*[0] * 8, *longer[8:]]).end is MatchEnd.NEVER_STORED  # the same block behind another prefix
    world.step(B, commits=[(2, 12, [])])
    found = explain(world, longer)
    assert (found.num_matched, found.end) == (12, MatchEnd.PARTIAL_BLOCK)


def test_a_block_that_is_computed_again_is_computing_rather_than_evicted() -> None:
    world = cached(num_blocks=4)
    world.manager.evictions.evict_blocks(3)
    assert explain(world, PROMPT).end is MatchEnd.EVICTED
    world.create(2, PROMPT)
    world.step(A, starts=[(2, 100, 100)])
    assert explain(world, PROMPT).end is MatchEnd.COMPUTING


def test_what_is_committed_and_about_to_be_published_is_computing() -> None:
    world = CorePool(block_size=4)
    world.create(1, PROMPT)
    world.step(A, starts=[(1, 100, 100)])
    world.step(A, commits=[(1, 9, [])], publish=False)
    assert (explain(world, PROMPT).num_matched, explain(world, PROMPT).end) == (0, MatchEnd.COMPUTING)
    world.manager.maintenance.publish_pending()
    assert explain(world, PROMPT).num_matched == 8


def test_what_retention_keeps_private_is_no_block_to_wait_for() -> None:
    world = CorePool(block_size=4)
    world.create(1, PROMPT, retention=Retention(num_sink_tokens=2, num_window_tokens=3))  # one whole block below 5 tokens
    world.step(A, starts=[(1, 100, 100)])
    assert explain(world, PROMPT).end is MatchEnd.COMPUTING
    world.step(A, commits=[(1, 4, [])])
    found = explain(world, PROMPT)
    assert (found.num_matched, found.end) == (4, MatchEnd.NEVER_STORED)


@pytest.mark.parametrize("tenant", ["b", "never seen"])
def test_what_another_tenant_has_had_or_computes_shows_in_nothing(tenant: str) -> None:
    world = CorePool(num_blocks=20, block_size=4)
    if tenant == "b":
        world.prefill(9, [100] * 5, tenant="b", session=B)

    def shown() -> tuple[Explanation, Explanation]:
        return explain(world, PROMPT, "a"), explain(world, PROMPT, tenant)

    nothing = shown()[1]
    assert (nothing.num_matched, nothing.num_common, nothing.end) == (0, 0, MatchEnd.NEVER_STORED)
    world.create(1, PROMPT, tenant="a")
    world.step(A, starts=[(1, 100, 100)])
    ours, theirs = shown()
    assert (ours.end, theirs) == (MatchEnd.COMPUTING, nothing)
    world.step(A, commits=[(1, 9, [])])
    ours, theirs = shown()
    assert (ours.num_matched, theirs) == (8, nothing)
    world.step(A, releases=[1])
    world.manager.prefixes.clear()
    ours, theirs = shown()
    assert (ours.end, theirs) == (MatchEnd.CLEARED, nothing)


def test_a_pool_that_caches_nothing_says_so() -> None:
    world = CorePool(block_size=4, prefix_caching=False)
    world.prefill(1, PROMPT)
    assert explain(world, PROMPT).end is MatchEnd.CACHING_OFF


def test_a_match_below_the_least_prefix_counts_for_nothing() -> None:
    world = cached(min_prefix_tokens=8)
    for num_tokens, hit, end in ((4, 0, MatchEnd.COMPLETE), (5, 0, MatchEnd.BELOW_MINIMUM), (9, 8, MatchEnd.PARTIAL_BLOCK)):
        found = explain(world, PROMPT[:num_tokens])
        assert (found.num_hit, found.end) == (hit, end)


def test_the_eviction_log_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_log, "CAPACITY", 8)
    clock = Clock()
    memory = EvictionLog(num_nodes=100, max_roots=4, block_size=2, clock=clock)
    memory.add_root(-1, 1)
    tokens = np.arange(200, dtype=np.int32).reshape(100, 2)
    memory.add_each(np.arange(1, 100, dtype=np.int32), np.full(99, -1, np.int32), tokens[1:])
    for node in range(1, 13):
        clock.now = float(node)
        memory.remove(int32([node]), MatchEnd.EVICTED)
    known = [node for node in range(1, 100) if memory.last_end(-1, tokens[node]) is not None]
    assert known == list(range(5, 13))
    memory.remove(np.arange(20, 40, dtype=np.int32), MatchEnd.CLEARED)  # more than it holds: the last are kept
    known = [node for node in range(1, 100) if memory.last_end(-1, tokens[node]) is not None]
    assert known == list(range(32, 40))
    clock.now = 100.0
    memory.remove(int32([35]), MatchEnd.EXPIRED)
    assert memory.last_end(-1, tokens[35]) == (MatchEnd.EXPIRED, 0.0)  # the last time counts


def test_a_block_that_comes_and_goes_pushes_no_other_out_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_log, "CAPACITY", 8)  # one set
    clock = Clock()
    memory = EvictionLog(num_nodes=20, max_roots=4, block_size=2, clock=clock)
    memory.add_root(-1, 1)
    memory.add_each(int32([1, 2]), int32([-1, -1]), int32([[1, 2], [3, 4]]))
    memory.remove(int32([2]), MatchEnd.CLEARED)
    for _ in range(200):
        clock.now += 1.0
        memory.remove(int32([1]), MatchEnd.EVICTED)
        assert memory.last_end(-1, int32([1, 2])) == (MatchEnd.EVICTED, 0.0)
    assert memory.last_end(-1, int32([3, 4])) == (MatchEnd.CLEARED, 200.0)


def test_a_run_and_single_blocks_have_the_same_digests() -> None:
    clock = Clock()
    memory = EvictionLog(num_nodes=20, max_roots=4, block_size=2, clock=clock)
    memory.add_root(-1, 1)
    tokens = int32([1, 2, 3, 4, 5, 6])
    memory.add_run(int32([1, 2, 3]), -1, tokens)
    for row, (node, parent) in enumerate([(11, -1), (12, 11), (13, 12)]):
        memory.add_each(int32([node]), int32([parent]), tokens[2 * row : 2 * row + 2].reshape(1, 2))
    clock.now = 1.0
    memory.remove(int32([13]), MatchEnd.EVICTED)
    assert memory.last_end(2, tokens[4:]) == (MatchEnd.EVICTED, 0.0)
    assert memory.last_end(1, tokens[4:]) is None


def test_words_hold_the_numbers() -> None:
    text = in_words(Explanation(40, 16, 8, 16, 3, MatchEnd.EVICTED, 2.0))
    assert text == (
        "16 of 40 tokens are cached (8 of them in the host tier only): the next block was evicted 2.0 s ago;"
        " the nearest cached block has 3 more tokens in common. A start would take 16."
    )
    assert all(in_words(Explanation(4, 0, 0, 0, 0, end)) for end in MatchEnd)
