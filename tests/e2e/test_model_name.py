"""--model-name: what clients and people are told, and that it says nothing of what is cached."""

from typing import Any

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvkeeper.engine_service.config import HASH_TOY
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate

PROMPT = list(range(1, 4 * BLOCK_SIZE))


async def test_the_name_is_told_wherever_the_model_is_named(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(model_name="acme/toy", vllm_metrics=True)
    client = await world.client(engine)
    assert (await client.model()).model_id == "acme/toy"
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub: Any = VllmEngineStub(channel)
        told = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert told.served_model_name == "acme/toy"
    assert "toy" not in told.model_path + told.tokenizer_path, "no path of ours to look up"
    labels = [sample.labels for family in engine.service.metrics() for sample in family.samples]
    named = {label[key] for label in labels for key in ("model", "model_name", "gen_ai_request_model") if key in label}
    assert named == {"acme/toy"}
    (session,) = (await (await world.cache_client()).stats()).sessions
    assert "acme/toy" in session.client_name


async def test_engines_share_what_is_cached_under_different_names(world: Services) -> None:
    await world.start_cache()
    first, second = [await world.client(await world.start_engine(model_name=name)) for name in ("acme/toy", "")]
    assert ((await first.model()).model_id, (await second.model()).model_id) == ("acme/toy", HASH_TOY)
    assert (await generate(first, PROMPT, 4)).usage.cached_tokens == 0
    assert (await generate(second, PROMPT, 4)).usage.cached_tokens == 3 * BLOCK_SIZE
