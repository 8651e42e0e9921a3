"""A gateway's messages and ours: every field means the same on both sides, or is refused."""

import hashlib
import io
import tracemalloc
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.rpc.gateway.calls import CHUNK_BYTES, make_archive
from kvkeeper.engine_service.rpc.gateway.generating import Answer, generate
from kvkeeper.engine_service.rpc.gateway.methods import CONTRACT
from kvkeeper.engine_service.rpc.gateway.requests import own_id, own_sampling
from kvkeeper.engine_service.values.errors import EngineError, InvalidField, NotImplementedYet

PROMPT = [5, 6, 7]
TEXT_TOKENS = [8, 9]


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "a", "tokenized": pb.TokenizedInput(input_ids=PROMPT), **fields})


class OwnCalls:
    """Our own service, which notes what it is asked and answers with two tokens at once."""

    def __init__(self) -> None:
        self.asked: list[own.GenerateRequest] = []

    async def generate(self, request: own.GenerateRequest) -> AsyncGenerator[own.GenerateResponse, None]:
        self.asked.append(request)
        yield own.GenerateResponse(token_ids=[10, 11])
        yield own.GenerateResponse(finish_reason=own.FINISH_REASON_STOP, usage=own.Usage(new_tokens=2))

    async def tokenize(self, request: own.TokenizeRequest) -> own.TokenizeResponse:
        assert request.text
        return own.TokenizeResponse(token_ids=TEXT_TOKENS)


async def served(message: pb.GenerateRequest, max_len: int = 100) -> tuple[own.GenerateRequest, list[pb.GenerateResponse]]:
    """What the engine is asked for, and what the gateway is told."""
    calls = OwnCalls()
    told = [each async for each in generate(message, max_len, calls.generate, calls.tokenize)]
    (asked,) = calls.asked
    return asked, told


async def asked(message: pb.GenerateRequest, max_len: int = 100) -> own.GenerateRequest:
    return (await served(message, max_len))[0]


# -- requests


def test_an_absent_field_is_none_and_not_the_models_default() -> None:
    sampling = own_sampling(pb.SamplingParams())
    assert sampling == own.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1, frequency_penalty=0, presence_penalty=0
    )
    left = {field.name for field in sampling.DESCRIPTOR.fields if field.has_presence and not sampling.HasField(field.name)}
    # No gateway can ask for a typical_p, so the model's applies, and none for a thought before an output.
    constraint = {"json_schema", "regex", "choices", "thought"}
    assert left == {"typical_p", "max_tokens", "seed", "num_logprobs", "num_prompt_logprobs"} | constraint


async def test_every_field_arrives() -> None:
    params = pb.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
        max_tokens=9, stop=["x"], stop_token_ids=[3], ignore_eos=True, logprobs=2, prompt_logprobs=1, seed=-4, n=3, regex="a+",
        min_tokens=4, logit_bias={7: -1.5},
    )  # fmt: skip
    found = await asked(request(sampling_params=params))
    assert (found.request_id, list(found.token_ids.ids), found.n) == ("a", PROMPT, 3)
    assert found.sampling == own.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, stop=["x"], stop_token_ids=[3], ignore_eos=True, num_logprobs=2,
        num_prompt_logprobs=1, seed=-4, regex="a+", min_tokens=4, logit_bias={7: -1.5},
    )  # fmt: skip


async def test_an_absent_limit_is_what_fits() -> None:
    assert (await asked(request())).sampling.max_tokens == 97
    assert (await asked(request(sampling_params=pb.SamplingParams(max_tokens=0)))).sampling.max_tokens == 0, "refused later"
    assert (await asked(request(), 2)).sampling.max_tokens == 1, "refused later, with its own words"


