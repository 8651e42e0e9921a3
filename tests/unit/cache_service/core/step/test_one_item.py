"""The one-item calls of the core (docs/api/protocol.md, section 3). Safe to repeat, all or nothing, each complete at once."""

import pytest

from kvkeeper.cache_service.core.values.errors import (
    DuplicateSequence,
    InvalidField,
    OutOfBlocks,
    OutOfSequences,
    UnknownSequence,
    WrongState,
)
from kvkeeper.cache_service.core.values.types import BlockState, SequenceId
from tests.support.worlds.core_pool import A, B, CorePool, int32


class CallPool(CorePool):
    """Session a, by one-item calls."""

    def extend(self, sequence_id: int, num_tokens: int, *, look_up: bool = True) -> list[tuple[int, int]]:
        copies = self.manager.one_item.extend(A, SequenceId(sequence_id), num_tokens, look_up=look_up)
        self.audit()
        return list(zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True))

    def commit(self, sequence_id: int, num_tokens: int, first: int = 0, tokens: range = range(0)) -> None:
        self.manager.one_item.commit(A, SequenceId(sequence_id), num_tokens, first, int32(tokens))
        self.audit()

    def fork(self, parent: int, child: int, num_tokens: int | None = None) -> None:
        self.manager.one_item.fork(A, SequenceId(parent), SequenceId(child), num_tokens)
        self.audit()

    def whole(self, sequence_id: int, tokens: range) -> list[int]:
        self.create(sequence_id, tokens)
        self.extend(sequence_id, len(tokens))
        self.commit(sequence_id, len(tokens))
        return self.table(sequence_id)


