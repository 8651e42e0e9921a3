"""Prompts computed by one engine, the rest by another: no block is copied, and clients notice nothing."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, Sampling
from kvkeeper.client.errors import to_error
from kvkeeper.common.service.settings import ConfigError
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.movement import prefill as prefill_part
from kvkeeper.engine_service.movement.messages import identity
from kvkeeper.engine_service.server import RunningServer
from tests.e2e.test_take_over import KINDS, TEXT_PROMPT, ask
from tests.support.models.odd_models import LateGate
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure

PROMPT = list(range(3, 40))
NUM_NEW = 20


async def start_decoder(
    world: Services, *helpers: RunningServer, model: ServedModel | None = None, **options: Any
) -> RunningServer:
    targets = ",".join(helper.address for helper in helpers)
    return await world.start_engine(model, role="decode", prefill=targets, **{"prefill_min_tokens": 1, **options})


async def start_pair(
    world: Services, model: ServedModel | None = None, **options: Any
) -> tuple[RunningServer, RunningServer, AsyncEngineClient]:
    """An engine for prompts, one for the rest, and a client of the latter."""
    helper = await world.start_engine(model, role="prefill", **options)
    decoder = await start_decoder(world, helper, model=model, **options)
    return helper, decoder, await world.client(decoder)


async def start_gated_pair(world: Services, **options: Any) -> tuple[RunningServer, RunningServer, AsyncEngineClient, LateGate]:
    """As start_pair; the engine for prompts stands still in the step that computes the last of PROMPT."""
    helper, gate = await world.start_late_engine(len(PROMPT), role="prefill")
    decoder = await start_decoder(world, helper, **options)
    return helper, decoder, await world.client(decoder), gate


async def is_empty(engine: RunningServer) -> None:
    async def has_none() -> bool:
        return not engine.engine.requests.generations

    await until(has_none)


def asked(engine: RunningServer) -> tuple[int, int]:
    """Prompts that others computed for an engine, and those that they did not."""
    stats = engine.engine.stats
    return stats.num_remote_prefills, stats.num_failed_remote_prefills


async def test_prompts_are_computed_in_one_engine_and_the_rest_in_the_other(world: Services) -> None:
    await world.start_cache(num_blocks=512)
    helper, decoder, client = await start_pair(world)
    prompts = [[place, *PROMPT] for place in range(8)]

    async def all_are_handed_over() -> bool:
        return helper.engine.stats.num_handed_over_requests == 8

    outputs = await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [toy_output(prompt, NUM_NEW)]
        assert (output.usage.new_tokens, output.usage.prompt_tokens) == (NUM_NEW, len(prompt))
    assert asked(decoder) == (8, 0)
    assert decoder.engine.stats.num_prefill_tokens == 0, "its blocks came along"
    assert helper.engine.stats.num_prefill_tokens == sum(map(len, prompts))
    assert helper.engine.stats.num_new_tokens <= 8 * 3, "it goes no further than it had begun by then"
    assert decoder.engine.stats.num_completed_requests == 8
    await until(all_are_handed_over)
    assert helper.engine.stats.num_completed_requests == 0
    assert decoder.engine.stats.first_token.histogram.counts.sum() == 8, "their times to the first token are the client's"
    pool = await world.wait_idle()
    assert (pool.num_hand_offs, pool.num_referenced_blocks) == (8, 0)


async def test_a_prompt_that_is_cached_is_found_by_the_other_engine(world: Services) -> None:
    await world.start_cache(num_blocks=512)
    _, _, client = await start_pair(world)
    await generate(client, PROMPT, NUM_NEW)
    again = await generate(client, [*PROMPT, 1, 2, 3, 4], NUM_NEW)
    assert again.usage.cached_tokens == len(PROMPT) - len(PROMPT) % 4


@pytest.mark.parametrize("kind", KINDS)
async def test_the_output_is_that_of_one_engine(kind: str, world: Services, demo_model: ServedModel) -> None:
    options = KINDS[kind]
    await world.start_cache(num_blocks=128, pool_memory=16 << 20)
    alone = await world.start_engine(demo_model, block_size=8)
    expected = await ask(await world.client(alone), TEXT_PROMPT, options)
    _, decoder, client = await start_pair(world, demo_model, block_size=8)
    found = await ask(client, TEXT_PROMPT, options)
    assert found == expected
    for one, other in zip(found.all_logprobs(), expected.all_logprobs(), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), "computed anew, in chunks of other sizes"
    is_local = kind in ("best of", "beam search")
    assert asked(decoder) == ((0, 0) if is_local else (1, 0))
    if not is_local:
        assert decoder.engine.stats.num_prefill_tokens == 0
        assert 1 <= (await world.pool()).num_hand_offs <= len(expected.reasons)


async def test_a_request_that_ends_with_its_first_token_ends_here(world: Services) -> None:
    await world.start_cache()
    _, decoder, client = await start_pair(world)
    output = await generate(client, PROMPT, 1)
    assert output.token_ids == [toy_output(PROMPT, 1)]
    assert output.usage.cached_tokens == 0, "what is found of it was computed for it"
    assert asked(decoder) == (1, 0)
    assert decoder.engine.stats.num_prefill_tokens <= 4, "from the cached prompt"
    assert (await generate(client, PROMPT, 1)).usage.cached_tokens == len(PROMPT) - len(PROMPT) % 4


async def test_submitted_requests_too(world: Services) -> None:
    await world.start_cache()
    _, decoder, client = await start_pair(world)
    greedy = GenerateOptions(sampling=Sampling(temperature=0, repetition_penalty=1.0, max_tokens=NUM_NEW), request_id="mine")
    await client.submit(PROMPT, greedy)
    found = await client.result("mine", wait_s=20)
    assert list(found.outputs[0].token_ids) == toy_output(PROMPT, NUM_NEW)
    assert asked(decoder) == (1, 0)


async def test_short_prompts_are_computed_here(world: Services) -> None:
    await world.start_cache()
    helper = await world.start_engine(role="prefill")
    decoder = await start_decoder(world, helper, prefill_min_tokens=len(PROMPT))
    client = await world.client(decoder)
    assert (await generate(client, PROMPT[1:])).token_ids == [toy_output(PROMPT[1:], 8)]
    assert asked(decoder) == (0, 0)
    await generate(client, PROMPT)
    assert asked(decoder) == (1, 0)


async def test_a_request_that_waits_for_its_prompt_is_listed_and_cancelled(world: Services) -> None:
    await world.start_cache()
    helper, decoder, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW, request_id="mine"))
    await gate.reached()
    assert [info.request_id for info in (await client.list_requests())] == ["mine"]
    await client.cancel("mine")
    output = await asking
    assert (output.token_ids, output.reasons) == ([[]], ["cancelled"])
    await is_empty(helper)
    gate.is_open.set()
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert asked(decoder) == (0, 0), "nothing failed"


async def test_a_client_that_goes_away_ends_the_prompt(world: Services) -> None:
    await world.start_cache()
    helper, decoder, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW))
    await gate.reached()
    asking.cancel()
    await is_empty(decoder)
    await is_empty(helper)
    gate.is_open.set()
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_a_prompt_that_takes_too_long_elsewhere_is_computed_here(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_failure = prefill_part._PrefillEngine.note_failure

    def rests_long(helper: prefill_part._PrefillEngine) -> None:
        """However long a busy machine takes for the rest of the request."""
        helper.next_rest_s = 1000.0
        note_failure(helper)

    monkeypatch.setattr(prefill_part._PrefillEngine, "note_failure", rests_long)
    await world.start_cache()
    helper, decoder, client, gate = await start_gated_pair(world, prefill_timeout=0.1)
    assert (await generate(client, PROMPT, NUM_NEW)).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert asked(decoder) == (0, 1)
    assert (await generate(client, PROMPT[1:], NUM_NEW)).token_ids == [toy_output(PROMPT[1:], NUM_NEW)]
    assert asked(decoder) == (0, 1), "an engine that failed is left alone for a while"
    gate.is_open.set()
    await is_empty(helper)


async def test_without_the_other_engine_all_goes_on_here(world: Services) -> None:
    await world.start_cache()
    helper, decoder, client = await start_pair(world)
    await helper.stop()
    assert (await generate(client, PROMPT, NUM_NEW)).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert asked(decoder) == (0, 1)


async def test_an_engine_that_ends_in_the_middle_of_a_prompt(world: Services) -> None:
    await world.start_cache()
    helper, _, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW))
    await gate.reached()
    stopping = asyncio.create_task(helper.stop())
    gate.is_open.set()
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_NEW)]
    await stopping
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_the_least_busy_of_several_engines_is_asked(world: Services) -> None:
    await world.start_cache(num_blocks=256)
    first, second = await world.start_engine(role="prefill"), await world.start_engine(role="prefill")
    client = await world.client(await start_decoder(world, first, second))
    await asyncio.gather(*(generate(client, [place, *PROMPT]) for place in range(6)))
    assert first.engine.stats.num_handed_over_requests == second.engine.stats.num_handed_over_requests == 3


async def test_an_engine_that_computes_something_else_is_left_alone(world: Services) -> None:
    await world.start_cache()
    toy = load_served_model(EngineConfig(model=HASH_TOY))
    helper = await world.start_engine(dataclasses.replace(toy, compute_dtype="another"), role="prefill")
    decoder = await start_decoder(world, helper)
    assert (await generate(await world.client(decoder), PROMPT)).token_ids == [toy_output(PROMPT, 8)]
    assert asked(decoder) == (0, 1)
    assert helper.engine.stats.num_prefill_tokens == 0


class WrongAnswers(pb_grpc.EngineServiceServicer):
    """An engine whose first tokens no model has."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:
        self.num_asked += 1
        yield pb.PrefillResponse(request=pb.HandedRequest(outputs=[pb.HandedOutput(token_ids=[1 << 31])]))


