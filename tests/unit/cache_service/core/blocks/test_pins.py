"""Pins: the blocks that they keep, how many and until when, and the sequences for which they give way."""

import pytest

from kvkeeper.cache_service.core.blocks.pins import MAX_PINS
from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.errors import OutOfBlocks, OutOfPins, UnknownPin, UnknownSession
from kvkeeper.cache_service.core.values.types import BlockState, Executor, SessionId
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32

PROMPT = list(range(100, 116))  # four blocks of 4


def pinned(
    pool: CorePool, tokens: list[int], ttl: float = 60.0, *, session: SessionId = A, pin_id: str = "p", tenant: str = ""
) -> int:
    """Returns the tokens that the pin keeps."""
    result = pool.manager.prefixes.pin(session, pin_id, tenant, int32(tokens), ttl)
    pool.audit()
    assert result.pin_id == (pin_id if result.num_tokens else "")
    return result.num_tokens


def cached(num_blocks: int = 9, **config: object) -> CorePool:
    """A pool that has cached only the prompt."""
    pool = CorePool(num_blocks, **config)
    pool.prefill(1, PROMPT)
    pool.release(1)
    return pool


def end_pin(pool: CorePool, how: str, ttl: float = 60.0) -> None:
    """Ends pin p of session b."""
    if how == "unpin":
        pool.manager.prefixes.unpin(B, "p")
    elif how == "time":
        pool.pass_time(ttl)
    elif how == "session":
        pool.manager.sessions.close(B, may_still_write=False)
    else:
        num_freed, num_forgotten = pool.manager.prefixes.clear()
        assert num_freed == num_forgotten > 0
    pool.audit()


def referenced(pool: CorePool) -> int:
    return pool.manager.queries.stats().num_referenced_blocks


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_pinned_blocks_outlive_unpinned_ones(policy: str) -> None:
    pool = cached(eviction_policy=policy)
    assert pinned(pool, PROMPT[:8]) == 8
    pool.prefill(2, range(24))  # all but the pinned blocks
    assert len(pool.matched(PROMPT)) == 2
    pool.release(2)
    pool.manager.prefixes.unpin(A, "p")
    pool.prefill(3, range(1000, 1032))  # the whole pool
    assert pool.matched(PROMPT) == []


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_whole_blocks_are_pinned(num_tokens: int, num_kept: int) -> None:
    assert pinned(cached(), PROMPT[:num_tokens]) == num_kept


def test_only_blocks_that_are_cached_for_the_tenant_are_pinned() -> None:
    pool = cached()
    assert pinned(pool, [*PROMPT[:8], 7, 7, 7, 7]) == 8
    assert pinned(pool, [7, *PROMPT], pin_id="q") == 0
    assert pinned(pool, PROMPT, tenant="other", pin_id="q") == 0
    assert pool.manager.queries.stats().num_pins == 1


def test_all_pins_hold_at_most_half_the_pool_and_a_shared_block_counts_once() -> None:
    pool = cached(num_blocks=8)  # 7 usable blocks, 3 of them may be pinned
    assert pinned(pool, PROMPT, pin_id="p") == 12
    assert pinned(pool, PROMPT[:8], pin_id="q") == 8  # pinned already
    assert pinned(pool, PROMPT, pin_id="r", session=B) == 12
    pool.prefill(2, range(12))
    with pytest.raises(OutOfBlocks) as refused:
        pinned(pool, list(range(12)), pin_id="s")
    assert refused.value.metadata == {"requested": "3", "available": "0"}
    stats = pool.manager.queries.stats()
    assert (stats.num_pins, stats.num_pinned_blocks) == (3, 3)
    pool.manager.prefixes.unpin(A, "p")
    pool.manager.prefixes.unpin(B, "r")
    pool.audit()
    assert pinned(pool, list(range(12)), pin_id="s") == 4  # one block beside the two of q


