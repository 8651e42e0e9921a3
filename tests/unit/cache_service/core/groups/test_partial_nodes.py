"""Partial nodes: what sequences leave behind their last whole block, and starts that go on there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.index.partial_nodes import PartialNode, PartialNodes
from kvkeeper.cache_service.core.inspection.queries import Queries
from kvkeeper.cache_service.core.sequences.sequence_table import SequenceTable
from kvkeeper.cache_service.core.sequences.session_state import SessionState
from kvkeeper.cache_service.core.tables.lifecycle import SequenceLifecycle
from kvkeeper.cache_service.core.tables.reserve import Reservations
from kvkeeper.cache_service.core.values.kv_spec import WHOLE, ReadSpan, state_span
from kvkeeper.cache_service.core.values.types import Int32Array, MatchEnd, ReuseHint
from tests.support.reference.read_spans import make_spans
from tests.support.slices import todays
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32
from tests.support.worlds.grouped import GroupedWorld

_STATES = (WHOLE, state_span(3))
_SHAPES = [
    ((WHOLE,), 40, 4),
    (_STATES, 70, 4),
    ((WHOLE, state_span(2), state_span(4)), 90, 2),
    ((*make_spans(0, 9), state_span(3)), 90, 4),
    (make_spans(0, 3, 17, 6), 220, 2),
    ((*make_spans(0), ReadSpan(6, is_chunk=True)), 80, 4),
]
_CASES = [(shape, policy) for shape in range(len(_SHAPES)) for policy in POLICY_NAMES]


@pytest.mark.parametrize(("shape", "policy"), todays(_CASES, 2))
def test_random_steps_read_what_was_written_for_them(shape: int, policy: str) -> None:
    limits = {}, {"prefix_ttl": 5.0, "tenant_quota": 0.3}, {"max_partial_nodes": 2, "min_prefix_tokens": 3}
    worlds = [GroupedWorld(seed, *_SHAPES[shape], policy, takes_partial=True, **each) for seed, each in enumerate(limits)]
    for world in worlds:
        for step in range(300):
            world.manager.state.tick(step / 10)
            world.run_step()
    assert sum(world.num_partial_hits for world in worlds) > 10
    assert sum(world.num_ended for world in worlds) > 0


# Planted bugs, of which the contents of the blocks have to tell


@pytest.fixture
def contents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queries, "check_invariants", lambda self: [])


def _run_until_wrong(spans: tuple[ReadSpan, ...] = _STATES) -> None:
    for seed in range(8):
        world = GroupedWorld(seed, spans, 70, 4, "lru", takes_partial=True)
        for _ in range(200):
            world.run_step()


@pytest.mark.usefixtures("contents_alone")
def test_a_state_that_has_gone_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is named with what is committed, while a step in flight has computed a token more."""
    real = SequenceLifecycle._keep_partial

    def careless(self: SequenceLifecycle, owner: SessionState, slot: int) -> None:
        seqs, length = self._sequences, int(self._sequences.num_committed[slot])
        reserved, seqs.num_reserved[slot] = int(seqs.num_reserved[slot]), length
        step_id, seqs.last_reserve_step[slot] = int(seqs.last_reserve_step[slot]), 0
        real(self, owner, slot)
        seqs.num_reserved[slot], seqs.last_reserve_step[slot] = reserved, step_id

    monkeypatch.setattr(SequenceLifecycle, "_keep_partial", careless)
    with pytest.raises(AssertionError):
        _run_until_wrong()


@pytest.mark.usefixtures("contents_alone")
def test_a_hit_that_is_not_copied_before_it_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "copy_hit", lambda *_: None)
    monkeypatch.setattr(SequenceTable, "set_hit", _set_hit_without_copy)
    with pytest.raises(AssertionError):
        _run_until_wrong()


def _set_hit_without_copy(self: SequenceTable, slot: int, hit_len: int, part_len: int) -> None:
    for column in (self.num_committed, self.num_reserved_before, self.num_hit):
        column[slot] = hit_len


@pytest.mark.usefixtures("contents_alone")
def test_tokens_that_are_not_compared_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: PartialNodes, parent: int, tokens: Int32Array) -> Iterator[PartialNode]:
        return (node for node in self._below[parent].values() if node.num_tokens <= len(tokens))

    monkeypatch.setattr(PartialNodes, "find", find)
    with pytest.raises(AssertionError):
        _run_until_wrong((WHOLE,))


# By hand


def _pool(**config: Any) -> CorePool:
    return CorePool(**{"num_blocks": 33, "block_size": 4, "takes_partial": True} | config)


def _talk(pool: CorePool, sequence_id: int, tokens: list[int], most: int = ALL, **args: Any) -> int:
    """A sequence that computes these tokens and ends. Returns how many it found."""
    pool.create(sequence_id, tokens, **args)
    hit = int(pool.step(starts=[(sequence_id, ALL, most)]).start_hits[0])
    while (reserved := pool.counters(sequence_id)[2]) < len(tokens):  # where it parts from another one, its grant ends
        pool.step(commits=[(sequence_id, reserved, [])], reserves=[(sequence_id, reserved + 1, len(tokens))])
    pool.step(commits=[(sequence_id, len(tokens), [])])
    pool.release(sequence_id)
    return hit


