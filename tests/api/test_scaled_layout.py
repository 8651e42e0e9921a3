"""Pools of K and V in few bits over gRPC: the bytes of a block, the tail that hits and cuts do without, and what is refused."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.api.test_layer_groups import commit, start, step, tables
from tests.support.worlds.cache_api import Api, le32, le64, refusal, serving

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
    await step(session, 2, **commit(1, 21))
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
    error = await refusal(api.open(spec=spec))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", field)


async def test_a_tail_is_no_group_of_numbers(api: Api) -> None:
    plain = {"layout": pb.KV_LAYOUT_GROUPED, "kv_dtype": pb.KV_DTYPE_FLOAT16}
    error = await refusal(api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(4)), tail_of(4), **plain)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "spec.groups.kind")
    window = pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_SLIDING_WINDOW, layer_idx=[4], window_tokens=3, kv_dtype=1)
    error = await refusal(api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(4)), window, **plain)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "spec.groups.kv_dtype")


async def test_reading_and_writing_by_call_is_refused(api: Api) -> None:
    session = await api.open(spec=spec_of(), engine=False)
    await session.create(1, 9)
    for call in (session.read_kv(1), session.write_kv(1, 0, np.zeros((5, 2, 1, 12), np.float32))):
        error = await refusal(call)
        assert (error.reason, error.metadata["feature"]) == ("NOT_IMPLEMENTED", "scaled_layout")


async def test_a_host_tier_takes_blocks_without_a_tail_and_refuses_one() -> None:
    async with serving(host_memory=64 << 10) as api:
        await api.open(spec=spec_of())
        error = await refusal(api.open(spec=SPEC))
        assert (error.reason, error.metadata["feature"]) == ("NOT_IMPLEMENTED", "layer_groups")
