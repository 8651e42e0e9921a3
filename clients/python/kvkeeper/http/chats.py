"""POST /v1/chat/completions: a conversation by the model's template, with tools, and what the model thought apart from it."""

import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvkeeper.client import OutputChunk
from kvkeeper.http.answering import Work, check_streaming
from kvkeeper.http.asking import Constraint, EngineRequest, Prompt, ask, find_constraint, get_tokens, make_chat, make_options
from kvkeeper.http.calls import Call
from kvkeeper.http.engines import Engine
from kvkeeper.http.errors import refused
from kvkeeper.http.fields import ChatRequest, NamedTool, read
from kvkeeper.http.responses import CallArguments, CallStart, Content, Piece, Reader, Reasoning
from kvkeeper.http.tokens import Pieces, chat_logprobs, count_tokens_within, prompt_logprobs

_NUM_LAST = 16  # tokens of a prompt: more than any marker has
_REASONS = {"length": "length", "stop": "stop", "end_of_sequence": "stop", None: None}


async def converse(call: Call) -> Work:
    """Raises HttpError, KvkeeperError."""
    request = read(ChatRequest, call.body)
    return (await prepare(await call.engine(request.model, request.messages), request))[0]


async def prepare(engine: Engine, request: ChatRequest) -> "tuple[Work, ChatWriter]":
    """Raises HttpError."""
    _check(request)
    request_id = request.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    arguments = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    chat = make_chat(request, has_tools=request.tool_choice != "none", **arguments)
    prompt: Prompt = chat
    prompt_end = ""
    if engine.form.thought is not None or engine.form.template is not None:
        prompt = await get_tokens(engine, chat, "messages")
        prompt_end = await _end(engine, prompt)
    constraint, form = _constraint(request, engine, chat.tools, prompt_end)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    options = make_options(request, request_id, constraint, max_tokens, num_logprobs, engine.form.keeps_special_tokens)
    asked = await ask(engine, prompt, options, "messages", form, shows_ids=bool(request.return_token_ids or request.counts_on))
    is_forced = _is_forced(request)
    readers = [engine.form.reader(chat.tools, prompt_end, is_forced=is_forced) for _ in range(request.n or 1)]
    writer = ChatWriter(request, asked, readers)
    return Work(request_id, engine, [asked], request, writer), writer


async def _end(engine: Engine, prompt: Sequence[int]) -> str:
    """What the template writes last, which may begin a thought; a response template finds that in the whole prompt."""
    last = prompt if engine.form.template is not None else prompt[-_NUM_LAST:]
    pieces = await engine.spell(last)
    return b"".join(pieces[token] for token in last).decode(errors="replace")


def _check(request: ChatRequest) -> None:
    check_streaming(request)
    if not request.messages:
        raise refused("messages", "one or more")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise refused("max_tokens", "not together with max_completion_tokens")
    if request.max_tokens == 0:
        raise refused("max_tokens", "1 or more")
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", "with logprobs alone")
    choice = request.tool_choice
    names = {tool.function.name for tool in request.tools or ()}
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refused("tool_choice", f"no tool is called {choice.function.name!r}")
    if choice == "required" and not names:
        raise refused("tool_choice", "there are no tools")


