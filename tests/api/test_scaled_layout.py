"""Pools of K and V in few bits over gRPC: the bytes of a block, the tail that hits and cuts do without, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.types import SequenceId
from kvkeeper.client import AsyncCacheClient, KvTokens
from kvkeeper.kernels.quantised.attention import read_kv
from kvkeeper.kernels.quantised.formats import FORMATS, dequantise, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from tests.api.test_layer_groups import start, step, tables
from tests.support.worlds.cache_api import Api, blocks_of, commit_columns, le32, le64, refusal, refused, serving
from tests.support.worlds.memory_folder import memory_folder

FULL, TAIL = pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_TAIL
SIZE, WINDOW_TOKENS = 4, 7


def spec_of(*groups: pb.LayerGroup, **fields: Any) -> pb.KvSpec:
    values: dict[str, Any] = {"model_id": "scaled", "num_layers": 5, "num_kv_heads": 1, "head_dim": 12, "block_size": SIZE}
    return pb.KvSpec(**values | {"kv_dtype": pb.KV_DTYPE_INT8, "layout": pb.KV_LAYOUT_SCALED} | fields, groups=groups)


def tail_of(*layers: int, kv_dtype: pb.KvDtype = pb.KV_DTYPE_FLOAT16, window_tokens: int = WINDOW_TOKENS) -> pb.LayerGroup:
    return pb.LayerGroup(kind=TAIL, layer_idx=layers, window_tokens=window_tokens, kv_dtype=kv_dtype)


ALL = pb.LayerGroup(kind=FULL, layer_idx=range(5))
SPEC = spec_of(ALL, tail_of(0, 1, 2), tail_of(3, 4))


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (spec_of(), 5 * 2 * SIZE * (12 + 2)),
        (spec_of(kv_dtype=pb.KV_DTYPE_FLOAT8_E4M3), 5 * 2 * SIZE * (12 + 2)),
        (spec_of(kv_dtype=pb.KV_DTYPE_INT4), 5 * 2 * SIZE * (6 + 2)),
        (SPEC, 3 * 2 * SIZE * 12 * 2),  # a page of the tail is larger
        (spec_of(ALL, *(tail_of(layer) for layer in range(5))), 5 * 2 * SIZE * (12 + 2)),
        (spec_of(ALL, tail_of(0, 1, 2, 3, 4, kv_dtype=pb.KV_DTYPE_FLOAT32)), 5 * 2 * SIZE * 12 * 4),
    ],
)
async def test_a_block_is_the_larger_of_what_is_stored_and_a_page_in_whole_alignments(
    api: Api, spec: pb.KvSpec, num_bytes: int
) -> None:
    pool = (await api.open(spec=spec)).opened.pool
    assert pool.block_bytes == -(-num_bytes // 16) * 16
    assert pool.spec.groups == spec.groups


async def test_hits_and_cuts_do_without_the_tail(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 21)
    blocks = (await step(session, 1, **start(1))).start_block_ids.reshape(3, 6)
    await step(session, 2, **commit_columns(1, 21))
    # Token 21 reads from token 15 on: entries 0 to 2 of the tail are given back. A cut to 10 tokens leaves none of it.
    await step(session, 3, truncate_sequence_ids=le64(1), truncate_num_tokens=le32(10))
    assert await tables(session, 1) == [blocks[0, :3].tolist(), [0, 0, 0], [0, 0, 0]]
    reserve = {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(13), "reserve_max_tokens": le32(13)}
    answer = await step(session, 4, **reserve)
    assert answer.new_block_groups.tolist() == [0, 1, 2]
    after = await tables(session, 1)
    assert [table[:3] for table in after[1:]] == [[0, 0, 0], [0, 0, 0]]  # the half of entry 2 that is written anew, too
    assert all(table[3] for table in after)
    assert after[0][:2] == blocks[0, :2].tolist()
    # A prompt behind which no tail is left is hit all the same.
    await step(session, 5, release_sequence_ids=le64(1))
    for _ in range(9):
        await session.call("EvictBlocks", num_blocks=1)
        await api.audit()
    length = await session.create(2, 21)
    assert 0 < length < 20
    answer = await step(session, 6, **start(2))
    assert answer.start_hits.tolist() == [length]
    assert not answer.start_block_ids.reshape(3, 6)[1:, : length // SIZE].any()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (spec_of(kv_dtype=pb.KV_DTYPE_FLOAT16), "spec.kv_dtype"),
        (spec_of(layout=pb.KV_LAYOUT_BLOCK_MAJOR), "spec.kv_dtype"),
        (spec_of(head_dim=7), "spec.head_dim"),
        (spec_of(head_dim=6, kv_dtype=pb.KV_DTYPE_INT4), "spec.head_dim"),
        (spec_of(ALL), "spec.groups"),
        (spec_of(ALL, ALL), "spec.groups.kind"),
        (spec_of(tail_of(0, 1, 2, 3, 4), tail_of(0)), "spec.groups.kind"),
        (spec_of(ALL, tail_of(0, 1, 2)), "spec.groups.layer_idx"),
        (spec_of(ALL, tail_of(0, 1, 2, 3), tail_of(3, 4)), "spec.groups.layer_idx"),
        (spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(4)), tail_of(0, 1, 2, 3, 4)), "spec.groups.layer_idx"),
        (spec_of(ALL, tail_of(1, 0, 2, 3, 4)), "spec.groups.layer_idx"),
        (spec_of(ALL, tail_of(0, 1, 2, 3, 4, window_tokens=0)), "spec.groups.window_tokens"),
        (spec_of(ALL, tail_of(0, 1, 2, 3, 4, kv_dtype=pb.KV_DTYPE_INT8)), "spec.groups.kv_dtype"),
        (
            spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(5), kv_dtype=pb.KV_DTYPE_INT8), tail_of(0, 1, 2, 3, 4)),
            "spec.groups.kv_dtype",
        ),
    ],
)
async def test_what_no_scaled_layout_can_be_is_refused(api: Api, spec: pb.KvSpec, field: str) -> None:
    await refused(api.open(spec=spec), "INVALID_FIELD", field=field)


async def test_a_tail_is_no_group_of_numbers(api: Api) -> None:
    plain = {"layout": pb.KV_LAYOUT_GROUPED, "kv_dtype": pb.KV_DTYPE_FLOAT16}
    error = await refusal(api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(4)), tail_of(4), **plain)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "spec.groups.kind")
    window = pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_SLIDING_WINDOW, layer_idx=[4], window_tokens=3, kv_dtype=1)
    error = await refusal(api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(4)), window, **plain)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "spec.groups.kv_dtype")


async def test_reading_and_writing_by_call_needs_a_type_of_numbers(api: Api) -> None:
    session = await api.open(spec=spec_of(), engine=False)
    await session.create(1, 9)
    for call in (session.read_kv(1), session.write_kv(1, 0, np.zeros((5, 2, 1, 12), np.float32))):
        await refused(call, "NOT_IMPLEMENTED", feature="scaled_layout")
    await refused(session.read_kv(1, kv_dtype=pb.KV_DTYPE_INT8), "INVALID_FIELD", field="kv_dtype")


def numbers(num_tokens: int) -> KvTokens:
    """Of two heads, of another magnitude in each token."""
    shape = 5, num_tokens, 2, 12
    rng = np.random.default_rng(num_tokens)
    keys, values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 5, (*shape[:-1], 1)) for _ in range(2))
    return KvTokens(keys.astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize(
    ("kv_dtype", "name"), [(pb.KV_DTYPE_INT8, "int8"), (pb.KV_DTYPE_FLOAT8_E4M3, "fp8"), (pb.KV_DTYPE_INT4, "int4")]
)
async def test_what_is_written_as_numbers_is_stored_as_the_kernels_store_it_and_read_as_numbers(
    api: Api, kv_dtype: pb.KvDtype, name: str
) -> None:
    spec, exact = spec_of(kv_dtype=kv_dtype, num_kv_heads=2), numbers(11)
    async with AsyncCacheClient(api.server.address) as client:
        session = await client.open_session(spec)
        await session.create_sequence(1, list(range(11)))
        await session.extend(1, 11)
        with pytest.raises(ValueError, match="kv_dtype"):
            await session.write_kv(1, 0, exact)
        first, rest = (KvTokens(exact.keys[:, part], exact.values[:, part]) for part in (slice(7), slice(7, 11)))
        await session.write_kv(1, 0, first, kv_dtype=pb.KV_DTYPE_FLOAT32)
        await session.write_kv(1, 7, rest, kv_dtype=pb.KV_DTYPE_FLOAT32)
        table = (await session.commit(1, 11, 11)).block_table
        found = await session.read_kv(1, kv_dtype=pb.KV_DTYPE_FLOAT32)
        assert found.stored_kv_dtype == kv_dtype
        halves = await session.read_kv(1, 3, 5, layers=[4], kv_dtype=pb.KV_DTYPE_FLOAT16)
    layout = QuantisedLayout(5, 2, 12, SIZE, FORMATS[name], torch.float32)
    (pool,) = api.server.session_manager.registry.pools
    view = layout.view(torch.from_numpy(blocks_of(pool).copy()).flatten())
    for layer_idx in range(5):
        read = read_kv(get_layer(view, layout, layer_idx), torch.tensor(table), None, torch.arange(11), torch.float32)
        for got, stored, given in zip((found.keys, found.values), read, (exact.keys, exact.values), strict=True):
            np.testing.assert_array_equal(got[layer_idx], stored.numpy())
            expected = dequantise(
                *quantise(torch.from_numpy(given[layer_idx]), layout.kv_format), layout.kv_format, torch.float32
            )
            np.testing.assert_array_equal(got[layer_idx], expected.numpy())
    np.testing.assert_array_equal(halves.keys[0], found.keys[4, 3:8].astype(np.float16))


async def test_the_tail_is_written_beside_what_is_stored(api: Api) -> None:
    spec = spec_of(ALL, tail_of(0, 1, 2), tail_of(3, 4), num_kv_heads=2)
    exact = numbers(11)
    async with AsyncCacheClient(api.server.address) as client:
        session = await client.open_session(spec)
        await session.create_sequence(1, list(range(11)))
        await session.extend(1, 11)
        await session.write_kv(1, 0, exact, kv_dtype=pb.KV_DTYPE_FLOAT32)
        await session.commit(1, 11, 11)
        found = await session.read_kv(1, kv_dtype=pb.KV_DTYPE_FLOAT32)
    (pool,) = api.server.session_manager.registry.pools
    (core,) = pool.manager.state.sessions.values()
    view = pool.manager.queries.view(core.session, SequenceId(1))
    layout = QuantisedLayout(5, 2, 12, SIZE, FORMATS["int8"], torch.float16, tail_layers=3)
    arena = layout.view(torch.from_numpy(blocks_of(pool).copy()).flatten())
    for layer_idx in range(5):
        tail = torch.from_numpy(view.group_tables[layer_idx // 3].astype(np.int64))
        layer, stored = get_layer(arena, layout, layer_idx), torch.from_numpy(view.block_table.astype(np.int64))
        keys, _ = read_kv(layer, stored, tail, torch.arange(11), torch.float32)
        there = (tail[torch.arange(11) // SIZE] != 0).numpy()
        assert there.any() and not there.all()
        np.testing.assert_array_equal(keys.numpy()[there], exact.keys[layer_idx][there].astype(np.float16))
        np.testing.assert_array_equal(keys.numpy()[~there], found.keys[layer_idx][~there])


async def test_a_sequence_comes_back_from_the_host_tier_with_its_tail_and_a_hit_without() -> None:
    async with serving(num_blocks=40, num_host_blocks=41) as api:
        session = await api.open(spec=SPEC, engine=False)
        await session.compute(1, 21)
        (pool,) = api.server.session_manager.registry.pools

        def content() -> list[list[bytes]]:
            view = pool.manager.queries.view(session.opened.session_id, SequenceId(1))
            tables = (view.block_table, *view.group_tables)
            return [[blocks_of(pool)[block].tobytes() if block else b"" for block in table.tolist()] for table in tables]

        blocks_of(pool)[1:] = np.arange(1, pool.info.num_blocks, dtype=np.uint8)[:, None]
        before = content()
        assert before[1].count(b"") == before[2].count(b"") == 3
        out = (await session.call("SwapOutSequence", sequence_id=1)).sequence
        assert out.num_host_blocks == 6 + 3 + 3
        await session.call("ClearPrefixCache")
        blocks_of(pool)[1:] = 255
        await session.call("SwapInSequence", sequence_id=1)
        assert content() == before
        await session.call("ReleaseSequence", sequence_id=1)
        # What is evicted goes to the host without its tail, and is hit there all the same.
        await session.compute(2, 21)
        await session.call("ReleaseSequence", sequence_id=2)
        evicted = await session.call("EvictBlocks", num_free_blocks=39)
        assert evicted.num_demoted_blocks == 5
        assert await session.create(3, 21) == 20
        await session.call("ExtendSequence", sequence_id=3, num_tokens=21)
        tables = pool.manager.queries.view(session.opened.session_id, SequenceId(3)).group_tables
        assert [table[:5].any() for table in tables] == [False, False]
        assert all(table[5] for table in tables)
        await api.audit()


async def test_kept_memory_has_the_tail_of_before() -> None:
    spec, exact = spec_of(ALL, tail_of(0, 1, 2), tail_of(3, 4), num_kv_heads=2), numbers(20)
    with memory_folder() as folder:
        for has_come_back in (False, True):
            async with serving(memory_dir=folder, keep=True, num_blocks=60, num_host_blocks=21) as api:
                async with AsyncCacheClient(api.server.address) as client:
                    session = await client.open_session(spec)
                    await session.create_sequence(1, list(range(21)))
                    length = (await session.extend(1, 21)).num_hit_tokens
                    assert length == (20 if has_come_back else 0)
                    if not has_come_back:
                        await session.write_kv(1, 0, exact, kv_dtype=pb.KV_DTYPE_FLOAT32)
                        await session.commit(1, 20, 21)
                    found = await session.read_kv(1, num_tokens=20, kv_dtype=pb.KV_DTYPE_FLOAT32)
                    assert float(np.abs(found.keys - exact.keys).max()) < 0.01 * float(np.abs(exact.keys).max())
                    (pool,) = api.server.session_manager.registry.pools
                    (core,) = pool.manager.state.sessions.values()
                    tables = pool.manager.queries.view(core.session, SequenceId(1)).group_tables
                    page = int(tables[0][4])  # of the newest whole block; of its first layer the first key
                    assert page
                    key = blocks_of(pool)[page][: 2 * 12 * 2].view(np.float16).reshape(2, 12)
                    np.testing.assert_array_equal(key, exact.keys[0, 16].astype(np.float16))
                    await session.release(1)
                await api.audit()
