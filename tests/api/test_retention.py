"""Retention over the wire: what is read by sequence, layer and token range is exactly sink and window."""

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, Session, kv_of, le32, le64, read_all, refusal, refused, serving

SINK, WINDOW = 3, 6


def retention(sink: int, window: int) -> pb.Retention:
    return pb.Retention(num_sink_tokens=sink, num_window_tokens=window)


async def grow(session: Session, length: int, *, chunk: int) -> None:
    """Writes and commits sequence 1, chunk by chunk; the K and V of a token are those of its position."""
    shown = (await session.call("GetSequence", sequence_id=1)).sequence
    for first in range(shown.num_committed_tokens, length, chunk):
        last = min(first + chunk, length)
        await session.call("ExtendSequence", sequence_id=1, num_tokens=last)
        for position in range(first, last):
            await session.write_kv(1, position, kv_of(range(position, position + 1)))
        known = (await session.call("GetSequence", sequence_id=1)).sequence.num_tokens
        new = range(max(known, first), last)
        await session.call("CommitSequence", sequence_id=1, num_tokens=last, first_token_idx=new.start, token_ids=new)


def written(first: int, count: int) -> np.ndarray:
    return np.concatenate([kv_of(range(i, i + 1)) for i in range(first, first + count)], axis=2)


async def test_every_range_is_read_or_refused_to_the_token(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 4, retention=retention(SINK, WINDOW))
    for length in (7, 8, 9, 12, 13, 17):
        await grow(session, length, chunk=3)
        readable = {i for i in range(length) if i < SINK or i >= length - WINDOW}
        for first in range(length):
            for count in range(1, length - first + 1):
                if readable.issuperset(range(first, first + count)):
                    found = await read_all(session, 1, first_token_idx=first, num_tokens=count)
                    np.testing.assert_array_equal(found, written(first, count))
                    (chunk,) = await session.read_kv(1, first_token_idx=first, num_tokens=count, layer_idx=[1])
                    assert (chunk.layer_idx, chunk.first_token_idx, chunk.num_tokens) == (1, first, count)
                    continue
                error = await refusal(session.read_kv(1, first_token_idx=first, num_tokens=count))
                limit = ("num_tokens", SINK - first) if first < SINK else ("first_token_idx", length - WINDOW)
                assert (error.reason, error.metadata) == ("INVALID_FIELD", {"field": limit[0], "limit": str(limit[1])})
    assert (await refusal(session.read_kv(1))).metadata == {"field": "num_tokens", "limit": str(SINK)}
    found = await read_all(session, 1, first_token_idx=11)
    np.testing.assert_array_equal(found, written(11, 6))
    shown = (await session.call("GetSequence", sequence_id=1)).sequence
    assert [block == 0 for block in shown.block_table] == [False, True, False, False, False]
    assert shown.retention == retention(SINK, WINDOW)
    assert (await session.call("ReleaseSequence", sequence_id=1)).num_dropped_blocks == 4


async def test_a_sequence_longer_than_its_pool() -> None:
    async with serving(num_blocks=6, max_tokens_per_sequence=64) as api:
        session = await api.open(engine=False)
        pool = session.opened.pool
        assert (pool.max_tokens_per_sequence, pool.max_tokens_with_retention) == (20, 64)
        await session.create(1, 50, retention=retention(4, 8))
        await grow(session, 64, chunk=4)
        np.testing.assert_array_equal(await read_all(session, 1, num_tokens=4), written(0, 4))
        np.testing.assert_array_equal(await read_all(session, 1, first_token_idx=56), written(56, 8))
        (stats,) = (await api.stats()).pools
        # Two of the dropped ones were published below sink + window, stayed cached and were evicted for want of room.
        assert (stats.num_retention_dropped_blocks, stats.num_evicted_blocks) == (13, 15)
        await refused(session.call("ExtendSequence", sequence_id=1, num_tokens=65), "INVALID_FIELD", limit="64")
        verdict = await session.call("CheckAdmission", num_prompt_tokens=64)
        assert (verdict.verdict, verdict.limit_tokens) == (pb.ADMISSION_VERDICT_NEVER, 20)
        verdict = await session.call("CheckAdmission", num_prompt_tokens=64, retention=retention(4, 8))
        assert (verdict.verdict, verdict.limit_tokens) == (pb.ADMISSION_VERDICT_LATER, 64)
        await api.audit()


