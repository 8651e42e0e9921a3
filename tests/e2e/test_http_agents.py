"""Agents on `kvkeeper serve`: two calls in one stream, their results sent back, and the answer to them; many agents at once.

The demo model has the chat template of a family that calls tools. It would write no calls by itself: a regular expression holds
it to a word and two calls, whose arguments it draws. What our own client gets from the same engine is what an agent has to get.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from kvkeeper.client import CallOptions, Chat, EngineClient, GenerateOptions, Sampling
from tests.support.documents.markdown import ROOT
from tests.support.processes.serve import END_S, MODEL, Served, serving

NUM_AGENTS = 64
PLACE: Any = {"place": {"enum": ["Rome", "Oslo"]}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("forecast", PLACE | {"days": {"type": "integer"}}), ("map_of", PLACE))
]
_CALL = r'<tool_call>\n\{{"name": "{}", "arguments": \{{"place": "(Rome|Oslo)"{}\}}\}}\n</tool_call>\n'
CALLS = "(Well|Now), I look" + _CALL.format("forecast", ', "days": [0-9]{1,2}') + _CALL.format("map_of", "")
ANSWER = 16  # tokens
# As the same family's later templates end where no thought is wanted, which would be free of the form.
UNTHINKING = "{%- if add_generation_prompt %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
# What the model declares of its own output, which the family's form goes before.
RESPONSES = {"start_anchor": "<|im_start|>assistant\n", "fields": {"content": {}}}


def with_tools(model: Path) -> None:
    path = model / "tokenizer_config.json"
    template = (ROOT / "tests/support/models/chat_templates/qwen_2_5.jinja").read_text() + UNTHINKING
    own = {"chat_template": template, "response_template": RESPONSES}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--http-trust-network", change=with_tools, host="0.0.0.0") as found:  # as in a container
        yield found


def streamed(client: openai.OpenAI, messages: Any, **fields: Any) -> dict[str, Any]:
    """The message that the parts of a stream make."""
    text, calls, reason = "", dict[int, dict[str, Any]](), None
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            empty = {"id": part.id, "type": part.type, "function": {"name": part.function.name, "arguments": ""}}
            calls.setdefault(part.index, empty)["function"]["arguments"] += part.function.arguments
        reason = choice.finish_reason or reason
    assert reason == ("tool_calls" if calls else "length")
    assert sorted(calls) == list(range(len(calls)))
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls.values())} if calls else {})}


def work(client: openai.OpenAI, number: int) -> list[Any]:
    """The conversation of one agent."""
    messages: list[Any] = [{"role": "user", "content": f"def number_{number}(x):"}]
    form = {"guided_regex": CALLS}
    messages.append(streamed(client, messages, temperature=1, seed=number, max_tokens=200, extra_body=form))
    for call in messages[-1]["tool_calls"]:
        told = {name: len(str(value)) for name, value in json.loads(call["function"]["arguments"]).items()}
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(told)})
    messages.append(streamed(client, messages, temperature=0, max_tokens=ANSWER, extra_body={"ignore_eos": True}))
    return messages


def check(own: EngineClient, messages: list[Any], number: int) -> None:
    """Holds a conversation to what the engine gives by itself."""

    def text(prompt: list[Any], **sampling: Any) -> str:
        options = GenerateOptions(sampling=Sampling(**sampling))
        return "".join(chunk.text for chunk in own.generate(Chat(prompt, tools=TOOLS), options))

    said = text(messages[:1], temperature=1, seed=number, max_tokens=200, regex=CALLS)
    calls = [json.loads(each) for each in re.findall(r"<tool_call>\n(.*)\n</tool_call>", said)]
    found = [call["function"] for call in messages[1]["tool_calls"]]
    assert [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in found] == calls
    assert [call["name"] for call in calls] == ["forecast", "map_of"]
    assert len({call["id"] for call in messages[1]["tool_calls"]}) == 2
    assert messages[1]["content"] == said.partition("<tool_call>")[0]
    assert messages[-1]["content"] == text(messages[:-1], temperature=0, max_tokens=ANSWER, ignore_eos=True)


def test_agents_at_once_have_each_their_own_calls_and_answers(served: Served) -> None:
    with (
        openai.OpenAI(base_url=served.ready["http"], api_key="none", max_retries=0, timeout=END_S) as client,
        EngineClient(served.ready["engine"], CallOptions(retry_s=0)) as own,
        ThreadPoolExecutor(NUM_AGENTS) as pool,
    ):
        assert json.loads(own.model().response_template) == RESPONSES
        for number, messages in enumerate(pool.map(lambda number: work(client, number), range(NUM_AGENTS))):
            check(own, messages, number)