async def test_a_text_is_taken_as_its_tokens_and_an_absent_limit_is_what_fits_behind_them() -> None:
    found = await asked(pb.GenerateRequest(text="hello"))
    assert (list(found.token_ids.ids), found.sampling.max_tokens) == (TEXT_TOKENS, 98)
    limited = await asked(pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=5)))
    assert limited.sampling.max_tokens == 5
    _, told = await served(pb.GenerateRequest(text="hello", stream=True))
    assert [each.chunk.prompt_tokens for each in told if each.HasField("chunk")] == [2, 2]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": False}, {}),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, {"choices": own.Choices(texts=["a", "b"])}),
    ],
)
def test_constraints(params: dict[str, Any], expected: dict[str, Any]) -> None:
    found = own_sampling(pb.SamplingParams(**params))
    kind = found.WhichOneof("constraint")
    assert ({kind: getattr(found, kind)} if kind else {}) == expected


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens"])
async def test_a_number_that_is_too_large_for_ours_is_refused(name: str) -> None:
    with pytest.raises(InvalidField, match="at most"):
        await asked(request(sampling_params=pb.SamplingParams(**{name: 1 << 31})))


def test_a_bias_of_a_token_below_0_is_refused() -> None:
    with pytest.raises(InvalidField, match="logit_bias"):
        own_sampling(pb.SamplingParams(logit_bias={-1: 1.0}))


async def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="prompt"):
        await asked(pb.GenerateRequest(request_id="a"))


def test_long_ids_are_told_apart_by_their_digest() -> None:
    long = "chatcmpl-" + "x" * 70
    assert own_id("short") == "short"
    assert own_id(long) == hashlib.sha256(long.encode()).hexdigest()
    assert len(own_id(long)) <= 64


# -- no field is ignored in silence

TAKES_EFFECT: dict[str, Any] = {
    "SamplingParams.temperature": 0.5,
    "SamplingParams.top_p": 0.5,
    "SamplingParams.top_k": 3,
    "SamplingParams.min_p": 0.5,
    "SamplingParams.frequency_penalty": 0.5,
    "SamplingParams.presence_penalty": 0.5,
    "SamplingParams.repetition_penalty": 1.5,
    "SamplingParams.max_tokens": 3,
    "SamplingParams.min_tokens": 1,
    "SamplingParams.logit_bias": {3: 1.0},
    "SamplingParams.stop": ["x"],
    "SamplingParams.stop_token_ids": [3],
    "SamplingParams.ignore_eos": True,
    "SamplingParams.n": 2,
    "SamplingParams.logprobs": 1,
    "SamplingParams.prompt_logprobs": 1,
    "SamplingParams.seed": 3,
    "SamplingParams.json_schema": "{}",
    "SamplingParams.regex": "a",
    "SamplingParams.json_object": True,
    "SamplingParams.choice": pb.ChoiceConstraint(choices=["a"]),
    "GenerateRequest.request_id": "b",
    "GenerateRequest.tokenized": pb.TokenizedInput(input_ids=[1]),
    "GenerateRequest.text": "hello",
    "GenerateRequest.sampling_params": pb.SamplingParams(top_k=3),
    "GenerateRequest.stream": True,
}
REFUSED: dict[str, Any] = {
    "SamplingParams.truncate_prompt_tokens": 4,
    "SamplingParams.grammar": "root ::= x",
    "SamplingParams.structural_tag": "{}",
    "GenerateRequest.mm_inputs": pb.MultimodalInputs(),
    "GenerateRequest.extra_mm_inputs": [pb.MultimodalInputs()],
    "GenerateRequest.media_refs": pb.MediaRefs(),
    "GenerateRequest.kv_transfer_params": pb.KvTransferParams(remote_host="h"),
    "GenerateRequest.kv_transfer_params_json": "{}",
    "GenerateRequest.data_parallel_rank": 1,
}
# All that an engine answers is tokens, so these say nothing to it.
HOLDS_ANYHOW: dict[str, Any] = {
    "SamplingParams.skip_special_tokens": True,  # of texts, which the gateway makes
    "SamplingParams.spaces_between_special_tokens": True,
    "SamplingParams.include_stop_str_in_output": True,  # the tokens of a stop string are told; the gateway cuts the text
    "SamplingParams.grammar_from_first_token": True,  # which is where they start here, as GetServerInfo tells
}


