"""Groups of states: random steps of pools that have one, bugs they must catch, and rules of checkpoints and cuts by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.node_blocks import NodeBlocks
from kvkeeper.cache_service.core.inspection.explain import in_words
from kvkeeper.cache_service.core.inspection.queries import Queries
from kvkeeper.cache_service.core.sequences import spans
from kvkeeper.cache_service.core.sequences.new_entries import NewEntries
from kvkeeper.cache_service.core.sequences.publisher import Publisher
from kvkeeper.cache_service.core.sequences.sequence_table import SequenceTable
from kvkeeper.cache_service.core.sequences.session_state import SessionState
from kvkeeper.cache_service.core.tables import lifecycle
from kvkeeper.cache_service.core.tables.reserve import Reservations
from kvkeeper.cache_service.core.values.errors import InvalidField, NotImplementedYet, WrongState
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import Int32Array, Int64Array, ItemResult, SequenceId, StartResult
from tests.support.reference.read_spans import make_spans
from tests.support.slices import todays
from tests.support.worlds.core_pool import ALL, A, CorePool, int32, step_batch
from tests.support.worlds.grouped import GroupedWorld

SPANS = (*make_spans(0), state_span(3))
_BESIDE_A_WINDOW = (*make_spans(0, 9), state_span(2))
_SHAPES = [
    ((*make_spans(0), state_span(1)), 60, 4),
    (SPANS, 60, 4),
    (_BESIDE_A_WINDOW, 80, 4),
    ((*make_spans(0, 0), state_span(2), ReadSpan(6, is_chunk=True), state_span(3)), 150, 2),
    ((*make_spans(0), state_span(4)), 130, 1),
]


@pytest.mark.parametrize(("spans", "num_blocks", "block_size"), todays(_SHAPES, 2))
def test_random_steps_find_the_states_behind_their_tokens(
    spans: tuple[ReadSpan, ...], num_blocks: int, block_size: int
) -> None:
    worlds = [GroupedWorld(seed, spans, num_blocks, block_size, policy) for seed, policy in ((0, "lru"), (1, "adaptive"))]
    for world in worlds:
        for _ in range(150):
            world.run_step()
    assert sum(world.num_hits for world in worlds) > 0
    assert sum(world.num_shortened for world in worlds) > 5
    assert sum(world.num_kept_cuts for world in worlds) > 5
    assert sum(world.num_copies for world in worlds) > 5
    assert sum(world.num_late_cuts for world in worlds) > 0


def _run_until_wrong(spans: tuple[ReadSpan, ...] = SPANS) -> None:
    for seed in range(8):
        world = GroupedWorld(seed, spans, 60, 4, "lru")
        for _ in range(150):
            world.run_step()


@pytest.fixture
def contents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit says nothing, so what the blocks hold has to tell."""
    monkeypatch.setattr(Queries, "check_invariants", lambda self: [])


_WRONG = "holds (another state|garbage)"


@pytest.mark.usefixtures("contents_alone")
def test_a_hit_past_the_last_checkpoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeBlocks, "usable", lambda self, nodes, is_filling=None: nodes)
    with pytest.raises(AssertionError, match=_WRONG):
        _run_until_wrong()


@pytest.mark.usefixtures("contents_alone")
def test_a_state_that_is_updated_after_it_was_published_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the state of the block that is being computed is published for the block before it."""
    real = Publisher._settle_group

    def settle_next(
        self: Publisher, owner: SessionState, until: int, group: int, slots: Int64Array, places: Int32Array, nodes: Int32Array
    ) -> None:
        real(self, owner, until, group, slots, places + np.int32(1), nodes)

    monkeypatch.setattr(Publisher, "_settle_group", settle_next)
    with pytest.raises(AssertionError, match=_WRONG):
        _run_until_wrong()


@pytest.mark.usefixtures("contents_alone")
def test_a_fork_that_writes_the_state_of_its_parent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: of a group of states nothing is copied before it is written."""
    real = Reservations.copies_due

    def copies_due(self: Reservations, owner: SessionState, slot: int, wanted: int) -> Int64Array:
        due = real(self, owner, slot, wanted)
        return due[due < self._sequences.max_blocks]

    monkeypatch.setattr(Reservations, "copies_due", copies_due)
    with pytest.raises(AssertionError, match=_WRONG):
        _run_until_wrong()


