"""Groups of layers with heads or pages of their own: a client writes every slot of every group, and finds it where the layout
says, through copies, swaps, tiers and a restart. And what no group can have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.client import AsyncCacheClient, KvTokens
from kvkeeper.client import cache as client_cache
from tests.support.remote.redis_server import RedisServer
from tests.support.worlds.cache_api import Api, Session, blocks_of, failure, refusal, refused, serving
from tests.support.worlds.memory_folder import memory_folder

SIZE, WINDOW_TOKENS, LENGTH = 4, 7, 21
READABLE = 12  # the first token that the windows of a sequence of that length have not left behind
FULL, WINDOW, RECURRENT = pb.LAYER_GROUP_KIND_FULL, pb.LAYER_GROUP_KIND_SLIDING_WINDOW, pb.LAYER_GROUP_KIND_RECURRENT
GROUPS = (
    pb.LayerGroup(kind=FULL, layer_idx=[2, 5], num_kv_heads=1, head_dim=16),
    pb.LayerGroup(kind=WINDOW, layer_idx=[0, 1], window_tokens=WINDOW_TOKENS),
    pb.LayerGroup(kind=WINDOW, layer_idx=[3, 4], window_tokens=WINDOW_TOKENS, num_kv_heads=3, head_dim=8),
)
SPEC = pb.KvSpec(
    model_id="shapes",
    num_layers=6,
    num_kv_heads=2,
    head_dim=8,
    kv_dtype=pb.KV_DTYPE_FLOAT16,
    block_size=SIZE,
    layout=pb.KV_LAYOUT_GROUPED,
    groups=GROUPS,
)
HEADS = {2: (1, 16), 5: (1, 16), 0: (2, 8), 1: (2, 8), 3: (3, 8), 4: (3, 8)}
BLOCK_BYTES = 2 * 2 * SIZE * 3 * 8 * 2  # the last group's: layers, K and V, tokens, heads, elements, bytes
Rows = dict[int, np.ndarray]  # of each layer K and V, [2, tokens, heads, elements]


def with_group(at: int, **changes: Any) -> pb.KvSpec:
    """The spec with another group there."""
    spec = pb.KvSpec()
    spec.CopyFrom(SPEC)
    for name, value in changes.items():
        setattr(spec.groups[at], name, value)
    return spec


def rows_of(seed: int, length: int = LENGTH) -> Rows:
    rng = np.random.default_rng(seed)
    return {layer_idx: rng.standard_normal((2, length, *heads)).astype("<f2") for layer_idx, heads in HEADS.items()}


async def write(session: Session, sequence_id: int, rows: Rows, first: int = 0) -> None:
    """Every layer's rows of the tokens from the first on."""
    chunks = (
        pb.WriteKvRequest(
            **session.ids,
            sequence_id=sequence_id,
            layer_idx=layer_idx,
            first_token_idx=first,
            key=key[first:].tobytes(),
            value=value[first:].tobytes(),
        )
        for layer_idx, (key, value) in rows.items()
    )
    await session.api.stub.WriteKv(chunks)


async def compute(session: Session, sequence_id: int, rows: Rows, *, first: int = 0) -> int:
    """A sequence of consecutive numbers with these rows, behind what is cached. Returns how many tokens that was."""
    length = len(rows[0][0])
    await session.create(sequence_id, length, first=first)
    extended = (await session.call("ExtendSequence", sequence_id=sequence_id, num_tokens=length)).sequence
    await write(session, sequence_id, rows, extended.num_hit_tokens)
    await session.call("CommitSequence", sequence_id=sequence_id, num_tokens=length, first_token_idx=first + length)
    return int(extended.num_hit_tokens)


