"""When the loop begins to prepare the next step beside one that is computed."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvkeeper.engine_service.compute.step_compute import StepRows
from kvkeeper.engine_service.loop import step_worker
from kvkeeper.engine_service.loop.step_worker import InFlight, StepWorker, _Usual

STARTED_AT, DEADLINE_S = 100.0, 20.0


@pytest.mark.parametrize(
    ("usual_ms", "preparation_ms", "launch_ms", "waited_ms"),
    [
        (1.3, 0.0, 0.0, []),  # 0.8 ms are left: a timer of the loop would end after 1 ms, and the device would wait
        (1.3, 0.4, 0.0, []),
        (2.4, 0.4, 0.0, [1]),  # of 1.3
        (40.0, 1.0, 0.0, [38]),
        (40.0, 1.0, 5.0, [30]),  # the next launch has to be over, too, when the device has done this step
        (0.2, 0.0, 0.0, []),
    ],
)
async def test_a_wait_ends_before_the_next_step_is_due(
    monkeypatch: pytest.MonkeyPatch, usual_ms: float, preparation_ms: float, launch_ms: float, waited_ms: list[int]
) -> None:
    """The event loop rounds each wait up to whole milliseconds, and a device's step may be as short as one."""
    waits: list[float] = []

    async def note_wait(_: InFlight, seconds: float) -> None:
        waits.append(seconds)

    work: Any = SimpleNamespace(num_prompt_tokens=0, num_tokens=1)
    worker, flight = StepWorker(), InFlight(1, work, 0.0, False, None, started_at=STARTED_AT)
    worker._flights.append(flight)
    worker._usual_decode, worker._usual_preparation = _Usual(usual_ms / 1e3, launch_ms / 1e3), preparation_ms / 1e3
    with monkeypatch.context() as patched:
        patched.setattr(step_worker.time, "perf_counter", lambda: STARTED_AT)
        patched.setattr(InFlight, "wait", note_wait)
        await worker.wait_until_due(10.0)
    worker.close()
    assert [round(seconds * 1e3, 6) for seconds in waits] == waited_ms


class Device:
    """Takes so many milliseconds to launch a step, and so many for the step behind its launch, by a clock moved by hand."""

    is_immediate = False

    def __init__(self, launch_ms: float, computation_ms: float) -> None:
        self.now, self._launch_ms, self._computation_ms = STARTED_AT, launch_ms, computation_ms

    def launch(self, *_: object) -> "Device":
        self.now += self._launch_ms / 1e3
        return self

    def read(self) -> None:
        self.now += self._computation_ms / 1e3


async def test_a_step_that_found_the_device_idle_counts_without_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted with it, the next step would be prepared as much too late, find the device idle again, and so on."""
    work: Any = SimpleNamespace(num_prompt_tokens=4, num_tokens=4, batch=object())
    worker, device = StepWorker(), Device(6.0, 12.0)
    with monkeypatch.context() as patched:
        patched.setattr(step_worker.time, "perf_counter", lambda: device.now)
        patched.setattr(step_worker, "_SMOOTHING", 1.0)
        worker.start(1, work, device, StepRows([], []), None)  # type: ignore[arg-type]
        flight = worker.in_flight
        assert flight is not None
        await flight.computing
        worker.take_step()
    worker.close()
    usual = worker._usual_prefill
    assert (round(flight.seconds, 6), round(usual.computation, 6), round(usual.launch, 6)) == (0.018, 0.003, 0.006)


@pytest.mark.parametrize(("launched_at", "computed_ms"), [(0.004, 10), (0.012, 8), (None, 10)])
async def test_a_step_that_ran_ahead_counts_from_the_end_of_the_one_before(launched_at: float | None, computed_ms: int) -> None:
    """And from its launch, where that was over later still. A processor computes in the launch."""
    flight = InFlight(2, Any, 0.0, False, None, started_at=0.010, launched_at=launched_at, ended_at=0.020)  # type: ignore[arg-type]
    assert round(flight.device_seconds, 6) == computed_ms / 1e3


async def test_what_is_called_beside_steps_runs_in_order_and_its_error_is_raised() -> None:
    worker, ran = StepWorker(), list[int]()

    def fail() -> None:
        ran.append(1)
        raise KeyError("it failed")

    failing, following = worker.call(fail), worker.call(lambda: ran.append(2))
    with pytest.raises(KeyError, match="it failed"):
        await failing
    await following
    worker.call(lambda: ran.append(3)).cancel()  # nothing waits for it any more
    worker.close()
    assert ran == [1, 2, 3]
    await asyncio.sleep(0)


async def test_a_wait_for_a_step_ends_with_it_or_with_its_time() -> None:
    flight = InFlight(1, cast(Any, None), 0.0, False, None)
    await flight.wait(0.0)
    assert not flight.computing.done()
    threading.Timer(0.0, flight.end, (KeyError("it failed"),)).start()
    async with asyncio.timeout(DEADLINE_S):
        await flight.wait(10 * DEADLINE_S)
    with pytest.raises(KeyError):
        flight.computing.result()
    await flight.wait(DEADLINE_S)  # it has ended