@pytest.mark.usefixtures("contents_alone")
@pytest.mark.parametrize("name", ["truncated_length", "fork_length"])
def test_a_cut_that_keeps_a_state_of_later_tokens_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def as_asked(seqs: SequenceTable, slot: int, num_tokens: int) -> int:
        if num_tokens >= seqs.num_reserved[slot]:
            return num_tokens
        return min(num_tokens, int(seqs.num_committed[slot]))

    monkeypatch.setattr(lifecycle, name, as_asked)
    with pytest.raises(AssertionError, match=_WRONG):
        _run_until_wrong()


@pytest.mark.usefixtures("contents_alone")
def test_a_cut_that_forgets_a_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a cut goes back to a checkpoint whose window has moved on."""
    real = spans._last_states

    def careless(seqs: SequenceTable, slot: int, most: int) -> int:
        groups, seqs.new_entries.window_groups = seqs.new_entries.window_groups, ()
        found = real(seqs, slot, most)
        seqs.new_entries.window_groups = groups
        return found

    monkeypatch.setattr(spans, "_last_states", careless)
    with pytest.raises(AssertionError):
        _run_until_wrong(_BESIDE_A_WINDOW)


def _pool(**config: Any) -> CorePool:
    return CorePool(**{"num_blocks": 41, "block_size": 2, "group_spans": SPANS} | config)


def _states(pool: CorePool, sequence_id: int) -> list[int]:
    """1 where an entry of the group of states has a block."""
    view = pool.view(sequence_id)
    return [int(block > 0) for table in view.group_tables for block in table]


def _prefill(pool: CorePool, sequence_id: int, length: int) -> None:
    pool.prefill(sequence_id, list(range(length)))


def test_a_start_has_states_at_its_checkpoints_and_behind_its_last_token() -> None:
    pool = _pool()
    pool.create(1, list(range(15)))
    reply = pool.step(starts=[(1, ALL, ALL)])
    assert [int(block > 0) for block in reply.start_block_ids[8:]] == [0, 0, 1, 0, 0, 1, 0, 1]
    assert pool.manager.queries.stats().num_referenced_blocks == 8 + 3
    pool.step(commits=[(1, 15, [])])
    assert _states(pool, 1) == [0, 0, 1, 0, 0, 1, 0, 1]


def test_a_state_behind_a_block_is_given_back_when_the_next_one_is_committed() -> None:
    pool = _pool()
    _prefill(pool, 1, 8)
    assert _states(pool, 1) == [0, 0, 1, 1]
    reply = pool.step(commits=[(1, 8, [8])], reserves=[(1, 9, 9)])
    assert (reply.new_block_groups.tolist(), (reply.new_block_ids > 0).tolist()) == ([0, 1], [True, True])
    assert _states(pool, 1) == [0, 0, 1, 1, 1]
    reply = pool.step(commits=[(1, 9, [])])
    updates = zip(reply.update_groups, reply.update_table_idx, reply.update_block_ids, strict=True)
    assert [tuple(map(int, each)) for each in updates] == [(1, 3, 0)]
    assert _states(pool, 1) == [0, 0, 1, 0, 1]


def test_several_entries_at_once_name_their_holes() -> None:
    pool = _pool()
    _prefill(pool, 1, 2)
    pool.step(commits=[(1, 2, [])])
    pool.create(2, list(range(10, 24)))
    pool.step(starts=[(2, 2, 0)])
    reply = pool.step(commits=[(2, 2, [])], reserves=[(2, 3, 14)])
    assert [int(block > 0) for block in reply.new_block_ids.reshape(2, 6)[1]] == [0, 1, 0, 0, 1, 1]
    assert reply.new_block_item_idx.tolist() == [0] * 12


def test_a_hit_ends_at_a_checkpoint_and_reads_its_last_state_alone() -> None:
    pool = _pool()
    _prefill(pool, 1, 15)
    assert pool.create(2, list(range(13))) == 12  # a seventh block is cached, without a state
    reply = pool.step(starts=[(2, ALL, ALL)])
    assert (reply.start_hits.tolist(), reply.copy_sources.tolist()) == ([12], [])
    assert _states(pool, 2) == [0, 0, 0, 0, 0, 1, 1]
    assert pool.create(3, list(range(12))) == 12
    assert pool.step(starts=[(3, ALL, ALL)]).start_hits.tolist() == [6]  # a token is left to compute
    shown = pool.manager.queries.explain_match("", int32([*range(10), 99, 99]))
    assert (shown.num_matched, shown.num_hit, shown.short_group) == (10, 6, 1)
    assert "Group 1 of the layers lacks the state behind more" in in_words(shown)


def test_states_that_are_evicted_cost_the_hits_that_end_there() -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    index = pool.manager.state.index
    nodes = index.match(index.find_root(""), int32(range(12)), 6)
    pool.step(releases=[1])
    assert index.held.group_blocks[0][nodes].astype(bool).tolist() == [False, False, True, False, False, True]
    pool.manager.state.pool.expire(index.held.group_blocks[0][nodes[5:]])
    pool.audit()
    assert pool.create(2, list(range(13))) == 6


_CUTS = [  # tokens that a fork or a truncate asks for, after 13 were committed and no more is reserved; what is committed then
    (13, 13),
    (12, 12),
    (11, 6),
    (6, 6),
    (5, 0),
]


@pytest.mark.parametrize(("length", "kept"), _CUTS)
def test_a_fork_has_the_tokens_and_the_states_that_there_are(length: int, kept: int) -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    reply = pool.step(forks=[(1, 2, length)])
    assert (reply.fork_results.tolist(), reply.fork_committed.tolist()) == ([ItemResult.OK], [kept])
    assert pool.counters(2) == (length, kept, kept)
    reply = pool.step(reserves=[(2, kept + 1, length)] if kept < length else [(2, 14, 14)])
    assert len(reply.copy_sources) == 2 * (kept == 13)  # of both groups, or nothing is shared that is written
    pool.step(commits=[(2, length, [])])
    assert pool.counters(1) == (13, 13, 13)


@pytest.mark.parametrize(("length", "kept"), _CUTS)
def test_a_truncate_leaves_the_states_that_there_are(length: int, kept: int) -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    reply = pool.step(truncates=[(1, length)])
    assert reply.truncate_committed.tolist() == [kept]
    assert pool.counters(1) == (length, kept, kept)
    if kept < length:
        pool.step(reserves=[(1, length, length)])
        pool.step(commits=[(1, length, [])])
    assert _states(pool, 1)[(length - 1) // 2] == 1


def test_a_cut_below_a_step_in_flight_goes_back_to_a_checkpoint() -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    pool.step(commits=[(1, 13, [13])], reserves=[(1, 14, 14)])
    reply = pool.step(lag=1, forks=[(1, 2, 13)], truncates=[(1, 13)])
    assert (reply.fork_committed.tolist(), reply.truncate_committed.tolist()) == ([12], [12])
    reply = pool.step(lag=1, truncates=[(1, 20)])
    assert reply.truncate_committed.tolist() == [12]
    assert pool.counters(1) == (13, 12, 12)


def test_a_cut_at_the_reserved_length_or_above_takes_no_state() -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    pool.step(commits=[(1, 13, [13, 14])], reserves=[(1, 14, 14)])
    assert pool.step(lag=1, truncates=[(1, 14)]).truncate_committed.tolist() == [13]
    assert pool.counters(1) == (14, 13, 14)


def test_a_fork_of_a_child_of_the_same_step_has_no_more_than_the_child() -> None:
    pool = _pool()
    _prefill(pool, 1, 13)
    reply = pool.step(forks=[(1, 2, 11), (2, 3, 10), (2, 4, 3)])
    assert reply.fork_committed.tolist() == [6, 6, 0]
    assert pool.counters(4) == (3, 0, 0)


def test_a_commit_of_a_length_without_a_state_is_refused() -> None:
    pool = _pool()
    pool.create(1, list(range(11)))
    pool.step(starts=[(1, ALL, ALL)])
    with pytest.raises(InvalidField) as error:
        pool.step(commits=[(1, 9, [])])
    assert (error.value.metadata["field"], error.value.metadata["limit"]) == ("commit_num_tokens", "11")
    pool.step(commits=[(1, 6, [])])


def test_a_sequence_takes_as_few_blocks_as_it_is_counted_with() -> None:
    """Pools of each size: what is said to fit, fits, token by token and at once."""
    for num_blocks in range(4, 24):
        config = PoolConfig(num_blocks, 2, group_spans=SPANS, max_tokens_per_sequence=64)
        if not config.limit_tokens:
            continue
        for chunk in (1, 64):
            pool = _pool(num_blocks=num_blocks, max_tokens_per_sequence=64)
            limit = config.limit_tokens
            pool.create(1, list(range(limit)))
            pool.step(starts=[(1, chunk, 0)])
            while (committed := pool.counters(1)[2]) < limit:
                reply = pool.step(commits=[(1, committed, [])], reserves=[(1, committed + 1, min(committed + chunk, limit))])
                assert reply.reserve_reserved[0] > committed
            pool.step(commits=[(1, limit, [])])


def test_a_short_pool_grants_as_many_entries_as_there_are_blocks_for() -> None:
    pool = _pool(num_blocks=8)
    pool.create(1, list(range(8)))
    pool.step(starts=[(1, ALL, 0)])
    assert pool.counters(1) == (8, 0, 8)  # four and two, and one is left
    pool.step(commits=[(1, 8, [])])
    pool.create(2, list(range(50, 58)))
    assert pool.step(starts=[(2, ALL, 0)]).start_results.tolist() == [StartResult.NO_ROOM]
    entries = NewEntries(SPANS)
    for start in range(7):
        for room in range(14):
            most = entries.most_entries(start, 9, room)
            assert entries.num_blocks(start, start + most) <= room
            assert most == 9 or entries.num_blocks(start, start + most + 1) > room


@pytest.mark.parametrize("spans", [make_spans(0), make_spans(0, 4), SPANS, (*make_spans(0, 0), state_span(1), state_span(4))])
def test_entries_are_counted_as_they_are_granted(spans: tuple[ReadSpan, ...]) -> None:
    entries = NewEntries(spans)
    for start in range(9):
        for end in range(start, 14):
            places = np.arange(start, end, dtype=np.int32)
            count = int(np.count_nonzero(entries.have_blocks(places, places + 1 == end)))
            assert entries.num_blocks(start, end) == count
            assert entries.count_blocks(int32([start, end]), int32([end, start])).tolist() == [count, 0]


def test_statistics_count_the_entries_that_keep_no_state() -> None:
    pool = _pool()
    _prefill(pool, 1, 15)
    assert [tuple(group) for group in pool.manager.queries.group_stats()] == [(0, 8, 0), (2, 3, 5)]


def test_a_waiting_sequence_is_told_of_a_checkpoint_to_come() -> None:
    pool = _pool()
    pool.create(1, list(range(20)))
    pool.step(starts=[(1, 15, 0)])
    pool.create(2, list(range(20)))
    reply = _step_that_may_wait(pool, (2, ALL, ALL))
    assert (reply.start_results.tolist(), reply.start_hits.tolist()) == ([StartResult.COMPUTING], [12])
    pool.step(commits=[(1, 15, [])], reserves=[(1, 16, 17)])
    assert _step_that_may_wait(pool, (2, ALL, ALL)).start_results.tolist() == [StartResult.STARTED]  # 14 are no checkpoint


def _step_that_may_wait(pool: CorePool, *starts: tuple[int, int, int]) -> StepReply:
    pool.step_ids[A] += 1
    batch = step_batch(pool.step_ids[A], pool.step_ids[A] - 1, starts=starts)
    return pool.manager.steps.step(A, batch._replace(start_may_wait=int32([1] * len(starts))))


@pytest.mark.parametrize(
    "refused",
    [
        lambda pool: pool.manager.hand_offs.offer(A, SequenceId(1), b"0" * 16),
        lambda pool: pool.create(2, [1, 2, 3], retention=Retention(1, 4)),
    ],
    ids=["hand-off", "retention"],
)
def test_what_cannot_be_with_states_is_refused(refused: Callable[[CorePool], object]) -> None:
    pool = _pool()
    _prefill(pool, 1, 5)
    with pytest.raises(NotImplementedYet):
        refused(pool)


def test_a_swap_waits_until_the_states_are_those_of_the_committed_tokens() -> None:
    pool = _pool(num_host_blocks=41)
    _prefill(pool, 1, 13)
    pool.step(commits=[(1, 13, [13])], reserves=[(1, 14, 14)])
    step_id, pool.step_ids[A] = pool.step_ids[A] + 1, pool.step_ids[A] + 1
    reply = pool.manager.steps.step(A, step_batch(step_id, step_id - 1)._replace(swap_out_ids=np.array([1])))
    assert reply.swap_out_results.tolist() == [ItemResult.NO_ROOM]
    pool.step(commits=[(1, 14, [])])
    step_id, pool.step_ids[A] = pool.step_ids[A] + 1, pool.step_ids[A] + 1
    reply = pool.manager.steps.step(A, step_batch(step_id, step_id - 1)._replace(swap_out_ids=np.array([1])))
    assert reply.swap_out_results.tolist() == [ItemResult.OK]
    assert len(reply.transfer_ids) == 7 + 3


def test_a_swap_by_call_says_why_it_waits() -> None:
    pool = _pool(num_host_blocks=41)
    pool.create(1, [1, 2, 3])
    pool.manager.one_item.extend(A, 1, 3, look_up=True)
    with pytest.raises(WrongState):
        pool.manager.one_item.swap_out(A, 1)
    pool.manager.one_item.commit(A, 1, 3, 3, int32([]))
    pool.manager.one_item.swap_out(A, 1)
    pool.audit()
