"""One engine takes the place of another: requests under way go on in it, and their clients notice nothing."""

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from kvkeeper.client import (
    AsyncEngineClient,
    BeamSearch,
    CallOptions,
    EngineClient,
    GenerateOptions,
    OutputChunk,
    Retention,
    Sampling,
    TokenLogprobs,
)
from kvkeeper.client.errors import to_error
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.server import RunningServer, StartError
from kvkeeper.engine_service.values.errors import Draining
from tests.support.models.odd_models import LateGate
from tests.support.processes.service_pair import Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure

PROMPT = [1, 2, 3]
NUM_BEFORE, NUM_ALL = 6, 40
NO_PATIENCE = CallOptions(retry_s=0)
TEXT_PROMPT = "import os\nimport sys\n\n\ndef main():\n    "


def greedy(max_tokens: int = NUM_ALL, **more: Any) -> GenerateOptions:
    return GenerateOptions(sampling=Sampling(temperature=0, repetition_penalty=1.0, max_tokens=max_tokens), **more)


@dataclasses.dataclass
class Delivered:
    """What a client got of one request, by continuation."""

    token_ids: dict[int, list[int]]
    texts: dict[int, str]
    reasons: dict[int, str]
    num_new: int
    num_prompt: int
    logprobs: dict[int, list[TokenLogprobs]] = dataclasses.field(default_factory=dict, compare=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] = dataclasses.field(default=(), compare=False)

    def all_logprobs(self) -> list[TokenLogprobs]:
        return [*self.prompt_logprobs, *(one for _, told in sorted(self.logprobs.items()) for one in told)]


def told_of(chunks: list[OutputChunk], usage: Any) -> Delivered:
    told = Delivered({}, {}, {}, usage.new_tokens, usage.prompt_tokens)
    for chunk in chunks:
        assert chunk.index not in told.reasons, "nothing comes after the end of a continuation"
        told.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        told.texts[chunk.index] = told.texts.get(chunk.index, "") + chunk.text
        told.logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
        told.prompt_logprobs += chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            told.reasons[chunk.index] = chunk.finish_reason
    return told


async def ask(client: AsyncEngineClient, prompt: Any, options: GenerateOptions) -> Delivered:
    generation = client.generate(prompt, options)
    return told_of([chunk async for chunk in generation], generation.usage)


async def is_closed(engine: RunningServer) -> bool:
    try:
        engine.engine.check_open()
    except Draining:
        return True
    return False


async def take_over(
    world: Services, giver: RunningServer, gate: LateGate, model: ServedModel | None = None, **options: Any
) -> RunningServer:
    """An engine that has taken the place of the giver, which stood in the middle of a step."""
    starting = asyncio.create_task(world.start_engine(model, take_over=giver.address, **options))
    await until(lambda: is_closed(giver))
    gate.is_open.set()
    return await starting


async def test_streams_go_on_without_a_token_missed_or_doubled(world: Services) -> None:
    await world.start_cache(num_blocks=512)
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    client = await world.client(giver)
    prompts = [[*PROMPT[:2], 3 + place] for place in range(8)]
    asking = [asyncio.create_task(generate(client, prompt, NUM_ALL)) for prompt in prompts]
    await gate.reached()
    taker = await take_over(world, giver, gate)
    for prompt, output in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert output.token_ids == [toy_output(prompt, NUM_ALL)]
        assert output.usage.new_tokens == NUM_ALL
    await asyncio.wait_for(giver.wait_end(), 20)
    assert giver.engine.stats.num_handed_over_requests == 8
    assert (await (await world.client(taker)).stats()).num_taken_over_requests == 8
    assert giver.engine.stats.num_new_tokens < 8 * NUM_ALL, "the giver did not make them"
    assert taker.engine.stats.num_completed_requests == 8
    assert giver.engine.stats.num_failed_requests == 0
    num_hand_offs = (await world.pool()).num_hand_offs
    assert num_hand_offs >= 1, "the blocks of a request that runs come along"
    num_prefill = giver.engine.stats.num_prefill_tokens + taker.engine.stats.num_prefill_tokens
    assert num_prefill == 8 * len(PROMPT), "no prompt token is computed again"
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert (await generate(await world.client(taker), [7])).token_ids == [toy_output([7], 8)]


