"""Pools with a group of recurrent layers over gRPC: what such a spec may be, tables with holes, cuts that leave less."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, Session, commit_columns, le32, le64, refusal, refused, serving
from tests.support.worlds.memory_folder import memory_folder
from tests.support.worlds.small_steps import start, step

FULL, RECURRENT = pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_RECURRENT
SIZE = 4
BLOCK_BYTES = 2 * 2 * SIZE * 2 * 2  # 2 full layers, K and V, tokens, elements, bytes


def spec_of(state_bytes: int = BLOCK_BYTES, checkpoint_blocks: int = 2, **fields: Any) -> pb.KvSpec:
    values = {"model_id": "recurrent", "num_layers": 5, "num_kv_heads": 1, "head_dim": 2, "kv_dtype": pb.KV_DTYPE_FLOAT16}
    full = pb.LayerGroup(kind=FULL, layer_idx=[2, 4])
    states = pb.LayerGroup(kind=RECURRENT, layer_idx=[0, 1, 3], state_bytes=state_bytes, checkpoint_blocks=checkpoint_blocks)
    return pb.KvSpec(**values | {"block_size": SIZE, "layout": pb.KV_LAYOUT_GROUPED, "groups": [full, states]} | fields)


SPEC = spec_of()


async def computed(api: Api, length: int, spec: pb.KvSpec = SPEC) -> Session:
    """A session of steps whose sequence 1 has so many committed tokens, after step 2."""
    session = await api.open(spec=spec)
    await session.create(1, length)
    await step(session, 1, **start(1))
    await step(session, 2, **commit_columns(1, length))
    return session


async def states(session: Session, sequence_id: int) -> list[int]:
    """1 where an entry of the group of states has a block."""
    found = (await session.call("GetSequence", sequence_id=sequence_id)).sequence
    return [int(block > 0) for block in found.group_tables[0].block_table]


async def test_a_block_is_as_large_as_the_layers_with_k_and_v_want(api: Api) -> None:
    pool = (await api.open(spec=SPEC)).opened.pool
    assert pool.block_bytes == BLOCK_BYTES
    assert pool.spec.groups == SPEC.groups


async def test_states_that_no_block_holds_are_refused_with_the_least_block_size(api: Api) -> None:
    error = await refusal(api.open(spec=spec_of(state_bytes=BLOCK_BYTES + 1)))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "spec.groups.state_bytes")
    assert error.metadata["limit"] == str(SIZE + 1)
    await api.open(spec=spec_of(state_bytes=BLOCK_BYTES + 1, block_size=SIZE + 1))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(state_bytes=0), "INVALID_FIELD"),
        (spec_of(state_bytes=-1), "INVALID_FIELD"),
        (spec_of(checkpoint_blocks=0), "INVALID_FIELD"),
        (spec_of(checkpoint_blocks=(1 << 20) + 1), "INVALID_FIELD"),
        (spec_of(groups=reversed(SPEC.groups)), "INVALID_FIELD"),
        (spec_of(groups=[pb.LayerGroup(kind=FULL, layer_idx=range(5), state_bytes=1)]), "INVALID_FIELD"),
        (spec_of(groups=[pb.LayerGroup(kind=FULL, layer_idx=range(5), checkpoint_blocks=1)]), "INVALID_FIELD"),
        (spec_of(layout=pb.KV_LAYOUT_SCALED, kv_dtype=pb.KV_DTYPE_INT8, head_dim=16), "INVALID_FIELD"),
    ],
)
async def test_what_no_group_of_states_can_be_is_refused(api: Api, spec: pb.KvSpec, reason: str) -> None:
    assert (await refusal(api.open(spec=spec))).reason == reason


async def test_states_of_several_ranks_are_in_the_blocks_of_each(api: Api) -> None:
    alone = (await api.open(spec=spec_of())).opened.pool
    pool = (await api.open(spec=spec_of(tensor_parallel_size=2))).opened.pool
    assert (pool.block_bytes, pool.spec.tensor_parallel_size) == (alone.block_bytes, 2)


async def test_tables_tell_which_entries_keep_a_state(api: Api) -> None:
    session = await computed(api, 21)
    assert await states(session, 1) == [0, 1, 0, 1, 0, 1]
    await session.create(2, 21)
    answer = await step(session, 3, **start(2))
    assert answer.start_hits.tolist() == [16]
    assert (answer.start_block_ids.reshape(2, 6)[1] > 0).tolist() == [False, False, False, True, False, True]
    (pool,) = (await api.stats()).pools
    counts = [(group.window_tokens, group.num_held_entries, group.num_passed_entries) for group in pool.groups]
    assert counts == [(0, 12, 0), (2, 5, 7)]
    await api.audit()


async def test_cuts_tell_how_much_of_the_sequence_is_committed(api: Api) -> None:
    session = await computed(api, 21)
    forks = {"fork_parent_ids": le64(1, 1), "fork_child_ids": le64(2, 3), "fork_num_tokens": le32(21, 20)}
    answer = await step(session, 3, **forks, truncate_sequence_ids=le64(1), truncate_num_tokens=le32(19))
    assert (answer.fork_committed.tolist(), answer.truncate_committed.tolist()) == ([21, 16], [16])
    found = (await session.call("GetSequence", sequence_id=3)).sequence
    assert (found.num_tokens, found.num_committed_tokens, found.num_reserved_tokens) == (20, 16, 16)
    await api.audit()


async def test_calls_tell_it_as_well(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    await session.compute(1, 21)
    child = (await session.call("ForkSequence", parent_id=1, child_id=2, num_tokens=18)).sequence
    assert (child.num_tokens, child.num_committed_tokens) == (18, 16)
    cut = (await session.call("TruncateSequence", sequence_id=1, num_tokens=15)).sequence
    assert (cut.num_tokens, cut.num_committed_tokens, cut.num_reserved_tokens) == (15, 8, 8)
    await session.call("CollectGarbage")
    await api.audit()


async def test_a_pool_without_states_tells_nothing_of_cuts(api: Api) -> None:
    session = await api.open()
    await session.create(1, 9)
    await step(session, 1, **start(1))
    fork = {"fork_parent_ids": le64(1), "fork_child_ids": le64(2), "fork_num_tokens": le32(7)}
    cut = {"truncate_sequence_ids": le64(1), "truncate_num_tokens": le32(7)}
    answer = await session.step(2, **commit_columns(1, 9), **fork, **cut)
    assert (answer.fork_num_committed_tokens, answer.truncate_num_committed_tokens) == (b"", b"")


async def test_k_and_v_are_read_of_the_layers_that_have_them_and_written_of_none(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    await session.create(1, 9)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=9)
    rows = np.zeros((9, 2), "<f2").tobytes()
    request = pb.WriteKvRequest(**session.ids, sequence_id=1, layer_idx=2, first_token_idx=0, key=rows, value=rows)
    assert (await refusal(api.stub.WriteKv(iter([request])))).metadata["feature"] == "layer_group_kind"
    await session.call("CommitSequence", sequence_id=1, num_tokens=9, first_token_idx=9)
    assert [chunk.layer_idx for chunk in await session.read_kv(1)] == [2, 4]
    assert (await refusal(session.read_kv(1, layer_idx=[3]))).metadata["feature"] == "layer_group_kind"


async def test_a_sequence_with_states_is_not_handed_over(api: Api) -> None:
    session = await computed(api, 9)
    await refused(session.call("HandOffSequence", sequence_id=1), "NOT_IMPLEMENTED", feature="layer_group_kind")


async def test_states_come_back_from_the_host_tier_and_from_kept_memory() -> None:
    with memory_folder() as folder:
        for has_come_back in (False, True):
            async with serving(memory_dir=folder, keep=True, host_memory=64 << 10, block_digests=True) as api:
                if has_come_back:
                    session = await api.open(spec=SPEC)
                    assert await session.create(1, 21) == 16
                    answer = await step(session, 1, **start(1))
                    assert answer.start_hits.tolist() == [16]
                    await api.audit()
                    continue
                session = await computed(api, 21)
                answer = await step(session, 3, swap_out_sequence_ids=le64(1))
                assert len(answer.transfer_ids) == 6 + 3
                done = {"completed_transfer_ids": answer.transfer_ids.tobytes()}
                answer = await step(session, 4, swap_in_sequence_ids=le64(1), **done)
                if not len(answer.ready_ids):
                    answer = await step(session, 5, completed_transfer_ids=answer.transfer_ids.tobytes())
                assert (answer.ready_block_ids.reshape(2, 6)[1] > 0).tolist() == [False, True] * 3
                await api.audit()
