"""Sessions with copies run by the cache service: done before the answer, however long they take."""

import asyncio
import threading

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.copies import Copies
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena
from kvkeeper.cache_service.runtime import pool as running_pool
from tests.support.processes.child_processes import Processes
from tests.support.worlds import cache_api
from tests.support.worlds.cache_api import (
    BLOCK_BYTES,
    DEADLINE,
    Api,
    ManualClock,
    Session,
    commit_columns,
    int32s,
    kv_of,
    le32,
    le64,
    read_all,
    refusal,
)
from tests.support.worlds.step_carriers import StepCarriers


async def forked(api: Api, **fields: int) -> tuple[Session, list[int]]:
    """A session with sequence 1 of 6 committed tokens and its child 2 on the same blocks, after 3 steps."""
    session = await api.open(engine=False, **fields)
    await session.create(1, 6)
    answer = pb.StepResponse.FromString(await api.raw_step(session.start_bytes(1, 1)))
    table = int32s(answer.start_block_ids)
    blocks_of(api)[table] = np.arange(2 * BLOCK_BYTES).reshape(2, -1) % 251
    await session.step(
        2,
        **commit_columns(1, 6),
        fork_parent_ids=le64(1),
        fork_child_ids=le64(2),
        fork_num_tokens=le32(6),
    )
    return session, table


def blocks_of(api: Api) -> np.ndarray:
    (pool,) = api.server.session_manager.registry.pools
    return cache_api.blocks_of(pool)


def reserve_child(session: Session) -> bytes:
    return session.step_bytes(3, reserve_sequence_ids=le64(2), reserve_min_tokens=le32(7), reserve_max_tokens=le32(7))


class SlowCopies:
    """Copies that wait for the test: all count as large."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.num_begun = 0
        copy = SharedMemoryArena.copy

        def slowly(*args: object) -> None:
            self.num_begun += 1
            assert self.may_go_on.wait(DEADLINE)
            copy(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(SharedMemoryArena, "copy", slowly)
        monkeypatch.setattr(running_pool, "_MAX_INLINE_COPY_BYTES", 0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


async def begun(api: Api, slow: SlowCopies, count: int = 1) -> None:
    await api.until(lambda _: slow.num_begun == count)


async def test_a_step_copies_before_it_answers(api: Api) -> None:
    session, table = await forked(api)
    answer = pb.StepResponse.FromString(await api.raw_step(reserve_child(session)))
    assert int32s(answer.copy_source_block_ids) == [table[1]]
    (copy,) = int32s(answer.copy_destination_block_ids)
    assert copy not in table
    np.testing.assert_array_equal(blocks_of(api)[copy], blocks_of(api)[table[1]])
    assert blocks_of(api)[copy].any()


async def test_a_repeat_does_not_copy_again(api: Api) -> None:
    session, _ = await forked(api)
    answer = await api.raw_step(reserve_child(session))
    (copy,) = int32s(pb.StepResponse.FromString(answer).copy_destination_block_ids)
    blocks_of(api)[copy] = 7  # the client's own writes
    assert await api.raw_step(reserve_child(session)) == answer
    assert (blocks_of(api)[copy] == 7).all()


async def test_large_copies_leave_the_service_answering(api: Api, slow: SlowCopies) -> None:
    session, table = await forked(api)
    stepping = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    assert not stepping.done()
    slow.may_go_on.set()
    answer = pb.StepResponse.FromString(await asyncio.wait_for(stepping, DEADLINE))
    (copy,) = int32s(answer.copy_destination_block_ids)
    np.testing.assert_array_equal(blocks_of(api)[copy], blocks_of(api)[table[1]])


async def check_repeat(api: Api, slow: SlowCopies, session: Session, table: list[int]) -> None:
    """A repeat of the child's step awaits the copies that have begun, begins none, and finds them done."""
    again = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await api.stats()
    assert not again.done()
    slow.may_go_on.set()
    answer = pb.StepResponse.FromString(await asyncio.wait_for(again, DEADLINE))
    (copy,) = int32s(answer.copy_destination_block_ids)
    np.testing.assert_array_equal(blocks_of(api)[copy], blocks_of(api)[table[1]])
    assert slow.num_begun == 1


