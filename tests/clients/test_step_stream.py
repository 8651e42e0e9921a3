"""Steps over a stream: one id per answered step, the same bytes after a break, no silent loss."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, AsyncCacheSession, CacheClient, CallOptions, StepItems
from tests.support.stand_ins.fake_cache import FakeCache, Fault, Refusal
from tests.support.worlds.cache_api import failure

OPENED = pb.OpenSessionResponse(session_id="s1", epoch=3)
ITEMS = StepItems(release_ids=np.array([5], np.int64))
BROKEN = Refusal(grpc.StatusCode.UNAVAILABLE)
QUICK = CallOptions(timeout_s=5, retry_s=5, first_pause_s=0.001, longest_pause_s=0.002)


@pytest.fixture
async def session(fake: FakeCache) -> AsyncIterator[AsyncCacheSession]:
    fake.script["OpenSession"] = [OPENED]
    async with AsyncCacheClient(fake.target, QUICK) as client:
        yield await client.open_session(pb.KvSpec())


def sent(fake: FakeCache) -> list[tuple[int, int]]:
    requests = map(pb.StepRequest.FromString, fake.requests["StreamSteps"])
    return [(request.step_id, request.completed_step_id) for request in requests]


async def test_steps_are_counted_on_one_stream(fake: FakeCache, session: AsyncCacheSession) -> None:
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=step_id) for step_id in (1, 2, 3)]
    assert (await session.step(ITEMS)).step_id == 1
    assert (await session.step(ITEMS)).step_id == 2
    assert (await session.step(ITEMS, completed_step_id=1)).step_id == 3
    assert sent(fake) == [(1, 0), (2, 1), (3, 1)]
    assert fake.num_streams == 1


@pytest.mark.parametrize("fault", [BROKEN, Fault.HANG_UP], ids=["broken", "ended"])
async def test_a_broken_stream_repeats_the_same_bytes(
    fake: FakeCache, session: AsyncCacheSession, fault: Refusal | Fault
) -> None:
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=1), fault, fault, pb.StepResponse(step_id=2)]
    await session.step(ITEMS)
    assert (await session.step(ITEMS)).step_id == 2
    assert fake.num_streams == 3
    assert len(set(fake.requests["StreamSteps"][1:])) == 1
    assert sent(fake) == [(1, 0), (2, 1), (2, 1), (2, 1)]


async def test_a_stream_that_ended_between_steps_is_opened_again(fake: FakeCache, session: AsyncCacheSession) -> None:
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=1), Fault.LEAVE, pb.StepResponse(step_id=2)]
    await session.step(ITEMS)
    assert await session._steps._stream._call.code() is grpc.StatusCode.OK  # type: ignore[union-attr]
    assert (await session.step(ITEMS)).step_id == 2
    assert fake.num_streams == 2


async def test_a_refused_step_uses_no_id_and_the_next_opens_a_stream(fake: FakeCache, session: AsyncCacheSession) -> None:
    gap = Refusal(grpc.StatusCode.ABORTED, "STEP_GAP", metadata={"expected_step_id": "1"})
    fake.script["StreamSteps"] = [gap, pb.StepResponse(step_id=1)]
    caught = await failure(session.step(ITEMS))
    assert (caught.reason, caught.metadata) == ("STEP_GAP", {"expected_step_id": "1"})
    assert (await session.step(ITEMS)).step_id == 1
    assert fake.num_streams == 2


async def test_a_step_without_an_answer_meets_its_deadline(fake: FakeCache) -> None:
    fake.script["OpenSession"] = [OPENED]
    fake.script["StreamSteps"] = [Fault.SILENCE]
    async with AsyncCacheClient(fake.target, CallOptions(timeout_s=0.1)) as client:
        session = await client.open_session(pb.KvSpec())
        caught = await failure(session.step(ITEMS))
        assert caught.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_an_abandoned_step_is_cancelled_at_the_service(fake: FakeCache, session: AsyncCacheSession) -> None:
    fake.script["StreamSteps"] = [Fault.SILENCE]
    step = asyncio.create_task(session.step(ITEMS))
    await asyncio.wait_for(fake.waits.wait(), 5)
    with pytest.raises(RuntimeError, match="one unanswered step"):
        await session.step(ITEMS)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_closing_the_session_ends_the_stream(fake: FakeCache, session: AsyncCacheSession) -> None:
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=1)]
    fake.script["CloseSession"] = [pb.CloseSessionResponse(num_released_sequences=2)]
    await session.step(ITEMS)
    call = session._steps._stream._call  # type: ignore[union-attr]
    assert (await session.close()).num_released_sequences == 2
    assert call.cancelled()
    assert pb.CloseSessionRequest.FromString(fake.requests["CloseSession"][0]).drained


async def test_steps_of_the_synchronous_client_repeat_the_same_bytes(fake: FakeCache) -> None:
    fake.script["OpenSession"] = [OPENED]
    fake.script["Step"] = [BROKEN, pb.StepResponse(step_id=1), pb.StepResponse(step_id=2)]

    def steps() -> list[int]:
        with CacheClient(fake.target, QUICK) as client:
            session = client.open_session(pb.KvSpec())
            return [session.step(ITEMS).step_id, session.step(ITEMS).step_id]

    assert await asyncio.to_thread(steps) == [1, 2]
    first, repeated, second = fake.requests["Step"]
    assert first == repeated
    assert pb.StepRequest.FromString(second).step_id == 2
