"""Defaults of absent sampling fields, and the meaning of temperature 0: over the wire, with the demo model."""

import dataclasses

import pytest

from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from kvkeeper.client.engine.calls import generate_request
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.values.sampling_params import SamplingParams
from tests.support.processes.service_pair import Services, generate

PROMPT = "def fibonacci(n):\n    a, b = 0, 1\n    "
NUM_TOKENS = 64


async def client_of(world: Services, model: ServedModel, defaults: SamplingParams | None = None) -> AsyncEngineClient:
    await world.start_cache()
    served = model if defaults is None else dataclasses.replace(model, sampling_defaults=defaults)
    return await world.client(await world.start_engine(served, block_size=16))


async def ranks(client: AsyncEngineClient, **sampling: object) -> list[int]:
    """Ranks in the model's own distribution, before penalties, temperature and filters."""
    options = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=0, **sampling)  # type: ignore[arg-type]
    generation = client.generate(PROMPT, GenerateOptions(sampling=options))
    return [one.rank async for chunk in generation for one in chunk.logprobs]


async def test_temperature_0_takes_the_likeliest_token_each_time(world: Services, demo_model: ServedModel) -> None:
    client = await client_of(world, demo_model)
    assert await ranks(client, temperature=0) == [1] * NUM_TOKENS
    penalised = await ranks(client, temperature=0, repetition_penalty=1.3)
    assert max(penalised) > 1, "a penalty that is asked for applies at any temperature"


async def test_the_model_s_own_defaults_apply_where_a_field_is_absent(world: Services, demo_model: ServedModel) -> None:
    client = await client_of(world, demo_model, SamplingParams(top_k=1, repetition_penalty=1.3))
    told = (await client.model()).sampling_defaults
    assert (told.temperature, told.top_p, told.top_k, told.typical_p) == (1.0, 1.0, 1, 1.0)
    assert told.repetition_penalty == pytest.approx(1.3)
    assert told.max_tokens == 256
    by_default = await ranks(client)
    assert max(by_default) > 1, "the penalty of generation_config.json"
    assert await ranks(client, temperature=0) == by_default, "which applies at temperature 0 too"
    assert await ranks(client, repetition_penalty=1.0) == [1] * NUM_TOKENS, "unless the request says otherwise"


async def test_without_defaults_of_the_model_a_request_draws_from_its_whole_distribution(
    world: Services, demo_model: ServedModel
) -> None:
    client = await client_of(world, demo_model)
    told = (await client.model()).sampling_defaults
    assert (told.temperature, told.top_p, told.top_k, told.min_p, told.typical_p) == (1.0, 1.0, 0, 0.0, 1.0)
    assert (told.repetition_penalty, told.frequency_penalty, told.presence_penalty) == (1.0, 0.0, 0.0)
    neutral = Sampling(temperature=1, top_p=1, top_k=0, repetition_penalty=1, seed=3, ignore_eos=True)
    plain = await generate(client, PROMPT, NUM_TOKENS, Sampling(seed=3, ignore_eos=True))
    assert plain.token_ids == (await generate(client, PROMPT, NUM_TOKENS, neutral)).token_ids


def test_the_client_leaves_what_is_not_asked_for_to_the_model() -> None:
    assert generate_request("x", GenerateOptions()).sampling == pb.SamplingParams()