def fields_of(*messages: Any) -> list[FieldDescriptor]:
    return [field for message in messages for field in message.DESCRIPTOR.fields]


@pytest.mark.parametrize("field", fields_of(pb.SamplingParams, pb.GenerateRequest), ids=lambda field: field.name)
async def test_each_field_takes_effect_or_is_refused_by_its_name(field: FieldDescriptor) -> None:
    """A field of a newer protocol is in none of the tables, and has to be looked at."""
    name = f"{field.containing_type.name}.{field.name}"
    tables = [table for table in (TAKES_EFFECT, REFUSED, HOLDS_ANYHOW) if name in table]
    assert len(tables) == 1, f"{name} is to be served or refused"
    value = {field.name: tables[0][name]}
    if field.containing_type.name == "SamplingParams":
        value = {"sampling_params": pb.SamplingParams(**value)}
    if tables[0] is REFUSED:
        with pytest.raises(EngineError) as refused:
            await served(request(**value))
        assert field.name.removeprefix("extra_").removesuffix("_json") in str(refused.value)
        assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
        return
    plain = await served(request())
    assert (await served(request(**value)) != plain) == (tables[0] is TAKES_EFFECT)


async def test_the_only_rank_may_be_named() -> None:
    assert await asked(request(data_parallel_rank=0)) == await asked(request())
    with pytest.raises(InvalidField, match=r"data_parallel_rank: 0, the only one, not -1"):
        await asked(request(data_parallel_rank=-1))


def code_of(error: EngineError) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == CONTRACT.refusals.to_status(error).code)


def test_what_is_not_implemented_is_a_fault_of_the_request_for_a_gateway() -> None:
    """It makes 501 of UNIMPLEMENTED, and HTTP clients repeat what ends with 5xx."""
    assert code_of(NotImplementedYet("x: not served", feature="x")) is grpc.StatusCode.INVALID_ARGUMENT


def test_every_method_is_served_or_named_as_not() -> None:
    served = {
        "Generate", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer", "SubscribeKvEvents",
    }  # fmt: skip
    assert {method.name for method in CONTRACT.service.methods} == served | CONTRACT.unimplemented.keys()


# -- answers


def message(
    index: int, tokens: list[int], reason: int = 0, usage: own.Usage | None = None, **fields: Any
) -> own.GenerateResponse:
    return own.GenerateResponse(index=index, token_ids=tokens, finish_reason=reason, usage=usage, **fields)  # type: ignore[arg-type]


USAGE = own.Usage(prompt_tokens=3, cached_tokens=2, new_tokens=5)
ANSWERS = [
    message(0, [10, 11]),
    message(1, [20]),
    message(1, [21], own.FINISH_REASON_END_OF_SEQUENCE),
    message(0, [12], own.FINISH_REASON_LENGTH),
    message(0, [], usage=USAGE),
]


