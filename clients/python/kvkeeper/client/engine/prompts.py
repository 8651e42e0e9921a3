"""What a prompt may be, and how it gets into a request: text, token ids, or a conversation.

A conversation may be written as OpenAI's clients write it, as far as the protocol can carry it: text, whole or in parts.
Anything else is a TypeError or a ValueError that names the place; nothing is dropped silently. Pure.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvkeeper.engine.v1 import engine_service_pb2 as pb


class Array(Protocol):
    """Token ids of numpy or torch."""

    def tolist(self) -> Any: ...


Message = Mapping[str, str | Sequence[Mapping[str, Any]]]
Prompt = str | Sequence[int] | Array | Sequence[Message]

_WHAT = "a prompt is text, token ids or a list of messages"


def set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """A string is text, integers are token ids, mappings with role and content are a conversation."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, bytes | bytearray):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}; decode it first")
    if isinstance(prompt, Mapping):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}; put a single message into a list")
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, Sequence):
        raise TypeError(f"{_WHAT}, not {_kind(prompt)}")
    if items and isinstance(items[0], Mapping):
        for number, message in enumerate(items):
            request.chat.messages.append(_turn(message, f"messages[{number}]"))
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids, items)


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
    if unknown := [str(key) for key in message if key not in ("role", "content")]:
        raise ValueError(f"{place}: a message has role and content, and no {' or '.join(unknown)}")
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{place}.{key} is missing")
    return pb.ChatMessage(
        role=_text(message["role"], f"{place}.role"), content=_content(message["content"], f"{place}.content")
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
