"""Messages come in turns: no connection has all places, a slow sender gives its place back, health checks have their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvkeeper.client.errors import KvkeeperError, to_error
from kvkeeper.common.service.intake import SMALL_BYTES, Intake
from kvkeeper.common.service.turns import TurnLimits, leave_place
from kvkeeper.engine_service.rpc.methods import REFUSALS
from kvkeeper.engine_service.values.errors import NotReceived, QueueFull

DEADLINE_S = 20.0
FOREVER_S = 600.0


class Echo(grpc.GenericRpcHandler):
    """Returns each message; the order of arrival is kept."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.may_answer = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        async def unary(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.seen.append(raw)
            return raw

        async def holds(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.seen.append(raw)
            await self.may_answer.wait()
            return b""

        async def counts(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            leave_place()
            return await holds(raw, context)

        async def writes(raw: bytes, context: grpc.aio.ServicerContext) -> None:
            for _ in range(3):
                await context.write(raw)

        async def yields(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            for _ in range(3):
                yield raw

        return {
            "/test/Unary": grpc.unary_unary_rpc_method_handler(unary),
            "/test/Holds": grpc.unary_unary_rpc_method_handler(holds),
            "/test/Counts": grpc.unary_unary_rpc_method_handler(counts),
            "/test/Writes": grpc.unary_stream_rpc_method_handler(writes),
            "/test/Yields": grpc.unary_stream_rpc_method_handler(yields),
        }.get(handler_call_details.method)


@dataclass
class Server:
    intake: Intake
    echo: Echo
    address: str
    _channels: list[grpc.aio.Channel] = field(default_factory=list)

    def connection(self) -> grpc.aio.Channel:
        """One that no other channel shares."""
        channel = grpc.aio.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])
        self._channels.append(channel)
        return channel

    async def ask(self, connection: grpc.aio.Channel, raw: bytes) -> bytes:
        answer: bytes = await connection.unary_unary("/test/Unary")(raw, timeout=DEADLINE_S)
        return answer

    async def stall(self, connection: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall:
        """A call that keeps its message to itself, and has its turn."""
        num_taken = self.intake.turns.num_taken
        call = connection.stream_unary("/test/Unary")(timeout=DEADLINE_S)
        await call.wait_for_connection()
        await self.until(lambda: self.intake.turns.num_taken == num_taken + 1)
        return call

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0)

    @property
    def num_waiting(self) -> int:
        return self.intake.turns.num_waiting


@asynccontextmanager
async def serving(num_at_once: int = 4, max_waiting_each: int = 8, seconds: float = FOREVER_S) -> AsyncIterator[Server]:
    full = lambda limit: QueueFull("full", limit=limit)  # noqa: E731
    late = lambda seconds: NotReceived("late", limit=seconds)  # noqa: E731
    intake, echo = Intake(TurnLimits(num_at_once, max_waiting_each), seconds, REFUSALS, full, late), Echo()
    server = grpc.aio.server(interceptors=(intake,))
    server.add_generic_rpc_handlers((echo,))
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = Server(intake, echo, f"127.0.0.1:{port}")
    try:
        yield made
    finally:
        for channel in made._channels:
            await channel.close()
        await server.stop(None)


async def refusal(call: object) -> KvkeeperError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call  # type: ignore[misc]
    return to_error(failed.value)


async def test_calls_of_every_kind_get_their_message_and_are_answered() -> None:
    async with serving() as server:
        connection = server.connection()
        assert await server.ask(connection, b"one") == b"one"
        for method in ("Writes", "Yields"):
            assert [raw async for raw in connection.unary_stream(f"/test/{method}")(b"x", timeout=DEADLINE_S)] == [b"x"] * 3
        check = health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)  # type: ignore[no-untyped-call]
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
        unknown = await refusal(connection.unary_unary("/test/Unknown")(b"", timeout=DEADLINE_S))
        assert unknown.code is grpc.StatusCode.UNIMPLEMENTED
        empty = connection.stream_unary("/test/Unary")(iter(()), timeout=DEADLINE_S)
        assert (await refusal(empty)).code is grpc.StatusCode.INVALID_ARGUMENT
        assert server.intake.turns.num_taken == 0


async def test_a_connection_that_sends_slowly_holds_up_itself_alone() -> None:
    async with serving(num_at_once=4) as server:
        slow, other = server.connection(), server.connection()
        stalled = await server.stall(slow)
        own = asyncio.create_task(server.ask(slow, b"own"))
        await server.until(lambda: server.num_waiting == 1)
        assert await server.ask(other, b"other") == b"other"
        assert not own.done(), "one connection has a quarter of the places"
        await stalled.write(b"late")
        assert await stalled == b"late"
        assert await own == b"own"
        assert server.echo.seen == [b"other", b"late", b"own"]


