"""MatchPrefix and ExplainMatch by tier: what is known without asking counts, and that there may be more is told."""

import pytest

from kvkeeper.cache_service.core.inspection.explain import in_words
from kvkeeper.cache_service.core.tiers.orders import TierRules
from kvkeeper.cache_service.core.values.copies import TierResult
from kvkeeper.cache_service.core.values.types import MatchEnd
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.tier_pool import TierPool, cached, push_out
from tests.support.worlds.core_pool import int32
from tests.unit.cache_service.core.groups.test_disk import TOKENS, stored

PROMPT = range(12)
MOST_ASKED = 8


class Below:
    """A pool with three blocks of four tokens, below the host tier alone: the first on the disk, and all in the remote tier."""

    def __init__(self) -> None:
        self.pool = TierPool(num_blocks=5, num_host_blocks=9)
        self.manager = manager = self.pool.manager
        self.disk = manager.add_disk(b"key", 9, 0, (), TierRules())
        self.remote = manager.add_remote(b"other key", TierRules(name="remote", most_asked=MOST_ASKED))
        cached(self.pool, 1, PROMPT)
        push_out(self.pool, 16, sequence_id=40)
        for question in self.remote.questions.take():
            self.remote.complete_question(question, 0)
        first = int32(PROMPT[:4]).tobytes()
        for tier, failed in ((self.disk, TierResult.CANCELLED), (self.remote, TierResult.DONE)):
            store = tier.stores.prepare(9)
            assert store is not None
            tier.stores.complete(store, [TierResult.DONE if order.tokens == first else failed for order in store.orders])
        host = manager.swapper.host  # type: ignore[union-attr]
        host.return_blocks(host.take_blocks(host.pool.num_available, held=False))

    def counts(self, tokens: range = PROMPT, tenant: str = "") -> tuple[int, int, int, int, bool]:
        """All, and those of the host tier, the disk and the remote tier, by both calls; whether there may be more."""
        found, shown = (
            self.manager.queries.match_prefix(tenant, int32(tokens)),
            self.manager.queries.explain_match(tenant, int32(tokens)),
        )
        assert (found.num_tokens, found.num_host, found.behind) == (shown.num_matched, shown.num_host, shown.behind)
        return found.num_tokens, found.num_host, found.behind.num_disk, found.behind.num_remote, found.behind.remote_not_asked


def test_each_tier_is_counted_and_the_rest_may_be_in_the_remote_tier() -> None:
    world = Below()
    assert world.counts() == (12, 0, 4, 8, False)
    assert world.counts(range(13)) == (12, 0, 4, 8, False)
    assert world.counts(range(16)) == (12, 0, 4, 8, True)
    assert world.counts(range(50, 58)) == (0, 0, 0, 0, True)
    assert world.counts(tenant="another") == (0, 0, 0, 0, True)
    found = world.manager.queries.explain_match("", int32(range(16)))
    assert (found.end, found.num_hit) == (MatchEnd.ON_DISK, 0)
    words = in_words(found)
    assert words.startswith(
        "12 of 16 tokens are cached (4 of them on the disk, 8 of them in the remote tier): the next block is in"
    )
    assert words.endswith("A start would take 0. The remote tier was not asked for more.")


@pytest.mark.parametrize("num_stored", [0, 1, 2, 3])
def test_what_the_remote_tier_says_that_it_has_is_counted(num_stored: int) -> None:
    pool = TierPool(num_blocks=9, num_host_blocks=9)
    remote = pool.manager.add_remote(b"key", TierRules(name="remote", most_asked=MOST_ASKED))
    cached(pool, 1, range(4))
    tokens = int32(range(17))
    for sequence_id in (2, 3):  # heard of twice is known once
        pool.create(sequence_id, range(17))
        (question,) = remote.questions.take()
        remote.complete_question(question, num_stored)
        found = pool.manager.queries.match_prefix("", tokens)
        assert (found.num_tokens, found.behind.num_remote) == (4 + 4 * num_stored, 4 * num_stored)
        assert found.behind.remote_not_asked == (num_stored < 3)
        for load in remote.loads.take():
            remote.loads.complete(load, [TierResult.MISSING] * len(load.orders))
        assert pool.manager.queries.match_prefix("", tokens).num_tokens == 4
    assert not pool.manager.queries.check_invariants()


def test_what_is_found_missing_in_the_remote_tier_is_not_counted_any_more() -> None:
    world = Below()
    world.remote.directory.learn([], sorted(world.remote.directory.names()))
    assert world.counts() == (4, 0, 4, 0, True)


def test_a_pool_without_such_tiers_has_nothing_to_ask() -> None:
    pool = TierPool(num_blocks=9, num_host_blocks=9)
    cached(pool, 1, PROMPT)
    found = pool.manager.queries.match_prefix("", int32(range(40)))
    assert (found.num_tokens, found.num_host, found.behind.num_disk, found.behind.remote_not_asked) == (12, 0, 0, False)


@pytest.mark.parametrize(("lost", "num_tokens"), [((), 10), (((4, 1),), 8), (((3, 1), (4, 1)), 6), (((2, 0),), 4)])
def test_with_groups_of_layers_a_match_counts_as_far_as_a_hit_would_reach(
    lost: tuple[tuple[int, int], ...], num_tokens: int
) -> None:
    manager, _ = stored(lost=lost, spans=make_spans(0, 2))
    found = manager.queries.match_prefix("", TOKENS)
    assert (found.num_tokens, found.behind.num_disk) == (num_tokens, num_tokens)
    assert manager.queries.match_prefix("another", TOKENS).num_tokens == 0
