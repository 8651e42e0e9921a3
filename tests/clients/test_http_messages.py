"""Anthropic's own client on the HTTP application, whose engine gives what a test says; and every field that it can send."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import anthropic
import grpc
import httpx2
import pytest
from anthropic import types
from anthropic.types import message_count_tokens_params, message_create_params

from kvkeeper.client import KvkeeperError, Thought
from kvkeeper.http.app import make_app
from kvkeeper.http.engines import Engine
from kvkeeper.http.message_fields import (
    MESSAGES_NO_EFFECT,
    MESSAGES_NO_EFFECT_WITHIN,
    MESSAGES_REFUSED,
    CountRequest,
    MessageRequest,
    OutputConfig,
    Thinking,
    ToolChoice,
    ToolParam,
)
from kvkeeper.http.responses import choose_form
from tests.support.documents.markdown import ROOT
from tests.support.stand_ins.asked_engine import AskedEngine

CALL = '<tool_call>{"name": "look", "arguments": {"at": "w\\"orld"}}</tool_call>'
TOOL: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASKED: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def connected(engine_client: AskedEngine, form: str = "qwen") -> AsyncIterator[anthropic.AsyncAnthropic]:
    engine = Engine(engine_client, None)  # type: ignore[arg-type]
    engine.model = SimpleNamespace(model_id="m", text_part_of="", max_tokens_per_sequence=100, revision="r" * 64)  # type: ignore[assignment]
    engine.form, engine._asked_at = choose_form(None, form), float("inf")

    async def find(key: str) -> Engine:
        assert key == "secret"
        return engine

    engines = SimpleNamespace(find=find, close=engine_client.close)
    transport = httpx2.ASGITransport(app=make_app(engines))  # type: ignore[arg-type]
    async with anthropic.AsyncAnthropic(
        api_key="secret", base_url="http://front", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        yield client


async def answer(engine: AskedEngine, is_stream: bool, **fields: Any) -> types.Message:
    """What the client makes of it, either way."""
    async with connected(engine) as client:
        if not is_stream:
            return await client.messages.create(**{**ASKED, **fields})
        async with client.messages.stream(**{**ASKED, **fields}) as stream:
            return await stream.get_final_message()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_thoughts_texts_and_calls_are_blocks(is_stream: bool) -> None:
    text = f"<think>\nhm\n</think>\n\nSo: {CALL}{CALL} done"
    found = await answer(AskedEngine(*text), is_stream, tools=[TOOL])
    call = {"type": "tool_use", "name": "look", "input": {"at": 'w"orld'}}
    blocks = [block.model_dump(exclude_none=True, exclude={"id"}) for block in found.content]
    assert blocks == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "So:"},
        call,
        call,
        {"type": "text", "text": "done"},
    ]
    assert len({block.id for block in found.content if block.type == "tool_use"}) == 2
    assert (found.stop_reason, found.stop_sequence, found.role, found.model) == ("tool_use", None, "assistant", "m")
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens, found.usage.output_tokens) == (4, 8, len(text))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "fields", "said"),
    [
        ("end_of_sequence", {}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("stop", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        ("stop", {"stop_sequences": ["END", "FIN"]}, ("stop_sequence", None)),
        ("stop", {}, ("end_turn", None)),
    ],
)
async def test_why_it_ended(reason: str, fields: Any, said: Any, is_stream: bool) -> None:
    found = await answer(AskedEngine("a", reason=reason), is_stream, **fields)
    assert (found.stop_reason, found.stop_sequence) == said


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_is_cut_has_what_is_whole_of_it(is_stream: bool) -> None:
    cut = '<tool_call>{"name": "look", "arguments": {"at": "here", "to": "the'
    found = await answer(AskedEngine(cut, reason="length"), is_stream, tools=[TOOL])
    assert found.stop_reason == "max_tokens"
    (block,) = found.content
    assert block.type == "tool_use" and block.input in ({"at": "here"}, {"at": "here", "to": "the"})


async def test_events_come_in_anthropics_order() -> None:
    async with connected(AskedEngine("<think>a", "b</think>", "c")) as client:
        events = [event async for event in await client.messages.create(**ASKED, stream=True)]
    assert [event.type for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0].message.usage.input_tokens == 3
    assert [event.index for event in events if hasattr(event, "index")] == [0, 0, 0, 0, 1, 1, 1]


async def test_a_conversation_with_tools_becomes_a_chat() -> None:
    engine = AskedEngine("a")
    blocks: Any = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}, "cache_control": {"type": "ephemeral"}},
    ]
    results: Any = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a tree"}]},
        {"type": "text", "text": "And?"},
    ]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "It is"},
    ]
    await answer(engine, False, system=[{"type": "text", "text": "Be brief."}], messages=messages, tools=[TOOL])
    chat = engine.asked[0].chat
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in chat.messages] == [
        ("system", "Be brief.", ""),
        ("user", "Look.", ""),
        ("assistant", "I look.", ""),
        ("tool", "a tree", "c1"),
        ("user", "And?", ""),
        ("assistant", "It is", ""),
    ]
    assert [(call.id, call.name, call.arguments) for call in chat.messages[2].tool_calls] == [("c1", "look", '{"at": "x"}')]
    assert chat.continue_final_message, "an assistant's last message is continued"
    function = {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
    assert json.loads(chat.tools) == [{"type": "function", "function": function}]
    async with connected(engine) as client:
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=[TOOL])  # type: ignore[arg-type]
    assert counted.input_tokens == 3


@pytest.mark.parametrize(
    ("fields", "status", "kind", "text"),
    [
        ({"model": "other"}, 404, "not_found_error", "does not exist"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"speed": "fast"}, 400, "invalid_request_error", "speed: not served"),
        ({"extra_body": {"x": 1}}, 400, "invalid_request_error", "x: there is no such field"),
        ({"tools": [{**TOOL, "x": 1}]}, 400, "invalid_request_error", "tools[0].x: there is no such field"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0]"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "no tool is called 'f'"),
        ({"thinking": {"type": "between_tools"}}, 400, "invalid_request_error", "thinking.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            *(400, "invalid_request_error", "messages[0].content[0].type: image is not served"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]}]},
            *(400, "invalid_request_error", "messages[0].content[0].citations: not served"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            *(400, "invalid_request_error", "messages[0].content[0].text: it is missing"),
        ),
    ],
)
async def test_errors_are_as_anthropic_has_them(fields: Any, status: int, kind: str, text: str) -> None:
    for is_stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as error:
            await answer(AskedEngine("a"), is_stream, **fields)
        assert error.value.status_code == status
        body: Any = error.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind) and text in body["error"]["message"]


async def test_a_prompt_that_is_too_long_has_the_words_that_agents_look_for() -> None:
    class TooSmall(AskedEngine):
        async def __aiter__(self) -> Any:
            raise KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS", "", {"requested": "209", "limit": "100"})
            yield

    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 100 tokens.*\(200 in the messages"):
        await answer(TooSmall("a"), False)


async def test_what_the_engine_refuses_has_the_name_that_it_has_here() -> None:
    class Picky(AskedEngine):
        async def __aiter__(self) -> Any:
            field = {"field": "sampling.stop"}
            raise KvkeeperError(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "sampling.stop: 1 to 256 bytes, not 0", field
            )
            yield

    with pytest.raises(anthropic.BadRequestError) as error:
        await answer(Picky("a"), False, stop_sequences=[""])
    assert error.value.body["error"]["message"] == "stop_sequences: 1 to 256 bytes, not 0"  # type: ignore[index]


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    with pytest.raises(anthropic.APIStatusError, match="the request took too long"):
        await answer(AskedEngine("a", "b", reason="timed_out"), True)


# -- every field


async def seen(kind: Any, **fields: Any) -> str:
    engine = AskedEngine("<think>hm</think>", CALL)
    path = "/v1/messages" if kind is MessageRequest else "/v1/messages/count_tokens"
    body = {name: value for name, value in ASKED.items() if kind is MessageRequest or name != "max_tokens"}
    async with connected(engine) as client:
        sent = {**body, **fields}
        response = await client._client.post(f"http://front{path}", json=sent, headers={"x-api-key": "secret"})
    assert response.status_code == 200, response.text
    asked = str(engine.asked).replace(getattr(engine.asked[-1], "request_id", "") or "-", "")
    return asked + ("event" if response.text.startswith("event") else "")


SAMPLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "y"}],
    "output_config": {"effort": "low"},
    "system": "Be brief.",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "none"},
    "tools": [TOOL],
    "max_tokens": 5,
    "stop_sequences": ["x"],
    "stream": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
}


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, name) for kind in (MessageRequest, CountRequest) for name in kind.model_fields if name != "model"],
)
async def test_a_field_that_takes_effect_does(kind: Any, field: str) -> None:
    beside = {"tools": [TOOL]} if field == "tool_choice" else {}
    assert await seen(kind, **beside, **{field: SAMPLES[field]}) != await seen(kind, **beside)


@pytest.mark.parametrize("field", MESSAGES_NO_EFFECT)
async def test_a_field_without_an_effect_has_none(field: str) -> None:
    for kind in (MessageRequest, CountRequest):
        assert await seen(kind, **{field: "anything"}) == await seen(kind)


async def test_what_is_within_fields_takes_effect() -> None:
    plain = await seen(MessageRequest, tools=[TOOL])
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}, {"type": "none"}):
        assert await seen(MessageRequest, tools=[TOOL], tool_choice=choice) != plain
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
    engine = AskedEngine("a")
    await answer(engine, False, output_config={"format": {"type": "json_schema", "schema": schema}})
    sampling = engine.asked[-1].sampling
    assert json.loads(sampling.json_schema) == schema
    assert Thought(sampling.thought.opens, sampling.thought.closes) == Thought("<think>", "</think>")
    for kind, arguments in (
        ("enabled", '{"enable_thinking": true}'),
        ("disabled", '{"enable_thinking": false}'),
        ("adaptive", ""),
    ):
        thinking: Any = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
        await answer(engine, False, thinking=thinking)
        assert engine.asked[-2].chat.template_arguments == arguments
    text = f"<think>hm</think>{CALL}{CALL}"
    omitted: Any = {"type": "adaptive", "display": "omitted"}
    found = await answer(AskedEngine(text), True, tools=[TOOL], thinking=omitted)
    assert [block.type for block in found.content] == ["tool_use", "tool_use"]
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    found = await answer(AskedEngine(text), False, tools=[TOOL], tool_choice=single)
    assert [block.type for block in found.content] == ["thinking", "tool_use"]


def test_every_field_of_anthropics_client_is_in_one_column() -> None:
    columns = [set(MessageRequest.model_fields), set(MESSAGES_REFUSED), set(MESSAGES_NO_EFFECT)]
    known = set().union(*columns)
    page = (ROOT / "docs/operate/http.md").read_text().partition("### Messages")[2]
    assert all(f"| `{name}` |" in page for name in known)
    assert sum(map(len, columns)) == len(known)
    assert set(get_type_hints(message_create_params.MessageCreateParamsBase)) | {"stream"} <= known
    counted = set(get_type_hints(message_count_tokens_params.MessageCountTokensParams))
    assert counted <= {*CountRequest.model_fields, *MESSAGES_REFUSED, *MESSAGES_NO_EFFECT}
    for ours, theirs in ((OutputConfig, types.OutputConfigParam),):
        assert set(theirs.__annotations__) <= set(ours.model_fields)
    within = {name for choice in get_args(types.ToolChoiceParam) for name in get_type_hints(choice)}
    assert within <= set(ToolChoice.model_fields)
    within = {name for choice in get_args(types.ThinkingConfigParam) for name in get_type_hints(choice)}
    assert within <= set(Thinking.model_fields)
    refused = {"allowed_callers", "defer_loading", "input_examples"}  # as fields that there are not
    assert set(get_type_hints(types.ToolParam)) <= set(ToolParam.model_fields) | refused
    for path in MESSAGES_NO_EFFECT_WITHIN:
        assert path.partition("[")[0].partition(".")[0] in MessageRequest.model_fields
