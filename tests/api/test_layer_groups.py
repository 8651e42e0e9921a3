"""Pools of several groups of layers over gRPC: tables by group, hits at the edge of a window, and what is refused."""

from typing import Any

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import Api, Session, commit_columns, le32, le64, refusal, serving
from tests.support.worlds.memory_folder import memory_folder
from tests.support.worlds.small_steps import start, step

FULL, WINDOW = pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_SLIDING_WINDOW
CHUNKED, RECURRENT = pb.LAYER_GROUP_KIND_CHUNKED, pb.LAYER_GROUP_KIND_RECURRENT
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
    answer = await step(session, 2, **commit_columns(1, 21))
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
    answer = await step(session, 2, **commit_columns(1, 4), **reserve)
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
    answer = await step(session, 2, **commit_columns(1, 6), **fork, **reserve)
    assert answer.copy_sources.tolist() == [table[1] for table in before]
    assert answer.update_groups.tolist() == [0, 1, 2]
    assert await tables(session, 2) == before
    assert [table[1] for table in await tables(session, 1)] == answer.copy_destinations.tolist()


async def test_a_cut_into_what_a_window_left_behind_is_refused(api: Api) -> None:
    session = await api.open(spec=SPEC)
    await session.create(1, 21)
    await step(session, 1, **start(1))
    await step(session, 2, **commit_columns(1, 21))
    cut = {"truncate_sequence_ids": le64(1), "truncate_num_tokens": le32(17)}
    error = await refusal(session.step(3, **cut))
    assert (error.reason, error.metadata["limit"]) == ("INVALID_FIELD", "18")  # 12 tokens are gone, and 6 before it are read
    await session.step(3, truncate_sequence_ids=le64(1), truncate_num_tokens=le32(18))


async def test_a_chunk_is_given_back_whole_and_a_hit_needs_its_start(api: Api) -> None:
    """Chunks of 8 tokens, so 2 blocks: while a chunk grows it is kept, and with its last token it goes."""
    chunked = pb.LayerGroup(kind=CHUNKED, layer_idx=[0, 1, 3, 4], window_tokens=8)
    session = await api.open(spec=spec_of(pb.LayerGroup(kind=FULL, layer_idx=[2]), chunked))
    await session.create(1, 24)
    await step(session, 1, **start(1))
    await step(session, 2, **commit_columns(1, 23))
    full, chunks = await tables(session, 1)
    assert (full.count(0), chunks[:4].count(0), chunks[4:].count(0)) == (0, 4, 0)
    cut = {"truncate_sequence_ids": le64(1), "truncate_num_tokens": le32(15)}
    assert (await refusal(session.step(3, **cut))).metadata["limit"] == "16"
    await step(session, 3, **commit_columns(1, 24))
    assert (await tables(session, 1))[1] == [0] * 6
    await session.create(2, 30)
    answer = await step(session, 4, **start(2))
    assert answer.start_hits.tolist() == [24]  # behind whole chunks nothing of them is read
    shown = (await tables(session, 2))[1]
    assert (shown[:6].count(0), shown[6:].count(0)) == (6, 0)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "INVALID_FIELD"),
        ([pb.LayerGroup(kind=CHUNKED, layer_idx=range(5), window_tokens=8)], "INVALID_FIELD"),
        (
            [pb.LayerGroup(kind=FULL, layer_idx=range(4)), pb.LayerGroup(kind=CHUNKED, layer_idx=[4])],
            "INVALID_FIELD",
        ),
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
        ([pb.LayerGroup(kind=RECURRENT, layer_idx=range(5), state_bytes=8, checkpoint_blocks=1)], "INVALID_FIELD"),
    ],
)
async def test_what_no_groups_can_be_is_refused(api: Api, groups: list[pb.LayerGroup], reason: str) -> None:
    assert (await refusal(api.open(spec=spec_of(*groups)))).reason == reason


async def test_groups_need_their_layout(api: Api) -> None:
    error = await refusal(api.open(spec=spec_of(*SPEC.groups, layout=pb.KV_LAYOUT_BLOCK_MAJOR)))
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "spec.groups")


