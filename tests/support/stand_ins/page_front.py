"""An HTTP front whose answers are written by the test: the real page, and what it asks for."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvkeeper.http import page

USAGE = {"prompt_tokens": 48, "completion_tokens": 3, "total_tokens": 51, "prompt_tokens_details": {"cached_tokens": 32}}


@dataclass
class PageFront:
    """answers: deltas of each answer in turn; None as the last of them leaves it open. asked: bodies of requests.

    error: what is said instead of an answer, as a status and a text. left: set when a client went away from an open answer.
    """

    url: str = ""
    answers: list[list[dict[str, Any] | None]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    error: tuple[int, str] | None = None
    left: threading.Event = field(default_factory=threading.Event)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "acme/small"}]})

    async def converse(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        if self.error is not None:
            return JSONResponse({"error": {"message": self.error[1]}}, self.error[0])
        return StreamingResponse(self._events(self.answers.pop(0)), media_type="text/event-stream")

    async def _events(self, deltas: list[dict[str, Any] | None]) -> AsyncIterator[str]:
        for delta in deltas:
            if delta is None:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.left.set()
            yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
        yield _event({"choices": [], "usage": USAGE})
        yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@contextmanager
def page_front() -> Iterator[PageFront]:
    front = PageFront()
    routes = [
        *page.routes(),
        Route("/v1/models", front.models),
        Route("/v1/chat/completions", front.converse, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", ws="none", lifespan="off"))
    with server.config.bind_socket() as listening:
        front.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield front
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive()
