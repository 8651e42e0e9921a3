"""Text, constraints and messages that are too much: each is refused with its reason, and takes nothing from other clients."""

import asyncio
import dataclasses
import functools

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvkeeper.client import AsyncEngineClient, KvkeeperError, Sampling
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.outputs import constraint as constraints
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import Services, generate, until
from tests.support.worlds.cache_api import failure, refusal

FREE = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)
PROMPT = "def main():\n    "
BOMB = "((a{100}){100}){100}"


@pytest.fixture
async def client(world: Services, demo_model: ServedModel) -> AsyncEngineClient:
    await world.start_cache()
    return await world.client(await world.start_engine(demo_model, block_size=16))


async def stub_of(world: Services, **options: object) -> pb_grpc.EngineServiceStub:
    """A channel to the engine that was started last."""
    channel = grpc.aio.insecure_channel(world.engines[-1].address, **options)  # type: ignore[arg-type]
    world.defer(channel.close)
    return pb_grpc.EngineServiceStub(channel)


# -- text


async def test_text_is_bounded_by_what_the_model_can_take_before_it_is_tokenised(
    world: Services, client: AsyncEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = await stub_of(world)
    model = await stub.GetModel(pb.GetModelRequest())
    limit = model.max_text_bytes
    assert limit == 32 * model.max_tokens_per_sequence < 1 << 20
    longest = " " * limit  # 32 in a token
    assert len((await stub.Tokenize(pb.TokenizeRequest(text=longest))).token_ids) == model.max_tokens_per_sequence
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kwargs: pytest.fail("it was tokenised"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=longest + "x")])
    for field, request in (
        ("text", pb.GenerateRequest(request_id="x", text=longest + "x")),
        ("chat", pb.GenerateRequest(request_id="x", chat=chat)),
    ):
        error = await refusal(stub.SubmitRequest(pb.SubmitRequestRequest(request=request)))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.metadata == {"field": field, "limit": str(limit)}
    error = await refusal(stub.Tokenize(pb.TokenizeRequest(text=longest + "x")))
    assert error.metadata == {"field": "text", "limit": str(limit)}
    error = await refusal(stub.Detokenize(pb.DetokenizeRequest(token_ids=[1] * (model.max_tokens_per_sequence + 1))))
    assert error.metadata == {"field": "token_ids", "limit": str(model.max_tokens_per_sequence)}


async def test_long_text_is_not_tokenised_where_streams_are_served(
    client: AsyncEngineClient, demo_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = demo_model.text.tokenizer
    assert tokenizer is not None
    text = PROMPT * 200 + "日本語 🙂"
    expected = tokenizer.encode(text)
    assert tokenizer.without_added(expected) == expected, "it adds nothing"
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kwargs: pytest.fail("it was tokenised here"))
    assert list(await client.tokenize(text)) == expected
    monkeypatch.setattr(Tokenizer, "decode", lambda *args, **kwargs: pytest.fail("it was put together here"))
    assert await client.detokenize(expected) == text
    monkeypatch.undo()
    assert (await generate(client, text, 4, FREE)).usage.prompt_tokens == len(expected)


