"""A gateway's messages and ours: every field means the same on both sides, or is refused."""

import hashlib
import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.rpc.gateway.answers import Answer
from kvkeeper.engine_service.rpc.gateway.methods import CONTRACT
from kvkeeper.engine_service.rpc.gateway.requests import own_id, own_request, own_sampling
from kvkeeper.engine_service.rpc.gateway.tokenizer_files import CHUNK_BYTES, archive_of
from kvkeeper.engine_service.values.errors import EngineError, InvalidField, NotImplementedYet

PROMPT = [5, 6, 7]


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "a", "tokenized": pb.TokenizedInput(input_ids=PROMPT), **fields})


# -- requests


def test_an_absent_field_is_none_and_not_the_models_default() -> None:
    sampling = own_sampling(pb.SamplingParams())
    assert sampling == own.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, typical_p=1, repetition_penalty=1, frequency_penalty=0, presence_penalty=0
    )
    left = {field.name for field in sampling.DESCRIPTOR.fields if field.has_presence and not sampling.HasField(field.name)}
    assert left == {"max_tokens", "seed", "num_logprobs", "num_prompt_logprobs", "json_schema", "regex", "choices"}


def test_every_field_arrives() -> None:
    params = pb.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
        max_tokens=9, stop=["x"], stop_token_ids=[3], ignore_eos=True, logprobs=2, prompt_logprobs=1, seed=-4, n=3, regex="a+",
    )  # fmt: skip
    found = own_request(request(sampling_params=params), 100)
    assert (found.request_id, list(found.token_ids.ids), found.n) == ("a", PROMPT, 3)
    assert found.sampling == own.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, typical_p=1, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, stop=["x"], stop_token_ids=[3], ignore_eos=True, num_logprobs=2,
        num_prompt_logprobs=1, seed=-4, regex="a+",
    )  # fmt: skip


def test_an_absent_limit_is_what_fits() -> None:
    assert own_request(request(), 100).sampling.max_tokens == 97
    assert own_request(request(sampling_params=pb.SamplingParams(max_tokens=0)), 100).sampling.max_tokens == 0, "refused later"
    assert own_request(request(), 2).sampling.max_tokens == 1, "refused later, with its own words"


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


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": pb.SamplingParams(min_tokens=1)},
        {"sampling_params": pb.SamplingParams(logit_bias={3: 1.0})},
        {"sampling_params": pb.SamplingParams(stop=["a"], include_stop_str_in_output=True)},
        {"sampling_params": pb.SamplingParams(truncate_prompt_tokens=4)},
        {"sampling_params": pb.SamplingParams(grammar="root ::= x")},
        {"sampling_params": pb.SamplingParams(structural_tag="{}")},
        {"mm_inputs": pb.MultimodalInputs()},
        {"extra_mm_inputs": [pb.MultimodalInputs()]},
        {"media_refs": pb.MediaRefs()},
        {"kv_transfer_params": pb.KvTransferParams(remote_host="h")},
        {"kv_transfer_params_json": "{}"},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedYet) as refused:
        own_request(request(**fields), 100)
    assert refused.value.metadata["feature"] in str(refused.value)


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens"])
def test_a_number_that_is_too_large_for_ours_is_refused(name: str) -> None:
    with pytest.raises(InvalidField, match="at most"):
        own_request(request(sampling_params=pb.SamplingParams(**{name: 1 << 31})), 100)


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="prompt"):
        own_request(pb.GenerateRequest(request_id="a"), 100)


def test_a_text_is_taken_as_a_text() -> None:
    assert own_request(pb.GenerateRequest(text="hello"), 100).text == "hello"


def test_long_ids_are_told_apart_by_their_digest() -> None:
    long = "chatcmpl-" + "x" * 70
    assert own_id("short") == "short"
    assert own_id(long) == hashlib.sha256(long.encode()).hexdigest()
    assert len(own_id(long)) <= 64


def test_the_sampling_fields_of_the_protocol_are_all_known() -> None:
    """A newer protocol with another field has to be looked at."""
    known = {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens",
        "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs", "seed", "logit_bias",
        "include_stop_str_in_output", "truncate_prompt_tokens", "json_schema", "regex", "grammar", "structural_tag",
        "json_object", "choice",
    }  # fmt: skip
    # Of texts, which the gateway makes itself; and where a constraint begins, which is always at the first token here.
    of_texts = {"skip_special_tokens", "spaces_between_special_tokens", "grammar_from_first_token"}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == known | of_texts
    fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert fields == {
        "request_id", "tokenized", "text", "sampling_params", "stream", "kv_transfer_params", "mm_inputs", "extra_mm_inputs",
        "kv_transfer_params_json", "data_parallel_rank", "media_refs",
    }  # fmt: skip


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
    assert [(chunk.index, list(chunk.token_ids)) for chunk in chunks] == [(0, [10, 11]), (1, [20]), (1, [21]), (0, [12])]
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


# -- the tokenizer's files


def test_the_archive_holds_the_tokenizer_and_no_weights() -> None:
    archive = archive_of(DEMO_MODEL_DIR)
    chunks = list(archive.chunks())
    data = b"".join(data for data, _ in chunks)
    assert [bool(digest) for _, digest in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1][1] == hashlib.sha256(data).hexdigest()
    assert all(len(part) <= CHUNK_BYTES for part, _ in chunks)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert set(found.namelist()) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        assert found.read("tokenizer.json") == (DEMO_MODEL_DIR / "tokenizer.json").read_bytes()
    assert archive_of(DEMO_MODEL_DIR) == archive


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of Hugging Face's hub has nothing but links in a model's folder."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "blob")
    with zipfile.ZipFile(io.BytesIO(archive_of(tmp_path / "model").data)) as found:
        assert found.read("tokenizer.json") == b"{}"
