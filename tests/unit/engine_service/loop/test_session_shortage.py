"""An engine that finds no thread to open its session with tries again, and does not end."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from kvkeeper.client.attaching import attaching
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.service.threads import NoThread
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.loop.session_loop import CacheServiceRefused, _open


class Engine:
    """Waits as long as it takes to look away."""

    is_stopping = False
    requests = SimpleNamespace(fail_all=lambda error: None)

    async def wait_for_stop(self, seconds: float) -> None:
        await asyncio.sleep(0)


def failing(*errors: Exception) -> Callable[[], Awaitable[Any]]:
    """Raises each in turn, then answers."""
    left = list(errors)

    async def attempt() -> str:
        if left:
            raise left.pop(0)
        return "memory"

    return attempt


@pytest.mark.parametrize(
    "error", [NoThread("no more threads"), RuntimeError("can't start new thread"), OSError(errno.EMFILE, "too many open files")]
)
async def test_it_tries_again_until_the_host_gives_what_it_needs(error: Exception) -> None:
    with structlog.testing.capture_logs() as logs:
        found = await _open(cast(Any, Engine()), failing(error, error), EngineConfig(), may_refuse=True)
    assert found == "memory"
    assert {(line["event"], line["code"], line["reason"]) for line in logs} == {("no_session", "UNAVAILABLE", "HOST_EXHAUSTED")}


async def test_a_cache_service_on_another_host_is_refused_at_the_start() -> None:
    with pytest.raises(KvkeeperError) as remote, attaching("", "token", 1.0):
        pass
    with pytest.raises(CacheServiceRefused, match="the service is on another host"):
        await _open(cast(Any, Engine()), failing(remote.value), EngineConfig(), may_refuse=True)


async def test_a_bug_is_none() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        await _open(cast(Any, Engine()), failing(RuntimeError("a bug")), EngineConfig(), may_refuse=True)
