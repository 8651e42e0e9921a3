"""Calls: explicit deadlines, UNAVAILABLE repeated with the same bytes and nothing else, one error type."""

import asyncio
import math

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1 import cache_service_pb2_grpc as pb_grpc
from kvkeeper.client import AsyncCacheClient, CacheClient, CallOptions, KvkeeperError
from kvkeeper.client.backends import ASYNCIO, BLOCKING, Backend, run
from kvkeeper.client.engine.calls import stream_options
from kvkeeper.client.retry import Patience
from kvkeeper.client.transport import AsyncTransport, Stream
from tests.support.stand_ins.fake_cache import FakeCache, Fault, Refusal
from tests.support.worlds.cache_api import failure

QUICK = CallOptions(timeout_s=5, retry_s=5, first_pause_s=0.001, longest_pause_s=0.002)
DRAINING = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_ms=1)
OPENED = pb.OpenSessionResponse(session_id="s1", epoch=3)


@pytest.fixture(params=["async", "sync"])
def call_stats(request: pytest.FixtureRequest, fake: FakeCache):  # type: ignore[no-untyped-def]
    """GetStats through either client, with the given options."""

    async def call(options: CallOptions) -> pb.GetStatsResponse:
        if request.param == "async":
            async with AsyncCacheClient(fake.target, options) as client:
                return await client.stats()
        with CacheClient(fake.target, options) as client:
            return await asyncio.to_thread(client.stats)

    return call


async def test_unavailable_is_repeated_with_the_same_bytes(fake: FakeCache, call_stats) -> None:  # type: ignore[no-untyped-def]
    fake.script["GetStats"] = [DRAINING, Refusal(grpc.StatusCode.UNAVAILABLE), pb.GetStatsResponse(epoch=9)]
    assert (await call_stats(QUICK)).epoch == 9
    assert len(fake.requests["GetStats"]) == 3
    assert len(set(fake.requests["GetStats"])) == 1


async def test_a_refusal_is_not_repeated_and_keeps_what_it_said(fake: FakeCache, call_stats) -> None:  # type: ignore[no-untyped-def]
    fake.script["GetStats"] = [
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_BLOCKS", "not enough", {"requested": "9", "available": "2"})
    ]
    caught = await failure(call_stats(QUICK))
    error = caught
    assert (error.code, error.reason, error.message) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OUT_OF_BLOCKS",
        "not enough",
    )
    assert error.metadata == {"requested": "9", "available": "2"}
    assert (error.retry_after, error.service_down, error.unavailable) == (None, False, False)
    assert str(error) == "RESOURCE_EXHAUSTED OUT_OF_BLOCKS: not enough"
    assert len(fake.requests["GetStats"]) == 1


async def test_a_busy_service_that_stays_busy_says_when_to_come_back(fake: FakeCache, call_stats) -> None:  # type: ignore[no-untyped-def]
    fake.script["GetStats"] = [Refusal(grpc.StatusCode.UNAVAILABLE, "POOL_NOT_READY", retry_ms=250)]
    caught = await failure(call_stats(CallOptions(timeout_s=5, retry_s=0.2)))
    assert (caught.reason, caught.retry_after) == ("POOL_NOT_READY", 0.25)
    assert not caught.service_down


async def test_a_call_that_met_a_server_as_it_stopped_is_repeated(fake: FakeCache, call_stats) -> None:  # type: ignore[no-untyped-def]
    fake.script["GetStats"] = [Refusal(grpc.StatusCode.CANCELLED), pb.GetStatsResponse(epoch=9)]
    assert (await call_stats(QUICK)).epoch == 9


@pytest.mark.parametrize("ends", ["stream", "transport"])
async def test_what_is_cancelled_here_is_cancelled(fake: FakeCache, ends: str) -> None:
    fake.script["ReadKv"] = [pb.ReadKvResponse(), Fault.SILENCE]
    transport = AsyncTransport(fake.target, QUICK, pb_grpc.CacheServiceStub, backend=BLOCKING)
    stream = Stream(transport.stream(transport.stub.ReadKv, pb.ReadKvRequest()))
    await asyncio.to_thread(next, stream)
    reading = asyncio.create_task(asyncio.to_thread(next, stream))
    await asyncio.wait_for(fake.waits.wait(), 5)
    stream.cancel() if ends == "stream" else run(transport.close())
    caught = await failure(reading)
    assert caught.code is grpc.StatusCode.CANCELLED
    run(transport.close())


async def test_an_address_without_a_listener_is_a_service_that_is_down(fake: FakeCache, unused_tcp_port: int) -> None:
    options = CallOptions(timeout_s=2, retry_s=0)
    async with AsyncCacheClient(f"127.0.0.1:{unused_tcp_port}", options) as client:
        caught = await failure(client.stats())
    assert caught.service_down