async def test_a_repeat_awaits_the_copies_of_a_call_that_was_cancelled(api: Api, slow: SlowCopies) -> None:
    session, table = await forked(api)
    first = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    first.cancel()
    await check_repeat(api, slow, session, table)


async def test_no_block_is_granted_while_large_copies_run(api: Api, slow: SlowCopies) -> None:
    session, _ = await forked(api)
    other, single = await api.open(), await api.open(engine=False)
    for waiting in (other, single):
        await waiting.create(1, 4)
    stepping = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    starting = asyncio.ensure_future(api.raw_step(other.start_bytes(1, 1)))
    extending = asyncio.ensure_future(single.call("ExtendSequence", sequence_id=1, num_tokens=4))
    before = (await api.stats()).pools[0]
    assert before.num_running_sequences == 2
    slow.may_go_on.set()
    await asyncio.wait_for(asyncio.gather(stepping, starting, extending), DEADLINE)
    assert (await api.stats()).pools[0].num_running_sequences == 4


async def test_nothing_is_read_before_the_copy_that_fills_it(api: Api, slow: SlowCopies) -> None:
    session, _ = await forked(api)
    parent = await read_all(session, 1)
    stepping = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    reading = asyncio.ensure_future(read_all(session, 2))
    for _ in range(9):  # long enough for a read that does not wait
        await api.stats()
    assert not reading.done()
    slow.may_go_on.set()
    await asyncio.wait_for(stepping, DEADLINE)
    assert parent.any()
    np.testing.assert_array_equal(await asyncio.wait_for(reading, DEADLINE), parent)


async def test_nothing_is_written_before_a_copy_of_an_extend_that_was_cancelled(api: Api, slow: SlowCopies) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    slow.may_go_on.set()
    await session.call("ExtendSequence", sequence_id=1, num_tokens=6)
    slow.may_go_on.clear()
    num_begun = slow.num_begun
    await session.call("CommitSequence", sequence_id=1, num_tokens=6)
    await session.call("ForkSequence", parent_id=1, child_id=2)
    extending = asyncio.ensure_future(session.call("ExtendSequence", sequence_id=2, num_tokens=7))
    await begun(api, slow, num_begun + 1)
    extending.cancel()
    content = kv_of(range(6, 7))
    writing = asyncio.ensure_future(session.write_kv(2, 6, content))
    for _ in range(9):  # long enough for a write that does not wait
        await api.stats()
    assert not writing.done()
    slow.may_go_on.set()
    await asyncio.wait_for(writing, DEADLINE)
    await session.call("CommitSequence", sequence_id=2, num_tokens=7, first_token_idx=6, token_ids=[6])
    np.testing.assert_array_equal(await read_all(session, 2, first_token_idx=6), content)


async def test_a_stream_waits_for_large_copies_and_reads_nothing_meanwhile(
    api: Api, slow: SlowCopies, carriers: StepCarriers
) -> None:
    session, table = await forked(api)
    stream = await carriers.open(session)
    await stream.write(reserve_child(session))
    await begun(api, slow)
    await stream.write(b"\xff")  # would be refused at once
    for _ in range(9):
        await api.stats()
    assert (await api.stats()).sessions[0].step_id == 3
    slow.may_go_on.set()
    answer = pb.StepResponse.FromString(await stream.read())
    (copy,) = int32s(answer.copy_destination_block_ids)
    np.testing.assert_array_equal(blocks_of(api)[copy], blocks_of(api)[table[1]])
    assert (await refusal(stream.read())).reason == "INVALID_FIELD"


