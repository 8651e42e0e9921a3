"""When the loop begins to prepare the next step beside one that is computed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeeper.engine_service.loop import step_worker
from kvkeeper.engine_service.loop.step_worker import InFlight, StepWorker

STARTED_AT = 100.0


@pytest.mark.parametrize(
    ("usual_ms", "preparation_ms", "waited_ms"),
    [
        (1.3, 0.0, []),  # 0.8 ms are left: a timer of the loop would end after 1 ms, and the device would wait
        (1.3, 0.4, []),
        (2.4, 0.4, [1]),  # of 1.3
        (40.0, 1.0, [38]),
        (0.2, 0.0, []),
    ],
)
async def test_a_wait_ends_before_the_next_step_is_due(
    monkeypatch: pytest.MonkeyPatch, usual_ms: float, preparation_ms: float, waited_ms: list[int]
) -> None:
    """The event loop rounds each wait up to whole milliseconds, and a device's step may be as short as one."""
    waits: list[float] = []

    async def note_wait(_: object, **options: float) -> None:
        waits.append(options["timeout"])

    work: Any = SimpleNamespace(num_prompt_tokens=0, num_tokens=1)
    worker, flight = StepWorker(), InFlight(1, work, 0.0, False, None, started_at=STARTED_AT)
    flight.computing = asyncio.get_running_loop().create_future()
    worker._flights.append(flight)
    worker._usual_decode, worker._usual_preparation = usual_ms / 1e3, preparation_ms / 1e3
    with monkeypatch.context() as patched:
        patched.setattr(step_worker.time, "perf_counter", lambda: STARTED_AT)
        patched.setattr(step_worker.asyncio, "wait", note_wait)
        await worker.wait_until_due(10.0)
    worker.close()
    assert [round(seconds * 1e3, 6) for seconds in waits] == waited_ms
