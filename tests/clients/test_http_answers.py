"""Answers over HTTP, as bytes of the application: streams of events, errors with what a client needs, calls of tools.

A stand-in for the engine's client gives what a test says, or fails as it says.
"""

import asyncio
import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog

from kvkeeper.client import KvkeeperError, OutputChunk, Usage
from kvkeeper.http import app as http_app
from kvkeeper.http import server as http_server
from kvkeeper.http.engines import Engine
from kvkeeper.http.responses import choose_form
from tests.support.stand_ins.asgi import Answer, post

CALL = '<tool_call>{"name": "look", "arguments": {"at": "world"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
Told = OutputChunk | KvkeeperError


@dataclass
class Client:
    """Gives the same to every request; a failure ends it. gate: what is behind the first chunk waits for it."""

    told: Sequence[Told]
    gate: asyncio.Event | None = None
    num_open: int = 0

    async def tokenize(self, prompt: Any) -> tuple[int, ...]:
        return (1, 2, 3)

    async def pieces(self, token_ids: Any) -> list[bytes]:
        return [b"t%d" % token for token in token_ids]

    def generate(self, prompt: Any, options: Any) -> "Generation":
        return Generation(self)


@dataclass
class Generation:
    client: Client
    usage = Usage(3, 1, 2, 0, 0)

    async def __aenter__(self) -> "Generation":
        self.client.num_open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.num_open -= 1

    async def __aiter__(self) -> Any:
        for place, each in enumerate(self.client.told):
            if place and self.client.gate:
                await self.client.gate.wait()
            if isinstance(each, KvkeeperError):
                raise each
            yield each


class Engines:
    """One engine for all keys, or the error that it gives."""

    def __init__(self, client: Client, form: str = "qwen", error: Exception | None = None) -> None:
        self._engine = engine = Engine(client, None)  # type: ignore[arg-type]
        engine.model = SimpleNamespace(model_id="m", text_part_of="", max_tokens_per_sequence=100, revision="r" * 64)  # type: ignore[assignment]
        engine.form, engine._asked_at = choose_form(None, form), float("inf")
        self._error = error
        self.keys: list[str] = []

    async def find(self, key: str) -> Engine:
        self.keys.append(key)
        if self._error:
            raise self._error
        return self._engine

    async def is_serving(self) -> bool:
        return self._error is None


async def chat(*told: Told, form: str = "qwen", **fields: Any) -> Answer:
    return await post(Engines(Client(told), form), "/v1/chat/completions", {**CHAT, **fields})


def texts(*parts: str, reason: str = "stop", index: int = 0) -> list[OutputChunk]:
    *others, last = parts
    return [*(OutputChunk(index, part, (5,), None) for part in others), OutputChunk(index, last, (5,), reason)]


# -- calls of tools


async def test_a_call_in_a_stream_has_its_index_its_id_and_its_reason() -> None:
    said = f"I look.{CALL}{CALL}"
    cut = [said[at : at + 7] for at in range(0, len(said), 7)]
    found = await chat(*texts(*cut), tools=TOOLS, stream=True)
    *chunks, done = found.events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert done == "[DONE]"
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in starts] == [
        (0, "function", "look"),
        (1, "function", "look"),
    ]
    assert len({call["id"] for call in starts}) == 2
    for index in (0, 1):
        arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == index)
        assert json.loads(arguments) == {"at": "world"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


async def test_a_call_without_a_stream_is_the_same() -> None:
    (choice,) = (await chat(*texts(CALL), tools=TOOLS)).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "world"}
    assert set(call) == {"id", "type", "function"}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_is_cut_is_told_as_far_as_it_came(is_stream: bool) -> None:
    found = await chat(*texts(CALL[:55], reason="length"), tools=TOOLS, stream=is_stream)
    if is_stream:
        choices = [chunk["choices"][0] for chunk in found.events[:-1]]
        arguments = "".join(
            call["function"]["arguments"] for choice in choices for call in choice["delta"].get("tool_calls", ())
        )
    else:
        (choice,) = choices = found.json["choices"]
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "length"
    assert arguments.startswith('{"at": "')
    assert arguments != '{"at": "world"}'
    assert '{"at": "world"}'.startswith(arguments)