@pytest.mark.parametrize("spans", [(WHOLE,), _STATES, make_spans(0, 5)], ids=["dense", "states", "window"])
def test_a_prompt_goes_on_where_another_sequence_ended(spans: tuple[ReadSpan, ...]) -> None:
    """Lengths around the edges of blocks, and of prompts that end where the other one does."""
    for length in (1, 3, 4, 5, 11, 12, 13, 15):
        pool, tokens = _pool(group_spans=spans), list(range(length))
        _talk(pool, 1, tokens)
        pool.create(2, [*tokens, 99])
        reply = pool.step(starts=[(2, ALL, ALL)])
        assert reply.start_hits.tolist() == [length]
        is_part = length % 4 > 0
        is_left = is_part and spans == _STATES  # else the sequence goes on in its blocks
        assert len(reply.copy_sources) == len(spans) * is_left
        pool.step(commits=[(2, length + 1, [])])
        assert len(pool.manager.state.index.partials) == is_left
        pool.release(2)
        assert _talk(pool, 3, tokens) == (length - 1 if spans == (WHOLE,) and length % 4 == 1 else _whole(spans, length - 1))


def _whole(spans: tuple[ReadSpan, ...], most: int) -> int:
    """Tokens of whole blocks that a start finds of a sequence that went on, of so many that it takes."""
    return most // 12 * 12 if spans == _STATES else most // 4 * 4


def test_eight_turns_of_a_conversation_compute_what_is_new() -> None:
    """And with sessions that do not take partly filled blocks, as before."""
    for takes_partial, wanted in (True, [0, 14, 28, 42, 56, 70, 84, 98]), (False, [0, 12, 24, 36, 48, 60, 84, 96]):
        pool = _pool(group_spans=_STATES, num_blocks=200, takes_partial=takes_partial)
        turns = [list(range(14 * turn)) for turn in range(1, 9)]
        assert [_talk(pool, turn + 1, tokens) for turn, tokens in enumerate(turns)] == wanted
        stats = pool.manager.queries.stats()
        assert (stats.num_partial_hits, stats.num_partial_nodes) == ((4, 4) if takes_partial else (0, 0))


@pytest.mark.parametrize("reserved", [10, 11, 14])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("spans", [(WHOLE,), _STATES], ids=["dense", "states"])
def test_nothing_is_kept_of_a_sequence_that_a_step_may_have_taken_further(
    spans: tuple[ReadSpan, ...], lag: int, reserved: int
) -> None:
    """Whether that step has completed or not; slots may reach into a further block."""
    pool = _pool(group_spans=spans)
    pool.prefill(1, list(range(10)))
    if reserved > 10:
        pool.step(commits=[(1, 10, [10])], reserves=[(1, reserved, reserved)])
    pool.step(lag=lag, releases=[1])
    assert len(pool.manager.state.index.partials) == (reserved == 10)


@pytest.mark.parametrize("is_careless", [False, True])
def test_it_goes_with_the_node_that_it_is_behind(monkeypatch: pytest.MonkeyPatch, is_careless: bool) -> None:
    pool = _pool()
    _talk(pool, 1, list(range(6)))
    index = pool.manager.state.index
    if is_careless:
        monkeypatch.setattr(PartialNodes, "forget_below", lambda self, parents: int32([]))
    pool.manager.state.pool.expire(index.block_of_node[index.match(index.find_root(""), int32(range(4)), 1)])
    if is_careless:
        with pytest.raises(AssertionError):
            pool.audit()
        return
    pool.audit()
    assert (len(index.partials), pool.manager.queries.stats().num_free_blocks) == (0, 32)


def test_a_prompt_that_parts_from_another_one_leaves_its_states_there() -> None:
    """So the third prompt that begins as the first two finds what they have in common, whatever the checkpoints are."""
    pool, common = _pool(group_spans=(WHOLE, state_span(50)), num_blocks=100), list(range(32))
    assert _talk(pool, 1, [*common, *range(50, 60)]) == 0
    pool.create(2, [*common, *range(60, 70)])
    reply = pool.step(starts=[(2, 20, ALL)])
    assert (reply.start_hits.tolist(), reply.start_reserved.tolist()) == ([0], [20])
    reply = pool.step(commits=[(2, 20, [])], reserves=[(2, 21, 42)])
    assert reply.reserve_reserved.tolist() == [32], "a step ends where the two part"
    reply = pool.step(commits=[(2, 32, [])], reserves=[(2, 33, 42)])
    assert reply.reserve_reserved.tolist() == [42]
    pool.step(commits=[(2, 42, [])])
    assert _talk(pool, 3, [*common, *range(70, 80)]) == 32
    assert _talk(pool, 4, [*common, *range(70, 80), 5]) == 42


