"""Steps over a lane from the Python client: by default on one host; over gRPC, in the same session, what it cannot carry."""

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.rpc import step_lane as service_lane
from kvkeeper.cache_service.rpc.step_lane import StepLane as ServiceLane
from kvkeeper.cache_service.server import RunningServer
from kvkeeper.client import (
    AsyncCacheClient,
    AsyncCacheSession,
    CacheClient,
    CacheSession,
    CallOptions,
    KvkeeperError,
    StepItems,
)
from kvkeeper.client.backends import run
from kvkeeper.client.new_sequence import NewSequence
from kvkeeper.client.step_lane import BlockingStepLane, LaneBroken, StepLane
from kvkeeper.client.transport import AsyncTransport
from tests.support.stand_ins.fake_cache import FakeCache, Fault
from tests.support.worlds.cache_api import failure

ITEMS = StepItems()
QUICK = CallOptions(timeout_s=5, retry_s=5, first_pause_s=0.001, longest_pause_s=0.002)


@pytest.fixture
async def client(cache_server: RunningServer) -> AsyncIterator[AsyncCacheClient]:
    async with AsyncCacheClient(cache_server.address, QUICK) as made:
        yield made


@pytest.fixture
async def session(client: AsyncCacheClient, spec: pb.KvSpec) -> AsyncIterator[AsyncCacheSession]:
    """With a lane, and one step on it."""
    async with await client.open_session(spec, pb.EXECUTOR_ENGINE) as opened:
        assert await opened.attach_step_lane()
        await opened.step(ITEMS)
        yield opened


async def carrier(client: AsyncCacheClient) -> str:
    (row,) = (await client.stats()).sessions
    return pb.StepCarrier.Name(row.step_carrier)


async def num_steps(client: AsyncCacheClient) -> int:
    return (await client.stats()).pools[0].num_steps


@pytest.mark.parametrize("step_lane", [True, False])
async def test_attaching_brings_a_lane_unless_it_is_not_wanted(
    client: AsyncCacheClient, spec: pb.KvSpec, step_lane: bool
) -> None:
    async with await client.open_session(spec, pb.EXECUTOR_ENGINE) as session:
        arena = await session.attach(step_lane=step_lane)
        assert session.has_step_lane is step_lane
        assert [(await session.step(ITEMS)).step_id for _ in range(3)] == [1, 2, 3]
        assert await carrier(client) == ("STEP_CARRIER_LANE" if step_lane else "STEP_CARRIER_GRPC")
        assert session.has_step_lane is step_lane
        arena.close()


async def test_a_service_that_offers_no_lane_is_attached_to_without_one(fake: FakeCache) -> None:
    fake.script["OpenSession"] = [pb.OpenSessionResponse(session_id="s", epoch=1)]
    async with AsyncCacheClient(fake.target, QUICK) as client:
        session = await client.open_session(pb.KvSpec())
        assert not await session.attach_step_lane()


async def test_a_service_elsewhere_is_stepped_over_grpc(client: AsyncCacheClient, spec: pb.KvSpec) -> None:
    async with await client.open_session(spec, pb.EXECUTOR_ENGINE) as session:
        session._opened.attach_socket_path = "/nowhere/attach.sock"
        assert not await session.attach_step_lane()
        assert (await session.step(ITEMS)).step_id == 1


@pytest.mark.parametrize("is_applied", [True, False], ids=["applied", "not applied"])
async def test_a_lane_that_breaks_in_a_step_repeats_it_over_grpc(
    client: AsyncCacheClient, session: AsyncCacheSession, monkeypatch: pytest.MonkeyPatch, is_applied: bool
) -> None:
    def break_off(lane: ServiceLane, *_: object) -> None:
        lane._end(is_lost=True)

    monkeypatch.setattr(ServiceLane, "_send" if is_applied else "_take", break_off)
    answer = await session.step(ITEMS)
    assert answer.step_id == 2
    assert not session.has_step_lane
    assert (await num_steps(client), await carrier(client)) == (2, "STEP_CARRIER_GRPC")
    assert (await session.step(ITEMS)).step_id == 3


async def test_a_lane_that_ended_between_steps_is_left(
    client: AsyncCacheClient, cache_server: RunningServer, session: AsyncCacheSession
) -> None:
    (live,) = cache_server.session_manager.sessions
    live.lane._end(is_lost=True)  # type: ignore[union-attr]
    assert (await session.step(ITEMS)).step_id == 2
    await client.stats()  # the loop has seen the end
    live_session = (await client.stats()).sessions[0].session_id
    assert (live_session, await num_steps(client)) == (session.session_id, 2)