@pytest.mark.parametrize("length", [3, 4, 5, 11, 12, 13])
def test_extend_starts_a_waiting_sequence_and_takes_its_hit(length: int) -> None:
    pool = CallPool(num_blocks=17)
    cached = pool.whole(1, range(length))
    pool.create(2, range(length))
    assert pool.extend(2, length) == []
    hit = (length - 1) // 4 * 4
    assert pool.counters(2) == (length, hit, length)
    assert pool.table(2)[: hit // 4] == cached[: hit // 4]
    pool.create(3, range(length))
    pool.extend(3, length, look_up=False)
    assert pool.counters(3) == (length, 0, length)


def test_extend_is_all_or_nothing_and_tells_what_was_missing() -> None:
    pool = CallPool(num_blocks=5)
    pool.whole(1, range(8))
    pool.create(2, range(20, 30))
    with pytest.raises(OutOfBlocks) as refused:
        pool.extend(2, 9)
    assert refused.value.metadata == {"requested": "3", "available": "2"}
    assert (pool.table(2), pool.counters(2)) == ([], (10, 0, 0))
    pool.extend(2, 8)
    with pytest.raises(OutOfBlocks) as refused:
        pool.extend(1, 9)
    assert refused.value.metadata == {"requested": "1", "available": "0"}
    assert pool.counters(1) == (8, 8, 8)


def test_extend_counts_copies_hits_and_the_watermark_in_what_was_missing() -> None:
    pool = CallPool(num_blocks=4, watermark=0.4)
    pool.whole(1, range(6))
    pool.create(2, range(9))
    with pytest.raises(OutOfBlocks) as refused:
        pool.extend(2, 9)
    assert refused.value.metadata == {"requested": "2", "available": "0"}
    pool.extend(1, 12)
    pool.fork(1, 3)
    with pytest.raises(OutOfBlocks) as refused:
        pool.extend(3, 7)
    assert refused.value.metadata == {"requested": "1", "available": "0"}


def test_extend_is_retry_safe_and_never_shrinks() -> None:
    pool = CallPool()
    pool.whole(1, range(5))
    pool.extend(1, 9)
    table = pool.table(1)
    for length in (9, 5, 1):
        assert pool.extend(1, length) == []
        assert (pool.table(1), pool.counters(1)) == (table, (5, 5, 9))


@pytest.mark.parametrize("length", [0, -1, 33, 2**31 - 1])
def test_extend_refuses_lengths_that_cannot_be(length: int) -> None:
    pool = CallPool(num_blocks=9)
    pool.create(1, range(5))
    with pytest.raises(InvalidField):
        pool.extend(1, length)
    assert pool.counters(1) == (5, 0, 0)


def test_extend_copies_a_shared_partial_block_before_it_allows_a_write() -> None:
    pool = CallPool()
    shared = pool.whole(1, range(6))
    pool.fork(1, 2)
    assert pool.extend(2, 7) == [(shared[1], pool.table(2)[1])]
    assert pool.table(1) == shared
    assert pool.extend(1, 7) == []  # the only holder left


def test_extend_at_once_reuses_what_an_earlier_call_let_go() -> None:
    pool = CallPool(num_blocks=3)
    blocks = pool.whole(1, range(6))
    pool.manager.one_item.release(A, SequenceId(1))
    pool.create(2, range(20, 28))
    pool.extend(2, 8)
    assert sorted(pool.table(2)) == sorted(blocks)


def test_commit_appends_once_however_often_it_is_asked() -> None:
    pool = CallPool()
    pool.create(1, range(3))
    pool.extend(1, 8)
    for _ in range(3):
        pool.commit(1, 5, first=3, tokens=range(3, 6))
        assert pool.counters(1) == (6, 5, 8)
    pool.commit(1, 7, first=5, tokens=range(5, 8))  # overlaps what is stored
    assert pool.manager.queries.tokens(A, SequenceId(1)).tolist() == list(range(8))


@pytest.mark.parametrize(("first", "tokens"), [(4, range(9, 10)), (-1, range(1)), (2, range(9, 11)), (0, range(1, 3))])
def test_commit_refuses_tokens_that_leave_a_gap_or_contradict(first: int, tokens: range) -> None:
    pool = CallPool()
    pool.create(1, range(3))
    pool.extend(1, 8)
    with pytest.raises(InvalidField) as refused:
        pool.commit(1, 3, first=first, tokens=tokens)
    assert refused.value.metadata["field"] == "first_token_idx"
    assert pool.counters(1) == (3, 0, 8)


def test_commit_shares_at_once() -> None:
    pool = CallPool()
    blocks = pool.whole(1, range(8))
    assert pool.matched(range(8)) == blocks


def test_fork_again_is_the_same_fork_and_another_is_a_duplicate() -> None:
    pool = CallPool()
    pool.whole(1, range(6))
    pool.whole(2, range(6))
    pool.fork(1, 3, 5)
    before = pool.table(3), pool.manager.queries.stats().num_forks
    pool.fork(1, 3, 5)
    assert (pool.table(3), pool.manager.queries.stats().num_forks) == before
    for parent, child, length in ((1, 3, 4), (2, 3, 5), (1, 2, 6), (1, 1, 6)):
        with pytest.raises(DuplicateSequence):
            pool.fork(parent, child, length)


def test_fork_of_nothing_shares_all_that_is_committed() -> None:
    pool = CallPool()
    pool.create(1, range(9))
    pool.extend(1, 9)
    pool.commit(1, 6)
    for child, length in ((2, None), (3, 0)):
        pool.fork(1, child, length)
        assert pool.counters(child) == (6, 6, 6)


def test_fork_refuses_what_cannot_be_shared() -> None:
    pool = CallPool(max_sequences=2)
    pool.create(1, range(5))
    with pytest.raises(WrongState):
        pool.fork(1, 2, 1)
    pool.extend(1, 5)
    for length in (None, 1):  # nothing is committed
        with pytest.raises(InvalidField):
            pool.fork(1, 2, length)
    pool.commit(1, 5)
    with pytest.raises(InvalidField):
        pool.fork(1, 0, 5)
    pool.fork(1, 2)
    with pytest.raises(OutOfSequences):
        pool.fork(1, 3)


def test_release_tells_what_nothing_else_holds_and_a_second_is_refused() -> None:
    pool = CallPool()
    blocks = pool.whole(1, range(9))
    pool.fork(1, 2, 8)
    assert pool.manager.one_item.release(A, SequenceId(1)) == 1
    with pytest.raises(UnknownSequence):
        pool.manager.one_item.release(A, SequenceId(1))
    assert pool.manager.one_item.release(A, SequenceId(2)) == 2
    assert [pool.state(block) for block in blocks] == [BlockState.CACHED, BlockState.CACHED, BlockState.FREE]


def test_release_refuses_what_is_not_yours() -> None:
    pool = CallPool()
    pool.whole(1, range(5))
    for sequence_id in (0, -1, 2, 2**53):
        with pytest.raises(UnknownSequence):
            pool.manager.one_item.release(A, SequenceId(sequence_id))
    with pytest.raises(UnknownSequence):
        pool.manager.one_item.release(B, SequenceId(1))
    assert pool.counters(1) == (5, 5, 5)


def test_writes_are_allowed_between_committed_and_reserved() -> None:
    pool = CallPool()
    pool.whole(1, range(5))
    assert pool.manager.queries.writable_slots(A, SequenceId(1)) == (5, 5)
    pool.extend(1, 9)
    assert pool.manager.queries.writable_slots(A, SequenceId(1)) == (5, 9)
    pool.manager.one_item.truncate(A, SequenceId(1), 3)
    assert pool.manager.queries.writable_slots(A, SequenceId(1)) == (3, 3)
