"""From a Chat message to the Chat that is rendered, with roles and what goes with each checked. Raises InvalidField."""

from typing import Any

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..outputs.conversation import ROLES, Chat
from ..values.errors import InvalidField

MAX_CHAT_MESSAGES = 4096
_MAX_CALLS = 128


def parse_chat(message: pb.Chat) -> Chat:
    """What is JSON in it is parsed where it is rendered."""
    if len(message.messages) > MAX_CHAT_MESSAGES:
        raise InvalidField(f"chat: at most {MAX_CHAT_MESSAGES} messages", field="chat", limit=MAX_CHAT_MESSAGES)
    if not message.messages:
        raise InvalidField("chat: one message or more", field="chat")
    continues = message.continue_final_message
    adds_prompt = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continues
    if continues and adds_prompt:
        field = "chat.add_generation_prompt"
        raise InvalidField(f"{field}: does not go together with continue_final_message", field=field)
    messages = [_parse_turn(turn, f"chat.messages[{place}]") for place, turn in enumerate(message.messages)]
    return Chat(messages, message.tools, message.template_arguments, continues, adds_prompt, message.plain_user_text)


def _parse_turn(turn: pb.ChatMessage, place: str) -> dict[str, Any]:
    _require(turn.role in ROLES, f"{place}.role", f"one of {', '.join(ROLES)}")
    _require(turn.role == "assistant" or not turn.tool_calls, f"{place}.tool_calls", "of an assistant alone")
    _require(len(turn.tool_calls) <= _MAX_CALLS, f"{place}.tool_calls", f"at most {_MAX_CALLS}")
    _require(turn.role == "tool" or not turn.tool_call_id, f"{place}.tool_call_id", "of a tool alone")
    found: dict[str, Any] = {"role": turn.role}
    if turn.HasField("content") or not turn.tool_calls:
        found["content"] = turn.content
    found |= {name: getattr(turn, name) for name in ("name", "tool_call_id") if getattr(turn, name)}
    if turn.tool_calls:
        found["tool_calls"] = [_parse_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(turn.tool_calls)]
    return found


def _parse_call(call: pb.ToolCall, place: str) -> dict[str, Any]:
    _require(bool(call.name), f"{place}.name", "needed")
    known = {"id": call.id} if call.id else {}
    return {**known, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _require(holds: bool, field: str, text: str) -> None:
    if not holds:
        raise InvalidField(f"{field}: {text}", field=field)