@pytest.fixture
async def with_begin_token(world: Services, demo_model: ServedModel) -> AsyncEngineClient:
    """The demo model with a tokenizer that puts a token before each text, and one behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    begin, end = (("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>")))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[begin, end])
    text = ModelText(Tokenizer(backend, {}, frozenset({end[1]})))
    await world.start_cache()
    return await world.client(await world.start_engine(dataclasses.replace(demo_model, text=text), block_size=16))


async def test_what_tokenize_gave_becomes_the_text_again(with_begin_token: AsyncEngineClient) -> None:
    client = with_begin_token
    for text in ("", "x", PROMPT, "<s>", "<s>x</s>", "</s></s>", " naïve 日本語 🙂 "):
        ids = list(await client.tokenize(text))
        assert await client.detokenize(ids) == text
        assert await client.detokenize(ids, keep_special_tokens=True) == f"<s>{text}</s>"
        assert await client.detokenize(ids[1:-1]) == (text if not text.startswith("<s>") else text[3:]).removesuffix("</s>")


async def test_each_limit_of_text_is_a_setting_that_its_refusal_names(world: Services, demo_model: ServedModel) -> None:
    limits = {"max_text_bytes": 2048, "max_constraint_bytes": 1024, "max_stop_strings": 2, "max_stop_bytes": 3}
    client = await world.serve(demo_model, block_size=16, **limits)
    told = await client.model()
    assert {name: getattr(told, name) for name in limits} == limits
    schema = '{"type": "string", "description": "' + "x" * 1000 + '"}'
    chat = [{"role": "user", "content": "x" * 1024}, {"role": "user", "content": "x" * 1025}]
    refused: list[tuple[str, str, object, Sampling]] = [
        ("text", "max_text_bytes", "x" * 2049, FREE),
        ("chat", "max_text_bytes", chat, FREE),
        ("sampling.regex", "max_constraint_bytes", PROMPT, Sampling(regex="a" * 1025)),
        ("sampling.json_schema", "max_constraint_bytes", PROMPT, Sampling(json_schema=schema)),
        ("sampling.choices", "max_constraint_bytes", PROMPT, Sampling(choices=("a" * 512, "b" * 513))),
        ("sampling.choices", "max_constraint_bytes", PROMPT, Sampling(choices=("-" * 512,))),
        ("sampling.stop", "max_stop_strings", PROMPT, Sampling(stop=("a", "b", "c"))),
        ("sampling.stop", "max_stop_bytes", PROMPT, Sampling(stop=("abcd",))),
    ]
    for field, name, prompt, sampling in refused:
        ended = await failure(generate(client, prompt, 4, sampling))
        assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), field
        flag = "--" + name.replace("_", "-")
        assert ended.metadata == {"field": field, "limit": str(limits[name]), "flag": flag}, field
    taken = Sampling(regex="(" + "a|" * 500 + "a)", stop=("abc", "b"))
    assert (await generate(client, " " * 2048, 4, taken)).reasons != [None]


# -- constraints


async def test_a_constraint_that_takes_too_much_ends_alone(client: AsyncEngineClient) -> None:
    expected = await generate(client, PROMPT, 60, FREE)
    good = asyncio.create_task(generate(client, PROMPT, 60, FREE))
    hostile = [generate(client, PROMPT, 8, Sampling(regex=BOMB)) for _ in range(6)]
    for error in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(error, KvkeeperError)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_COMPLEX")
        assert error.metadata == {"field": "sampling.regex", "exceeded": "states"}
    assert (await good).token_ids == expected.token_ids
    assert (await client.stats()).num_failed_requests == 0, "none of them came as far as the batch"


async def test_a_constraint_that_nothing_can_match_is_refused_at_once(client: AsyncEngineClient) -> None:
    with pytest.raises(KvkeeperError, match="no text") as refused:
        await generate(client, PROMPT, 8, Sampling(regex=r"[^\x{0}-\x{10FFFF}]"))
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.value.metadata == {"field": "sampling.regex"}


async def test_masks_that_cost_too_much_end_their_request_alone(
    client: AsyncEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await generate(client, PROMPT, 40, FREE)
    monkeypatch.setattr(constraints, "Account", functools.partial(constraints.Account, at_once_s=0, per_token_s=0))
    good = asyncio.create_task(generate(client, PROMPT, 40, FREE))
    ended = await failure(generate(client, PROMPT, 40, Sampling(regex="[a-z]{50}"), n=3))
    assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_COMPLEX")
    assert ended.metadata == {"field": "sampling.regex", "exceeded": "time"}
    assert (await good).token_ids == expected.token_ids


# -- messages


async def test_nothing_compressed_is_taken(world: Services, client: AsyncEngineClient) -> None:
    from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
    from kvkeeper.cache.v1 import cache_service_pb2_grpc as cache_grpc

    stub = await stub_of(world, compression=grpc.Compression.Gzip)
    channel = grpc.aio.insecure_channel(world.cache.address, compression=grpc.Compression.Deflate)
    world.defer(channel.close)
    for call in (
        stub.Tokenize(pb.TokenizeRequest(text="x" * 100)),
        cache_grpc.CacheServiceStub(channel).GetCapabilities(cache_pb.GetCapabilitiesRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert list(await client.tokenize("x" * 100))


async def test_what_open_requests_hold_is_bounded(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(request_memory=1 << 20)
    client, stub = await world.client(engine), await stub_of(world)
    assert (await stub.GetModel(pb.GetModelRequest())).request_memory == 1 << 20
    metadata = {f"{place:064}": "m" * 256 for place in range(16)}

    def request(place: int) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(max_tokens=1)
        return pb.GenerateRequest(
            request_id=str(place), token_ids=pb.TokenIds(ids=[GATE_TOKEN]), metadata=metadata, sampling=sampling
        )

    fitting = (1 << 20) // (4096 + 4 * request(10).ByteSize())
    for place in range(10, 10 + fitting):
        await stub.SubmitRequest(pb.SubmitRequestRequest(request=request(place)))
    error = await refusal(stub.SubmitRequest(pb.SubmitRequestRequest(request=request(99))))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MUCH_HELD")
    assert error.metadata["limit"] == str(1 << 20)
    assert error.retry_after == 1.0
    await stub.CancelRequest(pb.CancelRequestRequest(request_id="10"))
    await stub.SubmitRequest(pb.SubmitRequestRequest(request=request(98)))
    assert (await refusal(stub.SubmitRequest(pb.SubmitRequestRequest(request=request(99))))).reason == "TOO_MUCH_HELD"
    gate.set()

    async def is_idle() -> bool:
        stats = await client.stats()
        return not stats.num_running_requests + stats.num_waiting_requests

    await until(is_idle)
    assert engine.service._admission.memory.num_bytes == 0
    for place in (96, 97):
        await stub.SubmitRequest(pb.SubmitRequestRequest(request=request(place)))
    bad = pb.GenerateRequest(text="a model without text")
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in stub.Generate(bad):
            pass
    await until(is_idle)
    assert engine.service._admission.memory.num_bytes == 0, "what was refused is not held either"


async def test_calls_are_let_in_by_windows_while_steps_are_computed(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(intake_percent=1)
    client, stub = await world.client(engine), await stub_of(world)
    turns = engine.turns
    assert turns.is_always_open, "nothing is computed"
    sampling = pb.SamplingParams(max_tokens=20)
    running = pb.GenerateRequest(request_id="a", token_ids=pb.TokenIds(ids=[GATE_TOKEN]), sampling=sampling)
    await stub.SubmitRequest(pb.SubmitRequestRequest(request=running))

    async def is_held() -> bool:
        return not turns.is_always_open

    await until(is_held)
    assert (await client.stats()).num_running_requests + (await client.stats()).num_waiting_requests == 1
    gate.set()
    await client.result("a", 20.0)

    async def is_open() -> bool:
        return turns.is_always_open

    await until(is_open)
