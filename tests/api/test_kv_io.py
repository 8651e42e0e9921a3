"""ReadKv and WriteKv: K and V of single tokens, within the bounds of what is committed and what is not."""

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import (
    DEADLINE,
    SPEC,
    Api,
    ManualClock,
    kv_of,
    le32,
    le64,
    read_all,
    refusal,
    refused,
    serving,
)


async def test_writes_stay_within_the_uncommitted_slots(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=6)
    await session.write_kv(1, 0, kv_of(range(4)))
    await session.call("CommitSequence", sequence_id=1, num_tokens=4, first_token_idx=6)
    content = await read_all(session, 1)
    for first, count in ((3, 1), (0, 6), (5, 2), (6, 1), (-1, 1), (2**31 - 1, 1)):
        await refused(session.write_kv(1, first, kv_of(range(count), salt=9)), "INVALID_FIELD", field="first_token_idx")
    np.testing.assert_array_equal(await read_all(session, 1), content)
    for changed in ({"layer_idx": 2}, {"layer_idx": -1}, {"key": b""}, {"key": bytes(11)}, {"value": bytes(24)}):
        chunk = {"sequence_id": 1, "first_token_idx": 4, "key": bytes(12), "value": bytes(12)} | changed
        request = pb.WriteKvRequest(**session.ids, **chunk)
        assert (await refusal(api.stub.WriteKv(iter([request]), timeout=DEADLINE))).reason == "INVALID_FIELD"


async def test_a_stepping_session_is_not_written_from_outside(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    await api.raw_step(session.start_bytes(1, 1))
    assert (await refusal(session.write_kv(1, 0, kv_of(range(1))))).reason == "WRONG_MODE"


async def test_reads_stay_below_the_committed_length(api: Api) -> None:
    session = await api.open(engine=False)
    await session.create(1, 6)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=6)
    content = kv_of(range(6))
    await session.write_kv(1, 0, content)
    await session.call("CommitSequence", sequence_id=1, num_tokens=5, first_token_idx=6)
    np.testing.assert_array_equal(await read_all(session, 1, first_token_idx=2, num_tokens=3), content[:, :, 2:5])
    for fields in (
        {"first_token_idx": 6},
        {"first_token_idx": -1},
        {"first_token_idx": 1, "num_tokens": 5},
        {"num_tokens": -1},
        {"layer_idx": [2]},
        {"layer_idx": [-1]},
        {"layer_idx": [0, 1, 0]},
    ):
        assert (await refusal(session.read_kv(1, **fields))).reason == "INVALID_FIELD"
    assert (await refusal(session.read_kv(2))).reason == "UNKNOWN_SEQUENCE"
    chunks = await session.read_kv(1, layer_idx=[1])
    assert [(chunk.layer_idx, chunk.first_token_idx, chunk.num_tokens) for chunk in chunks] == [(1, 0, 5)]


async def test_reads_of_an_engines_sequence_stop_before_a_copy_that_may_not_have_run(api: Api) -> None:
    session, size = await api.open(), SPEC.block_size
    length = 2 * size

    async def step(
        step_id: int, completed: int, num_committed: int, tokens: tuple[int, ...], **columns: bytes
    ) -> pb.StepResponse:
        commit = {"commit_num_tokens": le32(num_committed), "commit_num_new_tokens": le32(len(tokens))}
        columns |= commit | {"commit_sequence_ids": le64(1), "commit_token_ids": le32(*tokens)}
        return pb.StepResponse.FromString(await api.raw_step(session.step_bytes(step_id, completed=completed, **columns)))

    def reserve(num_tokens: int) -> dict[str, bytes]:
        wanted = le32(num_tokens)
        return {"reserve_sequence_ids": le64(1), "reserve_min_tokens": wanted, "reserve_max_tokens": wanted}

    await session.create(1, length - 1)
    await api.raw_step(session.start_bytes(1, 1))
    await step(2, 1, length - 1, (), **reserve(length))
    fork = {"fork_parent_ids": le64(1), "fork_child_ids": le64(2), "fork_num_tokens": le32(length - 1)}
    assert (await step(3, 1, length - 1, (7,), **fork, **reserve(length + 1))).copy_destination_block_ids
    await step(4, 2, length, ())
    assert (await session.call("GetSequence", sequence_id=1)).sequence.num_committed_tokens == length
    assert sum(chunk.num_tokens for chunk in await session.read_kv(1, layer_idx=[0])) == size
    for fields in ({"num_tokens": length}, {"first_token_idx": size, "num_tokens": 1}, {"first_token_idx": length}):
        await refused(session.read_kv(1, **fields), "INVALID_FIELD", limit=str(size))
    await session.call("RenewSession", completed_step_id=3)
    assert sum(chunk.num_tokens for chunk in await session.read_kv(1, layer_idx=[0])) == length


async def test_a_read_counts_as_one_access_and_a_refused_one_as_none(api: Api, clock: ManualClock) -> None:
    session = await api.open(engine=False)
    await session.compute(1, 6)
    clock.advance(2.5)
    before = (await session.call("GetSequence", sequence_id=1)).sequence
    await refusal(session.read_kv(1, first_token_idx=7))
    await refusal(session.read_kv(1, layer_idx=[2]))
    assert (await session.call("GetSequence", sequence_id=1)).sequence == before
    assert before.idle_ms == 2500
    await session.read_kv(1)
    after = (await session.call("GetSequence", sequence_id=1)).sequence
    assert (after.idle_ms, after.num_accesses) == (0, before.num_accesses + 1)


async def test_reads_come_in_chunks_below_a_mebibyte() -> None:
    spec = pb.KvSpec(
        model_id="wide",
        num_layers=1,
        num_kv_heads=8,
        head_dim=1024,
        kv_dtype=pb.KV_DTYPE_FLOAT32,
        block_size=16,
        layout=pb.KV_LAYOUT_BLOCK_MAJOR,
    )
    async with serving(pool_memory=8 << 20) as api:
        session = await api.open(spec=spec, engine=False)
        await session.create(1, 40)
        await session.call("ExtendSequence", sequence_id=1, num_tokens=40)
        key = np.random.default_rng(0).integers(0, 255, (40, 32 << 10), np.uint8)
        parts = [
            pb.WriteKvRequest(
                **session.ids, sequence_id=1, first_token_idx=row, key=key[row].tobytes(), value=key[row, ::-1].tobytes()
            )
            for row in range(40)
        ]
        answer = await api.stub.WriteKv(iter(parts), timeout=DEADLINE)
        assert (answer.num_chunks, answer.num_bytes) == (40, 2 * key.nbytes)
        await session.call("CommitSequence", sequence_id=1, num_tokens=40, first_token_idx=40)
        chunks = await session.read_kv(1)
        assert len(chunks) > 1
        assert max(len(chunk.key) + len(chunk.value) for chunk in chunks) < 1 << 20
        assert [chunk.first_token_idx for chunk in chunks] == np.cumsum([0, *(c.num_tokens for c in chunks[:-1])]).tolist()
        assert b"".join(chunk.key for chunk in chunks) == key.tobytes()
        assert b"".join(chunk.value for chunk in chunks) == key[:, ::-1].tobytes()
