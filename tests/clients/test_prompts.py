"""What a prompt may be: text, token ids, a conversation. What it may not be is refused before anything is sent, by name."""

import json
from typing import Any

import numpy as np
import pytest

from kvkeeper.client import Chat
from kvkeeper.client.engine.calls import GenerateOptions, generate_request
from kvkeeper.engine.v1 import engine_service_pb2 as pb


def asked(prompt: Any) -> pb.GenerateRequest:
    return generate_request(prompt, GenerateOptions())


def test_a_message_may_be_in_text_parts() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    request = asked([{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "Be brief."), ("user", "What is this?")]


def test_calls_and_their_replies_are_sent_as_they_are_written() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"function": {"name": "g", "arguments": {"b": [None, "é"]}}},
    ]
    said = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    first, second, third = asked(said).chat.messages
    assert [(call.id, call.name, json.loads(call.arguments)) for call in first.tool_calls] == [
        ("1", "f", {"a": 1}),
        ("", "g", {"b": [None, "é"]}),
    ]
    assert (first.HasField("content"), third.HasField("content")) == (False, True)
    assert (second.role, second.content, second.tool_call_id, second.name) == ("tool", "2", "1", "f")


def test_a_chat_brings_what_its_template_is_given() -> None:
    said = [{"role": "user", "content": "x"}]
    plain = asked(Chat(said)).chat
    assert plain == asked(said).chat
    assert not plain.HasField("add_generation_prompt")
    tools, variables = [{"type": "function"}], {"enable_thinking": False}
    chat = asked(
        Chat(said, tools, variables, continue_final_message=True, add_generation_prompt=False, plain_user_text=True)
    ).chat
    assert (json.loads(chat.tools), json.loads(chat.template_arguments)) == (tools, variables)
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.plain_user_text) == (True, False, True)
    assert set(Chat.__dataclass_fields__) == {field.name for field in pb.Chat.DESCRIPTOR.fields}
    assert asked(Chat([])).WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    "ids",
    [[3, 4, 5], (3, 4, 5), np.array([3, 4, 5], np.int32), range(3, 6), [np.int64(3), 4, 5]],
    ids=lambda v: type(v).__name__,
)
def test_token_ids_may_be_any_integers_in_order(ids: Any) -> None:
    assert list(asked(ids).token_ids.ids) == [3, 4, 5]


def test_no_token_ids_are_the_service_s_to_refuse() -> None:
    assert asked([]).WhichOneof("prompt") == "token_ids"


WRONG = {
    "image part": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ValueError,
        "messages[0].content[0]: a part of type 'image_url'; only parts of type 'text' are taken",
    ),
    "part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        TypeError,
        "messages[0].content[0].text: a string, not None",
    ),
    "part that is no mapping": (
        [{"role": "user", "content": ["hello"]}],
        TypeError,
        "messages[0].content[0]: a mapping with type and text, not a str",
    ),
    "name": (
        [{"role": "system", "content": "x"}, {"role": "user", "names": "ada", "content": "x"}],
        ValueError,
        "messages[1]: a message has role, content, name, tool_calls, tool_call_id, and no names",
    ),
    "name that is no text": (
        [{"role": "user", "name": 7, "content": "x"}],
        TypeError,
        "messages[0].name: a string, not an int",
    ),
    "call of another type": (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
        ValueError,
        "messages[0].tool_calls[0]: only calls of type 'function' with a function are taken",
    ),
    "call without a name": (
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        TypeError,
        "messages[0].tool_calls[0].function.name: a string, not None",
    ),
    "arguments that are no object": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        TypeError,
        "messages[0].tool_calls[0].function.arguments: a string, not a list",
    ),
    "no content": ([{"role": "user"}], ValueError, "messages[0].content is missing"),
    "null content": (
        [{"role": "assistant", "content": None}],
        TypeError,
        "messages[0].content: a string or a list of text parts, not None",
    ),
    "no role": ([{"content": "x"}], ValueError, "messages[0].role is missing"),
    "role that is no text": ([{"role": 1, "content": "x"}], TypeError, "messages[0].role: a string, not an int"),
    "one message alone": (
        {"role": "user", "content": "x"},
        TypeError,
        "a prompt is text, token ids or a list of messages, not a dict; put a single message into a list",
    ),
    "messages and ids": (
        [{"role": "user", "content": "x"}, 7],
        TypeError,
        "messages[1]: a mapping with role and content, not an int",
    ),
    "texts": (["a", "b"], TypeError, "token ids are integers, not a str; a prompt is one text, so ask once for each"),
    "fractions": ([1.0, 2.0], TypeError, "token ids are integers, not a float"),
    "two dimensions": (np.zeros((2, 2), int), TypeError, "token ids are integers, not a list"),
    "below zero": ([1, -1], ValueError, "token ids are 0 to 2^32 - 1"),
    "too large": ([2**32], ValueError, "token ids are 0 to 2^32 - 1"),
    "bytes": (b"abc", TypeError, "a prompt is text, token ids or a list of messages, not a bytes; decode it first"),
    "nothing": (None, TypeError, "a prompt is text, token ids or a list of messages, not None"),
}


@pytest.mark.parametrize(("prompt", "kind", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_prompt_is_refused_by_name(prompt: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        asked(prompt)
    assert str(caught.value) == said
