"""Every field of a chat's messages reaches what is rendered; an absent content is told from an empty one."""

from typing import Any

import pytest

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.outputs.conversation import Chat
from kvkeeper.engine_service.rpc.decode_chat import parse_chat

USER = pb.ChatMessage(role="user", content="x")
CALL = pb.ToolCall(id="1", name="f", arguments="{}")
FIELDS: dict[str, Any] = {
    "messages": [pb.ChatMessage(role="assistant")],
    "tools": "[]",
    "template_arguments": "{}",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "plain_user_text": True,
}


def test_no_field_is_left_out() -> None:
    fields = {field.name for field in pb.Chat.DESCRIPTOR.fields}
    assert set(FIELDS) == fields == set(Chat.__dataclass_fields__)
    plain = parse_chat(pb.Chat(messages=[USER]))
    for name, value in FIELDS.items():
        chat = parse_chat(pb.Chat(**{"messages": [USER], name: value}))
        assert getattr(chat, name) != getattr(plain, name)


def test_a_message_is_what_templates_take() -> None:
    called = pb.ChatMessage(role="assistant", content="y", name="n", tool_calls=[CALL, pb.ToolCall(name="g")])
    reply = pb.ChatMessage(role="tool", content="2", tool_call_id="1")
    assert {field.name for field, _ in called.ListFields()} | {field.name for field, _ in reply.ListFields()} == {
        field.name for field in pb.ChatMessage.DESCRIPTOR.fields
    }
    assert parse_chat(pb.Chat(messages=[called, reply])).messages == [
        {
            "role": "assistant",
            "content": "y",
            "name": "n",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"type": "function", "function": {"name": "g", "arguments": ""}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (pb.ChatMessage(role="user"), {"content": ""}),
        (pb.ChatMessage(role="assistant", tool_calls=[CALL]), {}),
        (pb.ChatMessage(role="assistant", content="", tool_calls=[CALL]), {"content": ""}),
    ],
)
def test_an_absent_content_is_none_beside_calls_alone(message: pb.ChatMessage, content: dict[str, str]) -> None:
    (found,) = parse_chat(pb.Chat(messages=[message])).messages
    assert {name: value for name, value in found.items() if name == "content"} == content


@pytest.mark.parametrize(("continues", "asked", "adds"), [(False, None, True), (True, None, False), (False, False, False)])
def test_a_prompt_for_an_answer_is_added_unless_a_message_is_continued(continues: bool, asked: bool | None, adds: bool) -> None:
    chat = parse_chat(pb.Chat(messages=[USER], continue_final_message=continues, add_generation_prompt=asked))
    assert chat.add_generation_prompt is adds
