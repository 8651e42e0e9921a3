"""The rows of a kept index: what they say, what they do not say any more, and the tree that they describe. Block size 1."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.index_record import IndexRecord, Slots, SlotTable
from kvkeeper.cache_service.core.index.kept_tree import KeptTree, make_tree
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.support.reference.naive_kept import Chain, NaiveRow
from tests.support.reference.naive_kept import believed as believed_by_reference
from tests.support.worlds.core_pool import int32
from tests.support.worlds.kept_pool import KeptMemory, twin_of

Row = tuple[int, int, int, int]  # block, name, parent, token


def slots(*rows: Row) -> Slots:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    blocks, tokens = columns[0].astype(np.int32), columns[3].astype(np.int32).reshape(-1, 1)
    return Slots(blocks, columns[1], columns[2], tokens, columns[1].astype(np.uint64) * np.uint64(3))


def table_of(*rows: Row, num_blocks: int = 8) -> tuple[SlotTable, KeptMemory]:
    memory = KeptMemory(PoolConfig(num_blocks, 1))
    table = SlotTable(memory.device)
    table.write(slots(*rows))
    return table, memory


def rows_of(found: Slots) -> list[Row]:
    columns = (found.blocks, found.names, found.parents, found.tokens[:, 0])
    return list(zip(*(column.tolist() for column in columns), strict=True))


ROWS: tuple[Row, ...] = ((5, 1, -1, 70), (2, 2, 1, 71), (7, 3, 1, 72))


def test_a_table_says_what_was_written() -> None:
    table, memory = table_of(*ROWS)
    assert rows_of(table.read()) == sorted(ROWS)
    assert rows_of(SlotTable(memory.device).read()) == sorted(ROWS), "to the next run, too"
    assert (table.num_written(), table.num_written(3, 6)) == (3, 1)
    assert rows_of(table.read(3, 6)) == [ROWS[0]]
    table.forget(int32([5, 2]))
    assert rows_of(table.read()) == [ROWS[2]]
    table.write(slots(*ROWS))
    table.forget_all_but(int32([2]))
    assert rows_of(table.read()) == [ROWS[1]]
    assert table.num_written() == 1


def test_numbers_of_all_sizes_come_back() -> None:
    rows = ((1, 2**62, -65_536, 2**31 - 1), (2, 1, 2**62, -(2**31)))
    assert rows_of(table_of(*rows)[0].read()) == list(rows)


def test_every_damaged_byte_is_noticed() -> None:
    _, memory = table_of(*ROWS)
    num_damaged = 0
    for array in (memory.rows, memory.checks):
        raw = array.view(np.uint8).reshape(len(array), -1)
        for block, *_ in ROWS:
            for place in range(raw.shape[1]):
                raw[block, place] ^= 1 << (place % 8)
                left = rows_of(SlotTable(memory.device).read())
                raw[block, place] ^= 1 << (place % 8)
                assert left == sorted(row for row in ROWS if row[0] != block)
                num_damaged += 1
    assert num_damaged == 3 * (28 + 8)


def test_a_row_that_was_being_stored_says_nothing() -> None:
    """Killed between any two stores: some words are new, some old, and the check is that of the old row or 0."""
    table, memory = table_of(*ROWS)
    old = twin_of(memory)
    table.write(slots((2, 9, 3, 99)))
    for num_stored in range(1, memory.rows.shape[1]):
        for check in (old.checks[2], 0):
            torn = twin_of(old)
            changed = np.flatnonzero(memory.rows[2] != old.rows[2])[:num_stored]
            torn.rows[2, changed] = memory.rows[2, changed]
            torn.checks[2] = check
            assert 2 not in SlotTable(torn.device).read().blocks


def test_a_row_elsewhere_or_of_other_memory_says_nothing() -> None:
    _, memory = table_of(*ROWS)
    memory.rows[3], memory.checks[3] = memory.rows[5], memory.checks[5]
    memory.rows[0], memory.checks[0] = memory.rows[5], memory.checks[5]
    assert rows_of(SlotTable(memory.device).read()) == sorted(ROWS)
    other = KeptMemory(memory.config, key=12)
    other.rows[:], other.checks[:] = memory.rows, memory.checks
    assert len(SlotTable(other.device).read()) == 0


def believed(*rows: Row, num_roots: int = 1) -> list[int]:
    """Blocks, parents before children."""
    tree = make_tree(slots(*rows), num_roots)
    check_tree(tree)
    return tree.blocks.tolist()


def check_tree(tree: KeptTree) -> None:
    assert [start for start, _ in tree.levels] == [0, *(end for _, end in tree.levels[:-1])][: len(tree.levels)]
    assert (tree.levels[-1][1] if tree.levels else 0) == len(tree.parents)
    for place, (parent, root) in enumerate(zip(tree.parents.tolist(), tree.roots.tolist(), strict=True)):
        assert parent < place + 1, "a parent comes before its children"
        assert root == (parent if parent < 0 else tree.roots[parent - 1])


def test_a_tree_has_what_reaches_the_root_of_a_known_tenant() -> None:
    assert believed() == []
    assert believed(*ROWS) == [5, 2, 7]
    assert believed(*reversed(ROWS)) == [5, 7, 2], "whatever the order of the rows"
    assert believed((1, 1, -1, 7), (2, 2, -2, 7), num_roots=2) == [1, 2]
    assert believed((1, 1, -1, 7), (2, 2, -2, 7), (3, 3, 2, 7)) == [1], "the second tenant is not known"


def test_rows_without_their_ancestors_are_left_out() -> None:
    chain = tuple((place, place, place - 1 or -1, 7) for place in range(1, 8))
    assert believed(*chain) == [1, 2, 3, 4, 5, 6, 7]
    for missing in range(1, 8):
        assert believed(*chain[: missing - 1], *chain[missing:]) == list(range(1, missing))


def test_rings_are_left_out() -> None:
    assert believed((1, 1, 1, 7), (2, 2, -1, 7)) == [2]
    assert believed((1, 1, 3, 7), (2, 2, 1, 7), (3, 3, 2, 7), (4, 4, 3, 7), (5, 5, -1, 7)) == [5]


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1, -1, 7), (2, 1, -1, 8)],  # one name, two nodes
        [(1, 1, -1, 7), (2, 2, -1, 7)],  # one content, two nodes
        [(1, 0, -1, 7), (2, 2, -1, 8)],  # no name
    ],
)
def test_rows_that_contradict_each_other_make_the_table_worthless(rows: list[Row]) -> None:
    assert believed(*rows) == []


def test_blocks_are_evicted_leaves_first_and_the_oldest_branch_before_younger_ones() -> None:
    rows = [(1, 1, -1, 7), (2, 2, 1, 7), (3, 3, -1, 8), (4, 4, 3, 8), (5, 5, 1, 9)]
    tree = make_tree(slots(*rows), 1)
    assert tree.blocks[tree.leaves_first()].tolist() == [2, 4, 3, 5, 1]


def kept_index(num_blocks: int = 8) -> tuple[PrefixIndex, KeptMemory]:
    memory, index = KeptMemory(PoolConfig(num_blocks, 1)), PrefixIndex(num_blocks, 1)
    index.add_tree(make_tree(SlotTable(memory.device).read(), 0), IndexRecord(memory.kept, index.held, index.key))
    return index, memory


def record_of(index: PrefixIndex) -> IndexRecord:
    assert index.record is not None
    return index.record


def test_what_was_forgotten_before_it_was_written_never_is() -> None:
    index, memory = kept_index()
    index.insert_run(index.root(""), int32([7, 8]), int32([1, 2]))
    index.forget_blocks(int32([2]))
    assert not memory.checks.any(), "written later, not at once"
    assert not record_of(index).write(10)
    assert np.flatnonzero(memory.checks).tolist() == [1]
    assert memory.scopes == [""]
    index.forget_blocks(int32([1]))
    assert not memory.checks.any(), "forgotten at once"
    assert not any(index.check())


def test_a_number_that_is_used_again_gets_another_name_and_finds_its_new_parent() -> None:
    index, memory = kept_index()
    root = index.root("")
    index.insert_run(root, int32([7]), int32([1]))
    index.insert_run(root, int32([8]), int32([2]))
    record_of(index).write(10)
    before = set(SlotTable(memory.device).read().names.tolist())
    index.insert_run(root, int32([9]), int32([3]))
    index.forget_blocks(int32([1, 2]))
    nodes = index.insert_run(root, int32([5, 6]), int32([4, 5])).tolist()
    assert nodes == [2, 1], "the child has the number that was noted first"
    while record_of(index).write(1):
        pass
    written = SlotTable(memory.device).read()
    assert not before.intersection(written.names.tolist())
    assert make_tree(written, 1).blocks.tolist() == [3, 4, 5]
    assert not any(index.check())


def test_a_child_finds_a_parent_that_was_away_when_both_were_to_be_written() -> None:
    """The parent lies in the host tier alone at that moment, and comes back to another block."""
    memory, index = KeptMemory(PoolConfig(8, 1)), PrefixIndex(8, 1, num_host_blocks=8)
    index.add_tree(make_tree(SlotTable(memory.device).read(), 0), IndexRecord(memory.kept, index.held, index.key))
    nodes = index.insert_run(index.root(""), int32([7, 8]), int32([1, 2]))
    index.add_hosts(nodes[:1], int32([5]))
    index.leave_device(int32([1]))
    record_of(index).write(10)
    assert np.flatnonzero(memory.checks).tolist() == [2]
    assert len(make_tree(SlotTable(memory.device).read(), 1).parents) == 0, "without its parent it is not believed"
    index.add_blocks(nodes[:1], int32([3]))
    record_of(index).write(10)
    assert make_tree(SlotTable(memory.device).read(), 1).blocks.tolist() == [3, 2]


def test_an_audit_finds_a_row_of_a_block_that_has_no_node() -> None:
    index, memory = kept_index()
    index.insert_run(index.root(""), int32([7, 8]), int32([1, 2]))
    record_of(index).write(10)
    kept = memory.checks[2]
    index.forget_blocks(int32([2]))
    assert not any(index.check())
    memory.checks[2] = kept
    assert [text for wrong in index.check() for text in wrong] == [
        "the kept index names a block that the index does not name, or under another node"
    ]


def test_an_audit_finds_such_a_row_of_the_host_tier() -> None:
    config = PoolConfig(8, 1, num_host_blocks=8)
    memory, index = KeptMemory(config), PrefixIndex(8, 1, num_host_blocks=8)
    index.add_tree(make_tree(SlotTable(memory.device).read(), 0), IndexRecord(memory.kept, index.held, index.key))
    nodes = index.insert_run(index.root(""), int32([7]), int32([1]))
    index.add_hosts(nodes, int32([5]))
    index.note_filled(int32([5]))
    while record_of(index).write(10):
        pass
    assert memory.hosts is not None
    assert not any(index.check())
    memory.hosts.checks[6], memory.hosts.rows[6] = memory.hosts.checks[5], memory.hosts.rows[5]
    assert any(index.check()), "the row of another block"


# Both tiers together


def chains_of(tree: KeptTree) -> dict[Chain, tuple[int, int]]:
    found: dict[Chain, tuple[int, int]] = {}
    names: list[Chain] = []
    for place, parent in enumerate(tree.parents.tolist()):
        root, above = (parent, ()) if parent < 0 else names[parent - 1]
        names.append((root, (*above, int(tree.tokens[place, 0]))))
        found[names[-1]] = int(tree.blocks[place]), int(tree.hosts[place])
    assert len(found) == len(names)
    return found


def test_a_chain_may_cross_the_tiers() -> None:
    device, hosts = slots((5, 1, -1, 70), (7, 3, 2, 72)), slots((4, 2, 1, 71), (6, 3, 2, 72))
    assert chains_of(make_tree(device, 1, hosts)) == {(-1, (70,)): (5, 0), (-1, (70, 71)): (0, 4), (-1, (70, 71, 72)): (7, 6)}
    assert chains_of(make_tree(device, 1)) == {(-1, (70,)): (5, 0)}, "without the host tier its parent is missing"
    assert chains_of(make_tree(slots(), 1, hosts)) == {}


@pytest.mark.parametrize("row", [(1, 1, -1, 71), (1, 1, -2, 70), (1, 9, -1, 70)])
def test_tiers_that_contradict_each_other_are_worthless(row: Row) -> None:
    """One name for other tokens, for another parent, and another name for the same."""
    assert chains_of(make_tree(slots((5, 1, -1, 70)), 2, slots(row))) == {}
    assert len(chains_of(make_tree(slots((5, 1, -1, 70)), 2, slots((1, 1, -1, 70))))) == 1


def test_whatever_the_rows_say_the_tree_is_that_of_the_reference_model() -> None:
    rng, num_found, num_worthless = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        nodes = [(name, int(rng.choice([-1, -2, -3, *range(1, name + 1)])), int(rng.integers(6))) for name in range(1, 9)]
        tiers: tuple[list[NaiveRow], list[NaiveRow]] = ([], [])
        for rows in tiers:
            for block, place in enumerate(rng.permutation(8)[: rng.integers(9)].tolist(), 1):
                name, parent, token = nodes[place]
                parent = parent if rng.random() < 0.995 else int(rng.integers(-3, 9))
                rows.append(NaiveRow(block, name if rng.random() < 0.995 else int(rng.integers(9)), parent, token))
        tree = make_tree(slots(*tiers[0]), 2, slots(*tiers[1]))
        check_tree(tree)
        wanted = believed_by_reference(tiers, 2)
        assert chains_of(tree) == wanted, tiers
        num_found, num_worthless = num_found + len(wanted), num_worthless + (not wanted)
    assert num_found > 2000 and num_worthless > 100


def kept_index_with_hosts() -> tuple[PrefixIndex, KeptMemory]:
    memory, index = KeptMemory(PoolConfig(8, 1, num_host_blocks=8)), PrefixIndex(8, 1, num_host_blocks=8)
    index.add_tree(make_tree(SlotTable(memory.device).read(), 0), IndexRecord(memory.kept, index.held, index.key))
    return index, memory


def written(memory: KeptMemory) -> tuple[list[int], list[int]]:
    assert memory.hosts is not None
    return np.flatnonzero(memory.device.checks).tolist(), np.flatnonzero(memory.hosts.checks).tolist()


def test_a_host_block_is_written_down_once_it_is_filled_and_forgotten_with_its_node() -> None:
    index, memory = kept_index_with_hosts()
    nodes = index.insert_run(index.root(""), int32([7, 8]), int32([1, 2]))
    index.add_hosts(nodes, int32([5, 6]))
    index.leave_device(int32([1, 2]))
    record_of(index).write(10)
    assert written(memory) == ([], []), "the copies are on their way"
    index.note_filled(int32([5, 6]))
    while record_of(index).write(1):
        pass
    assert written(memory) == ([], [5, 6])
    index.forget_hosts(int32([6]))
    assert written(memory) == ([], [5])
    index.forget_nodes(nodes[:1])
    assert written(memory) == ([], [])
    assert not any(index.check())


def test_a_host_block_that_was_filled_for_another_node_meanwhile_is_not_written_down() -> None:
    index, memory = kept_index_with_hosts()
    nodes = index.insert_run(index.root(""), int32([7, 8]), int32([1, 2]))
    index.add_hosts(nodes[:1], int32([5]))
    index.note_filled(int32([5]))
    index.forget_hosts(int32([5]))
    index.add_hosts(nodes[1:], int32([5]))  # it is being filled again
    while record_of(index).write(10):
        pass
    assert written(memory) == ([1, 2], [])


@pytest.mark.parametrize("is_back", [False, True])
def test_a_digest_counts_only_where_the_block_kept_its_node_meanwhile(is_back: bool) -> None:
    index, memory = kept_index()
    root = index.root("")
    index.insert_run(root, int32([7]), int32([1]))
    index.insert_run(root, int32([8]), int32([2]))
    taken = record_of(index).take(10)
    index.forget_blocks(int32([1]))
    if is_back:
        index.insert_run(root, int32([9]), int32([1]))
    record_of(index).write_taken(taken, np.array([11, 12], np.uint64))
    found = SlotTable(memory.device).read()
    assert (found.blocks.tolist(), found.digests.tolist()) == ([2], [12])
    while record_of(index).write(10, lambda tier, blocks: np.full(len(blocks), 13, np.uint64)):
        pass
    found = SlotTable(memory.device).read()
    assert found.digests.tolist() == ([13, 12] if is_back else [12]), "that of its new content"
    assert not any(index.check())
