"""An engine or a front that takes longer than the other end sends: what waits, what goes on meanwhile, and nothing is lost.

The lanes are real, on pairs of sockets that are filled to the brim.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from kvkeeper.common.service.turns import TurnLimits, Turns
from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.rpc.front.engine_link import EngineLink, open_link
from kvkeeper.engine_service.rpc.front.requests import GENERATE_PATH, FrontRequests
from kvkeeper.engine_service.rpc.front.server import LinkTurns
from kvkeeper.engine_service.rpc.fronts.calls import FrontCalls, FrontServices
from kvkeeper.engine_service.rpc.fronts.frames import FrameReader, Kind, frame, parts_of
from kvkeeper.engine_service.rpc.fronts.lane import Lane, open_lane
from kvkeeper.engine_service.rpc.fronts.told import Admitted, Told
from kvkeeper.engine_service.rpc.streams.stream_pace import StreamPace
from tests.unit.engine_service.rpc.front.test_both_ends import MAX_TOKENS, Engine

DEADLINE_S = 20.0
FILLING = 9  # number of a call whose answers fill the lane
PIECE = 1 << 16
NUM_PIECES = 100


async def until(condition: Callable[..., bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  a socket has no event for a test
            await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class OtherEnd:
    """A process that reads its end of a lane when a test says so."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self._reader = end, FrameReader()
        self.frames: list[tuple[Kind, int, bytes]] = []

    async def write(self, kind: Kind, number: int, body: bytes = b"") -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, frame(kind, number, body))

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.frames += self._reader.add(await asyncio.get_running_loop().sock_recv(self._end, 1 << 20))

    def bodies(self, kind: Kind, number: int) -> list[bytes]:
        return [body for each, of, body in self.frames if (each, of) == (kind, number)]


Taken = list[tuple[Kind, int, bytes]]


@asynccontextmanager
async def lane_and_other() -> AsyncIterator[tuple[Lane, OtherEnd, Taken]]:
    own, other = socket.socketpair()
    taken: Taken = []
    lane = await open_lane(own, lambda *each: taken.append(each), lambda: None)
    try:
        yield lane, OtherEnd(other), taken
    finally:
        lane.close()
        other.close()


