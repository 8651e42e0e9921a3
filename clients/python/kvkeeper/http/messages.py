"""POST /v1/messages and /v1/messages/count_tokens: chats as Anthropic's clients ask for them and read them.

An answer is made of the same parts whether it is streamed or not: blocks of thought, text and calls of tools.
"""

import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pydantic_core

from kvkeeper.client import Usage
from kvkeeper.http.answering import Work, event
from kvkeeper.http.asking import get_tokens, make_chat
from kvkeeper.http.blocks import Add, Begin, End, Finish, read_blocks
from kvkeeper.http.calls import Call
from kvkeeper.http.chats import ChatWriter, prepare
from kvkeeper.http.errors import HttpError
from kvkeeper.http.fields import ChatRequest, ChatToTokenize, read
from kvkeeper.http.message_fields import (
    MESSAGES_NO_EFFECT,
    MESSAGES_REFUSED,
    CountRequest,
    MessageRequest,
    answer_fields,
    chat_fields,
)
from kvkeeper.http.responses import Reasoning

_KINDS = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def anthropic_body(error: HttpError) -> Mapping[str, Any]:
    """The body that reports a failure."""
    kind = "api_error" if error.kind == "server_error" else error.kind
    is_too_long = error.code == "context_length_exceeded"
    text = f"prompt is too long: {error.message}" if is_too_long else error.message  # the words that agents look for
    return {"type": "error", "error": {"type": _KINDS.get(error.status, kind), "message": text}}


async def create_message(call: Call) -> "Message":
    """POST /v1/messages. Raises HttpError, KvkeeperError."""
    request = read(MessageRequest, call.body, MESSAGES_REFUSED, MESSAGES_NO_EFFECT)
    engine = await call.engine(request.model)
    return Message(request, *await prepare(engine, ChatRequest.model_validate(answer_fields(request))))


async def count_tokens(call: Call) -> dict[str, Any]:
    """POST /v1/messages/count_tokens."""
    request = read(CountRequest, call.body, MESSAGES_REFUSED, MESSAGES_NO_EFFECT)
    engine = await call.engine(request.model)
    has_tools = request.tool_choice is None or request.tool_choice.type != "none"
    effort = request.output_config.effort if request.output_config is not None else None
    arguments = {} if effort is None else {"reasoning_effort": effort}
    chat = make_chat(ChatToTokenize.model_validate(chat_fields(request)), has_tools=has_tools, **arguments)
    return {"input_tokens": len(await get_tokens(engine, chat, "messages"))}


@dataclass(frozen=True, slots=True)
class Message:
    """The answer to a request."""

    request: MessageRequest
    work: Work
    writer: ChatWriter

    @property
    def is_streamed(self) -> bool:
        return bool(self.request.stream)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises HttpError."""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                yield event(part)

    async def whole(self) -> Mapping[str, Any]:
        """Raises HttpError."""
        message: dict[str, Any] = {}
        arguments = ""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                match part:
                    case {"type": "message_start", "message": begun}:
                        message = begun
                    case {"content_block": block}:
                        message["content"].append(block)
                        arguments = ""
                    case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                        arguments += text
                    case {"delta": {"type": _, **added}}:
                        for name, text in added.items():
                            message["content"][-1][name] += text
                    case {"type": "content_block_stop"} if message["content"][-1]["type"] == "tool_use":
                        message["content"][-1]["input"] = _input(arguments)
                    case {"type": "message_delta"}:
                        message |= part["delta"]
                        message["usage"] |= part["usage"]
        return message

    async def _parts(self) -> AsyncGenerator[dict[str, Any], None]:
        index, added = -1, ("", "")
        has_thoughts = self.request.thinking is None or self.request.thinking.display != "omitted"
        async with aclosing(read_blocks(self.work, self.writer, with_thoughts=has_thoughts)) as steps:
            async for step in steps:
                match step:
                    case None:
                        yield {"type": "message_start", "message": self._begun()}
                    case Begin():
                        index += 1
                        block, added = _begun_block(step)
                        yield {"type": "content_block_start", "index": index, "content_block": block}
                    case Add(text):
                        delta = {"type": added[0], added[1]: text}
                        yield {"type": "content_block_delta", "index": index, "delta": delta}
                    case End():
                        yield {"type": "content_block_stop", "index": index}
                    case Finish(reason, usage):
                        yield {"type": "message_delta", "delta": self._ending(reason), "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def _begun(self) -> dict[str, Any]:
        num_tokens = len(self.work.asked[0].ids or ())
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.work.engine.model.model_id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_tokens, "output_tokens": 0},
        }

    def _ending(self, reason: str | None) -> dict[str, Any]:
        stops = self.request.stop_sequences or ()
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.writer.has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and stops and (self.request.output_config is None or self.request.output_config.format is None):
            return {"stop_reason": "stop_sequence", "stop_sequence": stops[0] if len(stops) == 1 else None}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _begun_block(step: Begin) -> tuple[dict[str, Any], tuple[str, str]]:
    """The block, and of what is added to it the type and the field."""
    if step.call is not None:
        block = {"type": "tool_use", "id": step.call.id, "name": step.call.name, "input": {}}
        return block, ("input_json_delta", "partial_json")
    if step.kind is Reasoning:
        return {"type": "thinking", "thinking": "", "signature": ""}, ("thinking_delta", "thinking")
    return {"type": "text", "text": ""}, ("text_delta", "text")


def _input(arguments: str) -> Any:
    """The arguments of a call; what is whole of them, if it was cut."""
    try:
        found = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> dict[str, Any]:
    """What was cached is not counted with the other tokens of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.new_tokens,
    }