async def test_the_client_for_threads_goes_on_as_well(world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)

    def follow(address: str) -> list[OutputChunk]:
        with EngineClient(address, NO_PATIENCE) as client, client.generate(PROMPT, greedy()) as generation:
            return list(generation)

    asking = asyncio.create_task(asyncio.to_thread(follow, giver.address))
    await gate.reached()
    await take_over(world, giver, gate)
    assert [token for chunk in await asking for token in chunk.token_ids] == toy_output(PROMPT, NUM_ALL)


DRAWN = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=7, max_tokens=30, ignore_eos=True)
SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
 "required": ["name", "count"], "additionalProperties": false}"""


def drawn(**more: Any) -> Sampling:
    return dataclasses.replace(DRAWN, **more)


KINDS = {
    "several continuations": GenerateOptions(n=3, sampling=DRAWN),
    "log probabilities": GenerateOptions(n=2, sampling=drawn(num_logprobs=2, num_prompt_logprobs=1)),
    "stop strings": GenerateOptions(n=4, sampling=drawn(stop=("()", "\n\n", "ion"))),
    "a regular expression": GenerateOptions(sampling=drawn(regex="[a-c]{25}[x-z]+", ignore_eos=False)),
    "a schema": GenerateOptions(sampling=drawn(max_tokens=60, json_schema=SCHEMA)),
    "penalties": GenerateOptions(sampling=drawn(repetition_penalty=1.5, frequency_penalty=0.5)),
    "rules about tokens": GenerateOptions(
        n=3,
        sampling=drawn(
            min_tokens=25, stop=("e", "i"), bad_words_token_ids=[[40, 41], [50]], logit_bias={30: 3}, bad_words=("import",)
        ),
    ),
    "best of": GenerateOptions(n=1, best_of=3, sampling=DRAWN),
    "beam search": GenerateOptions(n=2, beam_search=BeamSearch(4), sampling=Sampling(max_tokens=20)),
    "retention": GenerateOptions(retention=Retention(4, 12), sampling=drawn(max_tokens=40)),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_output_is_that_of_a_request_that_stays(kind: str, world: Services, demo_model: ServedModel) -> None:
    options = KINDS[kind]
    client = await world.serve(demo_model, block_size=8, cache={"num_blocks": 128, "pool_memory": 16 << 20})
    expected = await ask(client, TEXT_PROMPT, options)
    num_prompt = expected.num_prompt
    longest = max(map(len, expected.token_ids.values()))
    assert longest > 3
    giver, gate = await world.start_late_engine(num_prompt + min(longest, 10) - 2, demo_model, block_size=8)
    asking = asyncio.create_task(ask(await world.client(giver), TEXT_PROMPT, options))
    await gate.reached()
    taker = await take_over(world, giver, gate, demo_model, block_size=8)
    found = await asking
    assert found == expected
    for one, other in zip(found.all_logprobs(), expected.all_logprobs(), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), "computed anew, in chunks of other sizes"
    assert taker.engine.stats.num_completed_requests == 1
    if kind not in ("best of", "beam search"):
        assert taker.engine.stats.num_prefill_tokens == 0, "no token is computed again"
        assert 1 <= (await world.pool()).num_hand_offs <= len(expected.reasons)


async def test_a_drawn_seed_moves_along(world: Services) -> None:
    """Without a seed of the client's own: what the giver had drawn, the taker draws on."""
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    client = await world.client(giver)
    sampling = Sampling(temperature=5.0, repetition_penalty=1.0, max_tokens=NUM_ALL)
    asking = asyncio.create_task(ask(client, PROMPT, GenerateOptions(request_id="mine", sampling=sampling)))
    await gate.reached()
    seed = giver.engine.requests.generations["mine"].seed
    await take_over(world, giver, gate)
    seeded = dataclasses.replace(sampling, seed=seed - (1 << 64) * (seed >= 1 << 63))
    other = await world.client(await world.start_engine())
    assert (await asking).token_ids == (await ask(other, PROMPT, GenerateOptions(sampling=seeded))).token_ids


