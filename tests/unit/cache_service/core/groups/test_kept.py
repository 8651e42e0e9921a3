"""Several groups of layers in an index that is written down: what the next run believes of each group."""

import json

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.kept_tree import tree_of
from kvkeeper.cache_service.core.index.slot_table import Slots
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kv_spec import KvSpec, LayerGroup, spans_of
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from kvkeeper.cache_service.memory.kept_file import Description, FileRefused
from tests.support.worlds.kept_pool import KeptMemory, chains, write_all

A = SessionId("a")
SPANS = spans_of(0, 0, 5)


def slots(*rows: tuple[int, int, int, int, int]) -> Slots:
    """Rows are (block, name, parent, token, group)."""
    blocks, names, parents, tokens, groups = np.array(rows, np.int64).reshape(-1, 5).T
    digests = np.zeros(len(rows), np.uint64)
    return Slots(blocks.astype(np.int32), names, parents, tokens.astype(np.int32)[:, None], digests, groups.astype(np.int8))


def test_a_node_needs_a_row_of_each_group_that_reads_all() -> None:
    rows = slots((1, 1, -1, 70, 0), (2, 2, 1, 71, 0), (3, 1, -1, 70, 1), (4, 1, -1, 70, 2), (5, 2, 1, 71, 2))
    tree = tree_of(rows, 1, None, SPANS)
    assert (tree.blocks.tolist(), tree.group_blocks.tolist()) == ([1], [[3], [4]])
    hosts = slots((9, 2, 1, 71, 1))
    tree = tree_of(rows, 1, hosts, SPANS)
    assert (tree.blocks.tolist(), tree.group_blocks.tolist()) == ([1, 2], [[3, 0], [4, 5]])
    assert tree.group_hosts.tolist() == [[0, 9], [0, 0]]


@pytest.mark.parametrize(
    "row", [(4, 1, -1, 71, 2), (4, 1, 2, 70, 2), (4, 1, -1, 70, 3)], ids=["other tokens", "another parent", "no such group"]
)
def test_a_group_that_contradicts_the_first_makes_all_rows_worthless(row: tuple[int, int, int, int, int]) -> None:
    rows = slots((1, 1, -1, 70, 0), (3, 1, -1, 70, 1), row)
    assert len(tree_of(rows, 1, None, SPANS)) == 0


def test_a_pool_comes_back_with_the_blocks_of_all_groups() -> None:
    config = PoolConfig(41, 2, group_spans=SPANS, watermark=0.0, num_host_blocks=21)
    memory, manager = KeptMemory(config), PoolManager(config)
    manager.restore(memory.kept, may_still_write=False)
    manager.open_session(A, Executor.CACHE)
    tokens = np.arange(11, dtype=np.int32)
    manager.create_sequence(A, SequenceArgs(SequenceId(1), tokens))
    manager.extend(A, 1, 11, look_up=True)
    manager.commit(A, 1, 11, 0, tokens)
    manager.release(A, 1)
    with manager.demoting(A):
        manager.evict_blocks(36)
    write_all(manager)
    again, result = memory.restored()
    assert again.check_invariants() == []
    for group in range(len(SPANS)):
        assert chains(again, group=group) == chains(manager, group=group)
    stats = again.stats()
    assert (result.num_blocks, result.num_host_blocks) == (stats.num_cached_blocks, stats.num_cached_host_blocks)
    assert result.num_host_blocks > 0
    again.open_session(A, Executor.CACHE)
    again.create_sequence(A, SequenceArgs(SequenceId(1), tokens))
    again.extend(A, 1, 11, look_up=True)
    assert again.view(A, 1).num_hit_tokens == 10
    assert again.check_invariants() == []


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
