"""No field of a request over HTTP is ignored in silence: each takes effect, is refused by name, or is told to have no effect.

What a field does is seen in what a stand-in for the engine's client is asked, or in the answer.
"""

import json
import re
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import chat as openai_chat
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from kvkeeper.client import OutputChunk, TokenLogprobs, Usage
from kvkeeper.client.engine.calls import generate_request, tokenize_request
from kvkeeper.http import answering
from kvkeeper.http.calls import Call
from kvkeeper.http.chats import converse
from kvkeeper.http.completions import complete
from kvkeeper.http.engines import Engine
from kvkeeper.http.errors import HttpError
from kvkeeper.http.fields import (
    NO_EFFECT,
    NO_EFFECT_OF_MESSAGES,
    NO_EFFECT_WITHIN,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    StreamOptions,
    Tool,
)
from kvkeeper.http.responses import choose_form
from tests.support.documents.markdown import ROOT

KINDS: dict[str, Any] = {"completions": (CompletionRequest, complete), "chats": (ChatRequest, converse)}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
LOGPROBS = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.0)))


class StandIn:
    """The engine's client. Remembers what it was asked, and gives one answer."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def tokenize(self, prompt: Any) -> tuple[int, ...]:
        self.asked.append(tokenize_request(prompt))
        return (1, 2, 3)

    async def detokenize(self, token_ids: Any) -> str:
        return "abc"

    async def pieces(self, token_ids: Any) -> list[bytes]:
        return [b"t%d" % token for token in token_ids]

    def generate(self, prompt: Any, options: Any) -> "Answer":
        self.asked.append(generate_request(prompt, options))
        return Answer()


class Answer:
    usage = Usage(3, 1, 2, 0, 0)

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> Any:
        yield OutputChunk(0, "<tool_call>", (5,), None, (LOGPROBS,), (LOGPROBS, LOGPROBS))
        yield OutputChunk(0, '{"name": "f", "arguments": {}}</tool_call>', (6, 7), "stop", (LOGPROBS, LOGPROBS))


async def seen(name: str, fields: dict[str, Any], form: str = "qwen") -> str:
    """What the engine is asked and the client is told, but for what is drawn."""
    client = StandIn()
    engine = Engine(client, None)  # type: ignore[arg-type]
    engine.model = SimpleNamespace(model_id="m", text_part_of="", max_tokens_per_sequence=100, revision="r" * 64)  # type: ignore[assignment]
    engine.form, engine._asked_at = choose_form(None, form), float("inf")

    async def find(_: str) -> Engine:
        return engine

    prompt = {"prompt": "x"} if name == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = json.dumps({"request_id": "id", "max_tokens": 9, **prompt, **fields}).encode()
    work = await KINDS[name][1](Call(SimpleNamespace(find=find), body, ""))  # type: ignore[arg-type]
    told: Any = [part async for part in answering.stream(work)] if work.request.stream else await answering.whole(work)
    text = f"{client.asked} {told}"
    return re.sub(rf"{work.created}|call_\w+", "", text)


SAMPLES: dict[str, Any] = {
    "allowed_token_ids": [1], "bad_words": ["x"], "best_of": 3, "cache_salt": "x", "echo": True, "frequency_penalty": 0.5,
    "guided_choice": ["x"], "guided_json": {}, "guided_regex": "x", "ignore_eos": True, "logit_bias": {"1": 2},
    "max_completion_tokens": 4, "max_tokens": 5, "min_p": 0.1, "min_tokens": 2, "n": 2, "parallel_tool_calls": False,
    "presence_penalty": 0.5, "priority": 1, "prompt": "y", "prompt_logprobs": 1, "reasoning_effort": "low",
    "repetition_penalty": 1.5, "request_id": "other", "response_format": FORM, "return_token_ids": True, "seed": 7,
    "skip_special_tokens": False, "stop": "x", "stop_token_ids": [1], "stream": True, "structured_outputs": {"regex": "x"},
    "temperature": 0.5, "tools": [TOOL], "top_k": 3, "top_p": 0.5, "typical_p": 0.5, "use_beam_search": True,
    "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "continue_final_message": True, "documents": [{"a": "b"}],
    "messages": [{"role": "user", "content": "y"}],
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {  # what a field has an effect with alone
    "early_stopping": {"use_beam_search": True},
    "length_penalty": {"use_beam_search": True},
    "max_completion_tokens": {"max_tokens": None},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": True},
}
SAMPLES |= {"early_stopping": True, "length_penalty": 2, "stream_options": {"include_usage": True}, "tool_choice": "required",
            "top_logprobs": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, (kind, _) in KINDS.items() for field in kind.model_fields if field != "model"]
)
async def test_a_field_that_takes_effect_does(name: str, field: str) -> None:
    beside = BESIDE.get(field, {})
    value = {"completions": 2, "chats": True}[name] if field == "logprobs" else SAMPLES[field]
    if field == "parallel_tool_calls":
        return await two_calls_become_one()
    form = "plain" if field == "skip_special_tokens" else "qwen"  # which keeps them in any case
    assert await seen(name, {**beside, field: value}, form) != await seen(name, beside, form)
    return None


async def two_calls_become_one() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = [OutputChunk(0, call + call, (5,), "stop")]
    with pytest.MonkeyPatch.context() as patch:

        async def twice(_: Answer) -> Any:
            for each in answer:
                yield each

        patch.setattr(Answer, "__aiter__", twice)
        told = [await seen("chats", {"tools": [TOOL], "parallel_tool_calls": value}) for value in (True, False)]
    assert [text.count("'arguments'") for text in told] == [2, 1]


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, False),
        ({"type": "object"}, False),
    ],
)
async def test_a_call_that_is_required_has_the_arguments_that_are_named(parameters: Any, is_closed: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = await seen("chats", {"tools": [tool], "tool_choice": "required"})
    (schema,) = re.findall(r'json_schema: "(.*)"', asked.replace("\\\\", "\\"))
    (arguments,) = json.loads(schema.replace('\\"', '"'))["$defs"].values()
    assert (arguments.get("additionalProperties") is False) == is_closed


async def test_an_assistant_that_said_nothing_has_the_empty_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"content": None, "tool_calls": [call]}, {"tool_calls": [call]}, {"content": None}):
        asked = await seen("chats", {"messages": [{"role": "assistant", **message}]})
        assert 'content: ""' in asked


async def test_another_model_is_refused() -> None:
    for name in KINDS:
        with pytest.raises(HttpError) as error:
            await seen(name, {"model": "other"})
        assert (error.value.status, error.value.param) == (404, "model")


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, (kind, _) in KINDS.items() for field in REFUSED[kind]])
async def test_a_field_that_is_not_served_is_refused_by_its_name(name: str, field: str) -> None:
    no = REFUSED[KINDS[name][0]][field]
    plain = await seen(name, {})
    for harmless in (no.harmless, None):
        assert await seen(name, {field: harmless}) == plain
    for value in (not no.harmless, "some", ["x"], {"a": 1}):
        with pytest.raises(HttpError, match=f"^{field}: not served: ") as error:
            await seen(name, {field: value})
        assert (error.value.status, error.value.param) == (400, field)


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, (kind, _) in KINDS.items() for field in NO_EFFECT[kind]])
async def test_a_field_without_an_effect_has_none(name: str, field: str) -> None:
    assert await seen(name, {field: "anything"}) == await seen(name, {})


async def test_any_other_field_is_refused_by_its_path() -> None:
    tools = [{"type": "function", "function": {"name": "f", "x": 1}}]
    message = {"role": "user", "content": "x", "x": 1}
    for field, value, path in (
        ("x", 1, "x"), ("stream_options", {"x": 1}, "stream_options.x"), ("tools", tools, "tools[0].function.x"),
        ("messages", [message], "messages[0]"), ("structured_outputs", {"grammar": "x"}, "structured_outputs.grammar"),
        ("tool_choice", {"type": "custom", "custom": {}}, "tool_choice"), ("temperature", "1", "temperature"),
        ("top_p", True, "top_p"), ("early_stopping", True, "early_stopping"), ("length_penalty", 1, "length_penalty"),
        ("max_completion_tokens", 3, "max_tokens"), ("stop", ["a", 3], "stop"), ("max_tokens", -1, "max_tokens"),
    ):  # fmt: skip
        with pytest.raises(HttpError) as error:
            await seen("chats", {field: value})
        assert error.value.status == 400
        assert (error.value.param or "").startswith(path), error.value
        assert path in error.value.message


# -- what clients can send


def columns(kind: Any) -> list[set[str]]:
    return [set(kind.model_fields), set(REFUSED[kind]), set(NO_EFFECT[kind])]


@pytest.mark.parametrize(
    ("kind", "params"),
    [(CompletionRequest, completion_create_params), (ChatRequest, chat_create_params)],
    ids=["completions", "chats"],
)
def test_every_field_of_openais_client_is_in_one_column(kind: Any, params: Any) -> None:
    fields = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    takes, refused, none = columns(kind)
    assert fields <= takes | refused | none
    assert not (takes & refused or takes & none or refused & none)
    page = (ROOT / "docs/operate/http.md").read_text()
    assert all(f"| `{name}` |" in page for name in takes | refused | none)


def test_what_is_within_them_is_known_too() -> None:
    known = {"role", "content", "name", "tool_calls", "tool_call_id", *NO_EFFECT_OF_MESSAGES}
    refused = {"audio", "function_call", "refusal"}  # by the client's check of messages, where they say something
    for message in get_args(openai_chat.ChatCompletionMessageParam):
        assert set(get_type_hints(message)) <= known | refused
    assert set(openai_chat.ChatCompletionMessage.model_fields) <= known | refused
    assert set(openai_chat.ChatCompletionStreamOptionsParam.__annotations__) <= set(StreamOptions.model_fields)
    function = get_type_hints(openai_chat.ChatCompletionFunctionToolParam)["function"]
    assert set(function.__annotations__) <= set(Tool.model_fields["function"].annotation.model_fields)  # type: ignore[union-attr]
    assert {"type", "json_schema"} == set(ResponseFormat.model_fields)


def test_what_has_no_effect_within_a_field_is_a_field() -> None:
    for path in NO_EFFECT_WITHIN:
        kind: Any = ChatRequest
        for part in path.replace("[]", "").split("."):
            fields = {field.alias or name: field for name, field in kind.model_fields.items()}
            kind = next((arg for arg in nested(fields[part].annotation) if hasattr(arg, "model_fields")), None)


def nested(annotation: Any) -> list[Any]:
    return [annotation, *(inner for arg in get_args(annotation) for inner in nested(arg))]
