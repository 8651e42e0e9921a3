"""Whether the engine behind the HTTP front is there, said before a probe has given up."""

import asyncio
from typing import Any

import pytest

from kvkeeper.http import engines as http_engines
from kvkeeper.http.engines import Engines
from tests.support.worlds.cache_api import DEADLINE


async def test_an_engine_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engines, "_HEALTH_S", 0.0)
    engines = Engines("unix:/nowhere/engine")

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(engines._open.client, "model", never)
    assert await asyncio.wait_for(engines.is_serving(), DEADLINE) is False
    await engines.close()