async def test_a_refusal_comes_whole_and_the_lane_goes_on(client: AsyncCacheClient, session: AsyncCacheSession) -> None:
    caught = await failure(session.step(StepItems(release_ids=np.array([9], np.int64))))
    assert (caught.code, caught.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SEQUENCE")
    assert caught.metadata == {"sequence_id": "9"}
    assert (await session.step(ITEMS)).step_id == 2
    assert (session.has_step_lane, await carrier(client)) == (True, "STEP_CARRIER_LANE")


async def test_another_stream_takes_over_between_steps(
    client: AsyncCacheClient, cache_server: RunningServer, session: AsyncCacheSession
) -> None:
    other = AsyncCacheSession(AsyncTransport(cache_server.address, QUICK, None), session._opened)
    other.step_id = 1
    await other.step(ITEMS)
    session.step_id = 2
    with pytest.raises(KvkeeperError, match="STREAM_REPLACED"):
        await session.step(ITEMS)
    assert (await session.step(ITEMS)).step_id == 3  # now over a stream of its own, as after any end
    other.disconnect()
    await other._transport.close()


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_lane, "_BUFFER_BYTES", 1)  # the kernel's least


async def test_a_large_request_goes_over_grpc_and_the_next_one_over_the_lane(
    small_frames: None, client: AsyncCacheClient, session: AsyncCacheSession
) -> None:
    ids = np.arange(1, 2001, dtype=np.int64)
    lens = np.ones(len(ids), np.int32)
    with pytest.raises(KvkeeperError, match="UNKNOWN_SEQUENCE"):
        await session.step(StepItems(reserve_ids=ids, reserve_min=lens, reserve_max=lens))
    assert (session.has_step_lane, await carrier(client)) == (True, "STEP_CARRIER_LANE")
    assert (await session.step(ITEMS)).step_id == 2


async def test_a_large_answer_comes_over_grpc_and_the_next_one_over_the_lane(
    small_frames: None, client: AsyncCacheClient, session: AsyncCacheSession
) -> None:
    num_tokens = session.pool.block_size * (session.pool.num_blocks - 20)
    await session.create_sequence(1, np.zeros(num_tokens, np.int32))
    most = np.array([num_tokens], np.int32)
    answer = await session.step(StepItems(start_ids=np.array([1], np.int64), start_max_new=most, start_max_hit=most))
    assert len(answer.start_block_ids) * 4 > 8000
    assert (answer.step_id, await num_steps(client)) == (2, 2)
    assert (session.has_step_lane, await carrier(client)) == (True, "STEP_CARRIER_LANE")
    assert (await session.step(ITEMS)).step_id == 3


