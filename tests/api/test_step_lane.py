"""Step lanes beside what they share with StreamSteps (test_steps.py): frames, sockets and processes, and what never blocks."""

import asyncio
import errno
import json
import logging
import re
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.rpc import step_lane
from kvkeeper.cache_service.rpc.step_handler import StepHandler
from kvkeeper.cache_service.runtime import turns
from kvkeeper.client.arena import attach_arena_and_lane
from kvkeeper.client.attaching import attaching
from kvkeeper.client.errors import KvkeeperError, parse_error
from tests.support.processes.child_processes import Processes
from tests.support.worlds.cache_api import DEADLINE, Api, ManualClock, Session, int32s, le64, refusal, refused
from tests.support.worlds.messages import differences, show
from tests.support.worlds.step_carriers import (
    CALL,
    CALL_RESPONSE,
    STEP_REQUEST,
    STEP_RESPONSE,
    TOO_LARGE,
    LaneStream,
    StepCarriers,
    attach_lane,
    call_frame,
    num_open_files,
)


@pytest.fixture
def carriers(api: Api) -> Any:
    made = StepCarriers(api, "lane")
    yield made
    made.close()


def step_id_of(answer: bytes) -> int:
    return pb.StepResponse.FromString(answer).step_id


@pytest.mark.parametrize("frame", [b"\2", b"\3abc", b"\4", b"\0" * 100, b"\xff" * 1000, b"{}"])
async def test_a_frame_of_another_kind_is_refused_and_nothing_is_lost(
    api: Api, carriers: StepCarriers, clock: ManualClock, frame: bytes
) -> None:
    session = await api.open()
    await session.create(1, 6)
    lane, _ = await carriers.stepping(session, session.start_bytes(1, 1))
    before = (await api.stats()).pools[0]
    await lane.write_frame(frame)
    await refused(lane.read(), "INVALID_FIELD", field="request")
    assert (await api.stats()).pools[0] == before
    clock.advance(5)  # no grace is running
    await lane.write(session.step_bytes(2))
    assert step_id_of(await lane.read()) == 2