def test_a_hit_needs_what_each_window_reads() -> None:
    pool, tokens = _pool(group_spans=make_spans(0, 5)), list(range(10))
    _talk(pool, 1, tokens)
    index = pool.manager.state.index
    node = index.match(index.find_root(""), int32(tokens), 2)[1:]
    pool.manager.state.pool.expire(index.held.group_blocks[0][node])
    pool.audit()
    assert _talk(pool, 2, [*tokens, 99]) == 4
    assert len(index.partials) == 2, "its first group is as it was"


def test_a_sequence_is_kept_for_those_of_its_scope_alone() -> None:
    pool, tokens = _pool(), list(range(6))
    _talk(pool, 1, tokens, tenant="a")
    for number, args in enumerate(({"tenant": "b"}, {"tenant": "a", "adapter": "x"}, {"tenant": "a", "salt": "s"}), 2):
        assert _talk(pool, number, [*tokens, 9], **args) == 0
    assert _talk(pool, 9, [*tokens, 9], tenant="a") == 6


@pytest.mark.parametrize(
    "end",
    [
        lambda pool: pool.manager.evictions.evict_count(100),
        lambda pool: pool.manager.prefixes.clear(),
        lambda pool: pool.manager.state.pool.expire(pool.manager.state.index.partials.clear(100)),
    ],
    ids=["evicted", "cleared", "expired"],
)
def test_it_goes_with_its_blocks(end: Callable[[CorePool], object]) -> None:
    pool, tokens = _pool(group_spans=_STATES), list(range(6))
    for number, prompt in enumerate((tokens, [50, 51]), 1):
        _talk(pool, number, prompt)
    assert len(pool.manager.state.index.partials) == 2
    end(pool)
    pool.audit()
    assert len(pool.manager.state.index.partials) == 0
    assert pool.manager.queries.stats().num_free_blocks >= 32 - 2


def test_the_least_recently_used_one_goes_where_there_are_too_many() -> None:
    pool = _pool(group_spans=_STATES, max_partial_nodes=2)
    _talk(pool, 1, [1, 2])
    _talk(pool, 2, [3, 4])
    assert _talk(pool, 3, [1, 2, 9]) == 2  # names one more
    assert [_talk(pool, 4, [1, 2, 8]), _talk(pool, 5, [3, 4, 9])] == [2, 0]


def test_a_tenant_that_leaves_many_forgets_its_own() -> None:
    pool = _pool(group_spans=_STATES, max_partial_nodes=3)
    _talk(pool, 1, [1, 2], tenant="a")
    for number in range(2, 9):
        _talk(pool, number, [3, number], tenant="b")
    pool.audit()
    assert _talk(pool, 9, [1, 2, 9], tenant="a") == 2
    assert [_talk(pool, 10 + number, [3, number, 9], tenant="b") for number in (8, 2)] == [2, 0]


def test_a_start_that_has_no_room_for_the_copy_takes_whole_blocks() -> None:
    pool = _pool(num_blocks=5)
    _talk(pool, 1, list(range(6)))
    pool.prefill(2, [90, 91, 92, 93, 94])
    pool.create(3, [*range(6), 9])
    reply = pool.step(starts=[(3, ALL, ALL)])
    assert (reply.start_hits.tolist(), reply.copy_sources.tolist()) == ([4], [])


def test_every_token_that_is_not_found_has_a_cause() -> None:
    pool = _pool(group_spans=_STATES)
    _talk(pool, 1, list(range(30)))
    for number, (shared, rest, most) in enumerate([(30, 5, ALL), (30, 20, ALL), (30, 9, 31), (27, 9, ALL), (25, 1, 25)], 2):
        _talk(pool, number, [*range(shared), *([77 + number] * rest)], most)  # each step audits the sum
    misses = {miss.cause: miss.num_tokens for miss in pool.manager.queries.stats().misses}
    assert misses[MatchEnd.PARTIAL_BLOCK] > 0


def test_a_sequence_that_is_not_to_be_used_again_leaves_none() -> None:
    pool = _pool()
    _talk(pool, 1, list(range(6)), reuse_hint=ReuseHint.NONE)
    assert len(pool.manager.state.index.partials) == 0


def test_another_session_starts_while_the_first_one_copies_the_same_block() -> None:
    pool, tokens = _pool(group_spans=_STATES), list(range(6))
    _talk(pool, 1, tokens)
    pool.create(2, [*tokens, 7])
    pool.step(starts=[(2, ALL, ALL)])
    pool.create(2, [*tokens, 8], session=B)
    reply = pool.step(B, starts=[(2, ALL, ALL)])
    assert (reply.start_hits.tolist(), len(reply.copy_sources)) == ([6], 2)
    pool.manager.sessions.close(A, may_still_write=True)
    pool.audit()
    assert len(pool.manager.state.index.partials) == 1