# Creates


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls over gRPC."""
    names = list[str]()
    call = AsyncTransport.call_by_name

    async def counted(transport: AsyncTransport, method: str, *args: Any) -> Any:
        names.append(method)
        return await call(transport, method, *args)

    monkeypatch.setattr(AsyncTransport, "call_by_name", counted)
    return names


async def test_creates_go_over_the_lane(client: AsyncCacheClient, session: AsyncCacheSession, calls: list[str]) -> None:
    first = await session.create_sequence(1, [1, 2, 3], priority=2)
    second, refused = await session.create_sequences([NewSequence(2, [1, 2]), NewSequence(3, [1, 2], max_tokens=1)])
    assert isinstance(second, pb.CreateSequenceResponse) and second.start_number == first.start_number + 1
    assert isinstance(refused, KvkeeperError) and refused.reason == "INVALID_FIELD"
    with pytest.raises(KvkeeperError, match="DUPLICATE_SEQUENCE"):
        await session.create_sequence(1, [1, 2, 3], priority=3)
    assert not calls
    assert [(row.sequence_id, row.priority) for row in await session.list()] == [(1, 2), (2, 0)]


async def test_a_sequence_changes_its_session_over_lanes(
    client: AsyncCacheClient, session: AsyncCacheSession, spec: pb.KvSpec, calls: list[str]
) -> None:
    async with await client.open_session(spec, pb.EXECUTOR_ENGINE) as taker:
        assert await taker.attach_step_lane()
        await session.create_sequence(1, [1, 2, 3])
        most = np.array([3], np.int32)
        await session.step(StepItems(start_ids=np.array([1], np.int64), start_max_new=most, start_max_hit=most))
        await session.step(ITEMS)
        calls.clear()
        assert (await taker.take(await session.hand_off(1), 5)).sequence_id == 5
        with pytest.raises(KvkeeperError, match="UNKNOWN_SEQUENCE"):
            await session.withdraw(1)
        assert not calls


async def test_creates_beside_an_unanswered_step_get_their_own_answers(session: AsyncCacheSession, calls: list[str]) -> None:
    creating = [asyncio.create_task(session.create_sequence(place, [place, 2])) for place in (1, 2)]
    step, first, second = await asyncio.gather(session.step(ITEMS), *creating)
    assert (step.step_id, second.start_number - first.start_number) == (2, 1)
    assert not calls


async def test_a_crowd_of_creates_takes_turns_on_the_lane(session: AsyncCacheSession, calls: list[str]) -> None:
    created = await asyncio.gather(*(session.create_sequence(place, [place]) for place in range(1, 251)))
    numbers = [each.start_number for each in created]
    assert numbers == sorted(set(numbers))
    assert not calls


async def test_a_service_whose_lane_takes_no_creates_is_called(session: AsyncCacheSession, calls: list[str]) -> None:
    session._opened.ClearField("lane_calls")
    assert (await session.create_sequence(1, [1, 2])).start_number
    assert calls == ["CreateSequences"]


async def test_what_the_lane_cannot_carry_is_created_by_a_call(
    small_frames: None, client: AsyncCacheClient, session: AsyncCacheSession, calls: list[str]
) -> None:
    num_tokens = session.pool.block_size * (session.pool.num_blocks - 20)
    assert (await session.create_sequence(1, np.zeros(num_tokens, np.int32))).start_number
    assert calls == ["CreateSequences"]
    assert session.has_step_lane
    assert (await session.step(ITEMS)).step_id == 2


async def test_creates_in_a_full_lane_are_called(hold: Callable[..., Any], fake: FakeCache) -> None:
    held = await hold()
    held.session._opened.lane_calls.append("CreateSequences")
    lane = held.session._steps.lane
    with contextlib.suppress(BlockingIOError):
        while True:
            lane._socket.send(bytes(1000))  # and nothing is read
    result = pb.CreateSequenceResult(response=pb.CreateSequenceResponse(start_number=7))
    fake.script["CreateSequences"] = [pb.CreateSequencesResponse(results=[result])]
    assert (await held.session.create_sequence(1, [1, 2])).start_number == 7
    assert held.session.has_step_lane


async def test_a_lane_that_breaks_in_a_create_repeats_it_by_a_call(
    session: AsyncCacheSession, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(lane: ServiceLane, *_: object) -> None:
        lane._end(is_lost=True)

    monkeypatch.setattr(ServiceLane, "_send", break_off)  # once it is created
    created = await session.create_sequence(1, [1, 2])
    assert (created.start_number, calls) == (1, ["CreateSequences"])
    assert [row.sequence_id for row in await session.list()] == [1]
    assert (await session.step(ITEMS)).step_id == 2


async def test_creates_that_wait_for_their_turn_on_a_lane_that_breaks_go_by_calls(
    session: AsyncCacheSession, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(lane: ServiceLane, *_: object) -> None:
        lane._end(is_lost=True)

    monkeypatch.setattr(ServiceLane, "_take", break_off)
    creating = [asyncio.create_task(session.create_sequence(place, [place])) for place in range(1, 21)]
    assert (await session.step(ITEMS)).step_id == 2
    assert len({created.start_number for created in await asyncio.gather(*creating)}) == 20
    assert calls == ["CreateSequences"] * 20


async def test_a_create_without_an_answer_meets_its_deadline(hold: Callable[..., Any]) -> None:
    held = await hold()
    held.session._transport.options = CallOptions(timeout_s=0.1)  # of this call alone: a busy machine takes longer to open
    held.session._opened.lane_calls.append("CreateSequences")
    caught = await failure(held.session.create_sequence(1, [1, 2]))
    assert caught.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await held.read())[:1] == b"\5"
    assert await held.read() == b""  # so that a late answer is not taken for another request's


@pytest.mark.parametrize("step_lane", [True, False])
async def test_threads_step_over_a_lane_too(
    client: AsyncCacheClient, cache_server: RunningServer, spec: pb.KvSpec, step_lane: bool
) -> None:
    def steps() -> tuple[list[int], bool]:
        with CacheClient(cache_server.address, QUICK) as blocking, blocking.open_session(spec, pb.EXECUTOR_ENGINE) as session:
            arena = session.attach(step_lane=step_lane)
            with pytest.raises(KvkeeperError, match="UNKNOWN_SEQUENCE"):
                session.step(StepItems(release_ids=np.array([9], np.int64)))
            found = [session.step(ITEMS).step_id for _ in range(3)], session.has_step_lane
            arena.close()
            return found

    assert await asyncio.to_thread(steps) == ([1, 2, 3], step_lane)
    assert await num_steps(client) == 3


async def test_threads_repeat_over_grpc_what_a_lane_cannot_carry(
    small_frames: None, client: AsyncCacheClient, cache_server: RunningServer, spec: pb.KvSpec
) -> None:
    def large(session: CacheSession) -> tuple[int, bool]:
        num_tokens = session.pool.block_size * (session.pool.num_blocks - 20)
        session.create_sequence(1, np.zeros(num_tokens, np.int32))
        most = np.array([num_tokens], np.int32)
        items = StepItems(start_ids=np.array([1], np.int64), start_max_new=most, start_max_hit=most)
        return session.step(items).step_id, session.has_step_lane

    def broken(session: CacheSession) -> tuple[int, bool]:
        (live,) = cache_server.session_manager.sessions
        end_lane = partial(live.lane._end, is_lost=True)  # type: ignore[union-attr]
        loop.call_soon_threadsafe(end_lane)
        return session.step(ITEMS).step_id, session.has_step_lane

    def steps() -> list[tuple[int, bool]]:
        with CacheClient(cache_server.address, QUICK) as blocking, blocking.open_session(spec, pb.EXECUTOR_ENGINE) as session:
            assert session.attach_step_lane()
            return [large(session), broken(session)]

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(steps) == [(1, True), (2, False)]
    assert await num_steps(client) == 2


@pytest.mark.parametrize("ending", [TimeoutError, KeyboardInterrupt])
def test_a_thread_that_stops_waiting_for_an_answer_ends_its_lane(ending: type[BaseException]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = BlockingStepLane(ours, 0.05)

    def interrupt() -> int:
        raise ending

    if ending is KeyboardInterrupt:
        lane._read_frame = interrupt  # type: ignore[method-assign]
    with pytest.raises(KvkeeperError if ending is TimeoutError else ending) as caught:
        run(lane.exchange(b"step"))
    if isinstance(caught.value, KvkeeperError):
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not lane.is_open, "a late answer would be taken for that of the next step"
    with pytest.raises(LaneBroken):
        run(lane.exchange(b"step"))
    theirs.close()


# A service's end that the test holds


class HeldLane:
    """A session of the fake service whose lane ends here."""

    def __init__(self, fake: FakeCache, client: AsyncCacheClient, session: AsyncCacheSession, end: socket.socket) -> None:
        self.fake, self.client, self.session, self.end = fake, client, session, end

    async def read(self) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.end, 4096), 5)


@pytest.fixture
async def hold(fake: FakeCache) -> AsyncIterator[Callable[..., Any]]:
    held: list[HeldLane] = []

    async def open_with(options: CallOptions = QUICK) -> HeldLane:
        fake.script["OpenSession"] = [pb.OpenSessionResponse(session_id="s", epoch=1)]
        client = AsyncCacheClient(fake.target, options)
        session = await client.open_session(pb.KvSpec())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        session._steps.lane = StepLane(ours)
        held.append(HeldLane(fake, client, session, theirs))
        return held[-1]

    yield open_with
    for lane in held:
        lane.session.disconnect()
        await lane.client.close()
        lane.end.close()


@pytest.mark.parametrize("frame", [b"\1", b"\5abc", b"\xff" * 100], ids=["request", "unknown", "garbage"])
async def test_nonsense_ends_the_lane_and_repeats_the_step_over_grpc(
    hold: Callable[..., Any], fake: FakeCache, frame: bytes
) -> None:
    held = await hold()
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=1)]
    stepping = asyncio.create_task(held.session.step(ITEMS))
    request = await held.read()
    held.end.send(frame)
    assert (await stepping).step_id == 1
    assert fake.requests["StreamSteps"] == [request[1:]]
    assert await held.read() == b""


async def test_a_status_that_cannot_be_read_is_an_error(hold: Callable[..., Any]) -> None:
    held = await hold()
    stepping = asyncio.create_task(held.session.step(ITEMS))
    await held.read()
    held.end.send(b"\3\xff\xff")
    caught = await failure(stepping)
    assert caught.code is grpc.StatusCode.INTERNAL


async def test_a_step_without_an_answer_meets_its_deadline(hold: Callable[..., Any]) -> None:
    held = await hold(CallOptions(timeout_s=0.1))
    caught = await failure(held.session.step(ITEMS))
    assert caught.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await held.read())[:1] == b"\1"
    assert await held.read() == b""  # so that a late answer is not taken for another step's


async def test_an_abandoned_step_ends_the_lane(hold: Callable[..., Any], fake: FakeCache) -> None:
    held = await hold()
    fake.script["StreamSteps"] = [pb.StepResponse(step_id=1)]
    stepping = asyncio.create_task(held.session.step(ITEMS))
    await held.read()
    with pytest.raises(RuntimeError, match="one unanswered step"):
        await held.session.step(ITEMS)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert await held.read() == b""
    assert (await held.session.step(ITEMS)).step_id == 1


async def test_a_large_step_waits_for_its_answer_no_longer_than_others(hold: Callable[..., Any], fake: FakeCache) -> None:
    held = await hold(CallOptions(timeout_s=0.1))
    fake.script["Step"] = [Fault.SILENCE]
    stepping = asyncio.create_task(held.session.step(ITEMS))
    await held.read()
    held.end.send(b"\4")
    caught = await failure(stepping)
    assert caught.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_a_farewell_that_was_not_read_yet_is_told_before_the_end(hold: Callable[..., Any]) -> None:
    held = await hold()
    lane = held.session._steps.lane
    lane._loop.remove_reader(lane._socket)  # the loop is busy
    held.end.send(b"\3" + b"\x08\x0a\x12\x02no")
    held.end.close()
    with pytest.raises(KvkeeperError, match="ABORTED: no"):
        await held.session.step(ITEMS)
    assert not held.session.has_step_lane


async def test_a_farewell_is_read_after_the_reset_of_a_step_that_was_not_taken(hold: Callable[..., Any]) -> None:
    held = await hold()
    stepping = asyncio.create_task(held.session.step(ITEMS))
    await asyncio.to_thread(select.select, [held.end], [], [], 5)
    held.end.send(b"\3" + b"\x08\x0a\x12\x02no")
    held.end.close()  # with the step unread: the system tells its client of a reset first
    with pytest.raises(KvkeeperError, match="ABORTED: no"):
        await stepping


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_sessions_leave_no_descriptors(client: AsyncCacheClient, spec: pb.KvSpec) -> None:
    before = 0
    for turn in range(6):
        session = await client.open_session(spec, pb.EXECUTOR_ENGINE)
        arena = await session.attach()
        if turn % 2:  # once with steps, once without
            await session.step(ITEMS)
        arena.close()
        await session.close()
        while (await client.stats()).pools[0].num_quarantined_blocks:
            pass
        if turn == 1:
            before = open_descriptors()
    assert open_descriptors() == before


@pytest.fixture
def attach_socket(folder: Any) -> Iterator[tuple[str, threading.Event, threading.Event, socket.socket]]:
    """A service that hands a lane over when it is told to, and its own end of the lane."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "attach"))
    listener.listen(1)
    asked, go_on = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, theirs:
            assert connection.recv(64) == b"one-time step-lane\n"
            asked.set()
            assert go_on.wait(5)
            socket.send_fds(connection, [b'{"step_lane": true}\n'], [theirs.fileno()])

    thread = threading.Thread(target=serve)
    thread.start()
    yield str(folder / "attach"), asked, go_on, ours
    thread.join(5)
    listener.close()
    ours.close()


async def test_a_lane_of_an_attach_that_was_abandoned_is_closed(attach_socket: Any) -> None:
    path, asked, go_on, end = attach_socket
    opened = pb.OpenSessionResponse(attach_socket_path=path, attach_token="one-time", offers_step_lane=True)
    session = AsyncCacheSession(AsyncTransport("127.0.0.1:1", CallOptions(), None), opened)
    attaching = asyncio.create_task(session.attach_step_lane())
    assert await asyncio.to_thread(asked.wait, 5)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    go_on.set()
    end.settimeout(5)
    assert await asyncio.to_thread(end.recv, 1) == b""
    assert not session.has_step_lane
