"""Calls of the gateway's protocol that are refused by what the model is, without a gateway."""

from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvkeeper.client.errors import error_of
from tests.support.processes.service_pair import Services


async def tokenizer_of(address: str) -> list[pb.GetTokenizerChunk]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VllmEngineStub(channel)
        return [chunk async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest())]


async def test_a_model_without_a_tokenizer_has_none_to_give(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tokenizer_of(engine.address)
    assert (refused.value.code(), error_of(refused.value).reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED")