async def check(session: Session, sequence_id: int, rows: Rows, end: int = LENGTH, step: float = 0.0) -> None:
    """The sequence has these rows below `end`, windows those from READABLE on.

    step: between two numbers of what a host tier rounded them to, as a part of the greatest number of 8 neighbours.
    """
    seen = []
    for first, layers in ((0, [2, 5]), (READABLE, [0, 1, 3, 4])):
        for chunk in await session.read_kv(sequence_id, first_token_idx=first, num_tokens=end - first, layer_idx=layers):
            heads = HEADS[chunk.layer_idx]
            assert (chunk.num_kv_heads, chunk.head_dim) == heads
            for found, wanted in zip((chunk.key, chunk.value), rows[chunk.layer_idx][:, first:end], strict=True):
                difference = np.frombuffer(found, "<f2").astype(float).reshape(-1, 8) - wanted.reshape(-1, 8)
                most = np.abs(wanted.astype(float)).reshape(-1, 8).max(-1, keepdims=True)
                assert (np.abs(difference) <= step * most).all(), chunk.layer_idx
                assert difference.any() or not step, "it came from where it is kept in few bits"
            seen.append(chunk.layer_idx)
    assert sorted(seen) == sorted(HEADS), "one chunk has all tokens of a layer"


async def tables(session: Session, sequence_id: int) -> list[list[int]]:
    found = (await session.call("GetSequence", sequence_id=sequence_id)).sequence
    return [list(found.block_table), *(list(group.block_table) for group in found.group_tables)]


