"""Every field of a request is held to its bounds, and a refusal leaves nothing behind."""

import math

import grpc
import pytest

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from tests.support.processes.service_pair import Services
from tests.support.worlds.cache_api import refusal

TOKENS = pb.TokenIds(ids=[1, 2])


def sampling(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=TOKENS, sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def beams(sampling: pb.SamplingParams | None = None, **fields: object) -> pb.GenerateRequest:
    search = pb.BeamSearch(**fields)  # type: ignore[arg-type]
    return pb.GenerateRequest(token_ids=TOKENS, beam_search=search, sampling=sampling)


def retention(sink: int, window: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=TOKENS, retention=pb.Retention(num_sink_tokens=sink, num_window_tokens=window))


def chat(*messages: pb.ChatMessage, **fields: bool) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=messages, **fields))


BAD = {
    "prompt": pb.GenerateRequest(),
    "token_ids": pb.GenerateRequest(token_ids=pb.TokenIds()),
    "text": pb.GenerateRequest(text="x" * ((1 << 20) + 1)),
    "chat": pb.GenerateRequest(chat=pb.Chat()),
    "chat many": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)),
    "chat.messages[0].role": chat(pb.ChatMessage(role="User")),
    "chat.messages[1].role": chat(pb.ChatMessage(role="tool"), pb.ChatMessage(content="x")),
    "chat.messages[0].tool_calls": chat(pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])),
    "chat.messages[0].tool_calls many": chat(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 129)),
    "chat.messages[0].tool_calls[1].name": chat(
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f"), pb.ToolCall(id="a", arguments="{}")])
    ),
    "chat.messages[0].tool_call_id": chat(pb.ChatMessage(role="assistant", tool_call_id="1")),
    "chat.add_generation_prompt": chat(
        pb.ChatMessage(role="user", content="x"), continue_final_message=True, add_generation_prompt=True
    ),
    "request_id": pb.GenerateRequest(token_ids=TOKENS, request_id="x" * 65),
    "tenant": pb.GenerateRequest(token_ids=TOKENS, tenant="x" * 65),
    "session_id": pb.GenerateRequest(token_ids=TOKENS, session_id="x" * 65),
    "reuse_hint": pb.GenerateRequest(token_ids=TOKENS, reuse_hint=3),  # type: ignore[arg-type]
    "retain_ms low": pb.GenerateRequest(token_ids=TOKENS, retain_ms=-1),
    "retain_ms high": pb.GenerateRequest(token_ids=TOKENS, retain_ms=3_600_001),
    "retain_ms of none": pb.GenerateRequest(token_ids=TOKENS, retain_ms=1, reuse_hint=pb.REUSE_HINT_NONE),
    "cache_salt long": pb.GenerateRequest(token_ids=TOKENS, cache_salt="s" * 257),
    "cache_salt not printable": pb.GenerateRequest(token_ids=TOKENS, cache_salt="s\n"),
    "metadata many": pb.GenerateRequest(token_ids=TOKENS, metadata={f"k{place}": "" for place in range(17)}),
    "metadata no key": pb.GenerateRequest(token_ids=TOKENS, metadata={"": "x"}),
    "metadata long key": pb.GenerateRequest(token_ids=TOKENS, metadata={"k" * 65: ""}),
    "metadata long value": pb.GenerateRequest(token_ids=TOKENS, metadata={"k": "x" * 257}),
    "retention.num_sink_tokens": retention(-1, 4),
    "retention.num_window_tokens": retention(4, 0),
    "n low": pb.GenerateRequest(token_ids=TOKENS, n=0),
    "n high": pb.GenerateRequest(token_ids=TOKENS, n=65),
    "beam_search.num_beams none": beams(),
    "beam_search.num_beams low": pb.GenerateRequest(token_ids=TOKENS, n=3, beam_search=pb.BeamSearch(num_beams=2)),
    "beam_search.num_beams high": beams(num_beams=65),
    "beam_search.length_penalty low": beams(num_beams=2, length_penalty=-10.5),
    "beam_search.length_penalty high": beams(num_beams=2, length_penalty=10.5),
    "beam_search.length_penalty nan": beams(num_beams=2, length_penalty=math.nan),
    "beam_search with best_of": pb.GenerateRequest(token_ids=TOKENS, best_of=2, beam_search=pb.BeamSearch(num_beams=2)),
    "beam_search with logprobs": beams(pb.SamplingParams(num_logprobs=0), num_beams=2),
    "beam_search with prompt logprobs": beams(pb.SamplingParams(num_prompt_logprobs=0), num_beams=2),
    "beam_search with a constraint": beams(pb.SamplingParams(regex="a"), num_beams=2),
    "best_of low": pb.GenerateRequest(token_ids=TOKENS, n=3, best_of=2),
    "best_of zero": pb.GenerateRequest(token_ids=TOKENS, best_of=0),
    "best_of high": pb.GenerateRequest(token_ids=TOKENS, n=3, best_of=65),
    "priority low": pb.GenerateRequest(token_ids=TOKENS, priority=-1001),
    "priority high": pb.GenerateRequest(token_ids=TOKENS, priority=1001),
    "timeout_ms low": pb.GenerateRequest(token_ids=TOKENS, timeout_ms=0),
    "timeout_ms high": pb.GenerateRequest(token_ids=TOKENS, timeout_ms=3_600_001),
    "sampling.max_tokens": sampling(max_tokens=0),
    "sampling.temperature low": sampling(temperature=-1),
    "sampling.temperature high": sampling(temperature=101),
    "sampling.temperature nan": sampling(temperature=math.nan),
    "sampling.top_p low": sampling(top_p=0),
    "sampling.top_p high": sampling(top_p=1.1),
    "sampling.top_k": sampling(top_k=-1),
    "sampling.min_p low": sampling(min_p=-0.1),
    "sampling.min_p high": sampling(min_p=1),
    "sampling.repetition_penalty low": sampling(repetition_penalty=0),
    "sampling.repetition_penalty high": sampling(repetition_penalty=10.5),
    "sampling.frequency_penalty": sampling(frequency_penalty=2.5),
    "sampling.presence_penalty": sampling(presence_penalty=-2.5),
    "sampling.stop many": sampling(stop=["a"] * 17),
    "sampling.stop empty": sampling(stop=[""]),
    "sampling.stop long": sampling(stop=["a" * 257]),
    "sampling.stop without text": sampling(stop=["a"]),
    "sampling.stop_token_ids": sampling(stop_token_ids=[1] * 65),
    "sampling.logit_bias many": sampling(logit_bias=dict.fromkeys(range(1025), 0.0)),
    "sampling.logit_bias low": sampling(logit_bias={1: -100.5}),
    "sampling.logit_bias high": sampling(logit_bias={1: 100.5}),
    "sampling.logit_bias nan": sampling(logit_bias={1: math.nan}),
    "sampling.min_tokens low": sampling(min_tokens=-1),
    "sampling.min_tokens high": sampling(min_tokens=6, max_tokens=5),
    "sampling.bad_words many": sampling(bad_words=["a"] * 65),
    "sampling.bad_words long": sampling(bad_words=["a" * 1025] * 2),
    "sampling.bad_words empty": sampling(bad_words=[" "]),
    "sampling.bad_words without text": sampling(bad_words=["a"]),
    "sampling.bad_words_token_ids many": sampling(bad_words_token_ids=[TOKENS] * 65),
    "sampling.bad_words_token_ids empty": sampling(bad_words_token_ids=[pb.TokenIds()]),
    "sampling.bad_words_token_ids long": sampling(bad_words_token_ids=[pb.TokenIds(ids=[1] * 65)]),
    "sampling.allowed_token_ids many": sampling(allowed_token_ids=[1] * 513),
    "sampling.thought alone": sampling(thought=pb.Thought(closes="a")),
    "sampling.thought.closes": sampling(regex="a", thought=pb.Thought(closes="")),
    "sampling.thought.closes long": sampling(regex="a", thought=pb.Thought(closes="a" * 65)),
    "sampling.thought.opens": sampling(regex="a", thought=pb.Thought(opens="a" * 65, closes="a")),
    "sampling no token is left": sampling(allowed_token_ids=[1], bad_words_token_ids=[pb.TokenIds(ids=[1])]),
}


