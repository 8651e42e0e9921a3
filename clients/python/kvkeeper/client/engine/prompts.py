"""What a prompt may be, and how it gets into a request: text, token ids, or a conversation.

A conversation may be written as OpenAI's clients write it, as far as the protocol can carry it: text, whole or in parts, and
calls of functions.
Anything else is a TypeError or a ValueError that names the place; nothing is dropped silently. Pure.
"""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvkeeper.engine.v1 import engine_service_pb2 as pb


class Array(Protocol):
    """Token ids of numpy or torch."""

    def tolist(self) -> Any: ...


Message = Mapping[str, str | Sequence[Mapping[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with what the model's chat template is given beside it; the protocol's Chat explains each.

    messages: {"role", "content"}, and "name", "tool_calls" or "tool_call_id" where they apply, as OpenAI's clients write them.
    tools: as transformers' apply_chat_template takes them. template_arguments: further variables, such as enable_thinking.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    plain_user_text: bool = False


Prompt = str | Sequence[int] | Array | Sequence[Message] | Chat

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_WHAT = "a prompt is text, token ids or a list of messages"


def set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """A string is text, integers are token ids, a Chat or mappings with role and content are a conversation."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, bytes | bytearray):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}; decode it first")
    if isinstance(prompt, Mapping):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}; put a single message into a list")
    if isinstance(prompt, Chat):
        set_chat(request.chat, prompt)
        return
    items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, Sequence):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}")
    if items and isinstance(items[0], Mapping):
        set_chat(request.chat, Chat(items))
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids, items)


def set_chat(message: pb.Chat, chat: Chat) -> None:
    message.SetInParent()
    message.messages.extend(_turn(turn, f"messages[{number}]") for number, turn in enumerate(chat.messages))
    message.tools = json.dumps(list(chat.tools)) if chat.tools else ""
    message.template_arguments = json.dumps(dict(chat.template_arguments)) if chat.template_arguments else ""
    message.continue_final_message, message.plain_user_text = chat.continue_final_message, chat.plain_user_text
    if chat.add_generation_prompt is not None:
        message.add_generation_prompt = chat.add_generation_prompt


def _extend(token_ids: pb.TokenIds, items: Sequence[Any]) -> None:
    try:
        token_ids.ids.extend(map(operator.index, items))
    except TypeError:
        odd = next(item for item in items if not hasattr(item, "__index__"))
        hint = "; a prompt is one text, so ask once for each" if isinstance(odd, str) else ""
        raise TypeError(f"token ids are integers, not {_kind(odd)}{hint}") from None
    except ValueError:
        raise ValueError("token ids are 0 to 2^32 - 1") from None


def _turn(message: Any, place: str) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place}: a mapping with role and content, not {_kind(message)}")
    if unknown := [str(key) for key in message if key not in _KEYS]:
        raise ValueError(f"{place}: a message has {', '.join(_KEYS)}, and no {' or '.join(unknown)}")
    calls = message.get("tool_calls") or ()
    for key in ("role",) if calls else ("role", "content"):
        if key not in message:
            raise ValueError(f"{place}.{key} is missing")
    content = message.get("content")
    return pb.ChatMessage(
        role=_text(message["role"], f"{place}.role"),
        content=None if calls and content is None else _content(content, f"{place}.content"),
        tool_calls=[_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)],
        tool_call_id=_text(message.get("tool_call_id", ""), f"{place}.tool_call_id"),
        name=_text(message.get("name", ""), f"{place}.name"),
    )


def _call(call: Any, place: str) -> pb.ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ValueError(f"{place}: only calls of type 'function' with a function are taken")
    arguments = function.get("arguments", "")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(dict(arguments))
    return pb.ToolCall(
        id=_text(call.get("id", ""), f"{place}.id"),
        name=_text(function.get("name"), f"{place}.function.name"),
        arguments=_text(arguments, f"{place}.function.arguments"),
    )


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise TypeError(f"{place}: a string or a list of text parts, not {_kind(content)}")
    return "".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if not isinstance(part, Mapping):
        raise TypeError(f"{place}: a mapping with type and text, not {_kind(part)}")
    if part.get("type") != "text":
        raise ValueError(f"{place}: a part of type {part.get('type')!r}; only parts of type 'text' are taken")
    return _text(part.get("text"), f"{place}.text")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{place}: a string, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
