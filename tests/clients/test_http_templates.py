"""Response templates through HTTP: given to the front, or the model's own, for each kind of conversation, streamed or not."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.http.engines import Engine
from kvkeeper.http.responses import template_form
from tests.support.stand_ins.asgi import post
from tests.support.stand_ins.asked_engine import AskedEngine

QWEN = json.dumps(next(template for kinds, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in kinds))
CALL = '\n<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>'
TEXT = f"hm\n</think>\n\nSo.{CALL}"  # of a thought that the prompt began
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}


class Thinking(AskedEngine):
    """Its prompts begin a thought."""

    own = pb.GetModelResponse(model_id="m", max_tokens_per_sequence=100, revision="r")

    async def model(self) -> pb.GetModelResponse:
        return self.own

    async def pieces(self, token_ids: Any) -> list[bytes]:
        return [{1: b"x<|im_start|>assistant\n", 2: b"<think>", 3: b"\n"}.get(token, b"t") for token in token_ids]


async def ask(engine: Engine, path: str, body: dict[str, Any]) -> list[Any]:
    """The answer, or each event of a stream."""

    async def find(_: str) -> Engine:
        await engine.refresh()
        return engine

    found = await post(SimpleNamespace(find=find), path, body)
    assert found.status == 200
    lines = b"".join(found.parts).decode().splitlines()
    return [json.loads(line) for text in lines if (line := text.removeprefix("data: ")).startswith("{")]


def given(*parts: str) -> Engine:
    return Engine(Thinking(*parts), template_form(QWEN))  # type: ignore[arg-type]


async def test_chats() -> None:
    body = CHAT | {"tools": [{"type": "function", "function": LOOK}]}
    (whole,) = await ask(given(*TEXT), "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    assert (call["function"], choice["finish_reason"]) == ({"name": "look", "arguments": '{"at": "here"}'}, "tool_calls")
    events = await ask(given(*TEXT), "/v1/chat/completions", body | {"stream": True})
    choices = [event["choices"][0] for event in events]
    for name in ("content", "reasoning_content"):
        parts = [choice["delta"][name] for choice in choices if choice["delta"].get(name)]
        assert "".join(parts) == message[name] and len(parts) == len(message[name]), "each as it comes"
    (streamed,) = (call for choice in choices for call in choice["delta"].get("tool_calls", ()))
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_chat_whose_call_was_cut_has_its_text() -> None:
    body = CHAT | {"tools": [{"type": "function", "function": LOOK}]}
    engine = Engine(Thinking(TEXT[:-20], reason="length"), template_form(QWEN))  # type: ignore[arg-type]
    (whole,) = await ask(engine, "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == f"So.{CALL[:-20]}"


async def test_responses() -> None:
    body = {"input": "x", "max_output_tokens": 9, "tools": [{"type": "function", **LOOK}]}
    (whole,) = await ask(given(*TEXT), "/v1/responses", body)
    *_, last = await ask(given(*TEXT), "/v1/responses", body | {"stream": True})
    for response in (whole, last["response"]):
        thought, message, call = response["output"]
        assert (thought["content"][0]["text"], message["content"][0]["text"]) == ("hm", "So.")
        assert (call["name"], call["arguments"]) == ("look", '{"at": "here"}')


async def test_messages() -> None:
    body = CHAT | {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    (whole,) = await ask(given(*TEXT), "/v1/messages", body)
    thought, text, call = whole["content"]
    assert (thought["thinking"], text["text"], call["name"], call["input"]) == ("hm", "So.", "look", {"at": "here"})
    events = await ask(given(*TEXT), "/v1/messages", body | {"stream": True})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "So."
    assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == ['{"at": "here"}']


async def test_a_required_call_and_a_free_thought() -> None:
    tool = {"type": "function", "function": LOOK}
    text = 'hm</think>\n[{"name":"look","arguments":{"at":"here"}}]'
    engine = given(*text)
    (whole,) = await ask(engine, "/v1/chat/completions", CHAT | {"tools": [tool], "tool_choice": "required"})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", None)
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at":"here"}'}
    (asked,) = (each for each in engine.client.asked if hasattr(each, "sampling"))  # type: ignore[attr-defined]
    assert (asked.sampling.thought.opens, asked.sampling.thought.closes) == ("", "</think>")


@pytest.mark.parametrize(
    ("chat_template", "form"),
    [
        ("{{ messages }}", "template"),
        ("{{ '<think>' }}", "template"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
    ],
)
async def test_a_models_own_template_is_used_where_no_family_is_recognised(chat_template: str, form: str) -> None:
    engine = Engine(Thinking(), None)  # type: ignore[arg-type]
    engine.client.own = pb.GetModelResponse(chat_template=chat_template, response_template=QWEN)  # type: ignore[attr-defined]
    await engine.refresh()
    assert engine.form.name == form


async def test_a_models_own_template_that_is_wrong_is_logged_and_left_out() -> None:
    engine = Engine(Thinking(), None)  # type: ignore[arg-type]
    engine.client.own = pb.GetModelResponse(chat_template="{{ '<think>' }}", response_template="{}")  # type: ignore[attr-defined]
    with structlog.testing.capture_logs() as logs:
        await engine.refresh()
    assert engine.form.name == "think"
    (line,) = logs
    assert line["event"] == "response_template_not_used" and "fields" in line["error"]