async def test_an_engine_that_answers_nonsense_breaks_one_request_and_is_left_alone(world: Services) -> None:
    await world.start_cache()
    wrong, server = WrongAnswers(), grpc.aio.server()
    pb_grpc.add_EngineServiceServicer_to_server(wrong, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    world.defer(lambda: server.stop(None))
    decoder = await world.start_engine(role="decode", prefill=address, prefill_min_tokens=1)
    client = await world.client(decoder)
    assert (await failure(generate(client, PROMPT, NUM_NEW))).reason == "REQUEST_FAILED"
    assert (await generate(client, PROMPT, NUM_NEW)).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert (wrong.num_asked, asked(decoder)) == (1, (0, 1))


async def test_the_cache_service_restarts_while_a_prompt_is_computed(world: Services) -> None:
    await world.start_cache()
    _, _, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW))
    await gate.reached()
    await world.stop_cache()
    await world.start_cache()
    gate.is_open.set()
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_the_engine_that_asked_is_replaced(world: Services) -> None:
    """Its request goes along, without the prompt that is under way elsewhere."""
    await world.start_cache()
    helper, decoder, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW))
    await gate.reached()
    taker = await world.start_engine(take_over=decoder.address)
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert taker.engine.stats.num_taken_over_requests == 1
    gate.is_open.set()
    await is_empty(helper)
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_the_engine_that_was_asked_is_replaced(world: Services) -> None:
    await world.start_cache()
    helper, decoder, client, gate = await start_gated_pair(world)
    asking = asyncio.create_task(generate(client, PROMPT, NUM_NEW))
    await gate.reached()
    taking = asyncio.create_task(world.start_engine(take_over=helper.address))
    assert (await asyncio.wait_for(asking, DEADLINE_S)).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert asked(decoder) == (0, 1)
    gate.is_open.set()
    assert (await taking).engine.stats.num_taken_over_requests == 0, "its client is elsewhere"


