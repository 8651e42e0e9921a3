"""Steps in which sequences end while others go on: what they reserve is held against the state that the releases leave."""

import pytest

from kvkeeper.cache_service.core.values.errors import CacheError, UnknownSequence
from kvkeeper.cache_service.core.values.types import StartResult
from tests.support.worlds.core_pool import ALL, CorePool


def pool_of_two() -> CorePool:
    pool = CorePool(num_blocks=9, block_size=2, max_tokens_per_sequence=6)
    pool.prefill(1, [1, 2, 3])
    pool.prefill(2, [4, 5, 6])
    pool.create(3, [7, 8])
    return pool


@pytest.mark.parametrize(
    ("reserve", "reason"),
    [
        ((1, 4, 4), "UNKNOWN_SEQUENCE"),  # released in the same step
        ((9, 4, 4), "UNKNOWN_SEQUENCE"),
        ((3, 2, 2), "WRONG_STATE"),  # waits
        ((2, 4, 7), "INVALID_FIELD"),  # more than its most tokens
        ((2, 0, 4), "INVALID_FIELD"),
        ((2, 5, 4), "INVALID_FIELD"),
    ],
)
def test_a_bad_reservation_beside_a_release_leaves_no_trace(reserve: tuple[int, int, int], reason: str) -> None:
    pool = pool_of_two()
    before = pool.manager.queries.stats()
    with pytest.raises(CacheError) as refused:
        pool.step(releases=[1], reserves=[reserve])
    assert refused.value.reason == reason
    assert pool.manager.queries.stats() == before
    assert pool.step(releases=[1], reserves=[(2, 4, 4)]).reserve_reserved.tolist() == [4]


def test_reservations_and_starts_go_on_where_one_ends() -> None:
    pool = pool_of_two()
    reply = pool.step(releases=[1], starts=[(3, ALL, ALL)], reserves=[(2, 5, 5)])
    assert reply.reserve_reserved.tolist() == [5]
    assert reply.start_results.tolist() == [StartResult.STARTED]
    with pytest.raises(UnknownSequence):
        pool.view(1)
