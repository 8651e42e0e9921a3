"""Random steps on pools with several groups of layers: every audit, every told table and every byte after each."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.sequences.group_windows import GroupWindows
from kvkeeper.cache_service.core.sequences.sequence_table import SequenceTable
from kvkeeper.cache_service.core.values.types import Int32Array
from tests.support.worlds.grouped import GroupedWorld

_SHAPES = [
    ((0, 9), 60, 4),
    ((0, 1, 30), 100, 4),
    ((0, 0, 5), 110, 4),
    ((0, 3, 17, 6), 220, 2),
    ((0, 16, 16, 16, 16, 16), 240, 4),
]


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
@pytest.mark.parametrize(("windows", "num_blocks", "block_size"), _SHAPES, ids=str)
def test_random_steps_read_what_was_written_for_them(
    windows: tuple[int, ...], num_blocks: int, block_size: int, policy: str
) -> None:
    worlds = [GroupedWorld(seed, windows, num_blocks, block_size, policy) for seed in range(3)]
    for world in worlds:
        for _ in range(250):
            world.run_step()
    assert sum(world.num_hits for world in worlds) > 20
    assert sum(world.num_forks for world in worlds) > 20
    assert sum(world.num_copies for world in worlds) > 5
    assert sum(world.num_cut for world in worlds) > 5
    assert sum(world.num_holes for world in worlds) > 0
    assert sum(world.num_handed for world in worlds) > 0
    assert sum(world.num_pinned for world in worlds) > 0


@pytest.mark.parametrize("windows", [(0, 9), (0, 13, 13, 13)], ids=str)
def test_random_steps_with_a_tail_that_may_lack_any_part(windows: tuple[int, ...]) -> None:
    worlds = [GroupedWorld(seed, windows, 30 * len(windows), 4, "lru", has_tail=True) for seed in range(4)]
    for world in worlds:
        for _ in range(250):
            world.run_step()
    assert sum(world.num_hits for world in worlds) > 20
    assert sum(world.num_cut for world in worlds) > 5
    assert sum(world.num_copies for world in worlds) > 5
    assert sum(world.num_lacking for world in worlds) > 20
    assert sum(world.num_unwritten for world in worlds) > 0
    assert sum(world.num_holes for world in worlds) > 0


def test_a_tail_with_a_gap_is_taken_behind_it_alone() -> None:
    index = PrefixIndex(64, 4, group_windows=(0, 9), has_tail=True)
    nodes = np.arange(1, 7, dtype=np.int32)
    index.group_blocks[0][nodes] = [11, 12, 13, 0, 15, 16]
    assert len(index.usable(nodes)) == 6
    assert index.group_hits(nodes).tolist() == [[0, 0, 0, 0, 15, 16]]
    assert index.group_hits(nodes[:4]).tolist() == [[0, 0, 0, 0]]
    assert index.group_hits(nodes[:3]).tolist() == [[0, 12, 13]]


@pytest.mark.parametrize("name", ["truncate", "add_fork"])
def test_a_cut_into_a_tail_that_forgets_its_holes_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The planted bug: holes count on behind the end of a sequence that was cut before them."""
    real = getattr(SequenceTable, name)

    def careless(self: SequenceTable, slot: int, *args: object, **others: object) -> object:
        ends = self.group_hole_ends[slot].copy()
        answer = real(self, slot, *args, **others)
        self.group_hole_ends[slot if answer is None else answer] = ends
        return answer

    monkeypatch.setattr(SequenceTable, name, careless)
    with pytest.raises(AssertionError):
        _run_until_wrong(has_tail=True)


def test_a_hit_that_reads_before_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a hit takes all that the first group has, whether or not the windows behind it are there."""

    def usable(self: PrefixIndex, nodes: Int32Array, is_filling: object = None) -> Int32Array:
        return nodes

    monkeypatch.setattr(PrefixIndex, "usable", usable)
    with pytest.raises(AssertionError):
        _run_until_wrong()


def test_a_window_that_drops_a_token_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupWindows.drop_outside

    def early(self: GroupWindows, owner: object, slots: object) -> None:
        seqs = self._sequences
        windows, seqs.group_windows = (
            seqs.group_windows,
            tuple(max(w - seqs.block_size, 1) if w else 0 for w in seqs.group_windows),
        )
        real(self, owner, slots)  # type: ignore[arg-type]
        seqs.group_windows = windows

    monkeypatch.setattr(GroupWindows, "drop_outside", early)
    with pytest.raises(AssertionError):
        _run_until_wrong()


def _run_until_wrong(*, has_tail: bool = False) -> None:
    for seed in range(5):
        world = GroupedWorld(seed, (0, 9), 60, 4, "lru", has_tail=has_tail)
        for _ in range(250):
            world.run_step()


def test_the_longest_usable_match_is_where_every_window_is_whole() -> None:
    """Against the plain definition, over random gaps."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        windows = (0, *generator.integers(0, 14, generator.integers(1, 4)).tolist())
        index, count = PrefixIndex(64, 4, group_windows=windows), int(generator.integers(0, 12))
        nodes = np.arange(1, count + 1, dtype=np.int32)
        for of_node in index.group_blocks:
            of_node[nodes] = generator.random(count) < 0.7
        expected = 0
        for length in range(count + 1):
            reads = [range(max(0, length * 4 - w + 1) if w else 0, length * 4) for w in windows[1:]]
            if all(of_node[nodes[at // 4]] for of_node, places in zip(index.group_blocks, reads, strict=True) for at in places):
                expected = length
        assert len(index.usable(nodes)) == expected
