"""Further threads of gRPC: none while its own thread rests now and then, more where it never does, and a bound."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from kvkeeper.common.service import pollers

DEADLINE_S = 20.0


class Queue:
    """In place of gRPC's own queue, with threads that spin, or wait."""

    def __init__(self) -> None:
        self.is_spinning = threading.Event()
        self.is_over = threading.Event()

    def poll(self) -> None:
        while not self.is_over.is_set():
            if self.is_spinning.is_set():
                sum(range(100_000))
            else:
                self.is_over.wait(0.001)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setattr(cygrpc, "PollerCompletionQueue", Queue)
    made = Queue()
    own = threading.Thread(target=made.poll, daemon=True)
    own.start()
    yield made
    made.is_over.set()
    for thread in threads_of(made):
        thread.join(DEADLINE_S)


def threads_of(queue: Queue) -> list[threading.Thread]:
    targets = ((thread, getattr(thread, "_target", None)) for thread in threading.enumerate())
    return [thread for thread, target in targets if getattr(target, "__self__", None) is queue]


async def test_a_thread_that_rests_stays_alone(queue: Queue) -> None:
    made = pollers._Pollers(threads_of(queue)[0], queue.poll)
    for _ in range(5):
        made.look()
        await asyncio.sleep(pollers._LOOK_S)
    assert len(threads_of(queue)) == 1


async def test_threads_that_never_rest_are_doubled_up_to_the_bound(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, marks = list[int](), dict[threading.Thread, int]()

    def mark(thread: threading.Thread) -> tuple[float, int]:
        """Each was on a processor between two looks, and none waited."""
        marks[thread] = marks.get(thread, 0) + 1
        return float(marks[thread]), 7

    monkeypatch.setattr(pollers, "_mark", mark)
    made = pollers._Pollers(threads_of(queue)[0], queue.poll)
    for _ in range(14):
        made.look()
        seen.append(len(threads_of(queue)))
    assert sorted(set(seen)) == [1, 2, 4, 8, 16, 1 + pollers.NUM_POLLERS]


def test_what_a_thread_does_is_seen_in_its_marks(queue: Queue) -> None:
    (thread,) = threads_of(queue)
    before = pollers._mark(thread)
    deadline = time.monotonic() + DEADLINE_S
    while pollers._mark(thread)[1] <= before[1]:
        assert time.monotonic() < deadline
    queue.is_spinning.set()
    while pollers._mark(thread)[0] <= before[0] + 0.01:
        assert time.monotonic() < deadline


async def test_where_grpc_is_built_otherwise_there_are_none_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cygrpc, "PollerCompletionQueue")
    with capture_logs() as logs:
        pollers.add_pollers()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grpc-poller")]
    assert [entry["event"] for entry in logs] == ["no_pollers"]
