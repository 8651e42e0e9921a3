"""Pools of several groups of layers over gRPC: tables by group, hits at the edge of a window, and what is refused."""

from typing import Any

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.steps import decode
from tests.support.worlds.cache_api import Api, Session, le32, le64, refusal, serving

FULL, WINDOW = pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_SLIDING_WINDOW
SIZE, WINDOW_TOKENS = 4, 7


def spec_of(*groups: pb.LayerGroup, num_layers: int = 5, **fields: Any) -> pb.KvSpec:
    values = {"model_id": "hybrid", "num_kv_heads": 1, "head_dim": 2, "kv_dtype": pb.KV_DTYPE_FLOAT16, "block_size": SIZE}
    return pb.KvSpec(**values | {"layout": pb.KV_LAYOUT_GROUPED} | fields, num_layers=num_layers, groups=groups)


SPEC = spec_of(
    pb.LayerGroup(kind=FULL, layer_idx=[2]),
    pb.LayerGroup(kind=WINDOW, layer_idx=[0, 1], window_tokens=WINDOW_TOKENS),
    pb.LayerGroup(kind=WINDOW, layer_idx=[3, 4], window_tokens=WINDOW_TOKENS),
)


async def tables(session: Session, sequence_id: int) -> list[list[int]]:
    """Of each group, as GetSequence shows them."""
    found = (await session.call("GetSequence", sequence_id=sequence_id)).sequence
    return [list(found.block_table), *(list(group.block_table) for group in found.group_tables)]


async def step(session: Session, step_id: int, **columns: Any) -> Any:
    """The answer, with its columns as arrays."""
    return decode((await session.step(step_id, **columns)).SerializeToString())


def start(sequence_id: int) -> dict[str, bytes]:
    return {"start_sequence_ids": le64(sequence_id), "start_max_new_tokens": le32(64), "start_max_hit_tokens": le32(64)}


def commit(sequence_id: int, length: int) -> dict[str, bytes]:
    return {"commit_sequence_ids": le64(sequence_id), "commit_num_tokens": le32(length), "commit_num_new_tokens": le32(0)}


async def test_a_block_has_the_layers_of_the_largest_group(api: Api) -> None:
    pool = (await api.open(spec=SPEC)).opened.pool
    assert pool.block_bytes == 2 * 2 * SIZE * 2 * 2  # 2 layers, K and V, tokens, elements, bytes
    assert pool.spec.groups == SPEC.groups


async def test_a_window_gives_its_blocks_back_and_a_hit_needs_the_last_window_alone(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 21)
    answer = await step(session, 1, **start(1))
    blocks = answer.start_block_ids.reshape(3, 6)
    assert len(set(blocks.ravel().tolist())) == 18
    assert await tables(session, 1) == blocks.tolist()
    # Token 21 reads from token 15 on in a window of 7: blocks 0 to 2 of both window groups go.
    answer = await step(session, 2, **commit(1, 21))
    told = list(
        zip(answer.update_groups.tolist(), answer.update_table_idx.tolist(), answer.update_block_ids.tolist(), strict=True)
    )
    assert sorted(told) == [(group, idx, 0) for group in (1, 2) for idx in range(3)]
    left = [blocks[0].tolist(), [0, 0, 0, *blocks[1, 3:]], [0, 0, 0, *blocks[2, 3:]]]
    assert await tables(session, 1) == left
    # A prompt with the same 20 tokens hits all 5 full blocks: what its next token reads is there.
    assert await session.create(2, 21) == 20
    answer = await step(session, 3, **start(2))
    hit = answer.start_block_ids.reshape(3, 6)
    assert answer.start_hits.tolist() == [20]
    assert hit[:, :5].tolist() == [row[:5] for row in left]
    # A shorter one ends where the windows have passed; their blocks are cached still.
    assert await session.create(3, 9) == 8
    await step(session, 4, release_sequence_ids=le64(1))
    # And a longer window than what is left: blocks 0 to 2 of group 1 are evicted, and 8 tokens hit no more.
    for _ in range(6):
        await session.call("EvictBlocks", num_blocks=1)
        await api.audit()
    assert await session.create(4, 9) == 0
    assert await session.create(5, 21) == 20  # sequence 2 holds what this reads


async def test_new_blocks_name_their_group(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 4)
    await step(session, 1, **start(1))
    reserve = {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(5), "reserve_max_tokens": le32(5)}
    answer = await step(session, 2, **commit(1, 4), **reserve)
    assert answer.new_block_groups.tolist() == [0, 1, 2]
    assert answer.new_block_item_idx.tolist() == [0, 0, 0]
    assert [table[-1] for table in await tables(session, 1)] == answer.new_block_ids.tolist()


