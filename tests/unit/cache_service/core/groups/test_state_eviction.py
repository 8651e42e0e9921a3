"""Which states are evicted: those of one place one after the other, and none sooner than what is of less use."""

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.eviction.credit import Credit
from kvkeeper.cache_service.core.values.kv_spec import WHOLE, ReadSpan, state_span
from tests.support.reference.state_replay import LOADS, NUM_BLOCKS, StateReplay
from tests.support.slices import todays
from tests.support.worlds.core_pool import ALL, A, CorePool, int32

_SPANS = (WHOLE, state_span(50), ReadSpan(9), state_span(50))
_STATES = (WHOLE, state_span(50), state_span(50), state_span(50))


def _pool(spans: tuple[ReadSpan, ...] = _STATES, policy: str = "adaptive") -> CorePool:
    return CorePool(150, 4, takes_partial=True, group_spans=spans, eviction_policy=policy)


def _ask(pool: CorePool, sequence_id: int, tokens: list[int]) -> int:
    """A sequence that computes these tokens and ends. Returns how many it found."""
    pool.create(sequence_id, tokens)
    hit = int(pool.step(starts=[(sequence_id, ALL, ALL)]).start_hits[0])
    while (reserved := pool.counters(sequence_id)[2]) < len(tokens):  # where prompts part, a grant ends
        pool.step(commits=[(sequence_id, reserved, [])], reserves=[(sequence_id, reserved + 1, len(tokens))])
    pool.step(commits=[(sequence_id, len(tokens), [])])
    pool.release(sequence_id)
    return hit


def _num_lost(pool: CorePool, tokens: list[int]) -> int:
    """Blocks of a prompt that a hit would have, had no states been evicted."""
    index = pool.manager.state.index
    return index.held.num_lost(index.match(index.find_root(""), int32(tokens), len(tokens) // 4))


@pytest.mark.parametrize("load", todays(sorted(LOADS), 2))
def test_adaptive_finds_what_lru_finds(load: str) -> None:
    """Where hits end at states a miss shows in no block that comes back: what is computed again lies in the cache."""
    prompts = LOADS[load](0, 250)
    found = {policy: StateReplay(NUM_BLOCKS[load], policy).run(prompts) for policy in ("adaptive", "lru")}
    assert found["adaptive"].hit_rate > 0.98 * found["lru"].hit_rate
    assert [replay.manager.queries.check_invariants() for replay in found.values()] == [[], []]


@pytest.mark.parametrize("load", todays(sorted(LOADS), 2))
def test_adaptive_without_credit_is_lru(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past states, partial nodes and the places where prompts part, it takes the blocks that LRU takes."""
    monkeypatch.setattr(Credit, "trust", lambda *_: 0.0)
    prompts = LOADS[load](0, 250)
    found = [StateReplay(NUM_BLOCKS[load], policy).run(prompts).hit_rate for policy in ("adaptive", "lru")]
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_each_policy_evicts_states_that_sequences_left_behind(policy: str) -> None:
    """They wait when the use of their sequence is noted, which changes their place in the order."""
    replay = StateReplay(NUM_BLOCKS["chats"], policy).run(LOADS["chats"](0, 100))
    assert replay.hit_rate > 0.5
    assert not replay.manager.queries.check_invariants()


def test_states_that_a_sequence_has_left_behind_do_not_go_first() -> None:
    """Where prompts part, the states are in no table when a sequence ends that has made or read them."""
    pool, common = _pool(), list(range(32))
    assert [_ask(pool, i, [*common, *range(10 * i, 10 * i + 10)]) for i in (5, 6, 7)] == [0, 0, 32]
    pool.manager.evictions.evict_count(8)
    pool.audit()
    assert _ask(pool, 8, [*common, *range(80, 90)]) == 32


def test_states_go_before_the_block_that_they_are_behind() -> None:
    pool = _pool(_SPANS)
    pool.prefill(1, list(range(11)))
    tables = pool.manager.state.sequences.tables
    slot = pool.manager.state.session(A).ids.get(1)
    first, states, window, more_states = (tables.get(slot, group).tolist() for group in range(4))
    expected = [more_states[2], states[2], first[2], first[1], first[0], *window[::-1]]
    assert tables.leaves_first(slot).tolist() == [block for block in expected if block]


@pytest.mark.parametrize("num_tokens", [16, 18])
def test_it_is_known_where_states_were_lost(num_tokens: int) -> None:
    """Behind a whole block, and within one; until they are there again."""
    pool, tokens = _pool(policy="lru"), list(range(num_tokens))
    _ask(pool, 1, tokens)
    assert _num_lost(pool, tokens) == 0
    pool.manager.evictions.evict_count(1)
    pool.audit()
    assert _num_lost(pool, tokens) == 4
    if num_tokens == 16:
        _ask(pool, 2, tokens)
        assert _num_lost(pool, tokens) == 0
