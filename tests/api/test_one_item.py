"""The one-item calls: everything that a client without arrays and shared memory can do."""

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import BLOCK_SIZE, DEADLINE, Api, kv_of, le32, read_all, refusal, refused, serving


async def test_the_life_of_a_sequence(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    shown = (await session.call("ExtendSequence", sequence_id=1, num_tokens=8)).sequence
    assert (shown.state, shown.num_reserved_tokens, len(shown.block_table)) == (pb.SEQUENCE_STATE_RUNNING, 8, 2)
    content = kv_of(range(6))
    await session.write_kv(1, 0, content)
    shown = (await session.call("CommitSequence", sequence_id=1, num_tokens=6, first_token_idx=6)).sequence
    assert (shown.num_tokens, shown.num_committed_tokens) == (6, 6)
    shown = (await session.call("CommitSequence", sequence_id=1, num_tokens=6, first_token_idx=6, token_ids=[77])).sequence
    assert (shown.num_tokens, shown.num_committed_tokens) == (7, 6)
    child = (await session.call("ForkSequence", parent_id=1, child_id=2)).sequence
    assert (child.num_committed_tokens, list(child.block_table)) == (6, list(shown.block_table))
    np.testing.assert_array_equal(await read_all(session, 1), content)
    np.testing.assert_array_equal(await read_all(session, 2), content)
    shown = (await session.call("TruncateSequence", sequence_id=1, num_tokens=4)).sequence
    assert (shown.num_tokens, len(shown.block_table)) == (4, 1)
    shown = (await session.call("GetSequence", sequence_id=1, include_tokens=True)).sequence
    assert list(shown.token_ids) == [0, 1, 2, 3]
    assert (await session.call("ReleaseSequence", sequence_id=2)).num_dropped_blocks == 1
    await refused(session.call("ReleaseSequence", sequence_id=2), "UNKNOWN_SEQUENCE")


async def test_copy_on_write_really_copies(api: Api) -> None:
    session = await api.open(engine=False)
    content = kv_of(range(6))
    await session.compute(1, 6, content)
    await session.call("ForkSequence", parent_id=1, child_id=2)
    own = (await session.call("ExtendSequence", sequence_id=2, num_tokens=7)).sequence.block_table
    parents = (await session.call("GetSequence", sequence_id=1)).sequence.block_table
    assert own[0] == parents[0]
    assert own[1] != parents[1]
    await session.write_kv(2, 6, kv_of(range(6, 7), salt=5))
    await session.call("CommitSequence", sequence_id=2, num_tokens=7, first_token_idx=6, token_ids=[9])
    np.testing.assert_array_equal((await read_all(session, 2))[:, :, :6], content)
    np.testing.assert_array_equal((await read_all(session, 2))[:, :, 6:], kv_of(range(6, 7), salt=5))
    np.testing.assert_array_equal(await read_all(session, 1), content)
    assert (await api.stats()).pools[0].num_copies_on_write == 1


async def test_a_released_prefix_is_hit(api: Api) -> None:
    session = await api.open(engine=False)
    content = kv_of(range(9))
    await session.compute(1, 9, content)
    await session.call("ReleaseSequence", sequence_id=1)
    assert (await session.call("MatchPrefix", token_ids=range(9))).num_matched_tokens == 8
    assert (await session.call("MatchPrefix", token_ids=range(9), tenant="other")).num_matched_tokens == 0
    assert await session.create(2, 9) == 8
    shown = (await session.call("ExtendSequence", sequence_id=2, num_tokens=9)).sequence
    assert (shown.num_hit_tokens, shown.num_committed_tokens) == (8, 8)
    np.testing.assert_array_equal(await read_all(session, 2), content[:, :, :8])
    await session.create(3, 9)
    shown = (await session.call("ExtendSequence", sequence_id=3, num_tokens=9, skip_look_up=True)).sequence
    assert shown.num_hit_tokens == 0


async def test_clearing_and_evicting(api: Api) -> None:
    session = await api.open(engine=False)
    for number in (1, 2):
        await session.compute(number, 9, first=100 * number)
        await session.call("ReleaseSequence", sequence_id=number)
    stats = (await api.stats()).pools[0]
    assert (stats.num_cached_blocks, stats.num_indexed_blocks) == (4, 4)
    answer = await session.call("EvictBlocks", num_free_blocks=stats.num_free_blocks + 1)
    assert (answer.num_evicted_blocks, answer.num_free_blocks) == (1, stats.num_free_blocks + 1)
    assert (await session.call("EvictBlocks", num_free_blocks=stats.num_free_blocks + 1)).num_evicted_blocks == 0
    answer = await session.call("ClearPrefixCache")
    assert (answer.num_freed_blocks, answer.num_forgotten_blocks) == (3, 3)
    assert (await refusal(session.call("EvictBlocks", num_free_blocks=-1))).metadata["field"] == "num_free_blocks"


async def test_admission(api: Api) -> None:
    session = await api.open()
    num_blocks = session.opened.pool.num_blocks - 1
    now = await session.call("CheckAdmission", num_prompt_tokens=5)
    assert (now.verdict, now.num_required_blocks) == (pb.ADMISSION_VERDICT_NOW, 2)
    never = await session.call("CheckAdmission", num_prompt_tokens=5, num_new_tokens=10_000)
    assert (never.verdict, never.limit_tokens) == (pb.ADMISSION_VERDICT_NEVER, num_blocks * BLOCK_SIZE)
    await session.create(1, num_blocks * BLOCK_SIZE - 4)
    await api.raw_step(session.start_bytes(1, 1))
    later = await session.call("CheckAdmission", token_ids=range(8))
    assert later.verdict == pb.ADMISSION_VERDICT_LATER
    assert (await refusal(session.call("CheckAdmission"))).metadata["field"] == "num_prompt_tokens"


async def test_creating_is_idempotent_by_arguments(api: Api) -> None:
    session = await api.open()
    await session.create(1, 6)
    await session.create(1, 6)
    await refused(session.create(1, 7), "DUPLICATE_SEQUENCE", sequence_id="1")


async def test_packed_and_plain_prompts_are_the_same(api: Api) -> None:
    session = await api.open()
    await session.create(1, 3, first=5)
    await session.call("CreateSequence", sequence_id=1, packed_token_ids=le32(5, 6, 7))


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"sequence_id": 1}, "INVALID_FIELD", "token_ids"),
        ({"sequence_id": 1, "token_ids": [1], "packed_token_ids": le32(1)}, "INVALID_FIELD", "token_ids"),
        ({"sequence_id": 1, "token_ids": [2**31]}, "INVALID_FIELD", "token_ids"),
        ({"sequence_id": 1, "packed_token_ids": le32(-1)}, "INVALID_FIELD", "packed_token_ids"),
        ({"sequence_id": 1, "packed_token_ids": b"12345"}, "INVALID_FIELD", "packed_token_ids"),
        ({"sequence_id": 1, "token_ids": [1, 2], "max_tokens": 1}, "INVALID_FIELD", "max_tokens"),
        ({"sequence_id": 1, "token_ids": [1] * 4097}, "NEVER_FITS", None),
        ({"sequence_id": 1, "token_ids": [1], "max_tokens": 5000}, "NEVER_FITS", None),
        ({"sequence_id": 1, "token_ids": [1], "retention": pb.Retention()}, "INVALID_FIELD", "retention.num_window_tokens"),
    ],
)
async def test_prompts_that_are_refused(api: Api, fields: dict[str, object], reason: str, field: str | None) -> None:
    session = await api.open()
    error = await refusal(session.call("CreateSequence", **fields))
    assert (error.reason, error.metadata.get("field")) == (reason, field)
    assert (await api.stats()).pools[0].num_waiting_sequences == 0


