"""A client of the HTTP application in this process: what it gets, as it was sent."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from kvkeeper.http.app import make_app


@dataclass
class Answer:
    """has_begun: its first bytes came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.parts))

    @property
    def events(self) -> list[Any]:
        """The last of a stream that did not break is [DONE]."""
        texts = [text.removeprefix("data: ") for text in b"".join(self.parts).decode().split("\n\n") if text]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def post(
    engines: Any, path: str, body: Any, headers: dict[str, str] | None = None, leave: Any = None, answer: Answer | None = None
) -> Answer:
    """leave: an event; the client goes away when it is set. answer: filled as it comes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = answer or Answer()
    received = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.parts.append(message.get("body", b""))
            answer.has_begun.set()

    sent = {"content-length": str(len(raw)), **(headers or {})}
    scope = {"type": "http", "http_version": "1.1", "method": "POST" if body else "GET", "path": path,
             "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 80),
             "client": ("y", 1), "headers": [(name.encode(), value.encode()) for name, value in sent.items()]}  # fmt: skip
    await make_app(engines)(scope, receive, send)
    return answer
