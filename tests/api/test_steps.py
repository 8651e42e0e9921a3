"""Steps take effect exactly once, in order, or not at all; over the unary call, over StreamSteps and over a step lane."""

import asyncio
import sys
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import DEADLINE, Api, ManualClock, int32s, le32, le64, refusal, refused, serving
from tests.support.worlds.step_carriers import EOF, StepCarriers


async def test_a_step_over_a_stream_answers_what_the_unary_one_does(api: Api, carriers: StepCarriers) -> None:
    unary, streamed = await api.open(), await api.open()
    for session in (unary, streamed):
        await session.create(1, 6)
    answers = [
        pb.StepResponse.FromString(raw)
        for raw in (
            await api.raw_step(unary.start_bytes(1, 1)),
            (await carriers.stepping(streamed, streamed.start_bytes(1, 1)))[1],
        )
    ]
    for answer, session in zip(answers, (unary, streamed), strict=True):
        assert (answer.step_id, answer.epoch) == (1, session.opened.epoch)
        assert int32s(answer.start_results) == [pb.START_RESULT_STARTED]
        assert int32s(answer.start_num_reserved_tokens) == [6]
        assert int32s(answer.start_num_blocks) == [2]
    assert set(int32s(answers[0].start_block_ids)).isdisjoint(int32s(answers[1].start_block_ids))


