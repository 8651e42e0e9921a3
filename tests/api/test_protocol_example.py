"""The worked example of docs/api/protocol.md, replayed against a live service: each answer is what the page shows."""

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds.cache_api import DEADLINE, Api, refusal
from tests.support.worlds.messages import Exchange, differences, exchanges, parse, show

PAGE = Path(__file__).parents[2] / "docs" / "api" / "protocol.md"


def _attach(path: str, token: str) -> tuple[socket.socket, dict[str, Any], list[int]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE)
    connection.connect(path)
    connection.sendall(token.encode() + b"\n")
    line, descriptors, _, _ = socket.recv_fds(connection, 4096, 4)
    return connection, json.loads(line), descriptors


class _Client:
    """Makes the calls of the page; remembers what the first answer told."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._opened: dict[str, Any] = {}
        self._mapped: tuple[socket.socket, list[int]] | None = None

    async def differences(self, exchange: Exchange) -> list[str]:
        request = json.loads(exchange.request)
        if exchange.method == "attach":
            told = await asyncio.to_thread(_attach, self._opened["attach_socket_path"], self._opened["attach_token"])
            return self._keep(*told, json.loads(exchange.answer))
        fields = {name: self._opened[name] if value in ("$S", "$E") else value for name, value in _items(request)}
        if fields.get("drained"):
            self._unmap()
        call = getattr(self._api.stub, exchange.method)(parse(exchange.method, fields), timeout=DEADLINE)
        if exchange.refusal is not None:
            error = await refusal(call)
            told_refusal = (error.code.name, error.reason, json.dumps(dict(error.metadata)))
            return differences(list(exchange.refusal), list(told_refusal))
        told_answer = show(await call)
        if exchange.method == "OpenSession":
            self._opened = told_answer
        return differences(json.loads(exchange.answer), told_answer)

    def _keep(self, connection: socket.socket, line: dict[str, Any], descriptors: list[int], shown: object) -> list[str]:
        self._mapped = connection, descriptors
        assert len(descriptors) == 1
        return differences(shown, line)

    def _unmap(self) -> None:
        if self._mapped is not None:
            connection, descriptors = self._mapped
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            self._mapped = None


def _items(request: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tuple(value) if isinstance(value, list) else value) for name, value in request.items()]


async def test_the_example_is_what_a_service_answers(api: Api) -> None:
    shown = exchanges(PAGE.read_text())
    assert {exchange.method for exchange in shown} == {
        "OpenSession", "attach", "CreateSequence", "Step", "RenewSession", "CloseSession",
    }  # fmt: skip
    client, wrong = _Client(api), []
    for number, exchange in enumerate(shown, 1):
        async with asyncio.timeout(DEADLINE):
            wrong += [f"message {number}, {exchange.method}: {text}" for text in await client.differences(exchange)]
    assert wrong == []


def test_a_page_that_shows_another_answer_is_found() -> None:
    assert differences({"a": [1], "b": {"c": 2}}, {"a": [1], "b": {"c": 2}, "d": 3}) == []
    assert len(differences({"a": [1], "b": {"c": 2}}, {"a": [2], "b": {}})) == 2


@pytest.mark.parametrize("text", ["-> Step {}\n<- ABORTED STEP_GAP {}", '-> Step {}\n<- {"step_id": 1}'])
def test_refusals_are_told_from_answers(text: str) -> None:
    (exchange,) = exchanges(text)
    assert (exchange.refusal is None) == ("step_id" in text)
