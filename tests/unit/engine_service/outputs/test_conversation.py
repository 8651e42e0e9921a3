"""Chats with tools, and chats that a prompt continues, are those of transformers; what is wrong in one is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.engine_service.model.checkpoint.errors import TokenizerError
from kvkeeper.engine_service.outputs.conversation import Chat, WrongChat
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from tests.unit.engine_service.outputs.test_chat_template import FAMILIES, clock, theirs, write

__all__ = ["clock"]  # a fixture of the tests here
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str, arguments: str, **more: str) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Weather in Łódź & Bonn?"}
CALLS = [
    call("weather", '{"city": "Łódź"}', id="call00001"),
    call("weather", '{"city": "Bonn", "n": [1.5, null]}', id="call00002"),
]
REPLIES = [
    {"role": "tool", "content": '{"t": 3}', "tool_call_id": "call00001", "name": "weather"},
    {"role": "tool", "content": "rain", "tool_call_id": "call00002", "name": "weather"},
]
TOOLS = json.dumps([WEATHER])
CHATS: dict[str, Chat] = {
    "tools": Chat([USER], tools=TOOLS),
    "no tools": Chat([USER], tools="[]"),
    "one call": Chat([USER, {"role": "assistant", "tool_calls": CALLS[:1]}, REPLIES[0]], tools=TOOLS),
    "two calls": Chat([USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, *REPLIES], tools=TOOLS),
    "calls with a text": Chat(
        [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS[:1]}]
    ),
    "empty arguments": Chat([USER, {"role": "assistant", "tool_calls": [call("now", "")]}], tools=TOOLS),
    "developer": Chat([{"role": "developer", "content": "Be brief."}, USER]),
    "variables": Chat([USER], template_arguments='{"enable_thinking": false, "documents": [{"title": "t", "text": "x"}]}'),
    "variables that replace tokens": Chat([USER], template_arguments='{"bos_token": "[b]", "date_string": "today"}'),
    "continued": Chat(
        [USER, {"role": "assistant", "content": " It is "}], continue_final_message=True, add_generation_prompt=False
    ),
    "continued without blanks": Chat(
        [USER, {"role": "assistant", "content": "It is"}], continue_final_message=True, add_generation_prompt=False
    ),
    "a user's turn continued": Chat([USER], continue_final_message=True, add_generation_prompt=False),
    "no prompt": Chat([USER], add_generation_prompt=False),
}


def with_parsed_arguments(message: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(message))
    for one in found.get("tool_calls", ()):
        one["function"]["arguments"] = json.loads(one["function"]["arguments"] or "{}")
    return found


def expected(folder: Path, chat: Chat) -> str | None:
    return theirs(
        folder,
        [with_parsed_arguments(message) for message in chat.messages],
        tools=json.loads(chat.tools) if chat.tools else None,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **json.loads(chat.template_arguments or "{}"),
    )


def found(folder: Path, chat: Chat) -> str | None:
    try:
        return chat.render(Tokenizer.load(folder).apply_chat_template)
    except (TokenizerError, WrongChat):
        return None


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_family_renders_them_as_in_transformers(path: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, path.read_text())
    for name, chat in CHATS.items():
        assert found(folder, chat) == expected(folder, chat), name


def test_the_chats_show(tmp_path: Path) -> None:
    folder = write(tmp_path, (FAMILIES / "qwen_2_5.jinja").read_text())
    rendered = {name: found(folder, chat) for name, chat in CHATS.items()}
    assert None not in rendered.values()
    assert '{"city": "Bonn", "n": [1.5, null]}' in str(rendered["two calls"])
    assert str(rendered["continued without blanks"]).endswith("\nIt is")
    assert len(set(rendered.values())) == len(rendered) - 3, "no tools, and variables that it does not look at"


@pytest.mark.parametrize("source", [{"tool_use": "tools", "default": "plain"}, {"tool_use": "tools"}, {"default": "plain"}])
def test_a_template_for_tools_goes_before_the_default_where_there_are_tools(source: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path, [{"name": name, "template": text} for name, text in source.items()])
    for chat in (CHATS["tools"], CHATS["no tools"], CHATS["no prompt"]):
        assert found(folder, chat) == expected(folder, chat)


def assistant(arguments: str) -> Chat:
    return Chat([USER, {"role": "assistant", "tool_calls": [call("a", "{}"), call("b", arguments)]}])


WRONG: dict[str, Chat] = {
    "chat.tools not JSON": Chat([USER], tools="[{]"),
    "chat.tools no list": Chat([USER], tools="{}"),
    "chat.tools no objects": Chat([USER], tools='["weather"]'),
    "chat.tools no number": Chat([USER], tools='[{"a": NaN}]'),
    "chat.template_arguments not JSON": Chat([USER], template_arguments="x"),
    "chat.template_arguments no object": Chat([USER], template_arguments="[1]"),
    "chat.template_arguments messages": Chat([USER], template_arguments='{"messages": []}'),
    "chat.template_arguments tools": Chat([USER], template_arguments='{"tools": null}'),
    "chat.template_arguments prompt": Chat([USER], template_arguments='{"add_generation_prompt": true}'),
    "chat.messages[1].tool_calls[1].arguments not JSON": assistant("{'a': 1}"),
    "chat.messages[1].tool_calls[1].arguments no object": assistant("[]"),
    "chat.messages[1].tool_calls[1].arguments cut": assistant('{"city": "Bo'),
    "chat.continue_final_message nothing": Chat(
        [USER, {"role": "assistant", "content": ""}], continue_final_message=True, add_generation_prompt=False
    ),
    "chat.continue_final_message dropped": Chat(
        [{"role": "system", "content": "dropped"}], continue_final_message=True, add_generation_prompt=False
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"))
    with pytest.raises(WrongChat) as wrong:
        tokenizer.encode_chat(WRONG[name])
    assert wrong.value.field == name.split()[0]


def test_no_variable_of_a_client_is_an_argument_of_ours(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, "{{ self is defined }}{{ variables }}{{ messages[0].content }}"))
    chat = Chat([{"role": "user", "content": "a"}], template_arguments='{"self": 1, "variables": 2}')
    assert chat.render(tokenizer.apply_chat_template).endswith("2a")
