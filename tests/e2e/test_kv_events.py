"""SubscribeKvEvents as a gateway reads it: what is cached, by numbers that never go back, whatever happens to the services."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from hashlib import sha256
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvkeeper.cache_service.core.index.events import watch
from kvkeeper.cache_service.rpc import watch_streams
from kvkeeper.engine_service.rpc.gateway import kv_events
from tests.support.processes.service_pair import BLOCK_SIZE, DEADLINE_S, Services, generate, toy_output, until

PROMPT = [*range(40, 52)]
_PING, _GO_AWAY, _SETTINGS, _ACK = 6, 7, 4, 1  # of HTTP/2


class Index:
    """What a gateway makes of the batches: the tokens of each block and of all before it, by the block's number."""

    def __init__(self, batches: AsyncIterator[pb.KvEventBatch], last_number: int = 0) -> None:
        self.last_number = last_number
        self.num_cleared = 0
        self.paths: dict[int, tuple[int, ...]] = {}
        self._batches = batches

    async def next(self) -> pb.KvEventBatch:
        async with asyncio.timeout(DEADLINE_S):
            batch = await anext(self._batches)
        assert batch.sequence_number == self.last_number + 1
        assert batch.events
        self.last_number += 1
        for event in batch.events:
            self._apply(event)
        return batch

    async def until(self, *prompts: list[int]) -> None:
        """Until just the whole blocks of these are known."""
        while set(self.paths.values()) != blocks_of(*prompts):
            await self.next()

    def _apply(self, event: pb.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.num_cleared += 1
            self.paths.clear()
        for number in event.removed.block_hashes:
            del self.paths[number]
        above = self.paths[event.stored.parent_block_hash] if event.stored.HasField("parent_block_hash") else ()
        for block in event.stored.blocks:
            assert block.block_size == len(block.token_ids) == BLOCK_SIZE
            assert block.block_hash not in self.paths, "told of twice"
            above = self.paths[block.block_hash] = (*above, *block.token_ids)


def blocks_of(*prompts: list[int]) -> set[tuple[int, ...]]:
    """Each whole block of each prompt, as the tokens up to its end."""
    return {tuple(each[:end]) for each in prompts for end in range(BLOCK_SIZE, len(each) + 1, BLOCK_SIZE)}


def written(prompt: list[int], num_new: int) -> list[int]:
    """The tokens of a request that are in the cache when it has ended: the last one was never computed with."""
    return [*prompt, *toy_output(prompt, num_new)][:-1]


@asynccontextmanager
async def subscribed(address: str, last_number: int = 0) -> AsyncIterator[Index]:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.SubscribeKvEventsRequest(start_sequence_number=last_number)
        call: Any = VllmEngineStub(channel).SubscribeKvEvents(request)
        try:
            yield Index(aiter(call), last_number)
        finally:
            call.cancel()


async def test_what_is_cached_comes_first_and_then_every_change(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    await generate(client, PROMPT, 6)
    async with subscribed(engine.address) as index:
        assert [event.WhichOneof("data") for event in (await index.next()).events] == ["cleared"]
        await index.until(written(PROMPT, 6))
        longer = [*PROMPT, 7, 8, 9, 10]
        await generate(client, longer, 9)
        await index.until(written(PROMPT, 6), written(longer, 9))
        session = await (await world.cache_client()).open_session(engine.engine.memory.session.pool.spec)  # type: ignore[union-attr]
        await session.clear_prefix_cache()
        await index.until()
        assert index.num_cleared == 1
        assert (await world.pool()).num_watches == 1
    await until(lambda: no_watch(world))


async def no_watch(world: Services) -> bool:
    return (await world.pool()).num_watches == 0


async def test_a_blocks_number_is_that_of_its_name_and_so_the_same_after_every_restart(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    await generate(await world.client(engine), PROMPT, 1)
    spec = engine.engine.memory.session.pool.spec  # type: ignore[union-attr]
    name, expected = sha256(spec.SerializeToString(deterministic=True) + b"\0").digest(), {}
    for path in sorted(blocks_of(PROMPT), key=len):
        name = sha256(name + np.array(path[-BLOCK_SIZE:], "<i4").tobytes()).digest()
        expected[int.from_bytes(name[:8], "little", signed=True)] = path
    async with subscribed(engine.address) as index:
        await index.until(PROMPT)
        assert index.paths == expected


async def test_another_tenants_tokens_are_never_told(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    secret, open_to_all = [400, *range(1, 12)], [*range(60, 72)]
    async with subscribed(engine.address) as index:
        await generate(client, secret, 1, tenant="a")
        await generate(client, open_to_all, 1)
        await index.until(open_to_all)
    await generate(client, [*secret, 13, 14, 15, 16], 1, tenant="a")
    async with subscribed(engine.address) as index:
        await index.until(open_to_all)


async def test_numbers_go_on_from_those_that_the_gateway_had(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    await generate(await world.client(engine), PROMPT, 1)
    async with subscribed(engine.address, 41) as index:
        await index.until(PROMPT)
        assert (index.num_cleared, index.last_number) == (1, 43)
    async with subscribed(engine.address, kv_events._MAX_NUMBER) as index:
        await index.until(PROMPT)
    async with subscribed(engine.address, kv_events._MAX_NUMBER + 1) as index:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await index.next()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_after_a_restart_of_the_cache_service_all_is_cleared_and_told_anew(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    await generate(client, PROMPT, 1)
    other = [*range(70, 82)]
    async with subscribed(engine.address) as index:
        await index.until(PROMPT)
        await world.stop_cache()
        await index.until()  # at once: a gateway should not send prompts for what is gone
        assert index.num_cleared == 2
        async with subscribed(engine.address) as late:
            await late.next()  # is answered while there is no cache service, too
            await world.start_cache()
            await until(lambda: has_session(engine))
            await generate(client, other, 1)
            await late.until(other)
        await index.until(other)
        assert index.num_cleared == 2, "nothing was told in between"


async def has_session(engine: Any) -> bool:
    return engine.engine.memory is not None


async def test_a_cache_service_that_has_no_watch_left_is_asked_again(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    asked: list[Any] = []
    monkeypatch.setattr(kv_events, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(watch_streams, "MAX_WATCHES", 0)
    monkeypatch.setattr(watch_streams, "OutOfWatches", _noted(watch_streams.OutOfWatches, asked))
    async with subscribed(engine.address) as index:
        await index.next()

        async def is_refused_again() -> bool:
            return len(asked) > 1

        await until(is_refused_again)
        monkeypatch.setattr(watch_streams, "MAX_WATCHES", 1)
        await generate(client, PROMPT, 1)
        await index.until(PROMPT)
        assert index.num_cleared == 1


def _noted(error: Any, made: list[Any]) -> Any:
    def make(*args: Any, **details: Any) -> Any:
        made.append(args)
        return error(*args, **details)

    return make


async def test_a_gateway_that_is_too_slow_starts_again_and_nothing_piles_up(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_WAITING_TOKENS", 100 * BLOCK_SIZE)
    await world.start_cache(num_blocks=300)
    engine = await world.start_engine()
    client = await world.client(engine)
    session = await (await world.cache_client()).open_session(engine.engine.memory.session.pool.spec)  # type: ignore[union-attr]
    prompt: list[int] = []
    async with aclosing(kv_events.batches(engine.engine, "", 0)) as batches:
        index = Index(batches)
        await index.next()
        await generate(client, PROMPT, 1)
        await index.until(PROMPT)
        first = 0
        while not (await world.pool()).num_lagged_watches:  # it reads nothing more, until the way to it is full
            first += 1
            prompt = [first % 500, *(number % 500 for number in range(first, first + 60 * BLOCK_SIZE - 1))]
            await generate(client, prompt, 1)
            await session.clear_prefix_cache()
        await generate(client, prompt, 1)
        while index.num_cleared == 1:
            await index.next()
        await index.until(prompt)
        assert index.num_cleared == 2


async def test_the_call_ends_in_good_order_with_the_engine(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    async with subscribed(engine.address) as index:
        await index.next()
        engine.engine.stop()
        with pytest.raises(StopAsyncIteration):
            await index.next()


async def test_a_connection_that_pings_without_a_pause_is_not_sent_away(world: Services) -> None:
    """Gateways ping each second, also where a stream of events says nothing for hours."""
    await world.start_cache()
    engine = await world.start_engine()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(engine.address.removeprefix("unix:"))
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS))
        for number in range(50):
            connection.sendall(_frame(_PING, number.to_bytes(8, "big")))
            kind, is_ack, payload = await asyncio.to_thread(_next_frame, connection)
            while kind != _PING or not is_ack:
                assert kind != _GO_AWAY, payload
                kind, is_ack, payload = await asyncio.to_thread(_next_frame, connection)
            assert int.from_bytes(payload, "big") == number


def _frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


def _next_frame(connection: socket.socket) -> tuple[int, bool, bytes]:
    """Kind, whether it has the flag ACK, payload."""
    head = _receive(connection, 9)
    return head[3], bool(head[4] & _ACK), _receive(connection, int.from_bytes(head[:3], "big"))


def _receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        assert part, "the connection was closed"
        found += part
    return found
