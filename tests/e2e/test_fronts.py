"""Streams in front processes: the same output as without them, and what dies with a front and what does not."""

import asyncio
import os
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Sampling
from kvkeeper.common.trust.caller import Role
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.serving.fronts import Fronts
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, toy_output, until
from tests.support.trust.trusting_services import trusting
from tests.support.worlds.cache_api import failure

pytestmark = pytest.mark.in_turn

PROMPT = "import os\nimport sys\n\n\ndef main():\n    "
FREE = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True, max_tokens=24)
WILD = replace(FREE, temperature=2.0, top_k=0, top_p=1.0, seed=3)
PROMPT_TOKENS = [1, 2, 3]


def cases(stop: str, stop_token: int) -> dict[str, GenerateOptions]:
    """stop: a piece of the free text, across the edges of tokens."""
    stopped = replace(FREE, stop=("never in it", stop))
    told = {"num_logprobs": 2, "num_prompt_logprobs": 1}
    return {
        "text": GenerateOptions(sampling=FREE),
        "characters of many tokens": GenerateOptions(sampling=replace(WILD, max_tokens=40)),
        "stop string": GenerateOptions(sampling=stopped),
        "stop strings of several": GenerateOptions(sampling=replace(WILD, stop=("e", "st")), n=3),
        "stop string with log probabilities": GenerateOptions(sampling=replace(stopped, **told), n=2),
        "held back at the end": GenerateOptions(sampling=replace(FREE, stop=(stop[0] + "\0",), max_tokens=1)),
        "special tokens": GenerateOptions(
            sampling=replace(WILD, keep_special_tokens=True, allowed_token_ids=(*range(4), stop_token), stop=(stop,))
        ),
        "one token": GenerateOptions(sampling=replace(FREE, max_tokens=1)),
        "stop string behind the fewest tokens": GenerateOptions(sampling=replace(stopped, min_tokens=20), n=2),
        "bad words": GenerateOptions(sampling=replace(FREE, bad_words=(stop.strip() or "self",), logit_bias={stop_token: -9})),
        "beams and the fewest tokens": GenerateOptions(
            sampling=replace(stopped, min_tokens=20), n=2, beam_search=BeamSearch(2)
        ),
        "stop token": GenerateOptions(sampling=replace(FREE, stop_token_ids=(stop_token,))),
        "log probabilities": GenerateOptions(sampling=replace(FREE, **told)),
        "best of": GenerateOptions(sampling=WILD, n=2, best_of=3),
        "best of with stop strings": GenerateOptions(sampling=replace(WILD, stop=("e",)), n=2, best_of=3),
        "beams": GenerateOptions(sampling=FREE, n=2, beam_search=BeamSearch(2)),
        "beams with stop strings": GenerateOptions(sampling=stopped, beam_search=BeamSearch(2)),
        "constraint": GenerateOptions(sampling=replace(WILD, regex="[a-c]{3,9}")),
        "constraint with stop string": GenerateOptions(sampling=replace(WILD, regex="[a-c]{9}", stop=("c",))),
    }


async def collected(chunks: Any) -> dict[str, object]:
    """Everything that a stream brings, whatever its messages were."""
    texts, tokens, logprobs = defaultdict[int, str](str), defaultdict[int, list[int]](list), defaultdict[int, list[Any]](list)
    reasons: dict[int, str | None] = {}
    async for chunk in chunks:
        assert reasons.get(chunk.index) is None, "nothing comes after the end of a continuation"
        texts[chunk.index] += chunk.text
        tokens[chunk.index] += chunk.token_ids
        logprobs[chunk.index] += [
            (one.token_id, round(one.logprob, 3), one.rank) for one in (*chunk.prompt_logprobs, *chunk.logprobs)
        ]
        reasons[chunk.index] = chunk.finish_reason
    usage = {name: getattr(chunks.usage, name) for name in ("prompt_tokens", "new_tokens")}
    return {"texts": dict(texts), "tokens": dict(tokens), "reasons": reasons, "logprobs": dict(logprobs), "usage": usage}


async def all_output(client: AsyncEngineClient, asked: dict[str, GenerateOptions]) -> dict[str, object]:
    found = await asyncio.gather(*(collected(client.generate(PROMPT, options)) for options in asked.values()))
    submitted = await client.submit(PROMPT, asked["stop string"])
    followed = await collected(client.follow(submitted))
    result = await client.result(submitted, DEADLINE_S)
    return {
        **dict(zip(asked, found, strict=True)),
        "followed": followed,
        "submitted": [(one.text, one.token_ids, one.finish_reason) for one in result.outputs],
    }


async def test_output_is_the_same_however_many_fronts_there_are(world: Services) -> None:
    model = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))
    client = await world.serve(model, block_size=16, fronts=0, cache={"num_blocks": 256})
    free = await generate(client, PROMPT, 24, FREE)
    asked = cases(free.texts[0][10:14], free.token_ids[0][9])
    expected = await all_output(client, asked)
    stop: Any = expected["stop string"]
    assert stop["reasons"] == {0: "stop"}
    assert 0 < stop["usage"]["new_tokens"] < 24
    for fronts, address, interval_ms in ((1, f"unix:{world.folder}/one", 16.0), (3, "127.0.0.1:0", 0.0)):
        engine = await world.start_engine(model, block_size=16, fronts=fronts, listen=address, stream_interval_ms=interval_ms)
        found = await all_output(await world.client(engine), asked)
        assert found == expected
        async with grpc.aio.insecure_channel(engine.address) as channel:  # calls of their own, of one connection each
            request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
            request.sampling.repetition_penalty = 1.0
            messages = [message async for message in pb_grpc.EngineServiceStub(channel).Generate(request)]
        assert "".join(message.text for message in messages) == free.texts[0]
        assert messages[-1].usage.new_tokens == 24
    await world.wait_idle()