async def test_an_empty_frame_is_the_end_of_the_lane(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    lane, _ = await carriers.stepping(session, session.step_bytes(1))
    await lane.write_frame(b"")
    assert await lane.read_frame() == b""
    await session.step(2)


async def test_frames_that_wait_are_answered_in_order(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    lane = await carriers.open(session)
    for step_id in (1, 2, 2, 3):
        await lane.write(session.step_bytes(step_id))
    assert [step_id_of(await lane.read()) for _ in range(4)] == [1, 2, 2, 3]
    assert (await api.stats()).pools[0].num_steps == 3


async def test_a_client_that_does_not_read_loses_its_lane_and_not_its_step(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    lane = await carriers.open(session)
    raw = session.step_bytes(1)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        await asyncio.wait_for(_repeat_for_ever(lane, raw), DEADLINE)
    assert [live.stream for live in api.server.session_manager.sessions] == [None]
    assert api.server.session_manager.sessions[0].core.grace_deadline is not None
    answer = (await lane.read_frame())[1:]
    assert await api.raw_step(raw) == answer  # over gRPC, in the same session
    assert (await api.stats()).pools[0].num_steps == 1


async def _repeat_for_ever(lane: LaneStream, raw: bytes) -> None:
    """Each repeat is answered, and no answer is read."""
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(lane.socket, STEP_REQUEST + raw)
        await asyncio.sleep(0)


async def test_an_answer_that_no_frame_holds_is_repeated_over_grpc(
    api: Api, carriers: StepCarriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_lane, "_BUFFER_BYTES", 1)  # the kernel's least
    session = await api.open()
    await session.create(1, 4)
    await session.create(2, 1336)  # 334 blocks
    lane, _ = await carriers.stepping(session, session.start_bytes(1, 1))
    raw = session.start_bytes(2, 2)
    largest = lane.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    monkeypatch.setattr(StepHandler, "apply", _with_padding(StepHandler.apply, largest))
    await lane.write(raw)
    assert await lane.read_frame() == TOO_LARGE
    monkeypatch.undo()
    answer = pb.StepResponse.FromString(await api.raw_step(raw))
    assert (answer.step_id, len(int32s(answer.start_block_ids))) == (2, 334)
    await lane.write(session.step_bytes(3))  # a unary call takes no lane over
    assert step_id_of(await lane.read()) == 3
    assert (await api.stats()).pools[0].num_steps == 3


def _with_padding(apply: Any, num_bytes: int) -> Any:
    """A reply that is longer than the recorded one: what a pool of a million blocks would make."""

    def padded(handler: StepHandler, raw: bytes, bound: Any = None) -> Any:
        live, reply = apply(handler, raw, bound)
        return live, reply + bytes(num_bytes)

    return padded


async def test_the_end_of_a_session_is_told_on_its_lane(api: Api, carriers: StepCarriers) -> None:
    stepping, idle = await api.open(), await api.open()
    lane, _ = await carriers.stepping(stepping, stepping.step_bytes(1))
    unused = await carriers.open(idle)
    for session, stream in ((stepping, lane), (idle, unused)):
        await session.call("CloseSession", drained=True)
        assert (await refusal(stream.read())).reason == "UNKNOWN_SESSION"
        assert await stream.read_frame() == b""


async def test_a_lane_without_steps_takes_over_with_its_first_one(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    lane = await carriers.open(session)
    stream, _ = await StepCarriers(api, "grpc").stepping(session, session.step_bytes(1))
    assert (await api.stats()).sessions[0].step_carrier == pb.STEP_CARRIER_GRPC
    await lane.write(session.step_bytes(2))
    assert step_id_of(await lane.read()) == 2
    assert (await refusal(stream.read())).reason == "STREAM_REPLACED"
    assert (await api.stats()).sessions[0].step_carrier == pb.STEP_CARRIER_LANE


async def test_the_end_of_an_unused_lane_starts_no_grace(api: Api, carriers: StepCarriers, clock: ManualClock) -> None:
    session = await api.open()
    lane = await carriers.open(session)
    stream, _ = await StepCarriers(api, "grpc").stepping(session, session.step_bytes(1))
    lane.cancel()
    await api.until(lambda _: api.server.session_manager.sessions[0].lane is None)
    clock.advance(5)
    await stream.write(session.step_bytes(2))
    assert step_id_of(await stream.read()) == 2


async def test_a_bug_is_told_without_details(api: Api, carriers: StepCarriers, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.open()
    lane = await carriers.open(session)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched:
        patched.setattr(StepHandler, "_apply", broken)
        await lane.write(session.step_bytes(1))
        error = await refusal(lane.read())
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "BROKEN_INVARIANT")
    assert "secret" not in str(error)
    await lane.write(session.step_bytes(1))
    assert step_id_of(await lane.read()) == 1


# Creates


def create_bytes(session: Session, *ids: int, **fields: Any) -> bytes:
    """A request for prompts of six tokens."""
    new = [pb.NewSequence(sequence_id=place, token_ids=range(place, place + 6), **fields) for place in ids]
    return call_frame("CreateSequences", pb.CreateSequencesRequest(**session.ids, sequences=new).SerializeToString())


async def test_creates_are_answered_on_the_lane_in_order_with_the_steps(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    assert "CreateSequences" in session.opened.lane_calls
    lane = await carriers.open(session)
    await lane.write_frame(create_bytes(session, 1, 0, 2))
    await lane.write(session.start_bytes(1, 1))
    await lane.write_frame(create_bytes(session, 3))
    frames = [await lane.read_frame() for _ in range(3)]
    assert [frame[:1] for frame in frames] == [CALL_RESPONSE, STEP_RESPONSE, CALL_RESPONSE]
    results = pb.CreateSequencesResponse.FromString(frames[0][1:]).results
    assert [result.WhichOneof("result") for result in results] == ["response", "error", "response"]
    assert parse_error(results[1].error).reason == "INVALID_FIELD"
    assert int32s(pb.StepResponse.FromString(frames[1][1:]).start_results) == [pb.START_RESULT_STARTED]
    assert (await api.stats()).pools[0].num_waiting_sequences == 2


async def test_creates_make_a_lane_no_stream_of_steps(api: Api, carriers: StepCarriers) -> None:
    session = await api.open()
    lane = await carriers.open(session)
    stream, _ = await StepCarriers(api, "grpc").stepping(session, session.step_bytes(1))
    await lane.write_frame(create_bytes(session, 1))
    assert (await lane.read_frame())[:1] == CALL_RESPONSE
    await stream.write(session.step_bytes(2))
    assert step_id_of(await stream.read()) == 2
    stream.cancel()


async def test_creates_that_are_none_are_refused_and_the_lane_goes_on(api: Api, carriers: StepCarriers) -> None:
    session, other = await api.open(), await api.open()
    lane = await carriers.open(session)
    too_many = create_bytes(session, *range(1, 258))
    other_call = call_frame("CloseSession", pb.CloseSessionRequest(**session.ids).SerializeToString())
    for frame in (CALL, CALL + b"\xff", other_call):
        await lane.write_frame(frame)
        await refused(lane.read(), "INVALID_FIELD", field="request")
    for frame, field in (
        (call_frame("CreateSequences", b"\xff"), "request"),
        (create_bytes(other, 1), "session_id"),
        (too_many, "sequences"),
    ):
        await lane.write_frame(frame)
        await refused(lane.read(), "INVALID_FIELD", field=field)
    assert (await api.stats()).pools[0].num_waiting_sequences == 0
    await lane.write_frame(create_bytes(session, 1))
    assert (await lane.read_frame())[:1] == CALL_RESPONSE


async def test_a_sequence_changes_its_session_over_lanes(api: Api, carriers: StepCarriers) -> None:
    giver, taker = await api.open(), await api.open()
    table = await giver.prefill(1, 9, num_committed=8)
    await giver.step(3)
    lanes = [await carriers.open(session) for session in (giver, taker)]
    await lanes[0].write_frame(
        call_frame("HandOffSequence", pb.HandOffSequenceRequest(**giver.ids, sequence_id=1).SerializeToString())
    )
    offer = pb.HandOffSequenceResponse.FromString(await lanes[0].read()).offer
    request = pb.TakeSequenceRequest(**taker.ids, sequence_id=7, offer=offer)
    await lanes[1].write_frame(call_frame("TakeSequence", request.SerializeToString()))
    taken = pb.TakeSequenceResponse.FromString(await lanes[1].read()).sequence
    assert (taken.sequence_id, list(taken.block_table)) == (7, table)
    withdrawal = pb.WithdrawHandOffRequest(**giver.ids, sequence_id=1)
    await lanes[0].write_frame(call_frame("WithdrawHandOff", withdrawal.SerializeToString()))
    await refused(lanes[0].read(), "UNKNOWN_SEQUENCE", sequence_id="1")
    assert (await giver.step(4)).step_id == 4


async def test_others_pass_while_a_lane_creates_many(api: Api, carriers: StepCarriers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MOST_SECONDS", 0.0)  # each prompt takes longer
    session = await api.open()
    lane = await carriers.open(session)
    (pool,) = api.server.session_manager.registry.pools
    await lane.write_frame(create_bytes(session, *range(1, 33)))
    await lane.write(session.step_bytes(1))
    seen, answer = set[int](), asyncio.ensure_future(lane.read_frame())
    while not answer.done():
        seen.add(pool.manager.queries.stats().num_waiting_sequences)
        await asyncio.sleep(0)
    assert any(0 < num_waiting < 32 for num_waiting in seen), "no turn came between"
    assert len(pb.CreateSequencesResponse.FromString((await answer)[1:]).results) == 32
    assert step_id_of(await lane.read()) == 1


async def test_a_session_that_ends_while_its_lane_creates_says_so(
    api: Api, carriers: StepCarriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_MOST_SECONDS", 0.0)
    session = await api.open()
    lane = await carriers.open(session)
    (pool,) = api.server.session_manager.registry.pools
    await lane.write_frame(create_bytes(session, *range(1, 201)))
    async with asyncio.timeout(DEADLINE):
        while not pool.manager.queries.stats().num_waiting_sequences:  # noqa: ASYNC110  it has no event for a test
            await asyncio.sleep(0)
    (live,) = api.server.session_manager.sessions
    api.server.session_manager.close(live.core.id, live.core.epoch, drained=True)
    assert (await refusal(lane.read())).reason == "UNKNOWN_SESSION"
    assert await lane.read_frame() == b""
    assert pool.manager.queries.stats().num_waiting_sequences == 0


# Sockets


async def test_a_service_without_descriptors_gives_the_memory_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.open()

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(step_lane.socket, "socketpair", refuse)
        opened = session.opened
        arena, lane = await asyncio.to_thread(
            attach_arena_and_lane, opened.attach_socket_path, opened.attach_token, opened.pool.arena_bytes, DEADLINE
        )
    assert lane is None
    assert arena.array.size == opened.pool.arena_bytes
    arena.close()
    await session.step(1)


async def test_a_session_with_a_long_lease_has_a_lane_but_no_memory(api: Api) -> None:
    session = await api.open(ttl_ms=3_600_000)

    def attach() -> None:
        opened = session.opened
        with attaching(opened.attach_socket_path, opened.attach_token, DEADLINE, "memory", "step-lane"):
            pass

    with pytest.raises(KvkeeperError, match="LEASE_TOO_LONG"):
        await asyncio.to_thread(attach)
    lane = LaneStream(await asyncio.to_thread(attach_lane, session))
    assert (await api.stats()).sessions[0].num_attached_processes == 0
    await lane.write(session.step_bytes(1))
    assert step_id_of(await lane.read()) == 1
    assert (await session.call("CloseSession")).num_quarantined_blocks == 0  # nothing is mapped
    lane.cancel()


async def test_lanes_leave_no_descriptors(api: Api) -> None:
    carriers, before = StepCarriers(api, "lane"), 0
    for turn in range(12):
        session = await api.open()
        lane, _ = await carriers.stepping(session, session.step_bytes(1))
        if turn % 3 == 0:
            lane.cancel()  # lost
            await api.until(lambda _: not api.server.session_manager.sessions[0].lane)
            await session.call("CloseSession", drained=True)
        elif turn % 3 == 1:
            await session.call("CloseSession", drained=True)
            assert (await refusal(lane.read())).reason == "UNKNOWN_SESSION"
        else:
            stream, _ = await StepCarriers(api, "grpc").stepping(session, session.step_bytes(1))
            assert (await refusal(lane.read())).reason == "STREAM_REPLACED"
            stream.cancel()
            await session.call("CloseSession", drained=True)
        lane.cancel()
        await _until_watched(api, 0)
        if turn == 2:  # what opens once is open
            before = num_open_files()
    assert num_open_files() == before


async def _until_watched(api: Api, num_processes: int) -> None:
    """The attach socket has let go of the processes of ended sessions."""
    await api.until(lambda _: len(api.server._attach._connections) == num_processes)


# Processes


async def stepped(processes: Processes, session: Session, raw: bytes, *parts: str) -> asyncio.subprocess.Process:
    """A process that has made a step over its lane."""
    child = await processes.with_lane(session, raw, *parts)
    for command, word in (("send", "sent"), ("read", "stepped")):
        await child.tell(command)
        await child.says(word)
    return child.process


@pytest.mark.parametrize("parts", [("step-lane",), ("memory", "step-lane")], ids=" and ".join)
async def test_a_killed_client_loses_its_session_at_once(api: Api, processes: Processes, parts: tuple[str, ...]) -> None:
    session = await api.open()
    await session.create(1, 10)
    client = await stepped(processes, session, session.start_bytes(1, 1), *parts)
    stats = await api.stats()
    assert (stats.sessions[0].step_carrier, stats.pools[0].num_running_sequences) == (pb.STEP_CARRIER_LANE, 1)
    client.kill()
    stats = await api.until(lambda stats: not stats.sessions and not stats.pools[0].num_quarantined_blocks)
    assert (stats.num_reaped_sessions, stats.pools[0].num_referenced_blocks) == (1, 0)


async def test_a_client_killed_in_a_step_loses_its_session_at_once(
    api: Api, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    session, other = await api.open(), await api.open()
    await session.create(1, 10)
    child = await processes.with_lane(session, session.start_bytes(1, 1))
    await child.tell("send-and-die")
    child.block_until_dead()
    stats = await api.until(lambda stats: len(stats.sessions) == 1 and not stats.pools[0].num_quarantined_blocks)
    assert (stats.num_reaped_sessions, stats.pools[0].num_referenced_blocks) == (1, 0)
    await other.step(1)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_stopped_client_stops_nothing_but_its_own_session(api: Api, processes: Processes, clock: ManualClock) -> None:
    session, other = await api.open(), await api.open()
    client = await stepped(processes, session, session.step_bytes(1))
    client.send_signal(signal.SIGSTOP)
    for step_id in range(1, 20):
        clock.advance(1)
        await other.step(step_id)
    assert [row.session_id for row in (await api.stats()).sessions] == [other.opened.session_id]


async def test_a_released_sequence_is_told_alike(api: Api, carriers: StepCarriers) -> None:
    """A refusal's details come over the lane as they do over gRPC."""
    session = await api.open()
    lane = await carriers.open(session)
    raw = session.step_bytes(1, release_sequence_ids=le64(9))
    over_grpc = await refusal(api.raw_step(raw))
    await lane.write(raw)
    over_lane = await refusal(lane.read())
    assert (over_lane.code, over_lane.reason, over_lane.message, over_lane.metadata) == (
        over_grpc.code,
        over_grpc.reason,
        over_grpc.message,
        over_grpc.metadata,
    )


async def test_the_example_of_the_page_is_what_a_service_answers(api: Api, carriers: StepCarriers) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api" / "protocol.md").read_text()
    shown = re.findall(r"^lane -> ([0-9a-f ]+)\nlane <- (\d\d) (.*)$", page, re.MULTILINE)
    assert len(shown) == 2
    session = await api.open()
    lane = await carriers.open(session)
    for sent, kind, answer in shown:
        frame = bytes.fromhex(sent)
        request = pb.StepRequest.FromString(frame[1:])
        assert (frame[:1], request.session_id, request.epoch) == (STEP_REQUEST, "0" * 32, 1)
        request.session_id, request.epoch = session.opened.session_id, session.opened.epoch
        await lane.write_frame(frame[:1] + request.SerializeToString())
        told = await lane.read_frame()
        assert told[:1].hex() == kind
        if told[:1] == STEP_RESPONSE:
            assert differences(json.loads(answer), show(pb.StepResponse.FromString(told[1:]))) == []
        else:
            error = parse_error(told[1:])
            assert answer == f"{error.code.name} {error.reason} {json.dumps(error.metadata)}"


def test_kinds_of_frames_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api" / "protocol.md").read_text().split("### Step lanes")[1]
    for kind, name in (
        (step_lane.STEP_REQUEST, "StepRequest"),
        (STEP_RESPONSE, "StepResponse"),
        (step_lane.STATUS, "google.rpc.Status"),
        (step_lane.TOO_LARGE, "nothing"),
    ):
        assert f"| {kind[0]} | " in page
        assert name in page.split(f"| {kind[0]} | ")[1].split("\n")[0]
