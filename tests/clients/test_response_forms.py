"""What the forms of model families say: thoughts, answers and calls, by hand and for any text."""

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeeper.http.responses import CallArguments, CallStart, Content, Piece, Reasoning, UnknownForm, choose_form
from kvkeeper.http.responses.forms import FORMS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "map_of")]
BAR, LOW = "\uff5c", "\u2581"  # of DeepSeek's markers


def deepseek(text: str) -> str:
    """DeepSeek's markers, from marks that can be read."""
    return re.sub(r"<\|(tool\w+)\|>", lambda found: f"<{BAR}{found.group(1).replace('_', LOW)}{BAR}>", text)


def read(form: str, parts: Sequence[str], prompt_end: str = "", *, is_forced: bool = False, tools: Any = TOOLS) -> list[Any]:
    """What the parts say, as short rows: a letter for the kind, and its text; texts of one kind are one."""
    reader = choose_form(None, form).reader(tools, prompt_end, is_forced=is_forced)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end()
    rows: list[Any] = []
    for piece in pieces:
        kind, text = _row(piece)
        if rows and rows[-1][0] == kind and kind != "call":
            rows[-1] = (kind, rows[-1][1] + text)
        else:
            rows.append((kind, text))
    return rows


def _row(piece: Piece) -> tuple[str, str]:
    match piece:
        case Reasoning(text):
            return "thought", text
        case Content(text):
            return "content", text
        case CallStart(_, _, name):
            return "call", name
        case CallArguments(index, text):
            return f"arguments {index}", text


CALL, TWO = (
    [("call", "weather"), ("arguments 0", '{"city": "Oslo", "days": 2}')],
    [("call", "map_of"), ("arguments 1", '{"days": 1}')],
)
ONE_JSON, TWO_JSON = '"weather", "arguments": {"city": "Oslo", "days": 2}', '"map_of", "arguments": {"days": 1}'
WHOLE = {
    "qwen": [
        ("Hello", [("content", "Hello")]),
        ("<think>\nhm <b>\n</think>\n\nSo.", [("thought", "hm <b>"), ("content", "So.")]),
        (f'Yes.\n<tool_call>\n{{"name": {ONE_JSON}}}\n</tool_call>', [("content", "Yes."), *CALL]),
        (
            f'<tool_call>\n{{"name": {ONE_JSON}}}\n</tool_call>\n<tool_call>\n{{"name": {TWO_JSON}}}\n</tool_call>\nDone.',
            [*CALL, *TWO, ("content", "Done.")],
        ),
        ('<tool_call>{"arguments": {"city": "Oslo", "days": 2}, "name": "weather"}</tool_call>', CALL),
        ('<tool_call>{"name": "weather"}</tool_call>', [CALL[0], ("arguments 0", "{}")]),
        (
            '<tool_call>{"name": "weather", "arguments": {"a": "</tool_call>}"}}</tool_call>',
            [CALL[0], ("arguments 0", '{"a": "</tool_call>}"}')],
        ),
        (f'<tool_call>{{"name": {ONE_JSON}}}}}\n</tool_call>', CALL),  # a brace too many
        (
            '<tool_call>{"name": "weather", "arguments": {"a": 1</tool_call>So.',
            [CALL[0], ("arguments 0", '{"a": 1'), ("content", "So.")],
        ),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            CALL,
        ),
        ("<tool_call>\n<function=weather>\n</function>\n</tool_call>", [CALL[0], ("arguments 0", "{}")]),
    ],
    "llama3": [
        (f'<|python_tag|>{{"name": {ONE_JSON}}}', CALL),
        (f'{{"name": {ONE_JSON}}}; {{"name": {TWO_JSON}}}'.replace("arguments", "parameters"), [*CALL, *TWO]),
        (f'{{"type": "function", "name": {ONE_JSON}}}', CALL),
    ],
    "mistral": [
        (f'[TOOL_CALLS][{{"name": {ONE_JSON}}}, {{"name": {TWO_JSON}}}]', [*CALL, *TWO]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]map_of[CALL_ID]a1[ARGS]{"days": 1}', [*CALL, *TWO]),
        ('[THINK]hm[/THINK]So. [TOOL_CALLS]weather{"city": "Oslo", "days": 2}', [("thought", "hm"), ("content", "So."), *CALL]),
    ],
    "deepseek": [
        (
            deepseek(
                '<think>hm</think><|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n{"city": '
                '"Oslo", "days": 2}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>map_of\n```json\n'
                '{"days": 1}\n```<|tool_call_end|><|tool_calls_end|>'
            ),
            [("thought", "hm"), *CALL, *TWO],
        ),
        (
            deepseek(
                'So.<|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>{"city": "Oslo", "days": 2}<|tool_call_end|>'
                '<|tool_call_begin|>map_of<|tool_sep|>{"days": 1}<|tool_call_end|><|tool_calls_end|>'
            ),
            [("content", "So."), *CALL, *TWO],
        ),
    ],
    "gemma4": [
        (
            '<|channel>thought\nhm<channel|>So.<|tool_call>call:weather{city:<|"|>Os"lo<|"|>,more:{a:[true,1.5,b]}}<tool_call|>',
            [("thought", "hm"), ("content", "So."), CALL[0], ("arguments 0", '{"city":"Os\\"lo","more":{"a":[true,1.5,"b"]}}')],
        )
    ],
    "function-gemma": [
        (
            "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>",
            [CALL[0], ("arguments 0", '{"city":"Oslo","days":2}')],
        )
    ],
    "harmony": [
        (
            "So.<|start|>assistant to=weather<|message|>" + '{"city": "Oslo", "days": 2}',  # a marker that goes on
            [("content", "So."), *CALL],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>',
            [("thought", "hm"), *CALL],
        ),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
            'json<|message|>{"city": "Oslo", "days": 2}',
            [("content", "First."), *CALL],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.",
            [("thought", "hm"), ("content", "So.")],
        ),
    ],
    "think": [("<think>hm</think> So <tool_call>", [("thought", "hm"), ("content", "So <tool_call>")])],
    "plain": [("<think> [TOOL_CALLS]\n", [("content", "<think> [TOOL_CALLS]\n")])],
}
CASES = [
    pytest.param(form, text, rows, id=f"{form}-{i}") for form, cases in WHOLE.items() for i, (text, rows) in enumerate(cases)
]


