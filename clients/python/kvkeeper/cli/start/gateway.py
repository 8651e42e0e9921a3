"""The gateway as a process: the program `smg`, which speaks HTTP with clients and our engine's gateway protocol with us.

It serves this host alone, its metrics too. `python -m kvkeeper.cli.start.gateway FLAG...` asks the kernel to end it with its
parent, and becomes it.
"""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from kvkeeper.cli.start.services import end_with_parent

MODULE = "smg"
_POLL_S = 0.1
_ANSWER_S = 5.0
# An engine that was started again has its requests within seconds, not minutes.
_WATCHFUL = ("--health-check-interval-secs", "2", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "2")


def flags(http: str, engine: str, typed: Sequence[str]) -> list[str]:
    """Flags of the gateway, those that were typed last. http: its own address; engine: that of the engine service."""
    host, _, port = http.rpartition(":")
    known = ("--host", host.strip("[]"), "--port", port, "--worker-urls", f"grpc://{engine}", "--prometheus-host", "127.0.0.1")
    return [*known, *_WATCHFUL, "--log-level", "warn", *typed]


async def until_serving(http: str) -> None:
    """Returns when the gateway serves a model; the caller limits the time."""
    while not await asyncio.to_thread(served_model, http):  # noqa: ASYNC110  the event is in another process
        await asyncio.sleep(_POLL_S)


def served_model(http: str) -> str:
    """The name of the model that it serves and has the tokenizer of; empty for none yet."""
    try:
        models = _answer(f"http://{http}/v1/models")["data"]
        name = str(models[0]["id"]) if models else ""
        if name:  # it is listed before its tokenizer has been fetched, and until then requests fail
            _answer(f"http://{http}/v1/tokenize", {"model": name, "prompt": "a"})
    except (urllib.error.URLError, OSError, ValueError, KeyError):
        return ""
    return name


def _answer(url: str, message: dict[str, str] | None = None) -> Any:
    body = None if message is None else json.dumps(message).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        return json.load(answer)


def main(argv: Sequence[str]) -> None:
    if not end_with_parent():
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, "launch", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
