"""Anthropic's client on `kvkeeper serve` with the demo model: what it gets is what our own client gets from the same engine."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvkeeper.client import CallOptions, Chat, EngineClient, GenerateOptions, Sampling
from tests.support.processes.serve import END_S, MODEL, Served, serving

TURNS: list[Any] = [{"role": "user", "content": "def fibonacci(n):\n" * 3}]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 24,
    "messages": TURNS,
    "extra_body": {"temperature": 0},
}  # of earlier clients


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    url = served.ready["http"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=END_S) as client:
        yield client


def test_a_message_is_what_the_engine_gives(served: Served, client: anthropic.Anthropic) -> None:
    with EngineClient(served.ready["engine"], CallOptions(retry_s=0)) as own:
        chunks = own.generate(Chat(TURNS), GenerateOptions(sampling=Sampling(max_tokens=24, temperature=0)))
        text = "".join(chunk.text for chunk in chunks)
    num_tokens = client.messages.count_tokens(model=MODEL, messages=TURNS).input_tokens
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        parts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(parts) == text
    for message in (whole, streamed):
        (block,) = message.content
        assert block.type == "text" and block.text == text
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)
        assert message.usage.cache_read_input_tokens, "our own client's prompt is cached"
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == num_tokens
    stop = text[5:8]
    stopped = client.messages.create(**ASKED, stop_sequences=[stop])
    assert "".join(block.text for block in stopped.content if block.type == "text") == text[: text.index(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_a_required_call_fits_the_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["home", "sea"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools: Any = [
        {"name": "look", "input_schema": schema},
        {"name": "wait", "input_schema": {**schema, "properties": {}, "required": []}},
    ]
    for choice, names in (({"type": "any"}, {"look", "wait"}), ({"type": "tool", "name": "look"}, {"look"})):
        found = client.messages.create(**{**ASKED, "max_tokens": 200}, tools=tools, tool_choice=choice)  # type: ignore[call-overload]
        assert found.content and {block.name for block in found.content} <= names
        assert all(block.input.get("at") in ("home", "sea") for block in found.content if block.name == "look")
        assert found.stop_reason == "tool_use"


def test_what_is_wrong_is_named(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ASKED, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as error:
        client.messages.create(**{**ASKED, "max_tokens": 5000})
    assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