def told(answer: Answer, messages: list[own.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [response for each in messages for response in answer.add(each)]


def test_a_stream_is_its_chunks_and_an_empty_end_for_each_continuation() -> None:
    found = told(Answer(PROMPT, 2, is_streamed=True), ANSWERS)
    chunks = [each.chunk for each in found if each.HasField("chunk")]
    assert [(chunk.index, list(chunk.token_ids)) for chunk in chunks] == [
        (0, [10]), (0, [11]), (1, [20]), (1, [21]), (0, [12])
    ]  # fmt: skip
    assert [chunk.completion_tokens for chunk in chunks] == [1] * 5
    ends = [each.complete for each in found if each.HasField("complete")]
    assert [(end.index, list(end.output_ids), end.finish_reason) for end in ends] == [(0, [], "length"), (1, [], "stop")]
    assert [(end.prompt_tokens, end.completion_tokens, end.cached_tokens) for end in ends] == [(3, 3, 2), (3, 2, 2)]


def test_continuations_that_will_be_refused_take_no_memory() -> None:
    tracemalloc.start()
    try:
        Answer(PROMPT, (1 << 31) - 1, is_streamed=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_without_a_stream_all_comes_at_the_end() -> None:
    found = told(Answer(PROMPT, 2, is_streamed=False), ANSWERS)
    assert [(each.complete.index, list(each.complete.output_ids)) for each in found] == [(0, [10, 11, 12]), (1, [20, 21])]


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (own.FINISH_REASON_LENGTH, "length"),
        (own.FINISH_REASON_STOP, "stop"),
        (own.FINISH_REASON_END_OF_SEQUENCE, "stop"),
        (own.FINISH_REASON_CANCELLED, "abort"),
        (own.FINISH_REASON_ERROR, "error"),
        (own.FINISH_REASON_TIMED_OUT, "error"),
        (own.FINISH_REASON_STALLED, "error"),
        (own.FINISH_REASON_UNSPECIFIED, "error"),
    ],
)
def test_every_reason_has_a_name(reason: int, name: str) -> None:
    (found,) = told(Answer(PROMPT, 1, is_streamed=True), [message(0, [], reason, USAGE)])
    assert found.complete.finish_reason == name
    assert len(own.FinishReason.values()) == 8


def test_log_probabilities_of_prompt_and_output() -> None:
    of_prompt = [own.TokenLogprobs(token_id=6, logprob=-1, top_token_ids=[6, 9], top_logprobs=[-1, -2])]
    of_output = [own.TokenLogprobs(token_id=10, logprob=-0.5, top_token_ids=[10], top_logprobs=[-0.5])]
    messages = [message(0, [10], prompt_logprobs=of_prompt, logprobs=of_output), message(0, [], own.FINISH_REASON_STOP, USAGE)]
    for is_streamed in (True, False):
        found = told(Answer(PROMPT, 1, is_streamed=is_streamed), messages)
        holder = found[0].chunk if is_streamed else found[0].complete
        assert list(holder.output_logprobs.token_logprobs) == [-0.5]
        assert list(holder.output_logprobs.top_logprobs[0].token_ids) == [10]
        assert [each.HasField("value") for each in holder.input_logprobs.token_logprobs] == [False, True]
        assert list(holder.input_logprobs.token_ids) == [5, 6]
        assert list(holder.input_logprobs.top_logprobs[1].values) == [-1, -2]
        assert not (is_streamed and found[1].complete.HasField("input_logprobs")), "told once"


def test_each_token_of_a_stream_has_its_own_log_probabilities_and_the_first_those_of_the_prompt() -> None:
    of_prompt = [own.TokenLogprobs(token_id=6, logprob=-1)]
    of_output = [own.TokenLogprobs(token_id=token_id, logprob=-token_id) for token_id in (10, 11, 12)]
    found = told(Answer(PROMPT, 1, is_streamed=True), [message(0, [10, 11, 12], prompt_logprobs=of_prompt, logprobs=of_output)])
    chunks = [each.chunk for each in found]
    assert [list(chunk.output_logprobs.token_ids) for chunk in chunks] == [[10], [11], [12]]
    assert [list(chunk.output_logprobs.token_logprobs) for chunk in chunks] == [[-10], [-11], [-12]]
    assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True, False, False]


# -- the tokenizer's files


def test_the_archive_holds_the_tokenizer_and_no_weights() -> None:
    archive = make_archive(DEMO_MODEL_DIR)
    chunks = list(archive.chunks())
    data = b"".join(data for data, _ in chunks)
    assert [bool(digest) for _, digest in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1][1] == hashlib.sha256(data).hexdigest()
    assert all(len(part) <= CHUNK_BYTES for part, _ in chunks)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert set(found.namelist()) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        assert found.read("tokenizer.json") == (DEMO_MODEL_DIR / "tokenizer.json").read_bytes()
    assert make_archive(DEMO_MODEL_DIR) == archive


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of Hugging Face's hub has nothing but links in a model's folder."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "blob")
    with zipfile.ZipFile(io.BytesIO(make_archive(tmp_path / "model").data)) as found:
        assert found.read("tokenizer.json") == b"{}"