def test_every_form_is_tested() -> None:
    assert {form.name for form in FORMS} == WHOLE.keys()


@pytest.mark.parametrize(("form", "text", "rows"), CASES)
def test_what_a_text_says(form: str, text: str, rows: list[Any]) -> None:
    assert read(form, [text]) == rows
    assert read(form, list(text)) == rows


@pytest.mark.parametrize(("form", "text", "rows"), CASES)
def test_a_cut_text_says_what_there_is_of_it(form: str, text: str, rows: list[Any]) -> None:
    """Nothing is completed: what each part of an answer says is the beginning of what the whole text says."""
    whole = "".join(kind + said for kind, said in rows if kind.startswith(("call", "arguments")))
    for end in range(len(text)):
        calls = [row for row in read(form, [text[:end]]) if row[0].startswith(("call", "arguments"))]
        assert whole.startswith("".join(kind + said for kind, said in calls)), text[:end]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen", "  a <tool_call> is a tag, </tool_call> another\n\n"),
        ("qwen", '<tool_call>\n{"name": "wea'),
        ("qwen", '<tool_call>{"city": 1}</tool_call>'),
        ("qwen", "<tool_call>{} <tool_call>[1]"),
        ("qwen", "it says <think> so </think>"),
        ("qwen", "a <tool_cal"),
        ("llama3", '{"name": "Bob", "parameters": {}}'),  # none of the tools
        ("llama3", '[1, 2] and {"name": "weather", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] are [TOOL_CALLS]weather[ARGS] without any"),
        ("mistral", f"[TOOL_CALLS]{'a' * 300}[ARGS]{{}}"),  # no tool has such a name
        ("gemma4", "<|tool_call>weather{}<tool_call|>"),
        ("harmony", "plain words to=functions.weather and more"),
    ],
)
def test_what_only_looks_like_a_marker_is_content(form: str, text: str) -> None:
    assert read(form, [text]) == [("content", text)]
    assert read(form, list(text)) == [("content", text)]


def test_a_thought_that_the_prompt_began() -> None:
    for text in ("hm\n</think>\nSo.", "<think>\nhm</think>So."):
        assert read("qwen", list(text), "<|im_start|>assistant\n<think>") == [("thought", "hm"), ("content", "So.")]
    assert read("qwen", ["hm, cut "], "<think>") == [("thought", "hm, cut ")]
    assert read("qwen", ["So."], "<think>\n\n</think>") == [("content", "So.")]


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert read("qwen", [text], tools=[]) == [("content", text)]


_BITS = {
    form: st.sampled_from(sorted({bit for text, _ in cases for bit in re.split(r"(<[^>]*>|\[[A-Z/_]+\]|[{}\",:\s])", text)}))
    for form, cases in WHOLE.items()
}


@given(st.data())
def test_it_says_the_same_wherever_it_is_cut(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(WHOLE)))
    bits = st.lists(
        st.one_of(_BITS[form], st.sampled_from([text for text, _ in WHOLE[form]]), st.text(max_size=3)), max_size=12
    )
    text = "".join(data.draw(bits))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt_end = data.draw(st.sampled_from(["", "<think>"]))
    whole = read(form, [text], prompt_end)
    assert read(form, parts, prompt_end) == whole
    assert read(form, list(text), prompt_end) == whole


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.text("abc.,!?é<", min_size=1), min_size=1))
def test_text_is_held_back_no_longer_than_it_may_be_a_marker(form: str, parts: list[str]) -> None:
    reader = choose_form(None, form).reader(TOOLS)
    fed = said = ""
    for part in parts:
        fed += part
        said += "".join(piece.text for piece in reader.feed(part) if isinstance(piece, Content))
        may_be_marker = fed == "<" if form == "think" else form not in ("plain", "mistral")
        assert said + ("<" if may_be_marker and fed.endswith("<") else "") == fed


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", '"}', "\\", "<|call|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('abé"{', max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_arguments_are_as_the_model_wrote_them(arguments: dict[str, Any], indent: int | None, is_ascii: bool) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
    named = f'{{"name": "weather", "arguments": {written}}}'
    texts = {
        "qwen": f"<tool_call>\n{named}\n</tool_call>",
        "llama3": named,
        "mistral": f"[TOOL_CALLS]weather[ARGS]{written}",
        "deepseek": deepseek(f"<|tool_call_begin|>weather<|tool_sep|>{written}<|tool_call_end|>"),
        "harmony": f"<|channel|>commentary to=functions.weather<|message|>{written}<|call|>",
    }
    for form, text in texts.items():
        assert read(form, list(text)) == [("call", "weather"), ("arguments 0", written)]


