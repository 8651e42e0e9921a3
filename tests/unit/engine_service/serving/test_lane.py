"""A lane in memory: frames come in order and as they are, without the sender's context, and both ends lose it together."""

import asyncio
from contextvars import ContextVar
from typing import Any

from kvkeeper.engine_service.serving.frames import Frame, Kind
from kvkeeper.engine_service.serving.lane import Lane, join_in_memory

caller: ContextVar[str] = ContextVar("caller", default="nobody")


class End:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.callers = set[str]()
        self.num_losses = 0
        self.lane = Lane(self._take, self._note_loss)

    def _take(self, kind: Kind, number: int, body: Any) -> None:
        self.frames.append((kind, number, body))
        self.callers.add(caller.get())

    def _note_loss(self) -> None:
        self.num_losses += 1


def joined() -> tuple[End, End]:
    one, other = End(), End()
    join_in_memory(one.lane, other.lane)
    return one, other


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_frames_come_in_order_and_with_nothing_of_the_task_that_sends() -> None:
    one, other = joined()
    body = object()
    caller.set("a client")
    for number in range(3):
        one.lane.send(Kind.ANSWER, number, body)
        other.lane.send(Kind.TAKEN, number)
    assert (one.frames, other.frames) == ([], []), "not within the turn that sends"
    await turn()
    assert other.frames == [(Kind.ANSWER, number, body) for number in range(3)]
    assert one.frames == [(Kind.TAKEN, number, None) for number in range(3)]
    assert one.callers == other.callers == {"nobody"}


async def test_both_ends_lose_the_lane_once_and_what_was_sent_before_arrives() -> None:
    one, other = joined()
    one.lane.send(Kind.END, 1)
    one.lane.close()
    other.lane.close()
    await turn()
    assert other.frames == [(Kind.END, 1, None)]
    assert (one.num_losses, other.num_losses) == (1, 1)
    other.lane.send(Kind.END, 2)
    one.lane.close()
    await turn()
    assert (one.frames, one.num_losses) == ([], 1)