async def test_without_tools_a_call_is_text_and_with_none_the_template_has_no_tools() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await chat(*texts(CALL), **fields)).json["choices"]  # type: ignore[arg-type]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_a_thought_is_told_apart() -> None:
    said = texts("<think>why", " not</think>", "Yes.")
    (choice,) = (await chat(*said)).json["choices"]
    assert choice["message"]["reasoning_content"].strip() == "why not"
    assert choice["message"]["content"].strip() == "Yes."
    deltas = [chunk["choices"][0]["delta"] for chunk in (await chat(*said, stream=True)).events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "why not"
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "Yes."


# -- usage

SPELLED = [  # by token; a thought begins where an answer does, and behind a call
    b"<think>", b"\nwhy", b" not", b"</think>", b"\n\nYes, ", b"<think>", b"\xe2", b"\x82\xac", b"</think>",
    b'<tool_call>{"name": "look", ', b'"arguments": {}}</tool_call>', b"<think>", b"so</think>", b"not",
]  # fmt: skip


class SpellingClient(Client):
    """Its tokens are places in SPELLED."""

    async def pieces(self, token_ids: Any) -> list[bytes]:
        return [SPELLED[token] for token in token_ids]


@pytest.mark.parametrize(
    ("tokens", "num_reasoning"), [(range(5), 2), (range(13), 3), ([4, 4], 0), ([0, 1], 1), ([0, 6, 7, 3, 4], 2)], ids=str
)
@pytest.mark.parametrize("in_each", [1, 3, 20])
async def test_tokens_of_thoughts_are_counted(tokens: Sequence[int], num_reasoning: int, in_each: int) -> None:
    tokens, whole = list(tokens), b"".join(SPELLED[token] for token in tokens).decode()
    decoder, said = codecs.getincrementaldecoder("utf-8")(), []
    for first in range(0, len(tokens), in_each):
        some = tokens[first : first + in_each]
        text = "".join(decoder.decode(SPELLED[token]) for token in some)
        said.append(OutputChunk(0, text, tuple(some), "stop" if first + in_each >= len(tokens) else None))
    assert "".join(each.text for each in said) == whole
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        found = await post(Engines(SpellingClient(said)), "/v1/chat/completions", {**CHAT, **fields, "tools": TOOLS})
        last = found.events[-2] if fields else found.json
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    found = await post(Engines(SpellingClient(said)), "/v1/responses", {"input": "x", "max_output_tokens": 9, "tools": [tool]})
    assert found.json["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning}


async def test_each_event_counts_the_tokens_up_to_it_where_that_is_asked_for() -> None:
    said = [*texts("a", "b", "c"), *texts("d", index=1)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 9})):
        found = await post(Engines(Client(said)), path, {**body, "n": 2, "stream": True, "stream_options": options})
        *chunks, last, _ = found.events
        counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
        assert counts == [(3, 1), (3, 2), (3, 3), (3, 1)]
        assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [4, 5, 6, 4]
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


# -- errors