def fronts_of(engine: RunningServer) -> Fronts:
    return engine._fronts


async def test_a_front_that_dies_ends_its_streams_and_no_submitted_request(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(fronts=1)
    client = await world.client(engine)
    prompt = [GATE_TOKEN, *PROMPT_TOKENS]
    submitted = await client.submit(prompt, GenerateOptions(sampling=replace(FREE, max_tokens=9)))
    blocked = client.generate([GATE_TOKEN], GenerateOptions(sampling=FREE))
    waiting = asyncio.create_task(collected(blocked))
    await until(lambda: has_requests(engine, 2))
    old = fronts_of(engine).processes
    os.kill(old[0], signal.SIGKILL)
    broken = await failure(waiting)
    assert broken.code is grpc.StatusCode.UNAVAILABLE
    await until(lambda: has_requests(engine, 1))
    gate.set()
    again = await world.client(engine, retry_s=DEADLINE_S)  # until the front is back
    result = await again.result(submitted, DEADLINE_S)
    assert list(result.outputs[0].token_ids) == toy_output(prompt, 9)
    assert (await generate(again, PROMPT_TOKENS, 5)).token_ids == [toy_output(PROMPT_TOKENS, 5)]
    assert fronts_of(engine).processes != old
    assert fronts_of(engine).num_restarts == 1
    await world.wait_idle()


async def has_requests(engine: RunningServer, count: int) -> bool:
    return len(engine.engine.requests.generations) == count


async def test_a_client_that_goes_away_ends_its_request(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(fronts=1)
    client = await world.client(engine)
    leaving = asyncio.create_task(collected(client.generate([GATE_TOKEN], GenerateOptions(sampling=FREE))))
    named = GenerateOptions(sampling=FREE, request_id="named")
    cancelled = asyncio.create_task(collected(client.generate([GATE_TOKEN, 1], named)))
    await until(lambda: has_requests(engine, 2))
    leaving.cancel()
    await until(lambda: has_requests(engine, 1))
    await client.cancel("named")
    assert (await cancelled)["reasons"] == {0: "cancelled"}
    gate.set()
    await world.wait_idle()
    await until(lambda: no_streams(engine))


async def no_streams(engine: RunningServer) -> bool:
    return not engine.service.num_streams


async def test_errors_are_told_with_their_reasons(world: Services) -> None:
    client = await world.serve(fronts=1)
    assert (await failure(generate(client, [1] * 10_000))).reason == "NEVER_FITS"
    unknown = await failure(client.result("nobody knows it"))
    assert (unknown.reason, unknown.code) == ("UNKNOWN_REQUEST", grpc.StatusCode.NOT_FOUND)
    no_text = await failure(generate(client, [1], sampling=replace(FREE, stop=("x",))))
    assert (no_text.reason, no_text.metadata["field"]) == ("INVALID_FIELD", "sampling.stop")


async def test_health_is_that_of_the_engine(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(fronts=1)
    name = health_pb2.HealthCheckRequest(service="kvkeeper.engine.v1.EngineService")
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(name, timeout=DEADLINE_S)).status == health_pb2.HealthCheckResponse.SERVING
        await world.stop_cache()

        async def is_away() -> bool:
            return bool((await stub.Check(name, timeout=DEADLINE_S)).status == health_pb2.HealthCheckResponse.NOT_SERVING)

        await until(is_away)


async def test_the_gate_is_in_the_front_and_the_engine_knows_who_calls(tmp_path: Path) -> None:
    async with trusting(tmp_path) as services:
        await services.start_cache()
        engine = await services.start_engine(fronts=2)
        await engine.wait_ready()
        own = await services.engine_client(engine, services.credentials(Role.CLIENT, "a"))
        other = await services.engine_client(engine, services.credentials(Role.CLIENT, "b"))
        request_id = await own.submit(PROMPT_TOKENS, GenerateOptions(sampling=replace(FREE, max_tokens=4)))
        assert (await own.result(request_id, DEADLINE_S)).outputs, "the owner finds it"
        assert (await failure(other.result(request_id))).reason == "UNKNOWN_REQUEST"
        assert (await failure(generate(other, PROMPT_TOKENS, 4, tenant="a"))).reason == "TENANT_NOT_ALLOWED"
        # Another process may refuse the call before gRPC has sent its message, which gRPC then takes for a broken connection.
        reader = await services.engine_client(engine, services.credentials(Role.READER), retry_s=20)
        refused = await failure(generate(reader, PROMPT_TOKENS, 4))
        assert refused.reason == "ROLE_NOT_ALLOWED"

        async def are_counted() -> bool:
            return bool(fronts_of(engine).refused["ROLE_NOT_ALLOWED"]) and bool(
                engine.guard.refused.counts["TENANT_NOT_ALLOWED"]
            )

        await until(are_counted)