def piece(at: int) -> bytes:
    return at.to_bytes(4, "little") * (PIECE // 4)


async def fill(lane: Lane) -> None:
    for at in range(NUM_PIECES):
        lane.send(Kind.ANSWER, FILLING, piece(at))
    await until(lambda: lane.is_full)


async def test_a_full_lane_says_so_reads_on_and_loses_nothing() -> None:
    async with lane_and_other() as (lane, other, taken):
        had_room: list[bool] = []
        lane.on_room = lambda: had_room.append(lane.is_full)
        await fill(lane)
        lane.send(Kind.ANSWER, FILLING, b"behind it")
        await other.write(Kind.MESSAGE, 1, b"meanwhile")
        await until(lambda: bool(taken))
        assert taken == [(Kind.MESSAGE, 1, b"meanwhile")]
        assert (lane.is_full, had_room) == (True, []), "the other end has not read"
        await other.read_until(lambda: len(other.frames) == NUM_PIECES + 1)
        assert other.bodies(Kind.ANSWER, FILLING) == [*map(piece, range(NUM_PIECES)), b"behind it"]
        await until(lambda: bool(had_room))
        assert (lane.is_full, had_room) == (False, [False]), "once"


async def test_tokens_wait_while_a_front_does_not_read_and_come_once_it_does() -> None:
    tokens = list(range(1, MAX_TOKENS + 1))
    tokens[8] = 20  # not the end of a sequence
    engines: list[Engine] = []

    async def admit(message: pb.GenerateRequest, send: Any, *, makes_text: bool) -> Generation:
        engines.append(Engine([tokens], (), 128))
        return engines[-1].make(send, makes_text=makes_text)

    message = Told(GENERATE_PATH, Caller("a", "", Role.CLIENT), "peer").with_message(pb.GenerateRequest().SerializeToString())
    nothing: Any = None
    services = FrontServices(
        {}, Turns(TurnLimits(1, 1)), admit, nothing, nullcontext, StreamPace(0.0001), lambda path, caller: None
    )
    async with lane_and_other() as (lane, other, taken):
        calls = FrontCalls(services, lane)
        calls.take(Kind.MESSAGE, 1, message)
        await other.read_until(lambda: bool(other.bodies(Kind.ADMITTED, 1)))
        await fill(lane)

        def unsent() -> int:
            assert lane._transport is not None
            return lane._transport.get_write_buffer_size() + sum(map(len, lane._unsent))

        most = unsent()
        for _ in range(MAX_TOKENS):
            engines[0].draw()
            assert engines[0].generation is not None
            engines[0].generation.deliver()
            await settle()
        assert unsent() == most, "tokens wait where a later one joins them"
        await other.write(Kind.MESSAGE, 2, message)
        await until(lambda: bool(taken))
        calls.take(*taken[0])
        await until(lambda: len(engines) == 2)
        found: list[int] = []

        def is_over() -> bool:
            nonlocal found
            found = []
            for kind, number, body in other.frames:
                if kind is Kind.PARTS:
                    found += [token for of, token_ids in parts_of(body) if of == 1 for token in token_ids]
                elif (kind, number) == (Kind.CHUNK, 1):
                    found += pb.GenerateResponse.FromString(body).token_ids
            return any(pb.GenerateResponse.FromString(body).HasField("usage") for body in other.bodies(Kind.CHUNK, 1))

        await other.read_until(is_over)
        assert found == tokens
        assert len(other.bodies(Kind.CHUNK, 1)) + sum(kind is Kind.PARTS for kind, *_ in other.frames) < MAX_TOKENS, "as few"
        assert other.bodies(Kind.ANSWER, FILLING) == [*map(piece, range(NUM_PIECES))]
        calls.end()


@asynccontextmanager
async def link_and_engine(max_unanswered: int) -> AsyncIterator[tuple[EngineLink, Lane, Taken]]:
    """The engine answers when a test has it answer; what came to it."""
    own, other = socket.socketpair()
    taken: Taken = []
    engine = await open_lane(other, lambda *each: taken.append(each), lambda: None)
    link = await open_link(own, lambda state: None, lambda seconds: None)
    link.max_unanswered = max_unanswered
    try:
        yield link, engine, taken
    finally:
        link.lane.close()
        engine.close()


def messages(taken: Taken) -> list[tuple[int, bytes]]:
    return [(number, Told.split(body)[1]) for kind, number, body in taken if kind is Kind.MESSAGE]


def answer(engine: Lane, number: int, body: bytes) -> None:
    engine.send(Kind.ANSWER, number, body)
    engine.send(Kind.END, number)


async def test_no_message_is_read_while_those_without_a_place_are_unanswered_and_none_is_lost() -> None:
    num_bytes, count = 1000, 12
    async with link_and_engine(3 * num_bytes) as (link, engine, taken):
        turns = LinkTurns(Turns(TurnLimits(8, 64)), link)

        async def call(at: int) -> bytes:
            """As Intake has it: the message is read in its turn, and a small one leaves its place."""
            async with turns.turn(f"client {at % 5}") as place:
                place.leave()
                return await link.call("/any", bytes([at]) * num_bytes)

        calls = [asyncio.create_task(call(at)) for at in range(count)]
        num_answered = 0
        while num_answered < count:
            await until(lambda after=num_answered: len(messages(taken)) > after)
            await settle()
            came = messages(taken)
            # Eight have a place, and have looked before the first of them was sent: none but those goes beyond the bound.
            assert len(came) - num_answered <= 8
            engine.send(Kind.PING)
            await until(lambda: (Kind.PONG, 0, b"") in taken)
            taken.remove((Kind.PONG, 0, b""))
            number, body = came[num_answered]
            answer(engine, number, body)
            num_answered += 1
        assert await asyncio.gather(*calls) == [bytes([at]) * num_bytes for at in range(count)]
        assert link._num_unanswered == 0


@pytest.mark.parametrize("how", ["answered", "refused", "given up"])
async def test_a_message_that_is_over_makes_room(how: str) -> None:
    async with link_and_engine(100) as (link, engine, taken):
        turns = LinkTurns(Turns(TurnLimits(8, 64)), link)

        async def call() -> bytes:
            async with turns.turn("client") as place:
                place.leave()
                return await link.call("/any", bytes(100))

        first = asyncio.create_task(call())
        await until(lambda: len(messages(taken)) == 1)
        second = asyncio.create_task(call())
        await settle()
        assert len(messages(taken)) == 1, "the second is not read"
        if how == "given up":
            first.cancel()
        else:
            engine.send(*(Kind.FULL, 1, b"3") if how == "refused" else (Kind.ANSWER, 1, b""))
        await until(lambda: len(messages(taken)) == 2)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert link._num_unanswered == 0


async def test_what_has_a_bound_of_its_own_keeps_no_other_message_out() -> None:
    """A large message holds its place, and GenerateMany has its calls: neither is counted a second time."""
    async with link_and_engine(100) as (link, engine, taken):
        turns = LinkTurns(own := Turns(TurnLimits(8, 64)), link)
        many = asyncio.create_task(FrontRequests(link).admit(pb.GenerateRequest(text="x" * 500), lambda output: None))

        async def call(num_bytes: int, *, leaves: bool) -> bytes:
            async with turns.turn(f"client of {num_bytes}") as place:
                if leaves:
                    place.leave()
                return await link.call("/any", bytes(num_bytes))

        large = asyncio.create_task(call(1000, leaves=False))
        await until(lambda: len(messages(taken)) == 2)
        assert (own.num_taken, link._num_unanswered) == (1, 0)
        small = asyncio.create_task(call(10, leaves=True))
        await until(lambda: len(messages(taken)) == 3)
        for number, body in messages(taken)[1:]:
            answer(engine, number, body)
        assert await asyncio.gather(large, small) == [bytes(1000), bytes(10)]
        engine.send(Kind.ADMITTED, messages(taken)[0][0], Admitted("id", False, []).to_bytes())
        (await many).cancel()