async def test_retention_is_refused_because_windows_read_no_sink(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    retention = pb.Retention(num_sink_tokens=1, num_window_tokens=4)
    await session.create(1, 9)
    for call in (
        session.create(2, 9, retention=retention),
        session.call("UpdateSequence", sequence_id=1, retention=retention),
        session.call("CheckAdmission", num_prompt_tokens=9, retention=retention),
    ):
        error = await refusal(call)
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED"), error
        assert error.metadata["feature"] == "layer_groups"


def rows_of(length: int, layers: int = 5) -> np.ndarray:
    """K and V, [layers, 2, tokens, elements of a token], another number everywhere."""
    return np.arange(layers * 2 * length * 2).reshape(layers, 2, length, 2).astype("<f2")


async def written(api: Api, length: int, **fields: Any) -> Session:
    """A session of one-item calls whose sequence 1 has these rows of K and V."""
    session = await api.open(spec=SPEC, engine=False, **fields)
    await session.create(1, length)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=length)
    chunks = [
        pb.WriteKvRequest(
            **session.ids, sequence_id=1, layer_idx=layer_idx, first_token_idx=0, key=key.tobytes(), value=value.tobytes()
        )
        for layer_idx, (key, value) in enumerate(rows_of(length))
    ]
    await api.stub.WriteKv(iter(chunks))
    await session.call("CommitSequence", sequence_id=1, num_tokens=length, first_token_idx=length)
    return session


async def test_k_and_v_are_read_where_their_group_has_them(api: Api) -> None:
    session = await written(api, 21)
    rows = rows_of(21)
    for chunk in await session.read_kv(1, first_token_idx=12):
        key, value = rows[chunk.layer_idx, :, 12:]
        assert (chunk.key, chunk.value) == (key.tobytes(), value.tobytes())
    (chunk,) = await session.read_kv(1, layer_idx=[2])
    assert chunk.key == rows[2, 0].tobytes()
    error = await refusal(session.read_kv(1, first_token_idx=11, layer_idx=[2, 3]))
    assert (error.reason, error.metadata["field"], error.metadata["limit"]) == ("INVALID_FIELD", "first_token_idx", "12")


async def test_a_sequence_is_handed_over_with_all_of_its_tables(api: Api) -> None:
    giver, taker = await written(api, 21), await api.open(spec=SPEC, engine=False)
    before = await tables(giver, 1)
    offer = (await giver.call("HandOffSequence", sequence_id=1)).offer
    taken = (await taker.call("TakeSequence", offer=offer, sequence_id=7)).sequence
    assert [list(taken.block_table), *(list(group.block_table) for group in taken.group_tables)] == before
    assert (await taker.read_kv(7, first_token_idx=12))[-1].value == rows_of(21)[4, 1, 12:].tobytes()
    await api.audit()


async def test_a_pin_holds_what_a_hit_of_its_length_reads(api: Api) -> None:
    session = await written(api, 21)
    pinned = await session.call("PinPrefix", token_ids=range(20), ttl_ms=60_000)
    assert pinned.num_pinned_tokens == 20
    await session.call("ReleaseSequence", sequence_id=1)
    await session.call("EvictBlocks", num_blocks=1000)
    await api.audit()
    (pool,) = (await api.stats()).pools
    assert pool.num_pinned_blocks == 5 + 2 * 2  # a token at 20 reads from token 14 on
    assert await session.create(2, 21) == 20
    assert await session.create(3, 17) == 0, "shorter ones read what is not held"
    await session.call("UnpinPrefix", pin_id=pinned.pin_id)
    await api.audit()


async def test_a_pin_is_as_long_as_there_is_room_for_all_groups() -> None:
    async with serving(num_blocks=27) as api:  # 26 that can be had, of which pins may hold 13
        session = await api.open(spec=SPEC)
        await session.create(1, 32)
        await step(session, 1, **start(1))
        reserve = {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(32), "reserve_max_tokens": le32(32)}
        await step(session, 2, **commit_columns(1, 28))
        await step(session, 3)
        await step(session, 4, **reserve)
        await step(session, 5, **commit_columns(1, 32))
        pinned = await session.call("PinPrefix", token_ids=range(32), ttl_ms=60_000)
        await api.audit()
        (pool,) = (await api.stats()).pools
        assert (pinned.num_pinned_tokens, pool.num_pinned_blocks) == (32, 8 + 2 * 2)
        refused = await refusal(session.call("PinPrefix", token_ids=range(28), ttl_ms=60_000))
        assert refused.reason == "OUT_OF_BLOCKS", "its windows begin an entry before, and two blocks more are too many"
        assert refused.metadata == {"requested": "2", "available": "1"}
        await api.audit()