async def test_sequences_and_blocks_run_out() -> None:
    async with serving(max_sequences=1, num_blocks=4) as api:
        session = await api.open(engine=False)
        await session.create(1, 8)
        await refused(session.create(2, 4), "OUT_OF_SEQUENCES", limit="1")
        await session.call("ExtendSequence", sequence_id=1, num_tokens=8)
        error = await refusal(session.call("ForkSequence", parent_id=1, child_id=2, num_tokens=8))
        assert error.reason == "INVALID_FIELD"  # nothing is committed yet
        other = await api.open(engine=False)
        await refused(session.create(5, 100), "NEVER_FITS", limit="12")
        await other.call("CloseSession")


async def test_an_extension_is_all_or_nothing() -> None:
    async with serving(num_blocks=4) as api:
        session = await api.open(engine=False)
        for number in (1, 2):
            await session.create(number, 8)
        await session.call("ExtendSequence", sequence_id=1, num_tokens=8)
        error = await refusal(session.call("ExtendSequence", sequence_id=2, num_tokens=8))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_BLOCKS")
        assert (error.metadata["requested"], error.metadata["available"]) == ("2", "1")
        shown = (await session.call("GetSequence", sequence_id=2)).sequence
        assert (shown.state, shown.num_reserved_tokens) == (pb.SEQUENCE_STATE_WAITING, 0)


async def test_a_waiting_sequence_cannot_be_committed(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    error = await refusal(session.call("CommitSequence", sequence_id=1, num_tokens=6, first_token_idx=6))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert (error.metadata["sequence_id"], error.metadata["state"]) == ("1", "WAITING")


async def test_an_engine_that_copies_itself_cannot_use_one_item_calls(api: Api) -> None:
    session = await api.open(engine=True)
    await session.create(1, 6)
    await refused(session.call("ExtendSequence", sequence_id=1, num_tokens=6), "WRONG_MODE", mode="steps")


async def test_lists_page_over_sessions(api: Api) -> None:
    first, second = await api.open(), await api.open()
    for session, count in ((first, 7), (second, 4)):
        for number in range(1, count + 1):
            await session.create(number, 2)
    rows: list[tuple[str, int]] = []
    token = ""
    for expected in (4, 4, 3):
        page = await api.stub.ListSequences(pb.ListSequencesRequest(page_size=4, page_token=token), timeout=DEADLINE)
        assert len(page.sequences) == expected
        rows += [(row.session_id, row.sequence_id) for row in page.sequences]
        token = page.next_page_token
    assert token == ""
    assert rows == sorted(
        [(first.opened.session_id, number) for number in range(1, 8)]
        + [(second.opened.session_id, number) for number in range(1, 5)]
    )
    request = pb.ListSequencesRequest(session_id=second.opened.session_id)
    page = await api.stub.ListSequences(request, timeout=DEADLINE)
    assert ([row.sequence_id for row in page.sequences], page.next_page_token) == ([1, 2, 3, 4], "")
    await refused(api.stub.ListSequences(pb.ListSequencesRequest(session_id="unknown"), timeout=DEADLINE), "UNKNOWN_SESSION")


@pytest.mark.parametrize(
    ("method", "limit"),
    [("GetSequence", 256 << 10), ("CommitSequence", 256 << 10), ("CreateSequence", 4 << 20), ("CreateSequences", 4 << 20)],
)
async def test_messages_have_limits(api: Api, method: str, limit: int) -> None:
    call = api.channel.unary_unary(f"/kvkeeper.cache.v1.CacheService/{method}")
    await refused(call(b"\x0a" + bytes(limit), timeout=DEADLINE), "INVALID_FIELD", field="request", limit=str(limit))
    await refused(call(b"\xff\xff", timeout=DEADLINE), "INVALID_FIELD", field="request")
