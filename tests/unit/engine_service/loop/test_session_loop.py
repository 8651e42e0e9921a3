"""Sessions that end because a rank is lost: when the requests go on, and when they are failed."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvkeeper.engine_service.cache_session.failures import rank_lost
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.loop import session_loop
from kvkeeper.engine_service.loop.open_requests import OpenRequests
from kvkeeper.engine_service.loop.session_loop import keep_serving
from kvkeeper.engine_service.loop.stats import EngineStats
from kvkeeper.engine_service.ranks import ranks as ranks_module
from kvkeeper.engine_service.ranks.ranks import Ranks

UNUSED: Any = None  # a part that nothing here comes to


class Team:
    """Ranks without processes."""

    def __init__(self, *parts: object) -> None:
        self.lost = ""

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
    monkeypatch.setattr(session_loop, "limits_of", lambda *parts: None)
    monkeypatch.setattr(session_loop, "_log_session", lambda *parts: None)
    parts: tuple[Any, ...] = engine, None, None, EngineConfig(model=HASH_TOY), nothing, "", ranks
    await keep_serving(*parts)
    assert (engine.num_sessions, engine.failed) == (num_sessions, failed)


def test_a_request_that_was_completed_has_got_on() -> None:
    stats = EngineStats()
    requests = OpenRequests(UNUSED, stats, UNUSED, 1, lambda: None)
    assert not requests.have_got_on()
    stats.num_completed_requests += 1
    assert requests.have_got_on()
    assert not requests.have_got_on()
