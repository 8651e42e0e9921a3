"""Requests that take too long, by their own time-out or without progress: each ends with its tokens so far, and the reason."""

import asyncio
from typing import Any

import grpc
import pytest

from kvkeeper.client import (
    AsyncEngineClient,
    BeamSearch,
    CallOptions,
    GenerateOptions,
    KvkeeperError,
    OutputChunk,
    Sampling,
    transport,
)
from kvkeeper.engine_service.loop.time_limits import NUM_LOOKS, StallWatch
from kvkeeper.engine_service.outputs.generation import Generation
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.cut_proxy import cutting
from tests.support.processes.service_pair import Services, toy_output, until
from tests.support.worlds.cache_api import failure

PROMPT, NUM_MADE = [7, 8, 9], 5
LONG = Sampling(max_tokens=50, temperature=0, ignore_eos=True)


async def start(world: Services, **options: Any) -> AsyncEngineClient:
    """An engine that generates NUM_MADE tokens for the prompt and then makes no progress."""
    await world.start_cache()
    engine, _ = await world.start_late_engine(len(PROMPT) + NUM_MADE, **options)
    return await world.client(engine)


async def told(client: AsyncEngineClient, way: str, **options: Any) -> tuple[list[OutputChunk], int]:
    """What a request gave, chunk by chunk or as a whole, and its count of new tokens."""
    asked = GenerateOptions(sampling=LONG, **options)
    if way == "submitted":
        found = await client.result(await client.submit(PROMPT, asked), wait_s=20)
        assert (found.state, found.error) == ("completed", None)
        assert found.usage is not None
        return list(found.outputs), found.usage.new_tokens
    generation = client.generate(PROMPT, asked)
    chunks = [chunk async for chunk in generation]
    assert generation.usage is not None
    return chunks, generation.usage.new_tokens


WAYS = {
    "streamed": {"n": 2},
    "submitted": {},
    "best of": {"best_of": 3, "n": 2},
    "beams": {"beam_search": BeamSearch(2), "n": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", ["timed_out", "stalled"])
async def test_what_was_made_is_told_with_why_it_ended(world: Services, way: str, limit: str) -> None:
    client = await start(world, stall_timeout=0.4 if limit == "stalled" else 300.0)
    chunks, num_new = await told(client, way, timeout_ms=1000 if limit == "timed_out" else None, **WAYS[way])
    outputs: dict[int, list[int]] = {}
    for chunk in chunks:
        outputs.setdefault(chunk.index, []).extend(chunk.token_ids)
    assert sorted(outputs) == list(range(WAYS[way].get("n", 1)))
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [limit] * len(outputs)
    assert all(NUM_MADE - 1 <= len(tokens) <= NUM_MADE for tokens in outputs.values()), "a fork may be a token behind"
    assert num_new >= sum(len(tokens) for tokens in outputs.values())
    if way != "beams":
        assert outputs[0] == toy_output(PROMPT, len(outputs[0]))
    if way in ("best of", "beams"):
        assert all(chunk.cumulative_logprob is not None for chunk in chunks)


@pytest.mark.parametrize(
    ("timeout_ms", "reason", "names"),
    [(50, "TIMED_OUT", ("timeout_ms", "--timeout-ms", "50 ms")), (None, "STALLED", ("--stall-timeout", "0.3 s"))],
)
async def test_a_request_without_a_token_is_refused_with_what_to_change(
    world: Services, timeout_ms: int | None, reason: str, names: tuple[str, ...]
) -> None:
    client, _ = await world.serve_gated(stall_timeout=0.3)
    with pytest.raises(KvkeeperError) as late:
        async for _ in client.generate([GATE_TOKEN], GenerateOptions(sampling=LONG, timeout_ms=timeout_ms)):
            pass
    assert (late.value.code, late.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, reason)
    assert all(name in late.value.message for name in names)


async def test_without_a_time_out_nothing_ends_what_makes_progress(world: Services) -> None:
    """No limit on either side: the call has no deadline, and the engine no timer."""
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    client = await world.client(engine)
    generation = client.generate([GATE_TOKEN], GenerateOptions(request_id="mine", sampling=LONG))
    assert generation._stream._call.time_remaining() is None
    taking = asyncio.create_task(anext(generation))

    async def admitted() -> Generation | None:
        return engine.engine.requests.generations.get("mine")

    assert (await until(admitted)).timer is None
    gate.set()
    assert (await taking).token_ids
    assert (await client.model()).stall_timeout_ms == 300_000


async def test_a_stream_without_a_deadline_ends_without_an_answer(
    world: Services, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """As with an engine that was stopped, or a machine that has failed."""
    quick = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.ping_timeout_ms", 200)]
    options = [option for option in transport._CHANNEL_OPTIONS if option[0] not in dict(quick)]
    assert len(options) == len(transport._CHANNEL_OPTIONS) - len(quick)
    await world.start_cache()
    engine, _ = await world.start_gated_engine(listen=f"127.0.0.1:{unused_tcp_port}")
    monkeypatch.setattr(transport, "_CHANNEL_OPTIONS", (*options, *quick))
    async with cutting(engine.address) as proxy, AsyncEngineClient(proxy.address, CallOptions(retry_s=0)) as client:
        generation = client.generate([GATE_TOKEN], GenerateOptions(sampling=LONG))
        taking = asyncio.create_task(anext(generation))

        async def is_admitted() -> bool:
            return bool(engine.engine.requests.generations)

        await until(is_admitted)
        proxy.is_holding = True
        lost = await failure(asyncio.wait_for(taking, 20))
        assert lost.code is grpc.StatusCode.UNAVAILABLE


def test_only_what_is_the_same_at_each_look_is_stalled() -> None:
    watch = StallWatch[str]()
    for look in range(NUM_LOOKS):
        seen = {"stuck": 5, "slow": look // (NUM_LOOKS - 1), **({"paused": 1} if look != 3 else {})}
        assert watch.look(seen) == []
    assert watch.look({"stuck": 5, "slow": 1, "paused": 1}) == ["stuck"]
    assert watch.look({}) == []
    assert watch.look({"stuck": 5}) == [], "what was not running starts anew"
