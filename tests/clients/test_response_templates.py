"""Response templates: our forms beside those that transformers has for the same families, and these as forms themselves."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from kvkeeper.http.responses import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    WrongTemplate,
    choose_form,
    template_form,
)

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
    functions = [call["function"] for call in theirs.get("tool_calls", ())]
    expected = {
        "reasoning_content": theirs.get("reasoning_content", ""),
        "content": theirs.get("content", ""),
        "tool_calls": [(function["name"], function["arguments"]) for function in functions],
    }
    for reader in (choose_form(None, form).reader(TOOLS), template_form(json.dumps(TEMPLATES[family])).reader(TOOLS, begins)):
        assert message([piece for char in text for piece in reader.feed(char)] + reader.end()) == expected
    assert expected["content"] == content and expected["tool_calls"] == calls, "and it is what was written"


def message(pieces: Iterable[Piece]) -> dict[str, Any]:
    pieces = list(pieces)
    arguments: defaultdict[int, str] = defaultdict(str)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    return {
        "reasoning_content": "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "content": "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        "tool_calls": [(start.name, json.loads(arguments[start.index])) for start in pieces if isinstance(start, CallStart)],
    }


def said(family: str, parts: Sequence[str], prompt: str, tools: Any = TOOLS) -> list[tuple[str, str]]:
    """What a template says of the parts, texts of one kind put together."""
    reader = template_form(json.dumps(TEMPLATES[family])).reader(tools, prompt)
    rows: list[tuple[str, str]] = []
    for piece in [piece for part in parts for piece in reader.feed(part)] + reader.end():
        kind = type(piece).__name__
        text = piece.name if isinstance(piece, CallStart) else piece.text
        if rows and rows[-1][0] == kind and isinstance(piece, Content | Reasoning):
            rows[-1] = (kind, rows[-1][1] + text)
        else:
            rows.append((kind, text))
    return rows


CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "gemma4": "<|tool_call>call:weather{days:2}<tool_call|>",
}
CALL = [("CallStart", "weather"), ("CallArguments", '{"days": 2}')]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_a_template_says_the_same_wherever_the_text_is_cut(family: str, data: st.DataObject) -> None:
    _, begins, around_thought, *_ = FAMILIES[family]
    marks = {*re.split(r"(<[^>]*>|[{}\",:\s])", CALLS[family] + around_thought), CALLS[family], " ", "\n", "a"}
    text = "".join(data.draw(st.lists(st.sampled_from(sorted(marks)) | st.text(max_size=3), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = begins + data.draw(st.sampled_from(["", around_thought.partition("{}")[0]]))
    whole = said(family, [text], prompt)
    assert said(family, parts, prompt) == whole
    assert said(family, list(text), prompt) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_reads_calls_and_leaves_what_is_none_as_it_was_written(family: str) -> None:
    _, begins, *_ = FAMILIES[family]
    call = CALLS[family]
    broken = call.replace('"weather"', '"weather').replace("{days:", "{days")  # no JSON
    assert said(family, [f"So.\n\n{call}\n{call}"], begins) == [("Content", "So."), *CALL, *CALL]
    assert said(family, [f"So. {call}"], begins, tools=[]) == [("Content", f"So. {call}")]
    if family != "qwen3_5":  # whose tags are read as far as there are any
        assert said(family, [f"a {broken} b{call}"], begins)[:1] == [("Content", f"a {broken} b")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_completes_no_call_that_was_cut(family: str) -> None:
    _, begins, *_ = FAMILIES[family]
    call = CALLS[family]
    is_whole = call.index("</tool_call>") if family == "qwen3" else len(call) - len("<tool_call|>")
    for end in range(len(call)):
        rows = said(family, [call[:end]], begins)
        if family != "qwen3_5" and end >= is_whole - 1:
            assert rows in (CALL, [("Content", call[:end])])  # its JSON is all there
        else:
            assert rows == ([("Content", call[:end].rstrip())] if end else [])


def test_a_template_goes_on_behind_what_the_prompt_has_begun() -> None:
    assert said("qwen3", [" hm</think> So."], "x<|im_start|>assistant\n<think>\n") == [("Reasoning", "hm"), ("Content", "So.")]
    assert said("qwen3", [" world"], "x<|im_start|>assistant\nHello") == [("Content", " world")]
    assert said("qwen3", ["So."], "<think><|im_start|>assistant\n<think>\n\n</think>\n\n") == [("Content", "So.")]


FIELDS = {"content": {}}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{", "Expecting"),
        ("[]", "must be a dict"),
        ({"start_anchor": "x"}, "non-empty dict"),
        ({"fields": FIELDS}, "start_anchor"),
        ({"start_anchor": "x", "fields": FIELDS, "version": 2}, "version"),
        ({"start_anchor": "x", "fields": FIELDS, "more": 1}, "more"),
        ({"start_anchor": "x", "fields": {"content": {"open_pattern": "("}}}, "invalid open_pattern"),
        ({"start_anchor": "x", "fields": {"content": {"open_pattern": 5}}}, "string"),
        ({"start_anchor": "x", "fields": {"audio": {}}}, "'audio' is none of content"),
        ({"start_anchor": "x", "fields": {"content": {"content": "json"}}}, "'content' is a text"),
        ({"start_anchor": "x", "fields": {"tool_calls": {"open": "<", "content": "xml-inline"}}}, "tag_pattern"),
        ({"start_anchor": "x", "fields": {"tool_calls": {"open": "<", "content": "json", "content_args": 5}}}, "content_args"),
        ({"start_anchor": "x", "fields": {"tool_calls": {"open": "<", "content": "int"}}}, "tool_calls"),
    ],
)
def test_a_wrong_template_is_refused_with_what_is_wrong(template: Any, said: str) -> None:
    text = template if isinstance(template, str) else json.dumps(template)
    with pytest.raises(WrongTemplate, match=re.escape(said)):
        template_form(text)