@pytest.mark.parametrize("end", ["unpin", "time", "session", "clear"])
def test_references_drop_however_a_pin_ends(end: str) -> None:
    pool = cached()
    assert pinned(pool, PROMPT, session=B) == 16
    assert referenced(pool) == 4
    assert pool.state(pool.matched(PROMPT)[0]) is BlockState.REFERENCED
    end_pin(pool, end)
    stats = pool.manager.queries.stats()
    assert (stats.num_referenced_blocks, stats.num_pins, stats.num_pinned_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == 8
    if end != "session":
        with pytest.raises(UnknownPin):
            pool.manager.prefixes.unpin(B, "p")


def test_a_pin_lives_for_its_time_exactly_and_longer_when_the_clock_goes_back() -> None:
    pool = cached()
    pool.manager.state.tick(100.0)
    assert pinned(pool, PROMPT, ttl=5.0) == 16
    pool.pass_time(4.75)
    assert referenced(pool) == 4
    pool.pass_time(-50.0)
    assert referenced(pool) == 4
    pool.pass_time(50.25)
    assert referenced(pool) == 0


def test_an_expired_pin_is_not_seen_even_without_a_tick() -> None:
    pool = cached()
    pinned(pool, PROMPT, ttl=5.0)
    pool.manager.state.tick(5.0)
    with pytest.raises(UnknownPin):
        pool.manager.prefixes.unpin(A, "p")
    assert referenced(pool) == 0


def test_only_its_session_ends_a_pin() -> None:
    pool = cached()
    pinned(pool, PROMPT)
    for pin_id in ("p", "", "q"):
        with pytest.raises(UnknownPin):
            pool.manager.prefixes.unpin(B, pin_id)
    with pytest.raises(UnknownSession):
        pool.manager.prefixes.unpin(SessionId("gone"), "p")
    with pytest.raises(UnknownSession):
        pinned(pool, PROMPT, session=SessionId("gone"))
    assert referenced(pool) == 4


def test_pins_are_bounded() -> None:
    pool = cached()
    for number in range(MAX_PINS):
        pool.manager.prefixes.pin(A, str(number), "", int32(PROMPT), 60.0 + number)
    with pytest.raises(OutOfPins) as refused:
        pinned(pool, PROMPT)
    assert refused.value.metadata == {"limit": str(MAX_PINS)}
    pool.pass_time(60.0)  # the first one ends
    assert pinned(pool, PROMPT) == 16


def test_a_pin_does_not_make_a_block_shared() -> None:
    pool = CorePool()
    pool.prefill(1, PROMPT)
    pinned(pool, PROMPT)
    assert pool.manager.queries.stats().num_shared_blocks == 0
    assert pool.manager.one_item.release(A, 1) == 0  # the pin holds them


def test_a_write_into_a_pinned_block_copies_first() -> None:
    pool = CorePool()
    table = pool.prefill(1, PROMPT[:8])
    pinned(pool, PROMPT[:8])
    reply = pool.step(truncates=[(1, 6)], reserves=[(1, 8, 8)])
    assert reply.copy_sources.tolist() == table[1:2]
    assert pool.matched(PROMPT[:8]) == table


def test_pins_make_starts_wait_while_another_sequence_runs() -> None:
    pool = cached()  # 8 usable blocks
    pinned(pool, PROMPT)
    pool.prefill(1, range(12))
    pool.create(2, range(500, 508))
    assert pool.step(starts=[(2, 8, 0)]).start_reserved.tolist() == [4]
    reply = pool.step(reserves=[(2, 8, 8)])
    assert reply.reserve_reserved[0] < 8
    assert pool.manager.queries.stats().num_pins == 1


def test_pins_give_way_to_a_sequence_that_runs_alone_the_soonest_to_end_first() -> None:
    pool = cached(num_blocks=10)  # 9 usable blocks, 4 may be pinned
    pool.prefill(1, range(16))
    pool.release(1)
    assert pinned(pool, PROMPT[:8], ttl=60.0, pin_id="later") == 8
    assert pinned(pool, list(range(8)), ttl=30.0, pin_id="sooner") == 8
    pool.create(2, range(500, 536))  # the whole pool
    assert pool.step(starts=[(2, ALL, 0)]).start_reserved.tolist() == [20]
    assert pool.step(reserves=[(2, 24, 28)]).reserve_reserved.tolist() == [28]
    assert pool.matched(list(range(8))) == []
    assert pool.manager.queries.stats().num_pins == 1
    assert pool.step(reserves=[(2, 36, 36)]).reserve_reserved.tolist() == [36]
    assert pool.manager.queries.stats().num_pins == 0


def test_no_pin_gives_way_for_a_short_wait_or_too_few_blocks() -> None:
    pool = cached(num_blocks=10)
    pinned(pool, PROMPT[:8])
    pool.prefill(1, range(28))
    pool.create(2, range(500, 508))
    # Released blocks stay fenced: the step before may still read them.
    assert pool.step(lag=1, releases=[1], starts=[(2, 8, 0)]).start_reserved.tolist() == [0]
    assert pool.manager.queries.stats().num_pins == 1
    assert pool.step(starts=[(2, 8, 0)]).start_reserved.tolist() == [8]
    # Beside the blocks that an ended session may still write, even the blocks of all pins are too few.
    pool.create(1, range(700, 720), session=B)
    pool.step(B, starts=[(1, ALL, 0)])
    pool.manager.sessions.close(B, may_still_write=True)
    assert pool.step(reserves=[(2, 36, 36)]).reserve_reserved[0] < 36
    assert pool.manager.queries.stats().num_pins == 1


def test_no_pin_gives_way_that_would_free_nothing_because_a_step_may_still_read_its_blocks() -> None:
    pool = cached()  # 8 usable blocks
    assert pinned(pool, PROMPT) == 16
    pool.create(1, [*PROMPT, 1])
    pool.create(2, range(500, 524))
    assert pool.step(starts=[(1, ALL, ALL), (2, 4, 0)]).start_hits.tolist() == [16, 0]
    # Five more blocks, with two free and one lifted soon: three would have to come from the pin, and its four are fenced.
    reply = pool.step(lag=1, releases=[1], reserves=[(2, 24, 24)])
    assert reply.reserve_reserved[0] < 24
    assert pool.manager.queries.stats().num_pins == 1
    assert pool.step(reserves=[(2, 24, 24)]).reserve_reserved.tolist() == [24]  # alone, and no block is fenced any more
    assert pool.manager.queries.stats().num_pins == 0


@pytest.mark.parametrize("is_pinned", [False, True])
def test_admission_is_told_exactly(is_pinned: bool) -> None:
    pool = cached()
    if is_pinned:
        pinned(pool, PROMPT)
    tokens = int32(range(700, 732))
    assert pool.manager.admission.check("", tokens, 0, 0).can_now
    pool.manager.sessions.open(SessionId("c"), Executor.CACHE)
    pool.create(1, tokens.tolist(), session=SessionId("c"))
    pool.manager.one_item.extend(SessionId("c"), 1, 32, look_up=True)
    assert pool.manager.queries.stats().num_pins == 0
    pool.audit()


def test_the_watermark_is_0_beside_nothing_but_pins() -> None:
    pool = cached(watermark=0.3)  # 2 of 8 blocks
    pinned(pool, PROMPT)
    pool.create(1, range(16))
    assert pool.step(starts=[(1, ALL, 0)]).start_reserved.tolist() == [16]


@pytest.mark.parametrize("end", ["unpin", "time", "session"])
def test_formerly_pinned_blocks_are_evicted_from_their_leaves(end: str) -> None:
    pool = cached()
    pinned(pool, PROMPT, session=B)
    end_pin(pool, end)
    for num_left in (3, 2, 1, 0):
        pool.manager.evictions.evict_blocks(pool.manager.queries.stats().num_free_blocks + 1)
        assert len(pool.matched(PROMPT)) == num_left
