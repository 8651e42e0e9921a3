"""OpenAI's own client on POST /v1/responses, whose engine gives what a test says; and every field that it can send."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from openai.types import responses
from openai.types.responses import response_create_params

from kvkeeper.http.app import make_app
from kvkeeper.http.engines import Engine
from kvkeeper.http.reply_fields import REPLIES_NO_EFFECT, REPLIES_REFUSED, ReplyRequest
from kvkeeper.http.responses import choose_form
from tests.support.documents.markdown import ROOT
from tests.support.stand_ins.asked_engine import AskedEngine

CALL = '<tool_call>{"name": "look", "arguments": {"at": "world"}}</tool_call>'
TOOL: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@asynccontextmanager
async def connected(engine_client: AskedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    engine = Engine(engine_client, None)  # type: ignore[arg-type]
    engine.model = SimpleNamespace(model_id="m", text_part_of="", max_tokens_per_sequence=100, revision="r" * 64)  # type: ignore[assignment]
    engine.form, engine._asked_at = choose_form(None, "qwen"), float("inf")

    async def find(_: str) -> Engine:
        return engine

    engines = SimpleNamespace(find=find, close=engine_client.close)
    transport = httpx2.ASGITransport(app=make_app(engines))  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(
        api_key="x", base_url="http://front/v1", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        yield client


async def respond(engine: AskedEngine, is_stream: bool, **fields: Any) -> responses.Response:
    """What the client makes of it, either way; a stream's events are whole and in order."""
    asked: Any = {"model": "m", "input": "x", "max_output_tokens": 9, **fields}
    async with connected(engine) as client:
        if not is_stream:
            return await client.responses.create(**asked)
        events = [each async for each in await client.responses.create(**asked, stream=True)]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last.type == f"response.{last.response.status}"
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert done == last.response.output
    for index, item in enumerate(last.response.output):
        own: list[Any] = [each for each in events if getattr(each, "output_index", None) == index]
        assert [own[0].type, own[-1].type] == ["response.output_item.added", "response.output_item.done"]
        assert {each.item_id for each in own if hasattr(each, "item_id")} == {item.id}
        deltas = "".join(each.delta for each in own if each.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    return last.response  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_thoughts_texts_and_calls_are_items(is_stream: bool) -> None:
    text = f"<think>\nhm\n</think>\n\nSo.{CALL}{CALL}"
    found = await respond(AskedEngine(*text), is_stream, tools=[TOOL])
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, *calls = found.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "hm"
    assert (found.output_text.strip(), message.type == "message" and message.role) == ("So.", "assistant")
    for call in calls:
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("look", {"at": "world"}, "completed")
    assert len({call.id for call in calls}) == 2
    assert (found.status, found.incomplete_details) == ("completed", None)
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.input_tokens_details.cached_tokens) == (
        12,
        len(text),
        8,
    )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_cut_is_incomplete(is_stream: bool) -> None:
    found = await respond(AskedEngine(*CALL[:55], reason="length"), is_stream, tools=[TOOL])
    (call,) = found.output
    assert call.type == "function_call"
    assert '{"at": "world"}'.startswith(call.arguments) and call.arguments.startswith('{"at": "')
    assert (found.status, call.status) == ("incomplete", "incomplete")
    assert found.incomplete_details is not None and found.incomplete_details.reason == "max_output_tokens"


async def test_an_answer_can_be_sent_back_with_what_its_calls_gave() -> None:
    first = await respond(AskedEngine(f"<think>hm</think>So.{CALL}"), False, tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    sent = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"},
    ]
    engine = AskedEngine("Good.")
    await respond(engine, False, input=sent, instructions="Be brief.", tools=[TOOL])
    turns = engine.asked[0].chat.messages
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool"]
    assert [turn.content.strip() for turn in turns] == ["Be brief.", "x", "So.", "seen"]
    assert turns[2].tool_calls[0].id == turns[3].tool_call_id == call.call_id


async def test_fields_reach_the_engine() -> None:
    engine = AskedEngine("{}")
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    await respond(engine, False, temperature=0.5, top_p=0.25, text=form, reasoning={"effort": "low"})
    sampling = engine.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)
    assert json.loads(sampling.json_schema) == SCHEMA
    assert json.loads(engine.asked[0].chat.template_arguments) == {"reasoning_effort": "low"}
    called = AskedEngine("[]")
    await respond(called, False, tools=[TOOL], tool_choice={"type": "function", "name": "look"})
    assert called.asked[-1].sampling.json_schema
    assert json.loads(called.asked[0].chat.tools)[0]["function"]["description"] == "Looks."
    single = await respond(AskedEngine(CALL + CALL), False, tools=[TOOL], parallel_tool_calls=False)
    assert len(single.output) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_come_where_they_are_asked_for(is_stream: bool) -> None:
    for include, num in ((["message.output_text.logprobs"], 3), (["reasoning.encrypted_content"], 0)):
        top = {"top_logprobs": 2} if num else {}
        found = await respond(AskedEngine("a", "b", "c"), is_stream, include=include, **top)
        (message,) = found.output
        assert message.type == "message" and message.content[0].type == "output_text"
        told = message.content[0].logprobs or []
        assert [(each.token, each.logprob, len(each.top_logprobs)) for each in told] == [("t", -0.5, 2)] * num


# -- fields


def test_every_field_of_openais_client_is_in_one_column() -> None:
    fields = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    takes, refused, none = set(ReplyRequest.model_fields), set(REPLIES_REFUSED), set(REPLIES_NO_EFFECT)
    assert fields <= takes | refused | none
    assert not (takes & refused or takes & none or refused & none)
    page = (ROOT / "docs/operate/http.md").read_text()
    page = page[page.index("### Responses") :]
    assert all(f"| `{name}` |" in page for name in takes | refused | none)


@pytest.mark.parametrize("field", REPLIES_REFUSED)
async def test_a_field_that_is_not_served_is_refused_by_its_name(field: str) -> None:
    no = REPLIES_REFUSED[field]
    assert (await respond(AskedEngine("a"), False, extra_body={field: no.harmless})).output_text == "a"
    for value in (not no.harmless, "some", {"a": 1}):
        with pytest.raises(openai.BadRequestError, match=f"{field}: not served: ") as error:
            await respond(AskedEngine("a"), False, extra_body={field: value})
        assert error.value.param == field


@pytest.mark.parametrize("field", REPLIES_NO_EFFECT)
async def test_a_field_without_an_effect_has_none(field: str) -> None:
    engines = AskedEngine("a"), AskedEngine("a")
    for engine, body in zip(engines, ({}, {field: "some"}), strict=True):
        await respond(engine, False, extra_body=body)
        for request in engine.asked:
            if hasattr(request, "request_id"):
                request.request_id = ""
    assert engines[0].asked == engines[1].asked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"x": 1}, "x"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "x", "x": 1}]}, "input[0].x"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_any_other_field_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await respond(AskedEngine("a"), False, extra_body=fields)
    assert (error.value.param or "").startswith(param), error.value