@asynccontextmanager
async def stub_of(engine: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield pb_grpc.EngineServiceStub(channel)


def prefill_request(prompt: list[int], **more: Any) -> pb.PrefillRequest:
    sampling = pb.SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=NUM_NEW)
    request = pb.GenerateRequest(request_id="theirs", token_ids=pb.TokenIds(ids=prompt), sampling=sampling, **more)
    return pb.PrefillRequest(engine=identity(load_served_model(EngineConfig(model=HASH_TOY))), request=request)


async def test_blocks_that_are_not_taken_are_released_when_the_call_ends(world: Services) -> None:
    await world.start_cache()
    helper = await world.start_engine(role="prefill")
    async with stub_of(helper) as stub:
        call = stub.Prefill(prefill_request(PROMPT))
        handed = (await call.read()).request
        tokens = list(handed.outputs[0].token_ids)
        assert tokens == toy_output(PROMPT, len(tokens))
        assert len(handed.outputs[0].offer) == 16
        assert not helper.engine.requests.generations or (await world.pool()).num_referenced_blocks
        call.cancel()
        await is_empty(helper)
        assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_what_has_no_first_tokens_is_refused(world: Services) -> None:
    await world.start_cache()
    helper = await world.start_engine(role="prefill")
    async with stub_of(helper) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Prefill(prefill_request(PROMPT, beam_search=pb.BeamSearch(num_beams=2))).read()
    assert to_error(refused.value).reason == "INVALID_FIELD"
    assert not helper.engine.requests.generations


async def test_each_role_refuses_the_other_ones_calls(world: Services) -> None:
    await world.start_cache()
    helper, decoder, _ = await start_pair(world)
    refused = await failure(generate(await world.client(helper), PROMPT))
    assert (refused.reason, refused.metadata) == ("WRONG_ROLE", {"role": "prefill"})
    async with stub_of(decoder) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as other:
            await stub.Prefill(prefill_request(PROMPT)).read()
    assert to_error(other.value).metadata == {"role": "decode"}


async def test_beams_stay_here(world: Services) -> None:
    await world.start_cache()
    _, decoder, client = await start_pair(world)
    await generate(client, PROMPT, beam_search=BeamSearch(2))
    assert asked(decoder) == (0, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefill": "unix:/a"}, "--prefill: with --role decode"),
        ({"prefill": "unix:/a", "role": "prefill"}, "--prefill: with --role decode"),
        ({"prefill": "unix:/a,nonsense", "role": "decode"}, "--prefill"),
        ({"role": "both of them"}, "--role"),
    ],
)
def test_roles_that_contradict_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**options)
