"""How often streams are written changes nothing of what they bring."""

import asyncio

import grpc
import pytest

from kvkeeper.client import GenerateOptions, Sampling
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from tests.support.models.odd_models import LateGate, late_gate_model
from tests.support.processes.service_pair import Services, generate, toy_output

NUM_TOKENS = 40
PROMPTS = [[1, 2, 3 + number] for number in range(8)]


async def messages(address: str, prompt: list[int], gate: LateGate) -> list[pb.GenerateResponse]:
    """All of a request; the gate, at which the second token waits, is opened once the first is here."""
    found = []
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(address) as channel:
        async for message in pb_grpc.EngineServiceStub(channel).Generate(request):
            found.append(message)
            gate.is_open.set()
    return found


@pytest.mark.parametrize("fronts", [0, 1])
@pytest.mark.parametrize(("interval_ms", "least", "most"), [(0.0, NUM_TOKENS, NUM_TOKENS), (1000.0, 2, 10)])
async def test_tokens_that_come_meanwhile_are_one_message_unless_the_interval_is_0(
    world: Services, interval_ms: float, least: int, most: int, fronts: int
) -> None:
    await world.start_cache()
    gate = LateGate(len(PROMPTS[0]) + 1)
    engine = await world.start_engine(late_gate_model(gate), stream_interval_ms=interval_ms, fronts=fronts)
    found = await messages(engine.address, PROMPTS[0], gate)
    assert [token for message in found for token in message.token_ids] == toy_output(PROMPTS[0], NUM_TOKENS)
    assert least <= len(found) <= most
    assert found[-1].HasField("usage")
    assert len(found[0].token_ids) == 1, "the first token does not wait for others"


@pytest.mark.parametrize("interval_ms", [0.0, 5.0, 1000.0])
async def test_output_is_the_same_whatever_the_interval(world: Services, interval_ms: float) -> None:
    client = await world.serve(stream_interval_ms=interval_ms)

    async def followed(prompt: list[int]) -> list[int]:
        sampling = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        generation = client.follow(await client.submit(prompt, GenerateOptions(sampling=sampling)))
        return [token async for chunk in generation for token in chunk.token_ids]

    sampling = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)
    found = await asyncio.gather(*(generate(client, prompt, NUM_TOKENS, sampling, n=2) for prompt in PROMPTS))
    expected = [toy_output(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [one.token_ids for one in found] == [[token_ids, token_ids] for token_ids in expected]
    assert all(one.reasons == ["length", "length"] and one.usage.new_tokens == 2 * NUM_TOKENS for one in found)
    assert await asyncio.gather(*map(followed, PROMPTS)) == expected
