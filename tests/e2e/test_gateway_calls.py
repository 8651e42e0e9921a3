"""Calls of the gateway's protocol without a gateway: what it would not show."""

from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvkeeper.engine.v1 import engine_service_pb2 as own_pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as own_grpc
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.models.odd_models import LateGate, late_gate_model
from tests.support.processes.service_pair import Services, toy_output
from tests.support.worlds.cache_api import refusal

pytestmark = pytest.mark.in_turn

NUM_TOKENS = 40
PROMPT = [1, 2, 3]
SAMPLING = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


async def tokenizer_of(address: str) -> list[pb.GetTokenizerChunk]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VllmEngineStub(channel)
        return [chunk async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest())]


async def test_a_model_without_a_tokenizer_has_none_to_give(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    refused = await refusal(tokenizer_of(engine.address))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_IMPLEMENTED")


async def gate_world(world: Services, fronts: int) -> tuple[str, LateGate]:
    """An engine whose second token waits for the gate, and whose others come at once; streams are as they are by default."""
    await world.start_cache()
    gate = LateGate(len(PROMPT) + 1)
    return (await world.start_engine(late_gate_model(gate), fronts=fronts)).address, gate


@pytest.mark.parametrize("fronts", [0, 1])
async def test_a_chunk_has_one_token_however_many_come_together(world: Services, fronts: int) -> None:
    address, gate = await gate_world(world, fronts)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VllmEngineStub(channel)
        request = vllm_pb.GenerateRequest(
            request_id="a",
            tokenized=vllm_pb.TokenizedInput(input_ids=PROMPT),
            sampling_params=vllm_pb.SamplingParams(**SAMPLING, logprobs=1),
            stream=True,
        )
        found = []
        async for told in stub.Generate(request):
            found.append(told)
            gate.is_open.set()
    chunks = [told.chunk for told in found if told.HasField("chunk")]
    assert [list(chunk.token_ids) for chunk in chunks] == [[token] for token in toy_output(PROMPT, NUM_TOKENS)]
    assert [list(chunk.output_logprobs.token_ids) for chunk in chunks] == [list(chunk.token_ids) for chunk in chunks]
    assert found[-1].complete.completion_tokens == NUM_TOKENS


async def test_they_do_come_together(world: Services) -> None:
    """So that the test above has something to take apart."""
    address, gate = await gate_world(world, 0)
    async with grpc.aio.insecure_channel(address) as channel:
        request = own_pb.GenerateRequest(token_ids=own_pb.TokenIds(ids=PROMPT), sampling=own_pb.SamplingParams(**SAMPLING))
        num_tokens = []
        async for told in own_grpc.EngineServiceStub(channel).Generate(request):
            num_tokens.append(len(told.token_ids))
            gate.is_open.set()
    assert max(num_tokens) > 1


@pytest.mark.parametrize("fronts", [0, 1])
async def test_a_text_has_as_many_tokens_behind_it_as_fit(world: Services, fronts: int) -> None:
    await world.start_cache(num_blocks=1024, pool_memory=64 << 20)
    engine = await world.start_engine(model_folder=DEMO_MODEL_DIR, block_size=16, max_tokens_per_sequence=400, fronts=fronts)
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub: Any = VllmEngineStub(channel)
        params = vllm_pb.SamplingParams(temperature=0, ignore_eos=True)
        request = vllm_pb.GenerateRequest(request_id="a", text="def fibonacci(n):", sampling_params=params)
        (told,) = [told async for told in stub.Generate(request)]
        asked = own_pb.TokenizeRequest(text=request.text)
        num_prompt_tokens = len((await own_grpc.EngineServiceStub(channel).Tokenize(asked)).token_ids)
    assert told.complete.prompt_tokens == num_prompt_tokens
    assert told.complete.completion_tokens == 400 - num_prompt_tokens
    assert told.complete.completion_tokens > 256, "the default of our own protocol"