@given(
    st.dictionaries(
        st.sampled_from(["city", "note"]), st.text(max_size=12).map(lambda text: text.replace("\r", "")), max_size=2
    ),
    st.integers(),
)
def test_arguments_in_tags_become_json(texts: dict[str, str], days: int) -> None:
    kinds = {"city": {"type": "string"}, "note": {"type": ["string", "null"]}, "days": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": kinds}}}]
    tags = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in {**texts, "days": days}.items())
    rows = read("qwen", list(f"<tool_call>\n<function=weather>\n{tags}\n</function>\n</tool_call>"), tools=tools)
    assert rows[0] == ("call", "weather") and len(rows) == 2
    assert json.loads(rows[1][1]) == {**texts, "days": days}


@pytest.mark.parametrize("form", sorted(WHOLE))
def test_forced_calls(form: str) -> None:
    chosen = choose_form(None, form)
    any_call, one_call = (json.loads(chosen.forced(TOOLS, choice)["json_schema"]) for choice in (None, "map_of"))
    calls = [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "map_of", "arguments": {"days": 1}}]
    jsonschema.validate(calls, any_call)
    jsonschema.validate(calls[1:], one_call)
    for wrong in ([], calls, calls[:1]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, one_call)
    rows = [("call", "weather"), ("arguments 0", '{"city":"Oslo"}'), ("call", "map_of"), ("arguments 1", '{"days":1}')]
    assert read(form, list(json.dumps(calls, separators=(",", ":"))), is_forced=True) == rows


def test_a_forced_call_keeps_the_references_of_its_schema() -> None:
    tree = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}},
        "required": ["tree"],
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"leaf": {"type": "integer"}, "$ref": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
                "required": ["leaf"],
            }
        },
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "grow", "parameters": tree}}]
    schema = json.loads(choose_form(None, "qwen").forced(tools, None)["json_schema"])
    good = {"tree": {"leaf": 1, "$ref": "x", "next": {"leaf": 2}}}
    jsonschema.validate([{"name": "grow", "arguments": good}], schema)
    for wrong in ({"tree": {}}, {"tree": {"leaf": 1, "next": {"leaf": "2"}}}, {"tree": {"leaf": 1, "$ref": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "grow", "arguments": wrong}], schema)


def test_the_constraint_is_for_the_answer_alone() -> None:
    qwen, constraint = choose_form(None, "qwen"), {"regex": "yes|no"}
    assert qwen.answer(constraint) == {**constraint, "thought": {"opens": "<think>", "closes": "</think>"}}
    assert qwen.answer(constraint, "<think>") == {**constraint, "thought": {"opens": "", "closes": "</think>"}}
    assert qwen.answer(constraint, "<think>\n\n</think>") == constraint
    assert choose_form(None, "plain").answer(constraint) == constraint


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, "plain"),
        ("{{ messages }}", "plain"),
        ("{{ '<think>' }}", "think"),
        ("<tool_call>{{ '<think>' }}</tool_call>", "qwen"),
        (deepseek("<|tool_calls_begin|><think>"), "deepseek"),
        ("<|start|>assistant<|channel|>final", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call>", "gemma4"),
        ("<|python_tag|>", "llama3"),
    ],
)
def test_a_form_is_chosen_by_the_chat_template(template: str | None, form: str) -> None:
    assert choose_form(template, None).name == form
    assert choose_form(template, "mistral").name == "mistral"


def test_an_unknown_form() -> None:
    with pytest.raises(UnknownForm, match="'gwen' is none of harmony, "):
        choose_form(None, "gwen")


def test_ids() -> None:
    """A call has an id of its own, of the shape that the family's template takes, or the id that the model gave it."""
    text = "[TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{}"
    ids = [piece.id for piece in choose_form(None, "mistral").reader(TOOLS).feed(text) if isinstance(piece, CallStart)]
    assert re.fullmatch(r"\w{9}", ids[0]) and ids[1] == "a1"
    text = '<tool_call>{"name": "weather"}</tool_call>' * 2
    ids = [piece.id for piece in choose_form(None, "qwen").reader(TOOLS).feed(text) if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)
