"""The cache that a scheduler of these tests runs on."""

import pytest

from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World
from tests.support.worlds.tiny_columns import TinyColumns


@pytest.fixture(params=[TinyColumns, CoreCache], ids=["tiny", "core"])
def each_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs on a cache of dicts and lists, and on the core."""
    monkeypatch.setattr(World, "default_cache", request.param)