NO_BOUNDS = {  # any value is in their bounds, or their bounds are another test's
    *("typical_p", "seed", "ignore_eos", "num_logprobs", "num_prompt_logprobs", "json_schema", "regex", "choices"),
    "keep_special_tokens",
}


def test_every_sampling_field_is_held_to_its_bounds() -> None:
    named = {name.split()[0].split(".")[1] for name in BAD if name.startswith("sampling.")}
    assert named | NO_BOUNDS == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert not named & NO_BOUNDS


@pytest.fixture
async def channel(world: Services) -> grpc.aio.Channel:
    await world.start_cache()
    engine = await world.start_engine()
    channel = grpc.aio.insecure_channel(engine.address)
    world.defer(channel.close)
    return channel


async def answers_to(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [answer async for answer in pb_grpc.EngineServiceStub(channel).Generate(request, timeout=10)]


async def test_generate(world: Services, channel: grpc.aio.Channel) -> None:
    for name, request in BAD.items():
        error = await refusal(answers_to(channel, request))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), name
        assert error.metadata["field"] == name.split()[0]
        assert name != "chat many" or error.metadata["limit"] == "4096"
    error = await refusal(answers_to(channel, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 512]))))
    assert (error.reason, error.metadata) == ("WRONG_TOKEN_ID", {"token_id": "512", "vocab_size": "512"})
    for request in (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
        sampling(logit_bias={512: 1.0}),
        sampling(bad_words_token_ids=[pb.TokenIds(ids=[1, 512])]),
        sampling(allowed_token_ids=[512]),
    ):
        assert (await refusal(answers_to(channel, request))).reason == "WRONG_TOKEN_ID"
    pool = await world.wait_idle()
    assert (pool.num_starts, pool.num_waiting_sequences) == (1, 0), "of the one for which no token is left"


