"""What the client tests share: a scripted cache service, a real one, and a small KV spec."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer, start_server
from tests.support.processes.node_package import install
from tests.support.processes.services import short_folder
from tests.support.stand_ins.fake_cache import FakeCache, serving


@pytest.fixture
async def fake() -> AsyncIterator[FakeCache]:
    async with serving(FakeCache()) as served:
        yield served


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
async def cache_server(folder: Path) -> AsyncIterator[RunningServer]:
    """A real cache service in this process, with memory for a handful of sequences."""
    config = CacheConfig(listen="127.0.0.1:0", runtime_dir=folder, pool_memory=1 << 20, num_pools=1, drain_timeout=0)
    server = await start_server(config)
    yield server
    await server.stop()


@pytest.fixture
def spec() -> pb.KvSpec:
    return pb.KvSpec(
        model_id="tiny",
        revision="1",
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        kv_dtype=pb.KV_DTYPE_FLOAT32,
        block_size=4,
        layout=pb.KV_LAYOUT_BLOCK_MAJOR,
        compute_dtype="float32",
    )


@pytest.fixture(scope="session")
def node_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project elsewhere that has installed the Node client."""
    return install(tmp_path_factory.mktemp("project"))
