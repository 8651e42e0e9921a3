"""What the client tests share: a scripted cache service and a small KV spec."""

from collections.abc import AsyncIterator

import pytest
from kvkeeper.cache.v1 import cache_service_pb2 as pb

from tests.support.fake_cache import FakeCache, serving


@pytest.fixture
async def fake() -> AsyncIterator[FakeCache]:
    async with serving(FakeCache()) as served:
        yield served


@pytest.fixture
def spec() -> pb.KvSpec:
    return pb.KvSpec(
        model_id="tiny",
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        kv_dtype=pb.KV_DTYPE_FLOAT32,
        block_size=4,
        layout=pb.KV_LAYOUT_BLOCK_MAJOR,
    )
