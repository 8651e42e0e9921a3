"""Chat: a conversation with all that its template is given beside it, and how the template's text becomes the prompt's.

What clients write as JSON is parsed here, so in a worker process. A message that a prompt continues is cut behind its content,
which is found by a mark that no client can know. Pure.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

USER_ROLES = ("user", "tool")  # that say what neither the application nor the model has written
ROLES = ("system", "developer", "assistant", *USER_ROLES)


class WrongChat(Exception):
    """A part of the chat is wrong. The text says how, in one line; field: of the request."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = f"chat.{field}"


@dataclass(frozen=True, slots=True)
class Chat:
    """Fields are the protocol's. messages: as a template takes them, but for the arguments of calls, which are JSON texts."""

    messages: Sequence[Mapping[str, Any]]
    tools: str = ""
    template_arguments: str = ""
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    plain_user_text: bool = False

    def texts(self) -> Iterator[str]:
        """Everything that clients have written in it."""
        yield self.tools
        yield self.template_arguments
        for message in self.messages:
            yield from (message.get("content", ""), message.get("name", ""), message.get("tool_call_id", ""))
            for call in message.get("tool_calls", ()):
                yield from (call.get("id", ""), call["function"]["name"], call["function"]["arguments"])

    def render(self, template: Callable[..., str], escape: Callable[[str], str] = str) -> str:
        """The prompt's text. escape: is used on what users have written. Raises WrongChat, and what the template raises."""
        arguments: dict[str, Any] = _parsed("template_arguments", self.template_arguments or "{}", dict)
        if taken := arguments.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise WrongChat("template_arguments", f"{min(taken)} is a field of its own")
        tools = _parsed("tools", self.tools, list) if self.tools else None
        if not all(isinstance(tool, dict) for tool in tools or ()):
            raise WrongChat("tools", "a list of objects is needed")
        messages = [_message(place, message, escape) for place, message in enumerate(self.messages)]
        given = {"tools": tools, "add_generation_prompt": self.add_generation_prompt, **arguments}
        if not self.continue_final_message:
            return template(messages, **given)
        if not (content := messages[-1].get("content")):
            raise WrongChat("continue_final_message", "the last message has no content")
        mark = f"{secrets.token_hex(16)} "
        messages[-1]["content"] += mark
        text = template(messages, **given)
        end = text.rfind(mark.strip())
        if end < 0 or content.strip() not in text:
            raise WrongChat("continue_final_message", "the chat template does not write the last message as it is")
        return text[:end] if text[end:].startswith(mark) else text[:end].rstrip()


def _message(place: int, message: Mapping[str, Any], escape: Callable[[str], str]) -> dict[str, Any]:
    """A message as the template takes it."""
    found = dict(message)
    if message["role"] in USER_ROLES:
        found |= {name: escape(message[name]) for name in ("content", "name", "tool_call_id") if message.get(name)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _arguments(f"messages[{place}].tool_calls[{at}]", call)}}
            for at, call in enumerate(calls)
        ]
    return found


def _arguments(field: str, call: Mapping[str, Any]) -> Any:
    return _parsed(f"{field}.arguments", call["function"]["arguments"] or "{}", dict)


def _parsed(field: str, text: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        raise WrongChat(field, "not JSON") from None
    if not isinstance(found, kind):
        raise WrongChat(field, "an object is needed" if kind is dict else "a list of objects is needed")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