async def test_no_more_messages_come_at_once_than_there_are_places() -> None:
    async with serving(num_at_once=2) as server:
        stalled = [await server.stall(server.connection()) for _ in range(2)]
        waiting = asyncio.create_task(server.ask(server.connection(), b"waiting"))
        await server.until(lambda: server.num_waiting == 1)
        assert server.intake.turns.num_taken == 2
        stalled[0].cancel()
        assert await waiting == b"waiting", "a call that ends gives its place back"
        checked = health_pb2_grpc.HealthStub(server.connection()).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)  # type: ignore[no-untyped-call]
        assert (await checked).status == health_pb2.HealthCheckResponse.SERVING


async def test_health_is_answered_while_all_places_are_taken() -> None:
    async with serving(num_at_once=1) as server:
        await server.stall(server.connection())
        stub = health_pb2_grpc.HealthStub(server.connection())  # type: ignore[no-untyped-call]
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)).status == 1


async def test_a_message_that_does_not_come_ends_its_call() -> None:
    async with serving(num_at_once=1, seconds=0.05) as server:
        connection = server.connection()
        error = await refusal(connection.stream_unary("/test/Unary")(timeout=DEADLINE_S))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "NOT_RECEIVED")
        assert error.metadata == {"limit": "0.05"}
        assert server.intake.turns.num_taken == 0


async def test_a_slow_sender_that_comes_again_and_again_lets_others_have_their_turn() -> None:
    """With all places its own, as of a front that has one, others wait for one of its calls, and not for all."""
    async with serving(num_at_once=1) as server:
        slow, other = server.connection(), server.connection()
        stalled = [await server.stall(slow)]
        for count in range(1, 5):
            stalled.append(slow.stream_unary("/test/Unary")(timeout=DEADLINE_S))
            await server.until(lambda count=count: server.num_waiting == count)
        waiting = asyncio.create_task(server.ask(other, b"other"))
        await server.until(lambda: server.num_waiting == 5)
        for at in range(2):  # each ends as one does whose message did not come in time
            stalled[at].cancel()
            await server.until(lambda at=at: server.num_waiting < 5 - at)
        assert await waiting == b"other"
        await server.until(lambda: server.num_waiting == 2)
        assert not any(call.done() for call in stalled[2:])


async def test_a_call_beyond_those_that_may_wait_is_refused_before_its_message_comes() -> None:
    async with serving(num_at_once=1, max_waiting_each=2) as server:
        hostile, other = server.connection(), server.connection()
        stalled = await server.stall(hostile)
        waiting = [asyncio.create_task(server.ask(hostile, b"waiting")) for _ in range(2)]
        await server.until(lambda: server.num_waiting == 2)
        error = await refusal(server.ask(hostile, b"too many"))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert (error.metadata, error.retry_after) == ({"limit": "2"}, 1.0)
        gone = asyncio.create_task(server.ask(other, b"gone"))
        await server.until(lambda: server.num_waiting == 3)
        gone.cancel()
        await server.until(lambda: server.num_waiting == 2)
        await stalled.write(b"late")
        assert await asyncio.gather(stalled, *waiting) == [b"late", b"waiting", b"waiting"]
        assert b"too many" not in server.echo.seen
        assert server.intake.turns.num_taken == server.num_waiting == 0


async def test_a_large_message_keeps_its_place_until_its_call_ends_or_has_counted_it() -> None:
    async with serving(num_at_once=4) as server:
        connection = server.connection()

        def call(method: str, num_bytes: int) -> "asyncio.Task[bytes]":
            async def ask() -> bytes:
                answer: bytes = await connection.unary_unary(f"/test/{method}")(bytes(num_bytes), timeout=DEADLINE_S)
                return answer

            return asyncio.create_task(ask())

        calls = [call("Holds", SMALL_BYTES), call("Counts", SMALL_BYTES + 1)]
        await server.until(lambda: len(server.echo.seen) == 2)
        assert server.intake.turns.num_taken == 0
        calls += [call("Holds", SMALL_BYTES + 1), call("Holds", SMALL_BYTES + 2)]
        await server.until(lambda: server.num_waiting == 1 and len(server.echo.seen) == 3)
        assert server.intake.turns.num_taken == 1
        server.echo.may_answer.set()
        assert await asyncio.gather(*calls) == [b""] * 4
        assert len(server.echo.seen[3]) == SMALL_BYTES + 2
        assert server.intake.turns.num_taken == 0
