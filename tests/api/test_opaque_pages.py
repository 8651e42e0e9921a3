"""Pools of opaque pages: blocks whose bytes only their clients can read are shared, copied, swapped and forgotten whole."""

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, KvTokens
from tests.support.worlds.cache_api import DEADLINE, Api, Session, blocks_of, refusal, refused, serving, spec_of

PAGE_BYTES = 48
PAGES = pb.KvSpec(
    model_id="packed",
    block_size=4,
    layout=pb.KV_LAYOUT_OPAQUE,
    page=pb.PageLayout(page_bytes=PAGE_BYTES, digest="0a" * 32),
)


def changed(**changes: object) -> pb.KvSpec:
    """The spec with other values; page_bytes and digest are those of the page."""
    spec = spec_of(PAGES)
    for name, value in changes.items():
        setattr(spec.page if name in ("page_bytes", "digest") else spec, name, value)
    return spec


async def table(session: Session, sequence_id: int) -> list[int]:
    return list((await session.call("GetSequence", sequence_id=sequence_id)).sequence.block_table)


async def test_a_block_is_one_page_and_equal_digests_share_a_pool(api: Api) -> None:
    session = await api.open(spec=PAGES)
    pool = session.opened.pool
    assert (pool.block_bytes, pool.arena_bytes) == (PAGE_BYTES, PAGE_BYTES * pool.num_blocks)
    assert pool.spec == changed(tensor_parallel_size=1)
    await api.open(spec=PAGES)
    assert [pool.num_sessions for pool in (await api.stats()).pools] == [2]
    await api.open(spec=changed(digest="0b" * 32))
    assert [pool.num_sessions for pool in (await api.stats()).pools] == [2, 1]


@pytest.mark.parametrize("page_bytes", [16, 1 << 12])
async def test_pages_within_their_bounds_are_served(api: Api, page_bytes: int) -> None:
    assert (await api.open(spec=changed(page_bytes=page_bytes))).opened.pool.block_bytes == page_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_bytes", 0),
        ("page_bytes", 8),
        ("page_bytes", 24),
        ("page_bytes", -16),
        ("page_bytes", (1 << 30) + 16),
        ("digest", ""),
        ("digest", "0A" * 32),
        ("digest", "0a" * 31),
        ("digest", "0a" * 32 + "\n"),
        ("num_layers", 1),
        ("num_kv_heads", 1),
        ("head_dim", -1),
        ("kv_dtype", pb.KV_DTYPE_FLOAT16),
        ("layout", pb.KV_LAYOUT_BLOCK_MAJOR),
    ],
)
async def test_what_no_page_can_be_is_refused(api: Api, field: str, value: object) -> None:
    error = await refusal(api.open(spec=changed(**{field: value})))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    expected = {"layout": "num_layers"}.get(field, f"page.{field}" if field in ("page_bytes", "digest") else field)
    assert error.metadata["field"] == f"spec.{expected}"
    assert not (await api.stats()).pools


async def test_a_page_beside_elements_is_refused(api: Api) -> None:
    spec = spec_of()
    spec.page.CopyFrom(PAGES.page)
    await refused(api.open(spec=spec), "INVALID_FIELD", field="spec.page")


async def test_rows_of_k_and_v_are_refused_and_change_nothing(api: Api) -> None:
    session = await api.open(spec=PAGES, engine=False)
    write = pb.WriteKvRequest(**session.ids, sequence_id=1, key=bytes(12), value=bytes(12))
    await refused(api.stub.WriteKv(iter([write]), timeout=DEADLINE), "OPAQUE_PAGES")
    await session.compute(1, 6)
    await refused(session.read_kv(1), "OPAQUE_PAGES")
    assert (await session.call("GetSequence", sequence_id=1)).sequence.num_tokens == 6
    await api.audit()


async def test_the_python_client_tells_the_same_of_reads_and_writes(api: Api) -> None:
    some = KvTokens(np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
    async with AsyncCacheClient(api.server.address) as client, await client.open_session(PAGES) as session:
        await session.create_sequence(1, range(6))
        await session.extend(1, 6)
        for call in (session.write_kv(1, 0, some), session.read_kv(1)):
            await refused(call, "OPAQUE_PAGES")


async def test_a_refused_write_leaves_the_session_free_to_step(api: Api) -> None:
    session = await api.open(spec=PAGES, engine=False)
    write = pb.WriteKvRequest(**session.ids, sequence_id=1, key=bytes(12), value=bytes(12))
    assert (await refusal(api.stub.WriteKv(iter([write]), timeout=DEADLINE))).reason == "OPAQUE_PAGES"
    assert (await session.step(1)).step_id == 1


async def test_a_copy_on_write_copies_the_whole_page(api: Api) -> None:
    session = await api.open(spec=PAGES, engine=False)
    _, last = await session.compute(1, 6)
    (pool,) = api.server.session_manager.registry.pools
    blocks = blocks_of(pool)
    blocks[last] = range(PAGE_BYTES)
    await session.call("ForkSequence", parent_id=1, child_id=2)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=7)
    ends = {(await table(session, 1))[-1], (await table(session, 2))[-1]}
    assert len(ends) == 2, "the shared page was copied before a write"
    assert [blocks[block].tolist() for block in ends] == [list(range(PAGE_BYTES))] * 2
    await api.audit()


async def test_pages_come_back_from_the_host_tier_as_they_were() -> None:
    async with serving(host_memory=16 << 10, prefix_caching=False) as api:  # so that nothing stays on the device
        session = await api.open(spec=PAGES, engine=False)
        blocks = await session.compute(1, 8)
        (pool,) = api.server.session_manager.registry.pools
        pages = blocks_of(pool)
        for number, block in enumerate(blocks):
            pages[block] = number + 1
        await session.call("SwapOutSequence", sequence_id=1)
        pages[:] = 0
        await session.call("SwapInSequence", sequence_id=1)
        assert [set(pages[block].tolist()) for block in await table(session, 1)] == [{1}, {2}]
        await api.audit()