async def test_forks_and_truncates_into_holes_are_refused(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 4, retention=retention(SINK, WINDOW))
    await grow(session, 17, chunk=5)
    for method, fields in (
        ("ForkSequence", {"parent_id": 1, "child_id": 2, "num_tokens": 13}),
        ("TruncateSequence", {"sequence_id": 1, "num_tokens": 13}),
    ):
        await refused(session.call(method, **fields), "INVALID_FIELD", limit="14")
    child = (await session.call("ForkSequence", parent_id=1, child_id=2)).sequence
    assert (child.num_committed_tokens, child.retention) == (17, retention(SINK, WINDOW))
    await session.call("TruncateSequence", sequence_id=2, num_tokens=14)
    np.testing.assert_array_equal(await read_all(session, 2, first_token_idx=8), written(8, 6))


async def test_a_step_tells_of_holes_and_of_nothing_else(api: Api) -> None:
    session = await api.open()
    await session.create(1, 14, retention=retention(0, 4))
    await session.create(2, 14)
    both = {"start_sequence_ids": le64(1, 2), "start_max_new_tokens": le32(14, 14), "start_max_hit_tokens": le32(0, 0)}
    await session.step(1, **both)
    zeros = le32(0, 0)
    reply = await session.step(2, commit_sequence_ids=le64(1, 2), commit_num_tokens=le32(14, 14), commit_num_new_tokens=zeros)
    holes = np.frombuffer(reply.table_update_block_ids, "<i4") == 0
    assert np.frombuffer(reply.table_update_sequence_ids, "<i8")[holes].tolist() == [1, 1]
    assert sorted(np.frombuffer(reply.table_update_table_idx, "<i4")[holes].tolist()) == [0, 1]


@pytest.mark.parametrize(("sink", "window", "field"), [(-1, 1, "num_sink_tokens"), (0, 0, "num_window_tokens")])
async def test_retention_that_is_refused(api: Api, sink: int, window: int, field: str) -> None:
    session = await api.open(engine=False)
    for call in (session.create(1, 4, retention=retention(sink, window)),
                 session.call("CheckAdmission", num_prompt_tokens=4, retention=retention(sink, window))):  # fmt: skip
        await refused(call, "INVALID_FIELD", field=f"retention.{field}")
    await session.create(1, 4, retention=retention(2**31 - 1, 2**31 - 1))  # keeps everything
    await grow(session, 9, chunk=9)
    np.testing.assert_array_equal(await read_all(session, 1), written(0, 9))


async def test_an_update_narrows_what_can_be_read(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 4)
    await grow(session, 17, chunk=17)
    shown = (await session.call("UpdateSequence", sequence_id=1, priority=5, retention=retention(SINK, WINDOW))).sequence
    assert (shown.priority, shown.retention) == (5, retention(SINK, WINDOW))
    assert [block == 0 for block in shown.block_table] == [False, True, False, False, False]
    np.testing.assert_array_equal(await read_all(session, 1, first_token_idx=11), written(11, 6))
    for fields in ({"first_token_idx": 10, "num_tokens": 1}, {"first_token_idx": 3, "num_tokens": 1}):
        assert (await refusal(session.read_kv(1, **fields))).metadata == {"field": "first_token_idx", "limit": "11"}
    error = await refusal(session.call("UpdateSequence", sequence_id=1, retention=retention(SINK + 1, WINDOW)))
    assert (error.reason, error.metadata["limit"]) == ("INVALID_FIELD", str(SINK))
    shown = (await session.call("UpdateSequence", sequence_id=1)).sequence  # nothing is to be changed
    assert (shown.priority, shown.retention) == (5, retention(SINK, WINDOW))