async def test_submitted_requests_are_found_where_they_went(world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    client = await world.client(giver)
    await client.submit(PROMPT, greedy(request_id="mine"))
    result = asyncio.create_task(client.result("mine", wait_s=20))
    following = client.follow("mine")
    first = await anext(following)
    await gate.reached()
    taker = await take_over(world, giver, gate)
    found = await result
    assert (found.state, list(found.outputs[0].token_ids)) == ("completed", toy_output(PROMPT, NUM_ALL))
    chunks = [first, *[chunk async for chunk in following]]
    assert [token for chunk in chunks for token in chunk.token_ids] == toy_output(PROMPT, NUM_ALL)
    await asyncio.wait_for(giver.wait_end(), 20)
    there = await world.client(taker)
    assert await there.submit(PROMPT, greedy(request_id="mine")) == "mine", "it is the same submission"
    assert (await there.result("mine")).usage == found.usage
    assert (await failure(there.submit(PROMPT, greedy(5, request_id="mine")))).reason == "DUPLICATE_REQUEST"


async def test_a_request_that_waits_moves_as_well(world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE, max_sequences=1)
    client = await world.client(giver)
    first = asyncio.create_task(generate(client, PROMPT, NUM_ALL))
    await gate.reached()
    second = asyncio.create_task(generate(client, [5, 6], NUM_ALL))

    async def are_there() -> bool:
        return len(giver.engine.requests.generations) == 2

    await until(are_there)
    await take_over(world, giver, gate)
    assert (await first).token_ids == [toy_output(PROMPT, NUM_ALL)]
    assert (await second).token_ids == [toy_output([5, 6], NUM_ALL)]


@pytest.mark.parametrize("change", ["revision", "compute_dtype", "sampling_defaults", "kv_format"])
async def test_a_foreign_engine_is_refused_and_nothing_changes(change: str, world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    toy = load_served_model(EngineConfig(model=HASH_TOY))
    if change == "sampling_defaults":
        foreign = dataclasses.replace(toy, sampling_defaults=dataclasses.replace(toy.sampling_defaults, top_k=5))
    else:
        foreign = dataclasses.replace(toy, **{change: "another"})  # type: ignore[arg-type]
    asking = asyncio.create_task(generate(await world.client(giver), PROMPT, NUM_ALL))
    await gate.reached()
    with pytest.raises(StartError, match=rf"--take-over {giver.address}: .*FOREIGN_ENGINE.*{change}"):
        await world.start_engine(foreign, take_over=giver.address)
    giver.engine.check_open()
    gate.is_open.set()
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_ALL)]
    assert giver.engine.stats.num_handed_over_requests == 0


async def test_where_none_answers_there_is_nothing_to_take_over(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(take_over=f"unix:{world.folder}/nothing")
    assert (await generate(await world.client(engine), PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_what_does_not_fit_the_taker_ends_where_it_is(world: Services) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    client = await world.client(giver)
    long = asyncio.create_task(generate(client, PROMPT, NUM_ALL))
    short = asyncio.create_task(generate(client, [5, 6], 12))
    await gate.reached()
    taker = await take_over(world, giver, gate, max_tokens_per_sequence=30)
    assert (await long).token_ids == [toy_output(PROMPT, NUM_ALL)]
    assert (await short).token_ids == [toy_output([5, 6], 12)]
    await asyncio.wait_for(giver.wait_end(), 20)
    assert (giver.engine.stats.num_completed_requests, taker.engine.stats.num_completed_requests) == (1, 1)


async def test_a_stream_whose_client_does_not_come_ends(world: Services) -> None:
    """The client of a Generate call that knows nothing of engines that move."""
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    async with grpc.aio.insecure_channel(giver.address) as channel:
        stream = pb_grpc.EngineServiceStub(channel).Generate(
            pb.GenerateRequest(
                request_id="mine",
                token_ids=pb.TokenIds(ids=PROMPT),
                sampling=pb.SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=200),
            )
        )
        await gate.reached()
        taker = await take_over(world, giver, gate, client_grace=0.0)
        with pytest.raises(grpc.aio.AioRpcError) as moved:
            _ = [answer async for answer in stream]
    error = to_error(moved.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "REQUEST_MOVED")
    assert error.metadata == {"address": taker.address, "request_id": "mine"}

    async def has_ended() -> bool:
        return not taker.engine.requests.generations

    await until(has_ended)
    assert taker.engine.stats.num_cancelled_requests == 1
    assert (await world.wait_idle()).num_referenced_blocks == 0
