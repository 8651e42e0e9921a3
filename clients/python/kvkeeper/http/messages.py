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
from kvkeeper.http.answering import Work, event, read_chunks
from kvkeeper.http.asking import get_tokens, make_chat
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
from kvkeeper.http.responses import CallArguments, CallStart, Content, Piece, Reasoning

_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}  # what a chat calls otherwise
_KINDS = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def anthropic_body(error: HttpError) -> Mapping[str, Any]:
    """The body that reports a failure."""
    kind = "api_error" if error.kind == "server_error" else error.kind
    is_too_long = error.code == "context_length_exceeded"
    text = f"prompt is too long: {error.message}" if is_too_long else error.message  # the words that agents look for
    for name, own in _NAMES.items():
        text = own + text.removeprefix(name) if error.param == name else text
    return {"type": "error", "error": {"type": _KINDS.get(error.status, kind), "message": text}}


async def create_message(call: Call) -> "Message":
    """POST /v1/messages. Raises HttpError, KvkeeperError."""
    request = read(MessageRequest, call.body, MESSAGES_REFUSED, MESSAGES_NO_EFFECT)
    engine = await call.engine(request.model, request.messages)
    return Message(request, *await prepare(engine, ChatRequest.model_validate(answer_fields(request))))


async def count_tokens(call: Call) -> dict[str, Any]:
    """POST /v1/messages/count_tokens."""
    request = read(CountRequest, call.body, MESSAGES_REFUSED, MESSAGES_NO_EFFECT)
    engine = await call.engine(request.model, request.messages)
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
        open_kind, index = "", -1
        reason: str | None = None
        is_begun = False
        async with aclosing(read_chunks(self.work)) as found:
            async for _, chunk in found:
                if not is_begun:
                    is_begun = True
                    yield {"type": "message_start", "message": self._begun()}
                if isinstance(chunk, Usage):
                    if open_kind:
                        yield {"type": "content_block_stop", "index": index}
                    yield {"type": "message_delta", "delta": self._ending(reason), "usage": _usage(chunk)}
                    continue
                reason = chunk.finish_reason or reason
                for piece in self.writer.read(chunk):
                    kind, block, delta = _block(piece)
                    if kind == "thinking" and self.request.thinking is not None and self.request.thinking.display == "omitted":
                        continue
                    if kind != open_kind or isinstance(piece, CallStart):
                        if open_kind:
                            yield {"type": "content_block_stop", "index": index}
                        open_kind, index = kind, index + 1
                        yield {"type": "content_block_start", "index": index, "content_block": block}
                    if delta:
                        yield {"type": "content_block_delta", "index": index, "delta": delta}
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


def _block(piece: Piece) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The kind of the block that a piece belongs to, the block as it begins, and what the piece adds to it."""
    match piece:
        case Content(text):
            return "text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
        case Reasoning(text):
            begun = {"type": "thinking", "thinking": "", "signature": ""}
            return "thinking", begun, {"type": "thinking_delta", "thinking": text}
        case CallStart(_, call_id, name):
            return "tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}, {}
        case CallArguments(_, text):
            return "tool_use", {}, {"type": "input_json_delta", "partial_json": text}


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