async def test_a_step_that_waits_for_copies_ends_with_its_stream(api: Api, slow: SlowCopies, carriers: StepCarriers) -> None:
    session, _ = await forked(api)
    other = await api.open()
    await other.create(1, 4)
    copying = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    replaced = await carriers.open(other)
    await replaced.write(other.step_bytes(1))  # it waits for the copies
    await api.until(lambda stats: stats.sessions[1].step_carrier != pb.STEP_CARRIER_UNSPECIFIED)
    stream = api.raw_stream()
    await stream.write(other.start_bytes(1, 1))
    assert (await refusal(asyncio.wait_for(replaced.read(), DEADLINE))).reason == "STREAM_REPLACED"
    slow.may_go_on.set()
    await asyncio.wait_for(copying, DEADLINE)
    answer = pb.StepResponse.FromString(await asyncio.wait_for(stream.read(), DEADLINE))  # and no STEP_CONFLICT
    assert int32s(answer.start_results) == [pb.START_RESULT_STARTED]


async def test_a_stream_that_is_lost_during_its_copies_finds_its_step_done(
    api: Api, slow: SlowCopies, carriers: StepCarriers
) -> None:
    session, table = await forked(api)
    stream = await carriers.open(session)
    await stream.write(reserve_child(session))
    await begun(api, slow)
    stream.cancel()
    await check_repeat(api, slow, session, table)
    await api.until(lambda stats: stats.sessions[0].step_carrier == pb.STEP_CARRIER_UNSPECIFIED)


async def test_a_session_that_ends_during_its_copies_is_quarantined_until_they_are_done(
    api: Api, slow: SlowCopies, clock: ManualClock
) -> None:
    session, _ = await forked(api, ttl_ms=1000)
    stepping = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    clock.advance(1.1)
    stats = await api.stats()
    assert (len(stats.sessions), stats.num_reaped_sessions) == (0, 1)
    assert stats.pools[0].num_quarantined_blocks > 0
    slow.may_go_on.set()
    await asyncio.wait_for(stepping, DEADLINE)
    await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)


async def test_a_client_that_is_killed_during_its_copies_is_quarantined_until_they_are_done(
    api: Api, slow: SlowCopies, processes: Processes
) -> None:
    session, _ = await forked(api)
    child = await processes.with_lane(session, reserve_child(session))
    await child.tell("send")
    await begun(api, slow)
    child.process.kill()
    stats = await api.until(lambda stats: not stats.sessions)
    assert stats.num_reaped_sessions == 1
    assert stats.pools[0].num_quarantined_blocks > 0
    slow.may_go_on.set()
    await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)


async def test_a_quarantine_ends_also_when_other_copies_begin_at_once(api: Api, slow: SlowCopies, clock: ManualClock) -> None:
    session, _ = await forked(api, ttl_ms=1000)
    (pool,) = api.server.session_manager.registry.pools
    stepping = asyncio.ensure_future(api.raw_step(reserve_child(session)))
    await begun(api, slow)
    assert pool.copying is not None
    others = Copies(np.zeros(1, np.int32), np.ones(1, np.int32))
    pool.copying.add_done_callback(lambda _: pool.copy(others))  # another call was faster than the end of the quarantine
    clock.advance(1.1)
    assert (await api.stats()).pools[0].num_quarantined_blocks > 0
    slow.may_go_on.set()
    await asyncio.wait_for(stepping, DEADLINE)
    await begun(api, slow, 2)
    await api.until(lambda stats: stats.pools[0].num_quarantined_blocks == 0)


async def test_copies_run_in_order(api: Api) -> None:
    """A block that changes tenant is cleared first: a copy of the null block comes first, then the other copies of the step."""
    owner = await api.open(engine=False)
    await owner.create(1, 4, tenant="a")
    table = int32s(pb.StepResponse.FromString(await api.raw_step(owner.start_bytes(1, 1))).start_block_ids)
    blocks_of(api)[:] = 9
    blocks_of(api)[0] = 0
    await owner.step(2, release_sequence_ids=le64(1))
    num_tokens = 4 * (owner.opened.pool.num_blocks - 1)
    await owner.create(2, min(num_tokens, owner.opened.pool.max_tokens_per_sequence), tenant="b")
    answer = pb.StepResponse.FromString(await api.raw_step(owner.start_bytes(3, 2)))
    assert table[0] in int32s(answer.start_block_ids)
    assert not blocks_of(api)[table[0]].any()