async def test_every_call_has_a_deadline(fake: FakeCache, call_stats) -> None:  # type: ignore[no-untyped-def]
    fake.script["GetStats"] = [Fault.SILENCE]
    caught = await failure(call_stats(CallOptions(timeout_s=0.1)))
    assert caught.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_an_abandoned_call_is_cancelled_at_the_service(fake: FakeCache) -> None:
    fake.script["GetStats"] = [Fault.SILENCE]
    async with AsyncCacheClient(fake.target) as client:
        call = asyncio.create_task(client.stats())
        await asyncio.wait_for(fake.waits.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(fake.cancelled.wait(), 5)  # while the channel is still open


async def test_an_abandoned_server_stream_is_cancelled_at_the_service(fake: FakeCache) -> None:
    fake.script["OpenSession"] = [OPENED]
    fake.script["ReadKv"] = [pb.ReadKvResponse(), Fault.SILENCE]
    async with AsyncCacheClient(fake.target) as client:
        session = await client.open_session(pb.KvSpec())
        call = asyncio.create_task(session.read_kv(1))
        await asyncio.wait_for(fake.waits.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(fake.cancelled.wait(), 5)


@pytest.mark.parametrize("backend", [ASYNCIO, BLOCKING], ids=["async", "sync"])
async def test_a_server_stream_is_repeated_until_its_first_message_and_not_after(fake: FakeCache, backend: Backend) -> None:
    fake.script["ReadKv"] = [DRAINING, DRAINING, pb.ReadKvResponse(num_tokens=1), pb.ReadKvResponse(num_tokens=2), DRAINING]

    async def received() -> list[int]:
        transport = AsyncTransport(fake.target, QUICK, pb_grpc.CacheServiceStub, backend=backend)
        stream = transport.stream(transport.stub.ReadKv, pb.ReadKvRequest())
        numbers = [(await anext(stream)).num_tokens, (await anext(stream)).num_tokens]
        with pytest.raises(KvkeeperError, match="DRAINING"):
            await anext(stream)
        await transport.close()
        return numbers

    assert await (received() if backend.has_loop else asyncio.to_thread(run, received())) == [1, 2]
    assert len(set(fake.requests["ReadKv"])) == 1


async def test_a_list_is_read_to_its_last_page(fake: FakeCache) -> None:
    pages = ((1, 2), (3,))
    fake.script["ListSequences"] = [
        pb.ListSequencesResponse(sequences=[pb.SequenceInfo(sequence_id=each) for each in page], next_page_token=token)
        for page, token in zip(pages, ("more", ""), strict=True)
    ]
    async with AsyncCacheClient(fake.target) as client:
        assert [row.sequence_id for row in await client.list_sequences("s1")] == [1, 2, 3]
    asked = [pb.ListSequencesRequest.FromString(raw) for raw in fake.requests["ListSequences"]]
    assert [(one.session_id, one.page_token) for one in asked] == [("s1", ""), ("s1", "more")]
    assert all(one.page_size > 0 for one in asked)


async def test_a_blocking_call_that_waits_for_a_loop_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="waited for an event loop"):
        run(asyncio.sleep(60))


def test_patience_grows_its_pauses_up_to_the_deadline() -> None:
    unavailable = KvkeeperError(grpc.StatusCode.UNAVAILABLE)
    patience = Patience(CallOptions(timeout_s=1.0, retry_s=9.0, first_pause_s=0.1, longest_pause_s=0.3), now=100.0)
    assert [patience.pause_after(unavailable, 100.0) for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]
    assert patience.pause_after(unavailable, 100.9) is None
    asked = KvkeeperError(grpc.StatusCode.UNAVAILABLE, retry_after=0.05)
    assert patience.pause_after(asked, 100.9) == 0.05
    assert patience.pause_after(KvkeeperError(grpc.StatusCode.ABORTED), 100.0) is None
    moved = KvkeeperError(grpc.StatusCode.UNAVAILABLE, "REQUEST_MOVED", metadata={"address": "unix:/other"})
    assert patience.pause_after(moved, 100.0) is None, "another engine has it, so the same one is not asked again"
    assert patience.left(100.4) == pytest.approx(0.6)
    assert patience.left(200.0) == 0.001
    endless = Patience(CallOptions(timeout_s=math.inf, retry_s=1.0, first_pause_s=0.1), now=100.0)
    assert endless.left(1e9) is None, "no deadline"
    assert [endless.pause_after(unavailable, now) for now in (100.0, 101.0)] == [0.1, None], "repeats have an end of their own"


def test_a_stream_has_the_deadline_of_its_request_or_none() -> None:
    base = CallOptions(timeout_s=10.0, retry_s=0.0)
    assert stream_options(base, None) == CallOptions(timeout_s=math.inf, retry_s=0.0)
    assert stream_options(base, 1500) == CallOptions(timeout_s=6.5, retry_s=0.0)
