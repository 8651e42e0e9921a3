"""Sessions that end because a rank is lost: when the requests go on, when they are failed, and when the engine ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from structlog.testing import capture_logs

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.engine_service.cache_session.failures import rank_lost
from kvkeeper.engine_service.compute.device.device_errors import DeviceFault, ReportedFault
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.loop import session_loop
from kvkeeper.engine_service.loop.open_requests import OpenRequests
from kvkeeper.engine_service.loop.session_loop import keep_serving
from kvkeeper.engine_service.loop.stats import EngineStats
from kvkeeper.engine_service.ranks import ranks as ranks_module
from kvkeeper.engine_service.ranks.ranks import Ranks
from kvkeeper.engine_service.values.errors import DeviceLost

UNUSED: Any = None  # a part that nothing here comes to


class Team:
    """Ranks without processes."""

    def __init__(self, *parts: object) -> None:
        self.lost, self.fault = "", None

    def hear(self) -> list[bytearray]:
        return []

    def stop(self) -> None: ...


class LosingEngine:
    """Each of its sessions computes good steps, brings its request as many tokens as are said, and then loses a rank."""

    def __init__(self, ranks: Ranks, num_new: list[int]) -> None:
        self.ranks, self.num_new = ranks, num_new
        self.stats = EngineStats()
        self.requests = OpenRequests(UNUSED, self.stats, UNUSED, 1, lambda: None)
        self.request: Any = SimpleNamespace(request_id="r", num_taken=0, fail=self.fail)
        self.requests.generations = {"r": self.request}
        self.num_sessions, self.is_stopping, self.failed = 0, False, ""

    def fail(self, error: Exception) -> None:
        self.failed, self.is_stopping = str(error), True

    async def run_session(self, *parts: object) -> None:
        self.ranks.hear()  # as of a device that is made ready, and of a prompt's first part
        self.request.num_taken += self.num_new[self.num_sessions]
        self.num_sessions += 1
        self.is_stopping = self.num_sessions == len(self.num_new)
        team: Any = self.ranks._team
        team.lost = "rank 1: a test"
        raise rank_lost(team.lost)


@pytest.mark.parametrize(
    ("num_new", "num_sessions", "failed"),
    [
        ([0] * 9, 4, "all ranks fail again and again"),
        ([0, 5, 0, 0, 0, 0], 5, "all ranks fail again and again"),
        ([0, 0, 1] * 4, 12, ""),
    ],
)
async def test_requests_that_lose_ranks_and_get_no_token_are_failed(
    monkeypatch: pytest.MonkeyPatch, num_new: list[int], num_sessions: int, failed: str
) -> None:
    ranks = Ranks(EngineConfig(model=HASH_TOY, tensor_parallel=2))
    engine = LosingEngine(ranks, num_new)

    async def nothing(*parts: object, **more: object) -> None: ...

    async def open_memory(*parts: object) -> Any:
        ranks.start()
        return SimpleNamespace(session=SimpleNamespace(pool=None, has_step_lane=False), close=nothing)

    monkeypatch.setattr(ranks_module, "Team", Team)
    monkeypatch.setattr(session_loop, "open_memory", open_memory)
    monkeypatch.setattr(session_loop, "make_limits", lambda *parts: None)
    monkeypatch.setattr(session_loop, "_log_session", lambda *parts: None)
    parts: tuple[Any, ...] = engine, None, None, EngineConfig(model=HASH_TOY), nothing, "", ranks
    await keep_serving(*parts)
    assert (engine.num_sessions, engine.failed) == (num_sessions, failed)


def not_mapped(name: str) -> KvkeeperError:
    """As the client tells that memory of the pool cannot be mapped."""
    try:
        try:
            raise CudaError("cuMemMap", name)
        except CudaError:
            raise KvkeeperError(StatusCode.FAILED_PRECONDITION, message="it cannot be mapped") from None
    except KvkeeperError as error:
        return error


ILLEGAL = ReportedFault(DeviceFault("cudaErrorIllegalAddress", where="rank 1 on cuda:1"))
SHORT = ReportedFault(DeviceFault("cudaErrorMemoryAllocation", where="rank 1 on cuda:1"))


class OneSession:
    """An engine whose session ends with the error, if there is one, or is lost; the next one cannot be opened for it."""

    def __init__(self, in_step: bool, error: Exception) -> None:
        self.in_step, self.error, self.closed = in_step, error, list[dict[str, bool]]()
        self.stats, self.failed, self.is_stopping, self.num_opened = EngineStats(), list[Exception](), False, 0
        self.requests: Any = SimpleNamespace(fail_all=self.failed.append, have_got_on=lambda: False)

    async def run_session(self, *parts: object) -> None:
        raise self.error if self.in_step else rank_lost("a test")

    def stop(self) -> None:
        self.is_stopping = True

    async def wait_for_stop(self, seconds: float) -> None:
        self.stop()

    async def open_memory(self, *parts: object) -> Any:
        self.num_opened += 1
        if self.num_opened > 1:
            raise self.error
        return SimpleNamespace(session=SimpleNamespace(pool=None, has_step_lane=False), close=self.close)

    async def close(self, **how: bool) -> None:
        self.closed.append(how)

    async def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def nothing(*parts: object) -> None: ...

        monkeypatch.setattr(session_loop, "open_memory", self.open_memory)
        monkeypatch.setattr(session_loop, "make_limits", lambda *parts: None)
        monkeypatch.setattr(session_loop, "_log_session", lambda *parts: None)
        parts: tuple[Any, ...] = self, None, None, EngineConfig(model=HASH_TOY), nothing, ""
        await keep_serving(*parts)


@pytest.mark.parametrize(
    ("in_step", "error", "words"),
    [
        (True, ILLEGAL, "rank 1 on cuda:1: cudaErrorIllegalAddress: a kernel went wrong"),
        (False, ILLEGAL, "rank 1 on cuda:1: cudaErrorIllegalAddress: a kernel went wrong"),
        (False, SHORT, "rank 1 on cuda:1: cudaErrorMemoryAllocation: the device has not so much memory left"),
        (False, not_mapped("CUDA_ERROR_ECC_UNCORRECTABLE"), "CUDA_ERROR_ECC_UNCORRECTABLE: "),
    ],
)
async def test_a_device_that_is_lost_to_any_rank_ends_serving_with_one_line(
    monkeypatch: pytest.MonkeyPatch, in_step: bool, error: Exception, words: str
) -> None:
    engine = OneSession(in_step, error)
    with capture_logs() as logs, pytest.raises(DeviceLost):
        await engine.serve(monkeypatch)
    (line,) = (entry for entry in logs if entry["log_level"] == "error")
    assert line["event"] == "device_lost"
    assert line["message"].startswith(words)
    assert engine.is_stopping
    assert isinstance(engine.failed[-1], DeviceLost)
    assert engine.closed == [{"is_away": False, "is_lost": in_step}]


async def test_memory_that_cannot_be_mapped_now_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a cache service that has ended meanwhile."""
    engine = OneSession(False, not_mapped("CUDA_ERROR_INVALID_HANDLE"))
    await engine.serve(monkeypatch)
    assert engine.num_opened == 2
    assert not any(isinstance(failed, DeviceLost) for failed in engine.failed)


def test_a_request_that_was_completed_has_got_on() -> None:
    stats = EngineStats()
    requests = OpenRequests(UNUSED, stats, UNUSED, 1, lambda: None)
    assert not requests.have_got_on()
    stats.num_completed_requests += 1
    assert requests.have_got_on()
    assert not requests.have_got_on()
