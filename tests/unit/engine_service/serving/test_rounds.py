"""Columns of tokens leave with rounds alone: a chunk that waits for the round was drawn before them."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvkeeper.engine_service.serving.calls import FrontCalls, _Call
from kvkeeper.engine_service.serving.frames import Kind
from kvkeeper.engine_service.values.output_chunk import NO_TOKEN_COLUMNS, OutputChunk, TokenColumns

COLUMNS = TokenColumns(np.array([1], np.uint64), np.array([1]), np.array([7], np.int32))


class HeldPace:
    """Rounds come when the test lets them."""

    merges = True

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, write: Callable[[], None]) -> None:
        self.due.append(write)


class Lane:
    is_full = False

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.on_room: Any = None

    def send(self, kind: Kind, number: int = 0, body: Any = None) -> None:
        self.kinds.append(kind)


async def turns_of_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_does_not_wait_for_a_round_takes_no_columns_along() -> None:
    pace, lane, columns = HeldPace(), Lane(), [COLUMNS]
    unread = SimpleNamespace(
        take_columns=lambda reader: columns.pop() if columns else NO_TOKEN_COLUMNS, drop_reader=lambda reader: None
    )
    calls = FrontCalls(SimpleNamespace(pace=pace, unread=unread), lane)  # type: ignore[arg-type]
    waiting, urgent = _Call(1), _Call(2)
    calls.notify()
    await turns_of_the_loop()
    waiting.unsent.append(OutputChunk(0, "a", (1,)))
    calls._notify(waiting, at_once=False)
    urgent.unsent.append(OutputChunk(0, "b", (2,)))
    calls._notify(urgent, at_once=True)
    await turns_of_the_loop()
    assert lane.kinds == [Kind.CHUNK]
    for write in pace.due:
        write()
    await turns_of_the_loop()
    assert lane.kinds == [Kind.CHUNK, Kind.CHUNK, Kind.TOKENS], "the chunk before the columns behind it"
    calls.end()
