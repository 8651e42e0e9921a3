"""The forms beside the response templates that transformers has for the same families: both read the same message."""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from kvkeeper.http.responses import CallArguments, CallStart, Content, Reasoning, choose_form

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "map_of")
]
TEMPLATES = {kind: template for kinds, template in _RESPONSE_TEMPLATE_FALLBACKS.items() for kind in kinds}
WORDS = st.text(st.sampled_from("ab é.,:{}[]'\n"), min_size=1, max_size=20).map(str.strip).filter(bool)
ARGUMENTS = st.fixed_dictionaries({}, optional={"city": WORDS, "days": st.integers(-9, 99)})


def hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def coder(name: str, arguments: Mapping[str, Any]) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def gemma(name: str, arguments: Mapping[str, Any]) -> str:
    values = (f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{','.join(values)}}}<tool_call|>"


FAMILIES = {  # form, what begins a turn, a thought, a call, what ends a turn
    "qwen3": ("qwen", "<|im_start|>assistant\n", "<think>\n{}\n</think>\n\n", hermes, "<|im_end|>"),
    "qwen3_5": ("qwen", "<|im_start|>assistant\n", "<think>\n{}\n</think>\n\n", coder, "<|im_end|>\n<|endoftext|>"),
    "gemma4": ("gemma4", "<|turn>model\n", "<|channel>thought\n{}<channel|>", gemma, "<turn|>"),
}


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_both_read_the_same_message(family: str, data: st.DataObject) -> None:
    form, begins, around_thought, write, ends = FAMILIES[family]
    thought, content = data.draw(st.none() | WORDS), data.draw(WORDS)
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["weather", "map_of"]), ARGUMENTS), max_size=3))
    text = ("" if thought is None else around_thought.format(thought)) + content
    text += "".join(write(*call) for call in calls) + data.draw(st.sampled_from(["", ends]))
    theirs = parse_response(text, TEMPLATES[family], prefix=begins, tools=TOOLS)
    reader = choose_form(None, form).reader(TOOLS)
    pieces = [piece for char in text for piece in reader.feed(char)] + reader.end()
    arguments: defaultdict[int, str] = defaultdict(str)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    ours = {
        "reasoning_content": "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "content": "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        "tool_calls": [(start.name, json.loads(arguments[start.index])) for start in pieces if isinstance(start, CallStart)],
    }
    functions = [call["function"] for call in theirs.get("tool_calls", ())]
    assert ours == {
        "reasoning_content": theirs.get("reasoning_content", ""),
        "content": theirs.get("content", ""),
        "tool_calls": [(function["name"], function["arguments"]) for function in functions],
    }
    assert ours["content"] == content and ours["tool_calls"] == calls, "and it is what was written"