async def test_a_fork_copies_the_partial_block_of_each_group(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 6)
    await step(session, 1, **start(1))
    fork = {"fork_parent_ids": le64(1), "fork_child_ids": le64(2), "fork_num_tokens": le32(6)}
    reserve = {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(7), "reserve_max_tokens": le32(7)}
    before = await tables(session, 1)
    answer = await step(session, 2, **commit(1, 6), **fork, **reserve)
    assert answer.copy_sources.tolist() == [table[1] for table in before]
    assert answer.update_groups.tolist() == [0, 1, 2]
    assert await tables(session, 2) == before
    assert [table[1] for table in await tables(session, 1)] == answer.copy_destinations.tolist()


async def test_a_cut_into_what_a_window_left_behind_is_refused(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 21)
    await step(session, 1, **start(1))
    await step(session, 2, **commit(1, 21))
    cut = {"truncate_sequence_ids": le64(1), "truncate_num_tokens": le32(17)}
    error = await refusal(session.step(3, **cut))
    assert (error.reason, error.metadata["limit"]) == ("INVALID_FIELD", "18")  # 12 tokens are gone, and 6 before it are read
    await session.step(3, truncate_sequence_ids=le64(1), truncate_num_tokens=le32(18))


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=WINDOW, layer_idx=range(5), window_tokens=4)], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=range(4))], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=[0, 1, 2, 3, 4, 4])], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=[1, 0, 2, 3, 4])], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=range(6))], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=range(5), window_tokens=1)], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=range(4)), pb.LayerGroup(kind=WINDOW, layer_idx=[4])], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=FULL, layer_idx=range(5)), pb.LayerGroup(kind=FULL)], "INVALID_FIELD"),
        ([pb.LayerGroup(layer_idx=range(5))], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_LATENT, layer_idx=range(5))], "NOT_IMPLEMENTED"),
        ([pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_RECURRENT, layer_idx=range(5))], "NOT_IMPLEMENTED"),
    ],
)
async def test_what_no_groups_can_be_is_refused(api: Api, groups: list[pb.LayerGroup], reason: str) -> None:
    assert (await refusal(api.open(spec=spec_of(*groups)))).reason == reason


async def test_groups_need_their_layout(api: Api) -> None:
    error = await refusal(api.open(spec=spec_of(*SPEC.groups, layout=pb.KV_LAYOUT_BLOCK_MAJOR)))
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "spec.groups")


async def test_what_groups_do_without_is_refused(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    retention = pb.Retention(num_sink_tokens=1, num_window_tokens=4)
    await session.create(1, 9)
    for call in (
        session.create(2, 9, retention=retention),
        session.call("UpdateSequence", sequence_id=1, retention=retention),
        session.call("CheckAdmission", num_prompt_tokens=9, retention=retention),
        session.call("PinPrefix", token_ids=range(9), ttl_ms=1000),
        session.call("StoreLogits", sequence_id=1, num_tokens=4, logits=b"1234"),
        session.call("HandOffSequence", sequence_id=1),
        session.read_kv(1),
        session.write_kv(1, 0, np.zeros((5, 2, 1, 2), np.float32)),
    ):
        error = await refusal(call)
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED"), error
        assert error.metadata["feature"] == "layer_groups"


async def test_a_service_with_a_host_tier_refuses_groups() -> None:
    async with serving(host_memory=64 << 10) as api:
        error = await refusal(api.open(spec=SPEC))
        assert (error.reason, error.metadata["feature"]) == ("NOT_IMPLEMENTED", "layer_groups")
        await api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=range(5))))  # one group does without nothing


async def test_one_item_calls_grow_and_share_all_groups(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    await session.create(1, 21)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=21)
    await session.call("CommitSequence", sequence_id=1, num_tokens=21, first_token_idx=21)
    assert [table.count(0) for table in await tables(session, 1)] == [0, 3, 3]
    await session.call("ForkSequence", parent_id=1, child_id=2)
    assert await tables(session, 2) == await tables(session, 1)
    answer = await session.call("ReleaseSequence", sequence_id=1)
    assert answer.num_dropped_blocks == 0
    await session.call("ReleaseSequence", sequence_id=2)
    assert [pool.num_referenced_blocks for pool in (await api.stats()).pools] == [0]