async def test_stored_logits_stand_for_a_prompt_whose_windows_are_there() -> None:
    async with serving(logits_memory=1 << 10) as api:
        session = await api.open(spec=SPEC)
        await session.create(1, 20)
        await step(session, 1, **start(1))
        await step(session, 2, **commit_columns(1, 20))
        await session.call("StoreLogits", sequence_id=1, num_tokens=20, logits=b"1234")
        await session.create(2, 20)
        answer = await step(session, 3, **start(2))
        assert (answer.start_hits.tolist(), answer.start_has_logits.tolist()) == ([20], [1])
        assert answer.start_block_ids.reshape(3, 5).tolist() == await tables(session, 1)
        await step(session, 4, release_sequence_ids=le64(1, 2))
        await api.audit()
        await step(session, 5)
        pinned = await session.call("PinPrefix", token_ids=range(16), ttl_ms=60_000)
        await session.call("EvictBlocks", num_blocks=1000)
        await session.create(3, 20)
        answer = await step(session, 6, **start(3))
        assert (answer.start_hits.tolist(), answer.start_has_logits.tolist()) == ([pinned.num_pinned_tokens], [])


async def test_a_sequence_is_swapped_with_the_tables_of_all_groups() -> None:
    async with serving(host_memory=64 << 10) as api:
        session = await api.open(spec=SPEC)
        await session.create(1, 21)
        await step(session, 1, **start(1))
        await step(session, 2, **commit_columns(1, 21))
        before = await tables(session, 1)
        answer = await step(session, 3, swap_out_sequence_ids=le64(1))
        assert sorted(answer.transfer_sources.tolist()) == sorted(block for table in before for block in table if block)
        found = (await session.call("GetSequence", sequence_id=1)).sequence
        assert (found.num_host_blocks, len(found.block_table), len(found.group_tables)) == (12, 0, 0)
        done = {"completed_transfer_ids": answer.transfer_ids.tobytes()}
        answer = await step(session, 4, swap_in_sequence_ids=le64(1), **done)
        if not len(answer.ready_ids):
            answer = await step(session, 5, completed_transfer_ids=answer.transfer_ids.tobytes())
        assert answer.ready_ids.tolist() == [1]
        assert answer.ready_num_blocks.tolist() == [6]
        assert answer.ready_block_ids.reshape(3, 6).tolist() == await tables(session, 1)
        assert [table.count(0) for table in await tables(session, 1)] == [0, 3, 3]
        await api.audit()


async def test_one_item_calls_grow_and_share_all_groups(api: Api) -> None:
    session = await api.open(spec=SPEC, engine=False)
    await session.compute(1, 21)
    assert [table.count(0) for table in await tables(session, 1)] == [0, 3, 3]
    await session.call("ForkSequence", parent_id=1, child_id=2)
    assert await tables(session, 2) == await tables(session, 1)
    answer = await session.call("ReleaseSequence", sequence_id=1)
    assert answer.num_dropped_blocks == 0
    await session.call("ReleaseSequence", sequence_id=2)
    assert [pool.num_referenced_blocks for pool in (await api.stats()).pools] == [0]


async def test_memory_that_is_kept_comes_back_with_all_groups() -> None:
    with memory_folder() as folder:
        for has_come_back in (False, True):
            async with serving(memory_dir=folder, keep=True, host_memory=64 << 10, block_digests=True) as api:
                if not has_come_back:
                    session = await written(api, 21)
                    await session.call("ReleaseSequence", sequence_id=1)
                    continue
                session = await api.open(spec=SPEC, engine=False)
                assert await session.create(1, 21) == 20
                await session.call("ExtendSequence", sequence_id=1, num_tokens=21)
                chunks = await session.read_kv(1, first_token_idx=12, num_tokens=8)
                assert [chunk.key for chunk in chunks] == [rows[0, 12:20].tobytes() for rows in rows_of(21)]
                await api.audit()