async def test_a_repeat_gets_the_same_bytes(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    await session.create(1, 6)
    raw = session.start_bytes(1, 1)
    first = await api.raw_step(raw)
    other = await api.open()  # the pool changes in between
    await other.create(1, 8)
    await api.raw_step(other.start_bytes(1, 1))
    assert await api.raw_step(raw) == first
    stream, again = await carriers.stepping(session, raw)
    assert again == first
    await stream.write(raw)
    assert await stream.read() == first
    stats = await api.stats()
    assert (stats.pools[0].num_starts, stats.pools[0].num_steps) == (2, 2)


async def test_a_repeat_after_the_next_step_is_a_gap(api: Api) -> None:
    session = await api.open()
    first = session.step_bytes(1)
    await api.raw_step(first)
    await session.step(2)
    await refused(api.raw_step(first), "STEP_GAP", expected_step_id="3")


@pytest.mark.parametrize("step_id", [0, -1, 3, 2**53])
async def test_a_gap_tells_the_expected_id(api: Api, step_id: int) -> None:
    session = await api.open()
    await refused(session.step(0), "STEP_GAP", expected_step_id="1")
    await session.step(1)
    await refused(session.step(step_id), "STEP_GAP", expected_step_id="2")


async def test_the_same_id_with_other_contents_is_a_conflict(api: Api) -> None:
    session = await api.open()
    await session.create(1, 6)
    await session.step(1)
    await refused(api.raw_step(session.start_bytes(1, 1)), "STEP_CONFLICT", expected_step_id="2")


async def test_a_failed_step_uses_no_id_and_changes_nothing(api: Api) -> None:
    session = await api.open()
    await session.create(1, 6)
    before = (await api.stats()).pools[0]
    failed = session.step_bytes(
        1,
        release_sequence_ids=le64(1),
        start_sequence_ids=le64(99),
        start_max_new_tokens=le32(1),
        start_max_hit_tokens=le32(0),
    )
    await refused(api.raw_step(failed), "UNKNOWN_SEQUENCE", sequence_id="99")
    assert (await api.stats()).pools[0] == before
    await api.raw_step(session.start_bytes(1, 1))


async def test_a_failed_step_ends_its_stream_but_no_lane_and_no_session(
    api: Api, carriers: StepCarriers, clock: ManualClock
) -> None:
    session = await api.open()
    stream, _ = await carriers.stepping(session, session.step_bytes(1))
    await stream.write(session.step_bytes(7))
    await refused(stream.read(), "STEP_GAP", expected_step_id="2")
    clock.advance(5)  # no grace is running: its client is there
    if carriers.kind == "grpc":
        stream = await carriers.open(session)
    await stream.write(session.step_bytes(2))
    assert pb.StepResponse.FromString(await stream.read()).step_id == 2


@pytest.mark.parametrize("kind", ["grpc", "lane"])
async def test_stopping_ends_a_stream_with_draining(kind: str) -> None:
    async with serving() as api:
        session, carriers = await api.open(), StepCarriers(api, kind)
        stream, _ = await carriers.stepping(session, session.step_bytes(1))
        await api.server.stop()
        error = await refusal(stream.read())
        assert (error.reason, error.retry_after is not None) == ("DRAINING", True)
        carriers.close()


@pytest.mark.parametrize("kinds", [("grpc", "grpc"), ("grpc", "lane"), ("lane", "grpc")], ids="-then-".join)
async def test_a_second_stream_takes_over(api: Api, kinds: tuple[str, str]) -> None:
    session = await api.open()
    raw = session.step_bytes(1)
    by_kind = {kind: StepCarriers(api, kind) for kind in kinds}
    first, answer = await by_kind[kinds[0]].stepping(session, raw)
    second, again = await by_kind[kinds[1]].stepping(session, raw)
    assert again == answer
    await refused(asyncio.wait_for(first.read(), DEADLINE), "STREAM_REPLACED")
    await second.write(session.step_bytes(2))
    assert pb.StepResponse.FromString(await second.read()).step_id == 2
    for opened in by_kind.values():
        opened.close()


async def test_a_lost_stream_may_come_back_over_grpc_within_its_grace(
    api: Api, carriers: StepCarriers, clock: ManualClock
) -> None:
    session = await api.open()
    raw = session.step_bytes(1)
    stream, answer = await carriers.stepping(session, raw)
    stream.cancel()
    await api.until(lambda _: _has_grace(api))
    clock.advance(0.4)
    again, repeated = await StepCarriers(api, "grpc").stepping(session, raw)
    assert repeated == answer
    clock.advance(5)
    assert len((await api.stats()).sessions) == 1
    again.cancel()
    await api.until(lambda _: _has_grace(api))
    clock.advance(0.6)
    stats = await api.stats()
    assert (len(stats.sessions), stats.num_reaped_sessions) == (0, 1)


STREAMING_CLIENT = """
import queue, sys, grpc
requests = queue.SimpleQueue()
requests.put(bytes.fromhex(sys.argv[2]))
call = grpc.insecure_channel(sys.argv[1]).stream_stream("/kvkeeper.cache.v1.CacheService/StreamSteps")(iter(requests.get, None))
next(call)
print("stepped", flush=True)
next(call)
"""


async def test_a_killed_client_has_a_grace_too(api: Api, clock: ManualClock) -> None:
    session = await api.open()
    arguments = ("-c", STREAMING_CLIENT, api.server.address, session.step_bytes(1).hex())
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert client.stdout is not None
    assert await asyncio.wait_for(client.stdout.readline(), DEADLINE) == b"stepped\n"
    assert not _has_grace(api)
    client.kill()
    await client.communicate()
    await api.until(lambda _: _has_grace(api))
    clock.advance(0.6)
    assert (await api.stats()).num_reaped_sessions == 1


async def test_a_stream_that_its_client_ends_starts_the_grace(api: Api, carriers: StepCarriers, clock: ManualClock) -> None:
    session = await api.open()
    stream, _ = await carriers.stepping(session, session.step_bytes(1))
    await stream.done_writing()
    assert await stream.read() is EOF
    clock.advance(0.4)
    await session.call("RenewSession")  # any message ends it
    clock.advance(5)
    assert len((await api.stats()).sessions) == 1


async def test_an_open_stream_alone_does_not_renew(api: Api, carriers: StepCarriers, clock: ManualClock) -> None:
    session = await api.open()
    stream, _ = await carriers.stepping(session, session.step_bytes(1))
    clock.advance(9)
    await stream.write(session.step_bytes(2))
    await stream.read()
    clock.advance(9)
    assert len((await api.stats()).sessions) == 1
    clock.advance(2)
    await refused(stream.read(), "UNKNOWN_SESSION")
    assert len((await api.stats()).sessions) == 0


async def test_a_stream_carries_one_session(api: Api, carriers: StepCarriers) -> None:
    first, second = await api.open(), await api.open()
    stream, _ = await carriers.stepping(first, first.step_bytes(1))
    await stream.write(second.step_bytes(1))
    await refused(stream.read(), "INVALID_FIELD", field="session_id")
    assert (await second.call("RenewSession")).expected_step_id == 1


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", bytes(100), b"\x08" * 1001])
async def test_malformed_bytes_are_refused(api: Api, carriers: StepCarriers, raw: bytes) -> None:
    stream = await carriers.open(await api.open())
    for call in (api.raw_step(raw), _answer(stream, raw)):
        await refused(call, "INVALID_FIELD", field="request")


async def test_a_step_message_has_a_limit(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    stream, raw = await carriers.open(session), session.step_bytes(1, commit_token_ids=bytes(256 << 10))
    for call in (api.raw_step(raw), _answer(stream, raw)):
        await refused(call, "INVALID_FIELD", limit=str(256 << 10))


@pytest.mark.parametrize("kind", ["grpc", "lane"])
async def test_the_limit_lets_a_step_name_all_sequences_of_the_pool(kind: str) -> None:
    """More than 256 KiB: most of 8192 sequences that commit a token and reserve the next slot are in no pool of this test."""
    async with serving(max_sequences=8192) as api:
        carriers = StepCarriers(api, kind)
        limit = (await api.stub.GetCapabilities(pb.GetCapabilitiesRequest())).max_message_bytes
        assert limit == 128 * 8192
        session, ids = await api.open(), le64(*range(1, 8193))
        stream = await carriers.open(session)
        columns = {"commit_num_tokens": 1, "commit_num_new_tokens": 1, "commit_token_ids": 7}
        columns |= {"reserve_min_tokens": 2, "reserve_max_tokens": 2}
        whole = {name: le32(*[value] * 8192) for name, value in columns.items()}
        raw = session.step_bytes(1, commit_sequence_ids=ids, reserve_sequence_ids=ids, **whole)
        assert 256 << 10 < len(raw) <= limit
        error = await refusal(_answer(stream, raw))
        assert (error.reason, error.metadata["sequence_id"]) == ("UNKNOWN_SEQUENCE", "1")  # so it was taken and read
        carriers.close()


async def test_without_a_host_tier_no_swap_out_fits(api: Api) -> None:
    session = await api.open()
    await session.create(1, 6)
    await api.raw_step(session.start_bytes(1, 1))
    answer = await session.step(2, swap_out_sequence_ids=le64(1), swap_in_sequence_ids=le64(1))
    assert (int32s(answer.swap_out_results), int32s(answer.swap_in_results)) == ([2], [1])


async def test_completions_lag_by_two_steps_at_most(api: Api) -> None:
    session = await api.open()
    await session.step(1)
    await api.raw_step(session.step_bytes(2, completed=0))
    await refused(api.raw_step(session.step_bytes(3, completed=0)), "INVALID_FIELD", field="completed_step_id")
    error = await refusal(api.raw_step(session.step_bytes(3, completed=3)))
    assert error.metadata["field"] == "completed_step_id"
    await api.raw_step(session.step_bytes(3, completed=1))


async def test_a_cache_executed_session_does_not_overlap_steps(api: Api) -> None:
    session = await api.open(engine=False)
    await session.step(1)
    error = await refusal(api.raw_step(session.step_bytes(2, completed=0)))
    assert error.metadata["field"] == "completed_step_id"


async def test_steps_and_one_item_calls_do_not_mix(api: Api) -> None:
    stepping, single = await api.open(engine=False), await api.open(engine=False)
    for session in (stepping, single):
        await session.create(1, 6)
    await api.raw_step(stepping.start_bytes(1, 1))
    await refused(stepping.call("ExtendSequence", sequence_id=1, num_tokens=8), "WRONG_MODE", mode="steps")
    await single.call("ExtendSequence", sequence_id=1, num_tokens=8)
    await refused(single.step(1), "WRONG_MODE", mode="one-item")


async def test_a_failed_call_fixes_no_mode(api: Api) -> None:
    session = await api.open(engine=False)
    await refusal(session.step(1, release_sequence_ids=le64(9)))
    await refusal(session.call("ReleaseSequence", sequence_id=9))
    await session.step(1)
    assert (await refusal(session.call("ReleaseSequence", sequence_id=9))).reason == "WRONG_MODE"


def _has_grace(api: Api) -> bool:
    return any(live.core.grace_deadline is not None for live in api.server.session_manager.sessions)


async def _answer(stream: Any, raw: bytes) -> bytes:
    await stream.write(raw)
    return await stream.read()


@pytest.mark.parametrize(
    "columns",
    [
        {"start_sequence_ids": 257},
        {"release_sequence_ids": 257},
        {"fork_parent_ids": 257},
        {"swap_out_sequence_ids": 257},
        {"swap_in_sequence_ids": 257},
        {"truncate_sequence_ids": 257},
        {"release_sequence_ids": 100, "start_sequence_ids": 157},
    ],
)
async def test_a_step_has_so_many_items_that_are_walked(columns: dict[str, int]) -> None:
    """Far more sequences than that may live: then a step of all of them would hold up all other sessions."""
    async with serving(max_sequences=8192) as api:
        capabilities = await api.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=DEADLINE)
        session = await api.open()
        limit = capabilities.max_step_items
        assert limit == session.opened.pool.max_step_items == 256
        named = {field: le64(*range(1, count + 1)) for field, count in columns.items()}
        error = await refusal(api.raw_step(session.step_bytes(1, **named)))
        longest = max(columns, key=columns.__getitem__)
        assert (error.reason, error.metadata) == ("INVALID_FIELD", {"field": longest, "limit": "256"})
        assert (await session.call("RenewSession")).expected_step_id == 1
        await api.audit()