async def test_what_is_at_a_bound_is_taken(channel: grpc.aio.Channel) -> None:
    request = sampling(
        max_tokens=1,
        temperature=1e-6,
        top_p=1,
        top_k=2**31 - 1,
        min_p=0.99,
        typical_p=1,
        repetition_penalty=10,
        frequency_penalty=2,
        presence_penalty=-2,
        seed=-(2**63),
        num_logprobs=0,
        logit_bias=dict.fromkeys(range(512), -100.0),
        min_tokens=1,
        bad_words_token_ids=[pb.TokenIds(ids=[1] * 64)] * 64,
        allowed_token_ids=[*range(512)],
    )
    request.n, request.priority, request.timeout_ms, request.tenant = 64, -1000, 3_600_000, "t" * 64
    request.session_id, request.cache_salt = "s" * 64, "é" * 256
    request.metadata.update({f"{place:064}": "é" * 256 for place in range(16)})
    answers = [answer async for answer in pb_grpc.EngineServiceStub(channel).Generate(request, timeout=10)]
    assert len(answers) == 64
    assert answers[-1].usage.new_tokens == 64


async def test_malformed_bytes_and_large_messages(channel: grpc.aio.Channel) -> None:
    for method, raw in (("GetModel", b"\xff"), ("Tokenize", b"\x0a\x7f"), ("ListRequests", b"\x00" * (257 << 10))):
        call = channel.unary_unary(f"/kvkeeper.engine.v1.EngineService/{method}")
        error = await refusal(call(raw, timeout=10))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert (await pb_grpc.EngineServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=10)).model_id == "hash-toy"


async def test_prompts_may_be_as_long_in_a_submission_as_in_a_stream(channel: grpc.aio.Channel) -> None:
    request = pb.GenerateRequest(request_id="long", token_ids=pb.TokenIds(ids=[1 << 8] * (300 << 10)))
    submit = pb_grpc.EngineServiceStub(channel).SubmitRequest
    for call in (submit(pb.SubmitRequestRequest(request=request), timeout=10), answers_to(channel, request)):
        assert (await refusal(call)).reason == "NEVER_FITS"


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("Tokenize", pb.TokenizeRequest(text="x" * ((1 << 20) + 1)), "INVALID_FIELD"),
        ("Tokenize", pb.TokenizeRequest(text="the toy has no tokenizer"), "INVALID_FIELD"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[512]), "WRONG_TOKEN_ID"),
        ("ListRequests", pb.ListRequestsRequest(page_size=-1), "INVALID_FIELD"),
        ("ListRequests", pb.ListRequestsRequest(page_size=1001), "INVALID_FIELD"),
        ("ListRequests", pb.ListRequestsRequest(page_token="x"), "INVALID_FIELD"),
        ("ListRequests", pb.ListRequestsRequest(session_id="s" * 65), "INVALID_FIELD"),
        ("CancelRequest", pb.CancelRequestRequest(), "UNKNOWN_REQUEST"),
    ],
)
async def test_other_methods(channel: grpc.aio.Channel, method: str, request_: object, reason: str) -> None:
    assert (await refusal(getattr(pb_grpc.EngineServiceStub(channel), method)(request_, timeout=10))).reason == reason
