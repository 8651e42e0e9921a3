"""A front's calls on its engine: when they hold a place of the front, and with what they are refused."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvkeeper.common.service.turns import TurnLimits, Turns
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.rpc.front.engine_link import EngineLink, open_link
from kvkeeper.engine_service.rpc.front.requests import FrontRequests
from kvkeeper.engine_service.rpc.fronts.frames import Kind
from kvkeeper.engine_service.rpc.fronts.lane import Lane, open_lane
from kvkeeper.engine_service.rpc.fronts.told import Admitted
from kvkeeper.engine_service.values.errors import QueueFull

Answer = Callable[[Lane, int], None]


@asynccontextmanager
async def linked(answer: Answer) -> AsyncIterator[EngineLink]:
    """A front's end of a lane on whose other end each message gets this answer."""
    own, other = socket.socketpair()

    def take(kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.MESSAGE:
            answer(engine, number)

    engine = await open_lane(other, take, lambda: None)
    link = await open_link(own, lambda state: None, lambda seconds: None)
    try:
        yield link
    finally:
        link.lane.close()
        engine.close()


async def test_a_request_whose_tokens_come_holds_no_place_for_its_message() -> None:
    turns, places = Turns(TurnLimits(1, 9)), list[int]()

    def admit(engine: Lane, number: int) -> None:
        places.append(turns.num_taken)
        engine.send(Kind.ADMITTED, number, Admitted("id", False, []).to_bytes())

    async with linked(admit) as link, turns.turn("client"):
        request = await FrontRequests(link).admit(pb.GenerateRequest(), lambda chunk: None)
        assert places == [1], "until the engine has it, the message counts here"
        assert turns.num_taken == 0
        request.cancel()


async def test_an_engine_whose_calls_wait_refuses_further_ones_as_it_does_without_fronts() -> None:
    async with linked(lambda engine, number: engine.send(Kind.FULL, number, b"3")) as link:
        with pytest.raises(QueueFull) as refused:
            await FrontRequests(link).admit(pb.GenerateRequest(), lambda chunk: None)
        assert refused.value.metadata["limit"] == "3"
        with pytest.raises(QueueFull):
            await link.call("/any", b"")
