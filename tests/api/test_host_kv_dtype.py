"""A host tier that keeps K and V in few bits: what comes back of a swap and of a hit, what is told, and who must convert."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.memory.host_packing import HostPacking
from kvkeeper.client import AsyncCacheClient, KvTokens
from kvkeeper.common.service.settings import ConfigError
from tests.support.worlds.cache_api import Api, refused, serving
from tests.support.worlds.memory_folder import memory_folder

LAYERS, HEADS, DIM, SIZE = 2, 2, 8, 4
SPEC = pb.KvSpec(
    model_id="numbers",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    kv_dtype=pb.KV_DTYPE_FLOAT32,
    block_size=SIZE,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
)
BLOCK_BYTES, HOST_BLOCK_BYTES = LAYERS * 2 * SIZE * HEADS * DIM * 4, LAYERS * 2 * SIZE * HEADS * (DIM + 2)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving(num_blocks=9, num_host_blocks=13, host_kv_dtype="int8") as served:
        yield served
        await served.audit()


def kv_of(num_tokens: int) -> KvTokens:
    rng = np.random.default_rng(num_tokens)
    keys, values = rng.standard_normal((2, LAYERS, num_tokens, HEADS, DIM)).astype(np.float32)
    return KvTokens(keys, values)


def errors(found: KvTokens, exact: KvTokens) -> np.ndarray:
    """Of each number, against the greatest one of its head."""
    both = [(found.keys, exact.keys), (found.values, exact.values)]
    return np.stack([np.abs(one - other) / np.abs(other).max(-1, keepdims=True) for one, other in both])


async def test_what_swaps_and_hits_bring_back_is_rounded_once_and_told(api: Api) -> None:
    async with AsyncCacheClient(api.server.address) as client:
        session = await client.open_session(SPEC)
        pool = session.pool
        assert (pool.host_kv_dtype, pool.host_block_bytes) == (pb.KV_DTYPE_INT8, HOST_BLOCK_BYTES)
        assert pool.host_arena_bytes == 13 * HOST_BLOCK_BYTES
        exact = kv_of(10)
        await session.create_sequence(1, list(range(10)))
        await session.extend(1, 10)
        await session.write_kv(1, 0, exact)
        await session.commit(1, 10, 10)
        assert errors(await session.read_kv(1), exact).max() == 0
        await session.swap_out(1)
        await session.clear_prefix_cache()
        await session.swap_in(1)
        found = await session.read_kv(1)
        assert 0 < errors(found, exact).max() <= 0.5 / 127 * (1 + 2**-7)
        assert found.stored_kv_dtype == pb.KV_DTYPE_FLOAT32
        await session.release(1)
        await session.evict_blocks(num_free_blocks=8)
        told = await session.explain_match([*range(10), 10])
        assert (told.num_host_tokens, told.host_kv_dtype) == (8, pb.KV_DTYPE_INT8)
        assert "kept in int8" in told.explanation
        await session.create_sequence(2, [*range(8), 99])
        await session.extend(2, 9)
        again = await session.read_kv(2, num_tokens=8)
        first = KvTokens(exact.keys[:, :8], exact.values[:, :8])
        assert 0 < errors(again, first).max() <= 1 / 127
        told = await session.explain_match([*range(8), 99])
        assert (told.num_host_tokens, told.host_kv_dtype) == (0, 0)


async def test_a_wrong_scale_is_found(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: each head comes back by the scale of the head behind it."""
    real = HostPacking.unpack

    def shifted(self: HostPacking, row: np.ndarray, block: np.ndarray) -> None:
        sides = self._get_sides(row.copy())
        sides[:, self._elements_bytes :] = np.roll(sides[:, self._elements_bytes :], 2, axis=1)
        real(self, sides.ravel(), block)

    monkeypatch.setattr(HostPacking, "unpack", shifted)
    with pytest.raises(AssertionError):
        await test_what_swaps_and_hits_bring_back_is_rounded_once_and_told(api)


