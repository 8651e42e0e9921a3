"""A cache service with two small pools, for the workers of the connector for vLLM."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer, start_server


@pytest.fixture
async def cache_server(folder: Path) -> AsyncIterator[RunningServer]:
    """Each pool has 31 blocks to give."""
    config = CacheConfig(listen=f"unix:{folder}/s", runtime_dir=folder, num_blocks=32, num_pools=2, drain_timeout=0)
    server = await start_server(config)
    yield server
    await server.stop()
