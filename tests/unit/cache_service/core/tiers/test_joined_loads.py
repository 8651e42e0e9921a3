"""Loads beside others: what is on its way is joined, what a store lacks is forgotten, and a tier at rest is left alone."""

from collections.abc import Iterable

import pytest

from kvkeeper.cache_service.core.values.copies import TierResult
from kvkeeper.cache_service.core.values.types import ReuseHint
from tests.support.worlds.core_pool import A, int32
from tests.unit.cache_service.core.tiers.test_worthless_loads import TOKENS, SlowTier


def prepared(world: SlowTier, num_tokens: int) -> tuple[list[int], int]:
    """How many blocks each load brings that a prompt of so many tokens waits for, and how many it can hit then."""
    root = world.pool.manager.state.index.find_root("")
    loads, end = world.tier.loads.prepare(root, int32(list(TOKENS)[:num_tokens]))
    return [load.num_entries for load in loads], end


def filled(most_asked: int = 0) -> SlowTier:
    world = SlowTier(weighs=False, most_asked=most_asked)
    world.fill()
    return world


def test_a_longer_prompt_joins_a_load_and_orders_the_rest_alone() -> None:
    world = filled()
    assert prepared(world, 8) == ([2], 2)
    assert prepared(world, 12) == ([2, 1], 3)
    assert prepared(world, 12) == ([2, 1], 3)
    first, second = world.tier.loads.take()
    assert [len(load.orders) for load in (first, second)] == [2, 1]
    assert world.tier.loads.complete(first, [TierResult.DONE] * 2) == 2
    assert world.tier.loads.complete(second, [TierResult.DONE]) == 1
    assert prepared(world, 12) == ([], 3)


def test_of_a_tier_at_rest_what_is_on_its_way_is_joined_and_no_more_is_ordered() -> None:
    world = filled()
    prepared(world, 8)
    for _ in range(3):
        world.tier.flight.breaker.failed(world.now)
    assert prepared(world, 12) == ([2], 2)
    assert len(world.tier.loads.take()) == 1


def test_what_a_store_lacks_is_forgotten_with_all_that_it_leads_to() -> None:
    world = filled(most_asked=8)
    assert len(world.tier.directory.names()) == 3
    world.pool.create(7, [*TOKENS, 5])
    world.answer(1)
    assert len(world.tier.directory.names()) == 1


def prefetch(world: SlowTier, tokens: Iterable[int]) -> None:
    world.pool.manager.prefixes.hint(A, "", int32(list(tokens)), ReuseHint.UNSPECIFIED, prefetch=True)


def num_on_host(world: SlowTier) -> int:
    return world.pool.manager.queries.match_prefix("", int32(TOKENS)).num_host


@pytest.mark.parametrize(("num_stored", "num_loaded"), [(3, 3), (1, 1), (0, 0), (None, 0)])
def test_what_a_remote_tier_has_is_asked_for_and_brought_for_no_sequence(num_stored: int | None, num_loaded: int) -> None:
    world = filled(most_asked=8)
    prefetch(world, TOKENS)
    (question,) = world.tier.questions.take()
    world.tier.complete_question(question, num_stored)
    for load in world.tier.loads.take():
        world.tier.loads.complete(load, [TierResult.DONE] * len(load.orders))
    assert num_on_host(world) == num_loaded * 4
    world.pool.audit()


def test_a_sequence_joins_what_is_brought_for_none() -> None:
    world = filled(most_asked=8)
    prefetch(world, TOKENS)
    world.answer(3)
    world.pool.create(7, [*TOKENS, 5])
    world.answer(3)
    (load,) = world.tier.loads.take()
    assert world.tier.length_to_come(world.pool.manager.state.session(A).ids.get(7), 13) == 12
    world.tier.loads.complete(load, [TierResult.DONE] * len(load.orders))
    assert num_on_host(world) == 12


def test_a_remote_tier_gets_a_bounded_number_of_questions_for_no_sequence() -> None:
    world = filled(most_asked=8)
    for number in range(40):
        prefetch(world, [100 + number, *TOKENS])
    assert len(world.tier.questions.take()) == 16
    world.pool.create(7, [*TOKENS, 5])
    assert len(world.tier.questions.take()) == 1
