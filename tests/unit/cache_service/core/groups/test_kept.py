"""Several groups of layers in an index that is written down: what the next run believes of each group."""

import json

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.index_record import Slots
from kvkeeper.cache_service.core.index.kept_tree import make_tree
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kv_spec import KvSpec, LayerGroup, ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from kvkeeper.cache_service.memory.kept.description import Description
from kvkeeper.cache_service.memory.private_file import FileRefused
from tests.support.reference.read_spans import make_spans
from tests.support.worlds.core_pool import compute
from tests.support.worlds.kept_pool import KeptMemory, chains, write_all

A = SessionId("a")
TOKENS = np.arange(11, dtype=np.int32)
SPANS = make_spans(0, 0, 5)


def slots(*rows: tuple[int, int, int, int, int]) -> Slots:
    """Rows are (block, name, parent, token, group)."""
    blocks, names, parents, tokens, groups = np.array(rows, np.int64).reshape(-1, 5).T
    digests = np.zeros(len(rows), np.uint64)
    return Slots(blocks.astype(np.int32), names, parents, tokens.astype(np.int32)[:, None], digests, groups.astype(np.int8))


def computed(config: PoolConfig) -> tuple[KeptMemory, PoolManager]:
    """A pool that has cached the tokens."""
    memory, manager = KeptMemory(config), PoolManager(config)
    manager.restore(memory.kept, may_still_write=False)
    manager.sessions.open(A, Executor.CACHE)
    compute(manager, A, 1, TOKENS)
    manager.one_item.release(A, 1)
    return memory, manager


def start_again(manager: PoolManager) -> None:
    manager.sessions.open(A, Executor.CACHE)
    manager.creation.create(A, SequenceArgs(SequenceId(1), TOKENS))
    manager.one_item.extend(A, 1, 11, look_up=True)


def test_a_node_needs_a_row_of_each_group_that_reads_all() -> None:
    rows = slots((1, 1, -1, 70, 0), (2, 2, 1, 71, 0), (3, 1, -1, 70, 1), (4, 1, -1, 70, 2), (5, 2, 1, 71, 2))
    tree = make_tree(rows, 1, None, SPANS)
    assert (tree.blocks.tolist(), tree.group_blocks.tolist()) == ([1], [[3], [4]])
    hosts = slots((9, 2, 1, 71, 1))
    tree = make_tree(rows, 1, hosts, SPANS)
    assert (tree.blocks.tolist(), tree.group_blocks.tolist()) == ([1, 2], [[3, 0], [4, 5]])
    assert tree.group_hosts.tolist() == [[0, 9], [0, 0]]


@pytest.mark.parametrize(
    "row", [(4, 1, -1, 71, 2), (4, 1, 2, 70, 2), (4, 1, -1, 70, 3)], ids=["other tokens", "another parent", "no such group"]
)
def test_a_group_that_contradicts_the_first_makes_all_rows_worthless(row: tuple[int, int, int, int, int]) -> None:
    rows = slots((1, 1, -1, 70, 0), (3, 1, -1, 70, 1), row)
    assert len(make_tree(rows, 1, None, SPANS)) == 0


@pytest.mark.parametrize(("spans", "hit"), [(SPANS, 10), ((*make_spans(0, 0), state_span(2)), 8)], ids=["window", "states"])
def test_a_pool_comes_back_with_the_blocks_of_all_groups(spans: tuple[ReadSpan, ...], hit: int) -> None:
    config = PoolConfig(41, 2, group_spans=spans, watermark=0.0, num_host_blocks=21)
    memory, manager = computed(config)
    with manager.evictions.demoting(A):
        manager.evictions.evict_blocks(36)
    write_all(manager)
    again, result = memory.restored()
    assert again.queries.check_invariants() == []
    for group in range(len(spans)):
        assert chains(again, group=group) == chains(manager, group=group)
    stats = again.queries.stats()
    assert (result.num_blocks, result.num_host_blocks) == (stats.num_cached_blocks, stats.num_cached_host_blocks)
    assert result.num_host_blocks > 0
    start_again(again)
    assert again.queries.view(A, 1).num_hit_tokens == hit
    assert again.queries.check_invariants() == []


def test_a_description_tells_the_states_and_refuses_such_as_cannot_be() -> None:
    groups = (LayerGroup((0, 2), 0), LayerGroup((1,), 0, state_bytes=256, checkpoint_blocks=3))
    description = Description(1, 1, 2, 1 << 20, KvSpec(b"key", "model", 3, 1, 4, 4, 4, groups=groups))
    text = description.encode()
    assert Description.decode(text) == description
    changes = [("state_bytes", 0), ("state_bytes", 257), ("state_bytes", -1), ("checkpoint_blocks", 0), ("window", 4)]
    for name, value in [*changes, ("state_bytes", 1.5), ("checkpoint_blocks", 1 << 31)]:
        fields = json.loads(text)
        fields["spec"]["groups"][1][name] = value
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    fields["spec"]["groups"] = [{"layers": [0, 1, 2], "window": 0, "state_bytes": 8, "checkpoint_blocks": 1}]
    with pytest.raises(FileRefused):
        Description.decode(json.dumps(fields).encode())


