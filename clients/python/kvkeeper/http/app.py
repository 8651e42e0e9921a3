"""The HTTP application: paths, bodies and keys in; JSON, or server-sent events, out.

A request ends when its client goes away, whether it waits or streams. A body is bounded in bytes and in time.
"""

import asyncio
import contextlib
import gc
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeeper.client import KvkeeperError
from kvkeeper.common.service import VERSION
from kvkeeper.http import page, pages
from kvkeeper.http.answering import DONE, Answer, event
from kvkeeper.http.calls import Call
from kvkeeper.http.chats import converse
from kvkeeper.http.completions import complete
from kvkeeper.http.engines import Engines
from kvkeeper.http.errors import HttpError, of_engine
from kvkeeper.http.figures import Figures
from kvkeeper.http.messages import anthropic_body, count_tokens, create_message
from kvkeeper.http.replies import reply

MOST_BODY_BYTES = 16 << 20
_BODY_S = 60.0
_BEARER = "bearer "
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = structlog.get_logger()
Handler = Callable[[Call], Awaitable[Answer | dict[str, Any]]]
BodyOf = Callable[[HttpError], Mapping[str, Any]]  # the body that reports a failure


def make_app(engines: Engines) -> ASGIApp:
    """The application; it closes `engines` at its end."""
    figures = Figures()

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await engines.is_serving() else 503)

    async def version(_: Request) -> Response:
        return Response(to_json({"version": VERSION}), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(figures.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        gc.freeze()  # what the libraries made stays: a collection that looked at it would stop all streams for 30 ms
        yield
        await engines.close()

    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", converse),
        ("POST", "/v1/completions", complete),
        ("POST", "/v1/responses", reply),
        ("GET", "/v1/models", pages.list_models),
        ("POST", "/tokenize", pages.tokenize),
        ("POST", "/detokenize", pages.detokenize),
    ]
    anthropic: list[tuple[str, Handler]] = [("/v1/messages", create_message), ("/v1/messages/count_tokens", count_tokens)]
    routes: list[BaseRoute] = [
        Route(path, Endpoint(path, engines, figures, handler), methods=[method]) for method, path, handler in handlers
    ]
    routes += [
        Route(path, Endpoint(path, engines, figures, handler, anthropic_body), methods=["POST"]) for path, handler in anthropic
    ]
    routes += [
        *page.routes(),
        Route("/v1/models/{name:path}", Endpoint("/v1/models", engines, figures, pages.show_model), methods=["GET"]),
        Route("/health", health),
        Route("/version", version),
        Route("/metrics", metrics),
    ]
    router = Router(routes, lifespan=lifespan)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """All paths. What Starlette has around them would be called with each event of a stream."""
        scope["app"] = app  # so that a router raises
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            await _no_such_path(Request(scope), error)(scope, receive, send)

    return app


def _no_such_path(request: Request, error: HTTPException) -> Response:
    failure = HttpError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return Response(to_json(failure.body()), error.status_code, error.headers, "application/json")


class Endpoint:
    """One path. Its handler makes the answer of a call."""

    def __init__(
        self,
        path: str,
        engines: Engines,
        figures: Figures,
        handler: Callable[..., Awaitable[Any]],
        body_of: BodyOf = HttpError.body,
    ) -> None:
        self._path, self._engines, self._figures, self._handler, self._body_of = path, engines, figures, handler, body_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._figures.open.inc()
        try:
            status = await self._answer(scope, receive, _Sender(send, self._body_of))
        finally:
            self._figures.open.dec()
        self._figures.requests.labels(self._path, str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, sender: "_Sender") -> int:
        """The status."""
        try:
            body = await _read_body(scope, receive)
        except HttpError as error:
            return await sender.fail(error)
        working = asyncio.create_task(self._work(scope, body, sender))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else _LEFT
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _work(self, scope: Scope, body: bytes, sender: "_Sender") -> int:
        try:
            found = await self._handler(Call(self._engines, body, _key(scope)), **scope["path_params"])
            if isinstance(found, dict):
                return await sender.send_json(200, found)
            if not found.is_streamed:
                return await sender.send_json(200, await found.whole())
            async with contextlib.aclosing(found.events()) as events:
                return await sender.send_events(events)
        except HttpError as error:
            return await sender.fail(error)
        except KvkeeperError as error:
            return await sender.fail(of_engine(error))
        except Exception as error:  # its text and its variables may hold a prompt
            frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            log.error("request_failed", path=self._path, error=type(error).__name__, at=" ".join(frames))
            return await sender.fail(HttpError(500, "the front has failed; its log says more"))


_LEFT = 499  # of a client that went away, as nginx has it


def _key(scope: Scope) -> str:
    """The bearer token; Anthropic's clients have it in a header of its own."""
    headers = dict(scope["headers"])
    given = headers.get(b"authorization", b"").decode("latin-1")
    if given[: len(_BEARER)].lower() == _BEARER:
        return given[len(_BEARER) :].strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Raises HttpError where it is too large, or too slow."""
    too_large = HttpError(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes")
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MOST_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(_LEFT, "the client went away")
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > MOST_BODY_BYTES:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {_BODY_S:g} s") from None


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """What goes to the client. A failure behind the first event of a stream is an event, and the stream's last."""

    def __init__(self, send: Send, body_of: BodyOf) -> None:
        self._send, self._body_of = send, body_of
        self._is_streaming = False

    async def send_json(self, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> int:
        body = to_json(value)
        head = [*_JSON, (b"content-length", str(len(body)).encode()), *(headers or ())]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})
        return status

    async def send_events(self, events: AsyncIterator[bytes]) -> int:
        has_more = True
        async for each in events:
            if not self._is_streaming:
                self._is_streaming = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            has_more = not each.endswith(DONE)
            await self._send({"type": "http.response.body", "body": each, "more_body": has_more})
        if has_more:
            await self._send({"type": "http.response.body", "body": b""})
        return 200

    async def fail(self, error: HttpError) -> int:
        if self._is_streaming:
            await self._send({"type": "http.response.body", "body": event(self._body_of(error))})
        elif error.status != _LEFT:
            further = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
            if error.status in (408, 413):
                further.append((b"connection", b"close"))  # the rest of the body is not read
            if error.status == 401:
                further.append((b"www-authenticate", b"Bearer"))
            await self.send_json(error.status, self._body_of(error), further)
        return error.status
