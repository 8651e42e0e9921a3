"""Many streams through the real gateway at once, with what it reads out of their texts: each is what it is without a stream.

The engine's streams are as they are by default, so that several tokens come together. What a gateway reads out of a text goes
by pieces, and has to be the same in whatever order they come.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.support.processes.serve import END_S, Served, serving

pytestmark = pytest.mark.in_turn

NUM_CLIENTS = 32
ARGUMENTS: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "New York", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "forecast", "description": "tells", "parameters": ARGUMENTS}}
# Of a model that says a word and calls twice, which the demo model would not without a form.
_CALL = r'<tool_call>\n\{"name": "forecast", "arguments": \{"place": "(Rome|Oslo)", "days": [0-9]\}\}\n</tool_call>\n'
CALLS = rf"(Well|Now), it is called{_CALL}{_CALL}"

Read = tuple[str, list[tuple[str, Any]], list[float]]  # text, calls with their arguments, log probabilities


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--gateway", "--gateway-tool-call-parser", "qwen") as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.ready["http"], api_key="none", max_retries=0, timeout=END_S) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> tuple[Read, Read]:
    """Without a stream, and with one."""
    whole = client.chat.completions.create(**fields)
    message, told = whole.choices[0].message, whole.choices[0].logprobs
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    logprobs = [each.logprob for each in (told.content or [] if told else [])]
    text, parts, streamed = "", dict[int, list[str]](), list[float]()
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                part = parts.setdefault(call.index, ["", ""])
                part[0] += call.function.name or ""
                part[1] += call.function.arguments or ""
            streamed += [each.logprob for each in (choice.logprobs.content or [] if choice.logprobs else [])]
    joined = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(parts.items())]
    return ((message.content or "").strip(), calls, logprobs), (text.strip(), joined, streamed)


def of_messages(client: anthropic.Anthropic, **fields: Any) -> tuple[Read, Read]:
    """The same of the other interface."""
    whole = client.messages.create(**fields)
    calls = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
    parts: list[list[str]] = []
    for event in client.messages.create(**fields, stream=True):
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            parts.append([event.content_block.name, ""])
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            parts[-1][1] += event.delta.partial_json
    return ("", calls, []), ("", [(name, json.loads(arguments)) for name, arguments in parts], [])


def at_once(ask: Callable[[int], tuple[Read, Read]]) -> list[tuple[Read, Read]]:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(ask, range(NUM_CLIENTS)))


def said(number: int) -> list[Any]:
    return [{"role": "user", "content": f"def number_{number}(x):"}]


def test_a_text_and_its_calls_come_whole(served: Served, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[Read, Read]:
        form = {"regex": CALLS}
        return chat(
            client, model=served.model, messages=said(number), max_tokens=200, temperature=0, tools=[TOOL], extra_body=form
        )

    for whole, streamed in at_once(ask):
        assert streamed == whole
        assert whole[0].endswith(", it is called")
        assert [name for name, _ in whole[1]] == ["forecast"] * 2


def test_calls_that_are_required_come_whole(served: Served, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[Read, Read]:
        choice: Any = {"type": "function", "function": {"name": "forecast"}}
        fields = {"model": served.model, "messages": said(number), "max_tokens": 100, "seed": number, "tools": [TOOL]}
        return chat(client, **fields, tool_choice=choice)

    for whole, streamed in at_once(ask):
        assert streamed == whole
        assert len(whole[1]) == 1


def test_calls_of_messages_come_whole(served: Served) -> None:
    tool: Any = {"name": "forecast", "description": "tells", "input_schema": ARGUMENTS}
    base = served.ready["http"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=END_S) as client:

        def ask(number: int) -> tuple[Read, Read]:
            fields = {"model": served.model, "messages": said(number), "max_tokens": 100, "tools": [tool]}
            choice: Any = {"type": "tool", "name": "forecast"}
            return of_messages(client, **fields, tool_choice=choice, extra_body={"temperature": 0})

        for whole, streamed in at_once(ask):
            assert streamed == whole
            assert len(whole[1]) == 1


def test_stop_strings_and_log_probabilities_are_each_tokens_own(served: Served, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[Read, Read]:
        fields = {"model": served.model, "messages": said(number), "max_tokens": 40, "temperature": 0, "stop": ["e"]}
        return chat(client, **fields, logprobs=True, top_logprobs=1)

    for whole, streamed in at_once(ask):
        assert streamed[0] == whole[0]
        assert "e" not in whole[0]
        assert streamed[2][: len(whole[2])] == pytest.approx(whole[2], abs=1e-4)
        assert whole[2]