def test_a_description_tells_the_groups_and_refuses_what_are_none() -> None:
    groups = (LayerGroup((0, 2), 0), LayerGroup((1,), 7))
    description = Description(1, 1, 2, 1 << 20, KvSpec(b"key", "model", 3, 1, 4, 4, 4, groups=groups))
    text = description.encode()
    assert Description.decode(text) == description
    for wrong in ([], [{"layers": [0, 1], "window": 0}], [{"layers": [0, 1, 2], "window": 3}], [{"layers": [0, 1, "2"]}], [1]):
        fields = json.loads(text)
        fields["spec"]["groups"] = wrong
        if wrong:
            with pytest.raises(FileRefused):
                Description.decode(json.dumps(fields).encode())


def test_a_description_tells_the_heads_of_groups_and_refuses_such_as_cannot_be() -> None:
    groups = (LayerGroup((0, 2), 0, num_kv_heads=2, head_dim=8), LayerGroup((1,), 7))
    spec = KvSpec(b"key", "model", 3, 1, 4, 4, 4, groups=groups, element_type="float32")
    description = Description(1, 1, 2, 2 * spec.block_bytes, spec)
    assert spec.block_bytes == 2 * 2 * 4 * 2 * 8 * 4
    text = description.encode()
    assert Description.decode(text) == description
    assert b"head_dim" not in json.dumps(json.loads(text)["spec"]["groups"][1]).encode(), "as before there were such heads"
    for name, value in (("num_kv_heads", 0), ("head_dim", 0), ("head_dim", -8), ("head_dim", "8"), ("num_kv_heads", 3)):
        fields = json.loads(text)
        fields["spec"]["groups"][0][name] = value
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    for changes in ({"is_tail": True, "tail_item_bytes": 2}, {"state_bytes": 8, "checkpoint_blocks": 1, "window": 0}):
        fields = json.loads(text)
        fields["spec"]["groups"][1] |= {"num_kv_heads": 1, "head_dim": 4} | changes
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    hosts = Description(1, 1, 2, 2 * spec.stored_bytes, spec.stored_as("int8"), pool=7)
    assert Description.decode(hosts.encode()) == hosts


def test_a_description_tells_the_pages_of_groups_and_refuses_such_as_cannot_be() -> None:
    groups = (LayerGroup((0, 2), 0, page_bytes=64), LayerGroup((1,), 0, state_bytes=64, checkpoint_blocks=1))
    description = Description(1, 1, 2, 128, KvSpec(b"key", "model", 3, 0, 0, 0, 4, groups=groups))
    text = description.encode()
    assert Description.decode(text) == description
    for name, value in (("page_bytes", 63), ("page_bytes", "64"), ("page_bytes", 1 << 31), ("page_bytes", 0), ("head_dim", 4)):
        fields = json.loads(text)
        fields["spec"]["groups"][0][name] = value
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    fields = json.loads(text)
    fields["spec"]["head_dim"] = 4
    with pytest.raises(FileRefused):
        Description.decode(json.dumps(fields).encode())


@pytest.mark.parametrize("is_demoted", [False, True])
def test_a_tail_comes_back_with_its_pool_and_stays_behind_where_blocks_went_to_the_host(is_demoted: bool) -> None:
    config = PoolConfig(41, 2, group_spans=make_spans(0, 5), has_tail=True, watermark=0.0, num_host_blocks=21)
    memory, manager = computed(config)
    if is_demoted:
        with manager.evictions.demoting(A):
            manager.evictions.evict_blocks(40)
    write_all(manager)
    again, result = memory.restored()
    assert again.queries.check_invariants() == []
    assert result.num_host_blocks == (5 if is_demoted else 0)
    start_again(again)
    view = again.queries.view(A, SequenceId(1))
    assert view.num_hit_tokens == 10
    # Token 10 reads from token 6 on; of the host's blocks no page came along.
    assert np.count_nonzero(view.group_tables[0][:5]) == (0 if is_demoted else 2)
    assert again.queries.check_invariants() == []


def test_a_description_tells_tails_and_what_a_host_tier_keeps_its_blocks_in() -> None:
    groups = (LayerGroup((0, 1, 2), 0), LayerGroup((0, 1), 7, True, 2, "float16"), LayerGroup((2,), 7, True, 2, "float16"))
    spec = KvSpec(b"key", "model", 3, 1, 4, 1, 4, groups=groups, scaled_bits=8, element_type="int8")
    text = Description(1, 1, 2, 1 << 20, spec).encode()
    assert Description.decode(text).spec == spec
    for place, name, wrong in ((0, "is_tail", True), (1, "tail_item_bytes", 0), (2, "layers", [1]), (0, "layers", [0, 1])):
        fields = json.loads(text)
        fields["spec"]["groups"][place][name] = wrong
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    plain = KvSpec(b"key", "model", 3, 1, 4, 4, 4, element_type="float32").stored_as("int8")
    hosts = Description(1, 1, 2, 2 * plain.stored_bytes, plain, pool=7)
    assert Description.decode(hosts.encode()) == hosts
    for changes in ({"host_kv_dtype": "int9"}, {"scaled_bits": 8}, {"host_kv_dtype": ""}):
        fields = json.loads(hosts.encode())
        fields["spec"] |= changes
        with pytest.raises(FileRefused):
            Description.decode(json.dumps(fields).encode())
    with pytest.raises(FileRefused):
        Description.decode(Description(1, 1, 2, 1 << 20, plain).encode())  # of a pool itself