def _is_forced(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def _constraint(
    request: ChatRequest, engine: Engine, tools: Sequence[Mapping[str, Any]], prompt_end: str
) -> tuple[Constraint, str]:
    """What the output is held to: a call where one is required, or an answer of a form; and the field. Raises HttpError."""
    found, field = find_constraint(request)
    if not _is_forced(request):
        return engine.form.answer(found, prompt_end) if found else {}, field
    if found:
        raise refused("tool_choice", "a required call does not go together with a form of the answer")
    name = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
    return engine.form.answer(engine.form.forced([_closed(tool) for tool in tools], name), prompt_end), "tools"


def _closed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool without arguments that its schema does not name, unless it speaks of them: small models invent some."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if "properties" not in parameters or "additionalProperties" in parameters:
        return tool
    return {**tool, "function": {**function, "parameters": {**parameters, "additionalProperties": False}}}


class ChatWriter:
    kind, part_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, asked: EngineRequest, readers: Sequence[Reader]) -> None:
        """readers: of each continuation."""
        self._request, self._asked, self._readers = request, asked, readers
        self._begun: set[int] = set()  # continuations of which something was sent
        self._calling: set[int] = set()  # those that called a tool
        self._of_prompt: OutputChunk | None = None
        self._tokens = [array("i") for _ in readers]  # which has four bytes for each
        self._thoughts: list[list[str]] = [[] for _ in readers]
        self._thinking: set[int] = set()  # continuations that said a thought last

    @property
    def has_called(self) -> bool:
        return bool(self._calling)

    def part(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any] | None:
        delta = _delta(self.read(chunk))
        is_first = chunk.index not in self._begun
        if is_first:
            self._begun.add(chunk.index)
            delta = {"role": "assistant", "content": "", **delta}
        elif not delta and chunk.finish_reason is None and not chunk.logprobs and not self._request.return_token_ids:
            return None
        found = {"delta": delta, **self._beside(chunk, pieces)}
        if is_first and self._request.return_token_ids:
            found["prompt_token_ids"] = self._asked.ids
        return found

    def whole(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any]:
        if chunk.prompt_logprobs:
            self._of_prompt = chunk
        message = _message(self.read(chunk))
        return {"message": message, **self._beside(chunk, pieces)}

    def further(self, pieces: Pieces) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            of_prompt = () if self._of_prompt is None else self._of_prompt.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(of_prompt, pieces)
        if self._request.return_token_ids:
            found["prompt_token_ids"] = self._asked.ids
        return found

    def read(self, chunk: OutputChunk) -> list[Piece]:
        reader = self._readers[chunk.index]
        pieces = reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces = [*pieces, *reader.end()]
        if self._request.parallel_tool_calls is False:  # the first alone
            pieces = [piece for piece in pieces if not isinstance(piece, CallStart | CallArguments) or piece.index == 0]
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._calling.add(chunk.index)
        self._note_thoughts(chunk, pieces)
        return pieces

    def _note_thoughts(self, chunk: OutputChunk, pieces: Sequence[Piece]) -> None:
        index, thoughts = chunk.index, self._thoughts[chunk.index]
        self._tokens[index].extend(chunk.token_ids)
        for piece in pieces:
            if not isinstance(piece, Reasoning):
                self._thinking.discard(index)
            elif index in self._thinking:
                thoughts[-1] += piece.text
            else:
                self._thinking.add(index)
                thoughts.append(piece.text)

    async def num_reasoning(self, engine: Engine) -> int:
        """How many tokens were thoughts, of all that was read. Raises KvkeeperError."""
        num_tokens = 0
        for tokens, thoughts in zip(self._tokens, self._thoughts, strict=True):
            if thoughts:
                pieces = await engine.spell(tokens)
                num_tokens += count_tokens_within(thoughts, [pieces[token] for token in tokens])
        return num_tokens

    async def usage_details(self, engine: Engine) -> dict[str, Any]:
        return {"completion_tokens_details": {"reasoning_tokens": await self.num_reasoning(engine)}}

    def _beside(self, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any]:
        """The choice without what was said. A call that was cut has the reason of the length."""
        reason = _REASONS[chunk.finish_reason]
        found: dict[str, Any] = {
            "logprobs": chat_logprobs(chunk.logprobs, pieces) if self._request.logprobs else None,
            "finish_reason": "tool_calls" if reason == "stop" and chunk.index in self._calling else reason,
        }
        return found | ({"token_ids": chunk.token_ids} if self._request.return_token_ids else {})


def _delta(pieces: Iterable[Piece]) -> dict[str, Any]:
    """What is new, as a part of a message."""
    found: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                found["content"] = found.get("content", "") + text
            case Reasoning(text):
                found["reasoning_content"] = found.get("reasoning_content", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append({"index": index, "id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    return found | ({"tool_calls": calls} if calls else {})


def _message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """All that was said. A call has no `index` of its own then."""
    delta = _delta(pieces)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    message = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})
