"""POST /v1/responses: chats as OpenAI's newer calls ask for them and read them. Nothing is stored.

An answer is the last event of its stream, whether it is streamed or not. Its items are a thought, a message and calls of tools.
"""

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvkeeper.client import Usage
from kvkeeper.http.answering import Work, event, read_chunks
from kvkeeper.http.calls import Call
from kvkeeper.http.chats import ChatWriter, prepare
from kvkeeper.http.fields import ChatRequest, read
from kvkeeper.http.reply_fields import REPLIES_NO_EFFECT, REPLIES_REFUSED, ReplyRequest, chat_fields
from kvkeeper.http.responses import CallArguments, CallStart, Content, Piece, Reasoning
from kvkeeper.http.tokens import chat_logprobs

Event = dict[str, Any]
_DONE = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


async def reply(call: Call) -> "Reply":
    """Raises HttpError, KvkeeperError."""
    request = read(ReplyRequest, call.body, REPLIES_REFUSED, REPLIES_NO_EFFECT)
    engine = await call.engine(request.model, request.input, "input")
    return Reply(request, *await prepare(engine, ChatRequest.model_validate(chat_fields(request))))


@dataclass(slots=True)
class Reply:
    """The answer to a request. open: whether the last item of the output may grow."""

    request: ReplyRequest
    work: Work
    writer: ChatWriter
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    output: list[dict[str, Any]] = field(default_factory=list)
    open: bool = False

    @property
    def is_streamed(self) -> bool:
        return bool(self.request.stream)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises HttpError."""
        number = 0
        async with aclosing(self._events()) as found:
            async for each in found:
                yield event({**each, "sequence_number": number})
                number += 1

    async def whole(self) -> Mapping[str, Any]:
        """Raises HttpError."""
        last: Event = {}
        async with aclosing(self._events()) as found:
            async for each in found:
                last = each
        response: Mapping[str, Any] = last["response"]
        return response

    async def _events(self) -> AsyncGenerator[Event, None]:
        is_begun, reason = False, None
        async with aclosing(read_chunks(self.work)) as found:
            async for _, chunk in found:
                if not is_begun:
                    is_begun = True
                    for kind in ("created", "in_progress"):
                        yield {"type": f"response.{kind}", "response": self._response("in_progress")}
                if isinstance(chunk, Usage):
                    status = "incomplete" if reason == "length" else "completed"
                    for each in self._close(status):
                        yield each
                    num_reasoning = await self.work.wait_for(self.writer.num_reasoning(self.work.engine))
                    yield {"type": f"response.{status}", "response": self._response(status, _usage(chunk, num_reasoning))}
                    continue
                reason = chunk.finish_reason or reason
                logprobs = chat_logprobs(chunk.logprobs, await self.work.spell(chunk))["content"]
                for piece in self.writer.read(chunk):
                    for each in self._add(piece, logprobs):
                        yield each
                    logprobs = logprobs if not isinstance(piece, Content) else []

    def _add(self, piece: Piece, logprobs: list[Any]) -> Iterator[Event]:
        """What a piece adds to the last item, or to a new one. logprobs: of text, not of any item yet."""
        kind = {Content: "message", Reasoning: "reasoning"}.get(type(piece), "function_call")
        if isinstance(piece, CallStart) or not self.open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind, piece)
        item = self.output[-1]
        match piece:
            case Content(text):
                part = item["content"][0]
                part["text"] += text
                part["logprobs"] += logprobs
                yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            case Reasoning(text):
                item["content"][0]["text"] += text
                yield self._event("reasoning_text.delta", content_index=0, delta=text)
            case CallArguments(_, text):
                item["arguments"] += text
                yield self._event("function_call_arguments.delta", delta=text)

    def _begin(self, kind: str, piece: Piece) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if isinstance(piece, CallStart):
            item |= {"call_id": piece.id, "name": piece.name, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.output.append(item)
        self.open = True
        yield self._event("output_item.added", item=_copy(item))
        if kind == "message":
            item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            yield self._event("content_part.added", content_index=0, part=dict(item["content"][0]))
        elif kind == "reasoning":
            item["content"].append({"type": "reasoning_text", "text": ""})

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the last item, if it is open."""
        if not self.open:
            return
        self.open = False
        item = self.output[-1]
        item["status"] = status
        kind = item["type"]
        if kind == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._event(f"{_DONE[kind]}.done", content_index=0, text=part["text"], **logprobs)
            if kind == "message":
                yield self._event("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        about = {} if "item" in fields else {"item_id": self.output[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self.output) - 1, **about, **fields}

    def _response(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        request, model = self.request.model_dump(by_alias=True), self.work.engine.model.model_id
        same = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p")
        return {
            "id": self.id, "object": "response", "created_at": self.work.created, "model": model, "status": status,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: request[name] for name in same}, "text": request["text"] or {"format": {"type": "text"}},
            "parallel_tool_calls": request["parallel_tool_calls"] is not False, "tool_choice": request["tool_choice"] or "auto",
            "tools": request["tools"] or [], "previous_response_id": None, "store": False, "truncation": "disabled",
            "metadata": {}, "output": [_copy(item) for item in self.output],
            "usage": usage,
        }  # fmt: skip


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
    }