async def test_a_block_has_its_groups_layers_and_heads_from_its_start_and_the_size_of_the_largest(api: Api) -> None:
    session, rows = await api.open(spec=SPEC, engine=False), rows_of(1)
    assert session.opened.pool.block_bytes == BLOCK_BYTES
    assert list(session.opened.pool.spec.groups) == list(GROUPS)
    await compute(session, 1, rows)
    (pool,) = api.server.session_manager.registry.pools
    blocks = blocks_of(pool)
    for group, table in zip(GROUPS, await tables(session, 1), strict=True):
        num_layers, heads = len(group.layer_idx), HEADS[group.layer_idx[0]]
        num_bytes = 2 * num_layers * 2 * SIZE * heads[0] * heads[1]
        for block_idx in range(READABLE // SIZE, len(table)):
            content = blocks[table[block_idx], :num_bytes].view("<f2").reshape(num_layers, 2, SIZE, *heads)
            for place, layer_idx in enumerate(group.layer_idx):
                wanted = rows[layer_idx][:, block_idx * SIZE : (block_idx + 1) * SIZE]
                np.testing.assert_array_equal(content[place][:, : wanted.shape[1]], wanted)
            assert not blocks[table[block_idx], num_bytes:].any(), "the rest is unused"
    await check(session, 1, rows)
    await api.audit()


async def test_a_layer_in_the_place_of_another_is_noticed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the second layer of a group lies behind one of the spec's heads."""
    monkeypatch.setattr(KvSpec, "token_bytes", lambda spec, _: 2 * spec.num_kv_heads * spec.head_dim)
    with pytest.raises(AssertionError):
        await test_a_block_has_its_groups_layers_and_heads_from_its_start_and_the_size_of_the_largest(api)


async def test_a_copy_on_write_takes_the_partial_block_of_each_shape(api: Api) -> None:
    session, rows, others = await api.open(spec=SPEC, engine=False), rows_of(1, 21), rows_of(2, 24)
    await compute(session, 1, rows)
    await session.call("ForkSequence", parent_id=1, child_id=2)
    await session.call("ExtendSequence", sequence_id=2, num_tokens=24)
    await write(session, 2, others, 21)
    await session.call("CommitSequence", sequence_id=2, num_tokens=24, first_token_idx=21, token_ids=[1, 2, 3])
    assert all(one[-1] != other[-1] for one, other in zip(await tables(session, 1), await tables(session, 2), strict=True))
    await check(session, 1, rows)
    of_child = {layer: np.concatenate((kv, others[layer][:, 21:]), 1) for layer, kv in rows.items()}
    for layer_idx in HEADS:  # the last block, whose first token is the parent's
        (chunk,) = await session.read_kv(2, first_token_idx=20, layer_idx=[layer_idx])
        assert chunk.key == of_child[layer_idx][0, 20:].tobytes()
        assert chunk.value == of_child[layer_idx][1, 20:].tobytes()
    await api.audit()


@pytest.mark.parametrize(("host_kv_dtype", "step"), [("auto", 0.0), ("int8", 1 / 127), ("fp8", 1 / 16)])
async def test_swaps_and_hits_of_the_host_tier_bring_every_shape_back(host_kv_dtype: str, step: float) -> None:
    async with serving(num_blocks=40, num_host_blocks=41, host_kv_dtype=host_kv_dtype) as api:
        session, rows = await api.open(spec=SPEC, engine=False), rows_of(3)
        pool = session.opened.pool
        heads = BLOCK_BYTES // 2 // 8  # of 8 elements, the greatest common divisor of all
        assert pool.host_block_bytes == (heads * (8 + 2) if step else BLOCK_BYTES)
        await compute(session, 1, rows)
        await session.call("SwapOutSequence", sequence_id=1)
        await session.call("ClearPrefixCache")
        await session.call("SwapInSequence", sequence_id=1)
        await check(session, 1, rows, step=step)
        await session.call("ReleaseSequence", sequence_id=1)
        await session.call("ClearPrefixCache")
        await compute(session, 2, rows)
        await session.call("ReleaseSequence", sequence_id=2)
        await session.call("EvictBlocks", num_free_blocks=39)
        assert await compute(session, 3, rows) == 20
        await check(session, 3, rows, 20, step)
        await api.audit()


@pytest.mark.parametrize("tier", ["disk", "remote"])
@pytest.mark.parametrize("host_kv_dtype", ["auto", "int8"])
async def test_another_run_finds_every_shape_behind_the_host_tier(tmp_path: Path, tier: str, host_kv_dtype: str) -> None:
    settings: dict[str, Any] = {"num_blocks": 40, "num_host_blocks": 41, "num_pools": 1, "tier_worth": "always"}
    if tier == "disk":
        settings |= {"disk_path": tmp_path / "disk", "disk_memory": 1 << 20}
    else:
        server = RedisServer(tmp_path)
        settings |= {"remote": server.address, "remote_secret": server.secret(), "remote_admit": "all", "remote_deadline": 10.0}
    try:
        rows = rows_of(4)
        async with serving(**settings, host_kv_dtype=host_kv_dtype) as api:
            session = await api.open(spec=SPEC, engine=False)
            await compute(session, 1, rows)
            held = sum(block > 0 for table in await tables(session, 1) for block in table[:5])
            await session.call("ReleaseSequence", sequence_id=1)
            await session.call("EvictBlocks", num_free_blocks=39)
            await api.until(lambda stats: getattr(stats.pools[0], f"num_{tier}_stored_blocks") >= held)
        others = [] if tier == "disk" else [("fp8", False)]  # which a disk is made anew for
        for other, is_found in (*others, (host_kv_dtype, True)):
            async with serving(**settings, host_kv_dtype=other) as api:
                session = await api.open(spec=SPEC, engine=False)
                hint = pb.PrefixHint(token_ids=range(LENGTH), prefetch=True)
                await session.call("HintPrefix", hints=[hint])
                if is_found:
                    await api.until(lambda stats: getattr(stats.pools[0], f"num_{tier}_hit_blocks") >= 5 + 2 * 2)
                assert await compute(session, 1, rows) == (20 if is_found else 0)
                await check(session, 1, rows, 20, 1 / 127 if is_found and host_kv_dtype == "int8" else 0.0)
                await api.audit()
    finally:
        if tier == "remote":
            server.close()


async def test_memory_that_is_kept_comes_back_with_every_shape() -> None:
    rows = rows_of(5)
    with memory_folder() as folder:
        settings: dict[str, Any] = {"memory_dir": folder, "keep": True, "host_memory": 64 << 10, "block_digests": True}
        async with serving(**settings) as api:
            session = await api.open(spec=SPEC, engine=False)
            await compute(session, 1, rows)
            await session.call("ReleaseSequence", sequence_id=1)
        async with serving(**settings) as api:
            (pool,) = (await api.stats()).pools
            assert list(pool.pool.spec.groups) == list(GROUPS)
            session = await api.open(spec=SPEC, engine=False)
            assert await compute(session, 1, rows) == 20
            await check(session, 1, rows)
            await api.audit()


async def test_the_client_reads_and_writes_layers_of_one_shape_at_a_time(api: Api) -> None:
    async with AsyncCacheClient(api.server.address) as client, await client.open_session(SPEC) as session:
        rows = rows_of(6, 6)
        await session.create_sequence(1, range(6))
        await session.extend(1, 6)
        for layers in ([2, 5], [0, 1], [3, 4]):
            keys, values = (np.stack([rows[layer][side] for layer in layers]) for side in (0, 1))
            await session.write_kv(1, 0, KvTokens(keys, values), layers)
        await session.commit(1, 6, 6)
        for layers in ([5], [0, 1], [4, 3]):
            found = await session.read_kv(1, layers=layers)
            np.testing.assert_array_equal(found.keys, np.stack([rows[layer][0] for layer in layers]))
            np.testing.assert_array_equal(found.values, np.stack([rows[layer][1] for layer in layers]))
        for mixed in ((), (1, 2)):
            with pytest.raises(ValueError, match="of different shapes"):
                await session.read_kv(1, layers=mixed)
        with pytest.raises(ValueError, match=r"\[1, num_tokens, 1, 16\]"):
            await session.write_kv(1, 0, KvTokens(rows[0][:1], rows[0][:1]), [2])
        for chunk in ({"layer_idx": 2, "key": bytes(2 * 8 * 2 - 2)}, {"layer_idx": 3, "key": bytes(32)}):
            request = pb.WriteKvRequest(
                session_id=session.session_id, epoch=session.epoch, sequence_id=1, value=chunk["key"], **chunk
            )
            limit = 2 * int(np.prod(HEADS[int(chunk["layer_idx"])]))
            await refused(api.stub.WriteKv(iter([request])), "INVALID_FIELD", field="key", limit=str(limit))


async def test_the_specs_own_heads_are_the_same_with_and_without_their_numbers(api: Api) -> None:
    told = with_group(1, num_kv_heads=2, head_dim=8)
    both = [(await api.open(spec=spec)).opened.pool for spec in (SPEC, told)]
    assert both[0] == both[1]
    assert len((await api.stats()).pools) == 1
    other = (await api.open(spec=with_group(1, num_kv_heads=1, head_dim=16))).opened.pool
    assert other.spec != both[0].spec, "of as many elements, and another shape"


PAGE_BYTES = BLOCK_BYTES + 16


def with_page(at: int, page_bytes: int = PAGE_BYTES, digest: str = "0a" * 32, **changes: Any) -> pb.KvSpec:
    """The spec with opaque pages in the place of heads there."""
    spec = with_group(at, **{"num_kv_heads": 0, "head_dim": 0} | changes)
    spec.groups[at].page.CopyFrom(pb.PageLayout(page_bytes=page_bytes, digest=digest))
    return spec


def latents(**changes: Any) -> pb.KvSpec:
    """Pages of all tokens beside states: no layer has K and V that the service can read."""
    fields: dict[str, Any] = {"kind": RECURRENT, "layer_idx": [0, 1, 3, 4], "state_bytes": PAGE_BYTES, "checkpoint_blocks": 2}
    spec = with_page(0)
    del spec.groups[1:]
    spec.groups.append(pb.LayerGroup(**fields))
    spec.num_kv_heads = spec.head_dim = spec.kv_dtype = 0
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


async def test_blocks_beside_pages_are_aligned(api: Api) -> None:
    spec = latents(block_size=1, kv_dtype=pb.KV_DTYPE_FLOAT16, num_kv_heads=1, head_dim=5)
    spec.groups[0].page.page_bytes = 16
    del spec.groups[1:]
    spec.groups.append(pb.LayerGroup(kind=FULL, layer_idx=[0, 1, 3, 4]))
    assert (await api.open(spec=spec)).opened.pool.block_bytes == 80
    spec.groups[1].layer_idx.remove(4)
    spec.groups[0].layer_idx.append(4)
    spec.groups[0].layer_idx.sort()
    assert (await api.open(spec=spec)).opened.pool.block_bytes == 64  # and 60 of K and V


async def test_a_page_of_a_group_is_part_of_the_spec_and_moved_whole() -> None:
    async with serving(num_blocks=40, num_host_blocks=41, host_kv_dtype="int8") as api:
        session, rows = await api.open(spec=with_page(1), engine=False), rows_of(7)
        pool = session.opened.pool
        assert (pool.block_bytes, pool.host_block_bytes, pool.host_kv_dtype) == (PAGE_BYTES, PAGE_BYTES, 0)
        for layer_idx in (0, 1):
            del rows[layer_idx]
        await session.create(1, LENGTH)
        await session.call("ExtendSequence", sequence_id=1, num_tokens=LENGTH)
        await write(session, 1, rows)
        (served,) = api.server.session_manager.registry.pools
        pages = np.random.default_rng(7).integers(0, 256, (3, PAGE_BYTES), np.uint8)
        blocks_of(served)[(await tables(session, 1))[1][READABLE // SIZE :]] = pages
        await session.call("CommitSequence", sequence_id=1, num_tokens=LENGTH, first_token_idx=LENGTH)
        await session.call("SwapOutSequence", sequence_id=1)
        await session.call("ClearPrefixCache")
        blocks_of(served)[1:] = 0
        await session.call("SwapInSequence", sequence_id=1)
        np.testing.assert_array_equal(blocks_of(served)[(await tables(session, 1))[1][READABLE // SIZE :]], pages)
        found = await session.read_kv(1, first_token_idx=READABLE)
        assert [chunk.layer_idx for chunk in found] == [2, 3, 4, 5]
        assert [chunk.value for chunk in found] == [rows[layer][1, READABLE:].tobytes() for layer in (2, 3, 4, 5)]
        await refused(session.read_kv(1, first_token_idx=READABLE, layer_idx=[2, 0]), "OPAQUE_PAGES")
        chunk = pb.WriteKvRequest(**session.ids, sequence_id=1, first_token_idx=LENGTH, key=bytes(32), value=bytes(32))
        await refused(api.stub.WriteKv(iter([chunk])), "OPAQUE_PAGES")
        async with AsyncCacheClient(api.server.address) as client, await client.open_session(with_page(1)) as other:
            with pytest.raises(ValueError, match="layers 2 and 3 have"):
                await other.read_kv(1)
        await api.open(spec=with_page(1, digest="0b" * 32))
        await api.audit()


async def test_a_digest_of_a_group_tells_pools_apart(api: Api) -> None:
    for digest in ("0a" * 32, "0b" * 32, "0a" * 32):
        await api.open(spec=with_page(1, digest=digest))
    assert [pool.num_sessions for pool in (await api.stats()).pools] == [2, 1]


async def test_latents_beside_states_have_no_heads_in_the_spec(api: Api) -> None:
    session = await api.open(spec=latents(), engine=False)
    assert session.opened.pool.block_bytes == PAGE_BYTES
    await session.create(1, 6)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=6)
    for layers in ([], [2], [5, 0], [0]):
        expected = "OPAQUE_PAGES" if 2 in layers or 5 in layers else "NOT_IMPLEMENTED"
        assert (await refusal(session.read_kv(1, layer_idx=layers))).reason == expected
    for name in ("num_kv_heads", "head_dim", "kv_dtype"):
        await refused(api.open(spec=latents(**{name: 1})), "INVALID_FIELD", field=f"spec.{name}")


async def test_pages_come_back_with_memory_that_is_kept() -> None:
    with memory_folder() as folder:
        for num_pools in (0, 1):
            async with serving(memory_dir=folder, keep=True) as api:
                pools = (await api.stats()).pools
                assert [list(pool.pool.spec.groups) for pool in pools] == [list(latents().groups)] * num_pools
                session = await api.open(spec=latents(), engine=False)
                assert await session.create(1, 9) == 8 * num_pools
                await session.call("ExtendSequence", sequence_id=1, num_tokens=9)
                await session.call("CommitSequence", sequence_id=1, num_tokens=8, first_token_idx=9)
                await session.call("ReleaseSequence", sequence_id=1)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (with_page(0, page_bytes=0), "spec.groups.page.page_bytes"),
        (with_page(0, page_bytes=24), "spec.groups.page.page_bytes"),
        (with_page(0, page_bytes=(1 << 30) + 16), "spec.groups.page.page_bytes"),
        (with_page(2, digest="0A" * 32), "spec.groups.page.digest"),
        (with_page(2, num_kv_heads=1, head_dim=1), "spec.groups.num_kv_heads"),
        (with_page(2, kind=RECURRENT, window_tokens=0, state_bytes=8, checkpoint_blocks=1), "spec.groups.page"),
    ],
)
async def test_pages_that_no_group_can_have_are_refused(api: Api, spec: pb.KvSpec, field: str) -> None:
    await refused(api.open(spec=spec), "INVALID_FIELD", field=field)


async def test_pages_are_for_groups_that_are_not_stored_in_few_bits(api: Api) -> None:
    spec = latents()
    spec.layout = pb.KV_LAYOUT_SCALED
    await refused(api.open(spec=spec), "INVALID_FIELD", field="spec.num_kv_heads")


async def test_pages_of_a_group_are_of_each_rank(api: Api) -> None:
    spec = with_page(1)
    alone = (await api.open(spec=spec)).opened.pool
    spec.tensor_parallel_size = 2
    pool = (await api.open(spec=spec)).opened.pool
    assert (pool.block_bytes, pool.spec.tensor_parallel_size) == (alone.block_bytes, 2)


async def test_states_need_a_whole_number_of_tokens_more_than_a_page_holds(api: Api) -> None:
    """A page of fewer bytes than tokens, too."""
    spec = latents(block_size=1024)
    spec.groups[0].page.page_bytes, spec.groups[1].state_bytes = 16, 17
    await refused(api.open(spec=spec), "INVALID_FIELD", field="spec.groups.state_bytes", limit="1088")


@pytest.mark.parametrize(
    ("spec", "field", "limit"),
    [
        (with_group(0, head_dim=0), "spec.groups.head_dim", "1"),
        (with_group(0, num_kv_heads=0), "spec.groups.num_kv_heads", "1"),
        (with_group(0, num_kv_heads=1025), "spec.groups.num_kv_heads", "1024"),
        (with_group(2, num_kv_heads=-1), "spec.groups.num_kv_heads", "1"),
        (with_group(2, head_dim=4097), "spec.groups.head_dim", "4096"),
        (with_group(2, kind=RECURRENT, window_tokens=0, state_bytes=8, checkpoint_blocks=1), "spec.groups.num_kv_heads", "0"),
    ],
)
async def test_heads_that_no_group_can_have_are_refused(api: Api, spec: pb.KvSpec, field: str, limit: str) -> None:
    await refused(api.open(spec=spec), "INVALID_FIELD", field=field, limit=limit)


async def test_a_layout_with_tails_has_one_shape(api: Api) -> None:
    groups = [
        pb.LayerGroup(kind=FULL, layer_idx=range(2)),
        pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_TAIL, layer_idx=range(2), window_tokens=4, kv_dtype=pb.KV_DTYPE_FLOAT16),
    ]
    fields: dict[str, Any] = {"kv_dtype": pb.KV_DTYPE_INT8, "layout": pb.KV_LAYOUT_SCALED, "block_size": SIZE}
    spec = pb.KvSpec(model_id="tail", num_layers=2, num_kv_heads=1, head_dim=16, groups=groups, **fields)
    await api.open(spec=spec)
    spec.groups[1].head_dim = 8
    await refused(api.open(spec=spec), "INVALID_FIELD", field="spec.groups.head_dim", limit="0")
    spec.groups[1].head_dim = 0
    spec.groups[1].page.page_bytes = 16
    await refused(api.open(spec=spec), "INVALID_FIELD", field="spec.groups.page")


async def test_states_fit_the_largest_block(api: Api) -> None:
    states: dict[str, Any] = {"kind": RECURRENT, "window_tokens": 0, "checkpoint_blocks": 1}
    fits = with_group(1, **states, state_bytes=BLOCK_BYTES)
    assert (await api.open(spec=fits)).opened.pool.block_bytes == BLOCK_BYTES
    larger = with_group(1, **states, state_bytes=BLOCK_BYTES + 1)
    await refused(api.open(spec=larger), "INVALID_FIELD", field="spec.groups.state_bytes", limit=str(SIZE + 1))


async def test_a_service_of_before_is_asked_for_no_such_groups(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take all groups for such of the spec's heads."""
    monkeypatch.setattr(client_cache, "PROTOCOL_VERSION", 2)
    async with AsyncCacheClient(api.server.address) as client:
        error = await failure(client.open_session(SPEC))
        assert error.reason == "PROTOCOL_VERSION_UNSUPPORTED"
        spec = with_group(0, num_kv_heads=0, head_dim=0)
        for group in spec.groups:
            group.num_kv_heads = group.head_dim = 0
        await (await client.open_session(spec)).close()
        assert (await failure(client.open_session(latents()))).reason == "PROTOCOL_VERSION_UNSUPPORTED"