def failure(code: grpc.StatusCode, reason: str, retry_after: float | None = None, **metadata: str) -> KvkeeperError:
    return KvkeeperError(code, reason, "the engine's own words", metadata, retry_after)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 2.2), 429, "rate_limit_error", "rate_limit_exceeded", "3"),
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "NOT_READ"), 429, "rate_limit_error", "rate_limit_exceeded", "1"),
        (failure(grpc.StatusCode.UNAVAILABLE, "DRAINING", 0.5), 503, "server_error", None, "1"),
        (failure(grpc.StatusCode.UNAUTHENTICATED, "WRONG_CREDENTIAL"), 401, "authentication_error", "invalid_api_key", None),
        (failure(grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"), 403, "permission_error", None, None),
        (failure(grpc.StatusCode.INTERNAL, "REQUEST_FAILED"), 500, "server_error", None, None),
        (failure(grpc.StatusCode.DEADLINE_EXCEEDED, "STALLED"), 504, "server_error", None, None),
        (failure(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"), 400, "invalid_request_error", None, None),
    ],
    ids=lambda value: value.reason if isinstance(value, KvkeeperError) else "",
)
async def test_a_refusal_has_a_status_that_clients_know(
    error: KvkeeperError, status: int, kind: str, code: str | None, retry_after: str | None
) -> None:
    for is_stream in (False, True):
        found = await chat(error, stream=is_stream)
        told = found.json["error"]
        assert (found.status, told["type"], told["code"]) == (status, kind, code)
        assert found.headers.get("retry-after") == retry_after
        assert told["message"] == "the engine's own words"
    found = await post(Engines(Client([]), error=error), "/v1/chat/completions", CHAT)
    assert (found.status, found.headers.get("www-authenticate")) == (status, "Bearer" if status == 401 else None)


async def test_a_stream_that_breaks_ends_with_an_event_that_says_so() -> None:
    broken = failure(grpc.StatusCode.UNAVAILABLE, "CACHE_SERVICE_DOWN", 1.0)
    found = await chat(*texts("a", "b")[:1], broken, stream=True)
    first, last = found.events
    assert found.status == 200
    assert first["choices"][0]["delta"]["content"] == "a"
    assert last["error"]["message"] == "the engine's own words"
    for reason, status in (("cancelled", 503), ("stalled", 504)):
        assert (await chat(*texts("a", "b", reason=reason))).status == status
        assert "error" in (await chat(*texts("a", "b", reason=reason), stream=True)).events[-1]


async def test_a_fault_of_the_front_is_told_without_what_it_was() -> None:
    engines = Engines(Client([]), error=ZeroDivisionError("secret"))
    with structlog.testing.capture_logs() as logged:
        found = await post(engines, "/v1/completions", {"prompt": "canary"})
    assert (found.status, "secret" in found.json["error"]["message"]) == (500, False)
    ((name, at),) = [(line["error"], line["at"]) for line in logged]
    assert (name, "app.py:" in at, "secret" in str(logged), "canary" in str(logged)) == (
        "ZeroDivisionError",
        True,
        False,
        False,
    )


async def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "MOST_BODY_BYTES", 100)
    for headers in ({}, {"content-length": "1"}, {"content-length": "x"}):
        found = await post(Engines(Client([])), "/v1/completions", b" " * 101, headers)
        assert (found.status, found.headers["connection"]) == (413, "close")
    assert (await post(Engines(Client(texts("a"))), "/v1/completions", {"prompt": "x"})).status == 200


async def test_keys_are_bearer_tokens_or_in_anthropics_header() -> None:
    engines = Engines(Client(texts("a")))
    for headers in ({"authorization": "Bearer abc"}, {"authorization": "bearer  abc "}, {"x-api-key": "abc"}, {}):
        await post(engines, "/v1/completions", {"prompt": "x"}, headers)
    assert engines.keys == ["abc", "abc", "abc", ""]


async def test_health_is_that_of_the_engine() -> None:
    assert (await post(Engines(Client([])), "/health", b"")).status == 200
    assert (await post(Engines(Client([]), error=ValueError()), "/health", b"")).status == 503


# -- clients that leave, and several prompts


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "two"])
async def test_a_client_that_leaves_ends_its_requests(is_stream: bool, prompt: Any) -> None:
    client, leave = Client(texts("a", "b"), asyncio.Event()), asyncio.Event()
    asking = asyncio.create_task(post(Engines(client), "/v1/completions", {"prompt": prompt, "stream": is_stream}, leave=leave))
    while client.num_open < len(prompt):  # noqa: ASYNC110  it is another task
        await asyncio.sleep(0)
    leave.set()
    await asyncio.wait_for(asking, 10)
    assert client.num_open == 0


async def test_a_failure_of_one_prompt_ends_the_others() -> None:
    client = Client([*texts("a", "b")[:1], failure(grpc.StatusCode.INTERNAL, "REQUEST_FAILED")])
    found = await post(Engines(client), "/v1/completions", {"prompt": ["x", "y"]})
    assert (found.status, client.num_open) == (500, 0)


# -- connections


class Transport:
    """What a connection is written to."""

    def __init__(self) -> None:
        self.written, self.is_closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return None


class Loop:
    """Remembers what is to be called later."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, call: Any) -> Any:
        entry = (seconds, call)
        self.later.append(entry)
        return SimpleNamespace(cancel=lambda: self.later.remove(entry))


def connection() -> tuple[Any, Loop, Transport]:
    import uvicorn
    from uvicorn.server import ServerState

    loop, transport = Loop(), Transport()
    config = uvicorn.Config(http_app.make_app(Engines(Client([]))), ws="none", log_config=None, lifespan="off")  # type: ignore[arg-type]
    protocol = http_server.BoundedProtocol(config, ServerState(), {}, _loop=loop)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    return protocol, loop, transport


def test_a_head_that_does_not_come_closes_the_connection() -> None:
    protocol, loop, transport = connection()
    protocol.data_received(b"GET / HTTP/1.1\r\nx: ")
    ((seconds, call),) = loop.later
    assert seconds == http_server.HEAD_S
    call()
    assert transport.is_closed
    assert transport.written.startswith(b"HTTP/1.1 431")


def test_a_head_is_bounded_in_bytes_however_it_comes() -> None:
    protocol, loop, transport = connection()
    protocol.data_received(b"GET / HTTP/1.1\r\nx: ")
    for _ in range(100):
        protocol.data_received(b"a" * 1000)
        if transport.is_closed:
            break
    assert transport.is_closed
    assert loop.later == []