async def test_an_engine_that_does_not_convert_is_refused_and_other_pools_keep_what_they_have(api: Api) -> None:
    async with AsyncCacheClient(api.server.address) as client:
        await refused(client.open_session(SPEC, pb.EXECUTOR_ENGINE), "NOT_IMPLEMENTED", feature="host_kv_dtype")
        await (await client.open_session(SPEC, pb.EXECUTOR_ENGINE, packs_host_blocks=True)).close()
    async with serving(num_blocks=9, num_host_blocks=13, host_kv_dtype="int8") as served:
        page = pb.PageLayout(page_bytes=64, digest="0" * 64)
        opaque = pb.KvSpec(model_id="pages", block_size=4, layout=pb.KV_LAYOUT_OPAQUE, page=page)
        pool = (await served.open(spec=opaque)).opened.pool
        assert (pool.host_kv_dtype, pool.host_block_bytes) == (0, 64)


async def test_the_same_memory_holds_more_blocks() -> None:
    held = {}
    for host_kv_dtype in ("auto", "int8", "int4"):
        async with serving(host_memory=64 << 10, host_kv_dtype=host_kv_dtype) as served:
            held[host_kv_dtype] = (await served.open(spec=SPEC, engine=False)).opened.pool.num_host_blocks
    assert held == {"auto": (64 << 10) // BLOCK_BYTES, "int8": (64 << 10) // HOST_BLOCK_BYTES, "int4": (64 << 10) // 192}


def test_a_format_needs_a_tier_to_be_of() -> None:
    with pytest.raises(ConfigError, match="--host-memory"):
        CacheConfig(host_kv_dtype="int8")


async def test_a_kept_host_tier_comes_back_in_the_same_precision_alone() -> None:
    """A run with another one keeps the pool, and begins a host tier of its own."""
    exact, found, rows = kv_of(8), {}, []
    with memory_folder() as folder:
        settings = {"num_blocks": 9, "num_host_blocks": 13, "memory_dir": folder, "keep": True}
        for run, host_kv_dtype in enumerate(("int8", "int8", "fp8")):
            async with serving(**settings, host_kv_dtype=host_kv_dtype) as served:
                async with AsyncCacheClient(served.server.address) as client:
                    session = await client.open_session(SPEC)
                    if run == 0:
                        await session.create_sequence(1, list(range(8)))
                        await session.extend(1, 8)
                        await session.write_kv(1, 0, exact)
                        await session.commit(1, 8, 8)
                        await session.release(1)
                        await session.evict_blocks(num_free_blocks=8)
                    found[run] = (await session.explain_match([*range(8), 9])).num_host_tokens
                    (pool,) = served.server.session_manager.registry.pools
                    assert pool.hosts is not None
                    rows.append(pool.hosts.copy())
                await served.audit()
    assert found == {0: 8, 1: 8, 2: 0}
    assert rows[0].any()
    np.testing.assert_array_equal(rows[1], rows[0])


async def test_two_precisions_never_meet_on_one_disk(tmp_path: Path) -> None:
    exact, found = kv_of(8), []
    for host_kv_dtype in ("int8", "fp8", "int8"):
        settings = {"disk_path": tmp_path / "disk", "disk_memory": 1 << 20, "num_pools": 2, "host_kv_dtype": host_kv_dtype}
        async with serving(num_blocks=9, num_host_blocks=13, **settings) as served:
            async with AsyncCacheClient(served.server.address) as client:
                session = await client.open_session(SPEC)
                (pool,) = (await served.stats()).pools
                found.append(pool.num_cached_disk_blocks)
                if not found[-1]:
                    await session.create_sequence(1, [*range(8), 9])
                    await session.extend(1, 8)
                    await session.write_kv(1, 0, exact)
                    await session.commit(1, 8, 0)
                    await session.release(1)
                    await session.evict_blocks(num_free_blocks=8)
                    await served.until(lambda stats: stats.pools[0].num_cached_disk_blocks == 2)
    assert found == [0, 0, 2]
