"""Stored last-token logits: full hits for starts that ask for them, and the lifetime of stored and promised logits."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.errors import InvalidField, UnknownLogits, UnknownSequence, WrongState
from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.worlds.core_pool import ALL, A, B, CorePool

PROMPT = list(range(100, 108))  # two blocks of 4


def logits(first: float, size: int = 3) -> bytes:
    return (np.arange(size) + first).astype("<f4").tobytes()


def stored(pool: CorePool, tokens: list[int] = PROMPT, first: float = 1.0, *, keep: bool = False, **args: object) -> None:
    """A sequence computes these tokens, stores the logits that follow, and ends."""
    pool.prefill(1, tokens, **args)
    pool.manager.prefixes.store_logits(A, 1, len(tokens), logits(first))
    if not keep:
        pool.release(1)


def logits_pool(num_blocks: int = 9, memory: int = 1000, **config: object) -> CorePool:
    return CorePool(num_blocks, logits_memory=memory, **config)


def start(
    pool: CorePool, tokens: list[int], *, max_hit: int = ALL, sequence_id: int = 2, **args: object
) -> tuple[int, int, bool]:
    """(hit, reserved, has logits) of a start."""
    pool.create(sequence_id, tokens, **args)
    reply = pool.step(starts=[(sequence_id, ALL, max_hit)])
    return int(reply.start_hits[0]), int(reply.start_reserved[0]), reply.start_has_logits.tolist() == [1]


def test_a_prompt_that_is_cached_whole_gets_its_logits_and_no_slot_to_compute() -> None:
    pool = logits_pool()
    stored(pool)
    assert start(pool, PROMPT) == (8, 8, True)
    assert pool.table(2) == pool.matched(PROMPT)
    assert pool.manager.prefixes.read_logits(A, 2) == logits(1.0)
    assert pool.counters(2) == (8, 8, 8)
    stats = pool.manager.queries.stats()
    assert (stats.num_full_hits, stats.num_stored_logits, stats.num_hit_tokens) == (1, 1, 8)


@pytest.mark.parametrize(("num_tokens", "full"), [(7, False), (8, True), (9, False)])
def test_only_whole_blocks_are_a_full_hit(num_tokens: int, full: bool) -> None:
    pool = logits_pool()
    stored(pool, [*PROMPT, 1, 2, 3, 4], first=9.0)
    stored(pool)
    hit, reserved, has_logits = start(pool, [*PROMPT, 1][:num_tokens])
    assert has_logits == full
    assert (hit, reserved) == (num_tokens // 4 * 4, num_tokens)


@pytest.mark.parametrize("max_hit", [0, 4, 7])
def test_a_start_that_does_not_ask_for_the_whole_prompt_gets_no_full_hit(max_hit: int) -> None:
    pool = logits_pool()
    stored(pool)
    assert start(pool, PROMPT, max_hit=max_hit) == (max_hit // 4 * 4, 8, False)
    with pytest.raises(UnknownLogits):
        pool.manager.prefixes.read_logits(A, 2)


def test_a_prompt_without_logits_of_its_own_computes_its_last_block() -> None:
    pool = logits_pool()
    stored(pool, [*PROMPT, 1, 2, 3, 4])
    assert start(pool, PROMPT) == (4, 8, False)


def test_one_item_calls_never_meet_a_full_hit() -> None:
    pool = logits_pool()
    stored(pool)
    session = SessionId("c")
    pool.manager.sessions.open(session, Executor.CACHE)
    pool.create(1, PROMPT, session=session)
    pool.manager.one_item.extend(session, 1, 8, look_up=True)
    assert pool.view(1, session=session).num_hit_tokens == 4


def test_another_tenant_and_another_prompt_have_logits_of_their_own() -> None:
    pool = logits_pool()
    stored(pool)
    stored(pool, [*PROMPT[:4], 9, 9, 9, 9], first=5.0)
    assert start(pool, PROMPT, tenant="other") == (0, 8, False)
    assert start(pool, [*PROMPT[:4], 9, 9, 9, 9], sequence_id=3)[2]
    assert pool.manager.prefixes.read_logits(A, 3) == logits(5.0)


def test_a_promise_holds_until_its_step_is_completed_through_any_eviction() -> None:
    pool = logits_pool()
    stored(pool)
    assert start(pool, PROMPT)[2]
    pool.manager.prefixes.clear()
    pool.step(lag=1)  # the step of the start still runs
    assert pool.manager.prefixes.read_logits(A, 2) == logits(1.0)
    pool.step()
    with pytest.raises(UnknownLogits):
        pool.manager.prefixes.read_logits(A, 2)


def test_a_release_ends_the_promise_also_when_the_id_is_used_again() -> None:
    pool = logits_pool()
    stored(pool)
    start(pool, PROMPT)
    pool.step(lag=1, releases=[2])
    with pytest.raises(UnknownSequence):
        pool.manager.prefixes.read_logits(A, 2)
    pool.create(2, [5] * 8)  # while the step of the start still runs
    with pytest.raises(UnknownLogits):
        pool.manager.prefixes.read_logits(A, 2)


def forget_all(pool: CorePool, end: str) -> None:
    """The two blocks that are cached are gone."""
    if end == "evict":
        assert pool.manager.evictions.evict_blocks(8) == 2
    elif end == "clear":
        assert pool.manager.prefixes.clear().num_freed_blocks == 2
    else:
        pool.pass_time(10.0)
    pool.audit()


@pytest.mark.parametrize("end", ["evict", "clear", "expire"])
def test_logits_are_forgotten_with_their_prefix_and_do_not_return_with_its_node_number(end: str) -> None:
    pool = logits_pool(prefix_ttl=10.0)
    stored(pool)
    forget_all(pool, end)
    assert pool.manager.queries.stats().num_stored_logits == 0
    pool.prefill(1, PROMPT)
    assert start(pool, PROMPT) == (4, 8, False)
    pool.prefill(3, list(range(8)))  # other content under the numbers used before
    assert not start(pool, list(range(8)), sequence_id=4)[2]


def test_the_least_recently_used_logits_are_dropped_first() -> None:
    pool = logits_pool(17, memory=2 * 12 + 11)  # room for two of 12 bytes
    stored(pool, PROMPT[:4], 1.0)
    stored(pool, PROMPT[4:], 2.0)
    assert start(pool, PROMPT[:4])[2]  # a use
    stored(pool, [3, 3, 3, 3], 3.0)
    assert pool.manager.queries.stats().num_stored_logits == 2
    assert not start(pool, PROMPT[4:], sequence_id=3)[2]
    assert start(pool, PROMPT[:4], sequence_id=4)[2]


def test_storing_again_changes_only_the_logits() -> None:
    pool = logits_pool()
    stored(pool, keep=True)
    for first in (1.0, 2.0):
        pool.manager.prefixes.store_logits(A, 1, 8, logits(first))
    pool.manager.prefixes.store_logits(A, 1, 4, logits(4.0))
    assert pool.manager.queries.stats().num_stored_logits == 2
    assert start(pool, PROMPT)[2]
    assert pool.manager.prefixes.read_logits(A, 2) == logits(2.0)


@pytest.mark.parametrize("num_tokens", [0, -4, 3, 9, 12, 2**31 - 4])
def test_a_length_that_is_not_whole_committed_blocks_is_refused(num_tokens: int) -> None:
    pool = logits_pool()
    pool.prefill(1, PROMPT)
    with pytest.raises(InvalidField):
        pool.manager.prefixes.store_logits(A, 1, num_tokens, logits(1.0))
    assert pool.manager.queries.stats().num_stored_logits == 0


@pytest.mark.parametrize(
    "wrong", [b"", b"abc", logits(1.0, 4), logits(1.0, 2), logits(np.nan), logits(np.inf), logits(-np.inf)]
)
def test_logits_of_another_size_or_no_numbers_are_refused(wrong: bytes) -> None:
    pool = logits_pool()
    stored(pool, keep=True)
    with pytest.raises(InvalidField) as refused:
        pool.manager.prefixes.store_logits(A, 1, 8, wrong)
    assert refused.value.metadata["field"] == "logits"
    assert start(pool, PROMPT)[2]
    assert pool.manager.prefixes.read_logits(A, 2) == logits(1.0)


def test_logits_larger_than_the_memory_are_refused_and_fix_no_size() -> None:
    pool = logits_pool(memory=12)
    pool.prefill(1, PROMPT)
    with pytest.raises(InvalidField):
        pool.manager.prefixes.store_logits(A, 1, 8, logits(1.0, 4))
    pool.manager.prefixes.store_logits(A, 1, 8, logits(1.0, 3))


def test_logits_are_stored_only_within_memory_and_for_cached_prefixes() -> None:
    for pool in (CorePool(), logits_pool(prefix_caching=False)):
        pool.prefill(1, PROMPT)
        with pytest.raises(WrongState):
            pool.manager.prefixes.store_logits(A, 1, 8, logits(1.0))
    pool = logits_pool()
    pool.prefill(1, PROMPT)
    pool.manager.prefixes.clear()
    with pytest.raises(WrongState):
        pool.manager.prefixes.store_logits(A, 1, 8, logits(1.0))
    with pytest.raises(UnknownSequence):
        pool.manager.prefixes.store_logits(B, 1, 8, logits(1.0))


def test_a_full_hit_continues_like_any_other_sequence() -> None:
    pool = logits_pool()
    stored(pool)
    start(pool, PROMPT)
    table = pool.table(2)
    reply = pool.step(commits=[(2, 8, [55])], reserves=[(2, 9, 9)])
    assert reply.reserve_reserved.tolist() == [9]
    assert not len(reply.copy_sources)  # its next token goes to a block of its own
    assert pool.table(2)[:2] == table
    pool.step(commits=[(2, 9, [])], forks=[(2, 3, 9)])
    assert pool.counters(3) == (9, 9, 9)


def test_a_full_hit_needs_no_free_block() -> None:
    pool = logits_pool()
    stored(pool)
    pool.prefill(5, list(range(24)))  # all other blocks
    assert start(pool, PROMPT) == (8, 8, True)


def test_the_minimum_length_applies_to_full_hits_too() -> None:
    pool = logits_pool(min_prefix_tokens=9)
    stored(pool)
    assert start(pool, PROMPT) == (0, 8, False)


@pytest.mark.parametrize("end", ["evict", "clear", "expire"])
def test_once_nothing_is_stored_the_next_logits_may_have_another_size(end: str) -> None:
    pool = logits_pool(prefix_ttl=10.0)
    stored(pool)
    pool.prefill(3, PROMPT[:4])
    with pytest.raises(InvalidField) as refused:
        pool.manager.prefixes.store_logits(A, 3, 4, logits(1.0, size=5))
    assert refused.value.metadata["limit"] == "12", "bytes of those that are stored"
    pool.release(3)
    forget_all(pool, end)
    assert pool.manager.queries.stats().num_stored_logits == 0
    pool.prefill(4, PROMPT)
    pool.manager.prefixes.store_logits(A, 4, 8, logits(2.0, size=5))
    assert start(pool, PROMPT) == (8, 8, True)
    assert pool.manager.prefixes.read_logits(A, 2) == logits(2.0, size=5)
    with pytest.raises(InvalidField):
        pool.manager.prefixes.store_logits(A, 4, 4, logits(1.0))


def test_another_size_in_place_of_the_only_logits_is_refused() -> None:
    pool = logits_pool()
    stored(pool, keep=True)
    with pytest.raises(InvalidField):
        pool.manager.prefixes.store_logits(A, 1, 8, logits(1.0, size=2))
    assert start(pool, PROMPT)[2]
