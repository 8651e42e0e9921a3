"""Further threads of gRPC: as many as there should be, and none where gRPC is built otherwise; a service serves either way."""

import threading

import pytest
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from kvkeeper.service import pollers


class _Queue:
    """In place of gRPC's own queue."""

    def __init__(self) -> None:
        self.num_polling = 0
        self.is_over = threading.Event()

    def poll(self) -> None:
        self.num_polling += 1
        self.is_over.wait(10)


def pollers_of(queue: _Queue) -> list[threading.Thread]:
    targets = ((thread, getattr(thread, "_target", None)) for thread in threading.enumerate())
    return [thread for thread, target in targets if getattr(target, "__self__", None) is queue]


async def test_the_work_of_grpcs_own_thread_is_done_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = _Queue()
    monkeypatch.setattr(cygrpc, "PollerCompletionQueue", _Queue)
    own = threading.Thread(target=queue.poll, daemon=True)
    own.start()
    try:
        pollers.add_pollers()
        assert len(pollers_of(queue)) == 1 + pollers.NUM_POLLERS
    finally:
        queue.is_over.set()
    for thread in [own, *pollers_of(queue)]:
        thread.join(10)


async def test_where_grpc_is_built_otherwise_there_are_none_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cygrpc, "PollerCompletionQueue")
    num_before = threading.active_count()
    with capture_logs() as logs:
        pollers.add_pollers()
    assert threading.active_count() == num_before
    assert [entry["event"] for entry in logs] == ["no_pollers"]
