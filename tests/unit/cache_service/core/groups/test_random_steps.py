"""Random steps on pools with several groups of layers: every audit, every told table and every byte after each."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.node_blocks import NodeBlocks
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.sequences.sequence_table import SequenceTable
from kvkeeper.cache_service.core.sequences.spans import SpanDrops
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan
from kvkeeper.cache_service.core.values.types import Int32Array, Int64Array
from tests.support.reference.read_spans import first_read, make_spans
from tests.support.slices import todays
from tests.support.worlds.grouped import GroupedWorld

_CHUNK_SIZES = 6, 12
_CHUNKS = tuple(ReadSpan(size, is_chunk=True) for size in _CHUNK_SIZES)  # with edges inside of blocks of 4, and between them
_SHAPES = [
    (make_spans(0, 9), 60, 4),
    (make_spans(0, 1, 30), 100, 4),
    (make_spans(0, 0, 5), 110, 4),
    (make_spans(0, 3, 17, 6), 220, 2),
    (make_spans(0, 16, 16, 16, 16, 16), 240, 4),
    ((*make_spans(0, 7), *_CHUNKS), 160, 4),
    ((*make_spans(0), *_CHUNKS), 110, 4),
]


_CASES = [(shape, policy) for shape in range(len(_SHAPES)) for policy in ("adaptive", "lru")]


@pytest.mark.parametrize(("shape", "policy"), todays(_CASES, 2))
def test_random_steps_read_what_was_written_for_them(shape: int, policy: str) -> None:
    spans, num_blocks, block_size = _SHAPES[shape]
    worlds = [GroupedWorld(seed, spans, num_blocks, block_size, policy) for seed in range(3)]
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


@pytest.mark.parametrize("windows", todays([(0, 9), (0, 13, 13, 13)], 1), ids=str)
def test_random_steps_with_a_tail_that_may_lack_any_part(windows: tuple[int, ...]) -> None:
    worlds = [GroupedWorld(seed, make_spans(*windows), 30 * len(windows), 4, "lru", has_tail=True) for seed in range(4)]
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
    index = PrefixIndex(64, 4, group_spans=make_spans(0, 9), has_tail=True)
    nodes = np.arange(1, 7, dtype=np.int32)
    index.held.group_blocks[0][nodes] = [11, 12, 13, 0, 15, 16]
    assert len(index.held.usable(nodes)) == 6
    assert index.held.group_hits(nodes).tolist() == [[0, 0, 0, 0, 15, 16]]
    assert index.held.group_hits(nodes[:4]).tolist() == [[0, 0, 0, 0]]
    assert index.held.group_hits(nodes[:3]).tolist() == [[0, 12, 13]]


@pytest.mark.parametrize("name", ["truncate", "add_fork"])
def test_a_cut_into_a_tail_that_forgets_its_holes_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The planted bug: holes count on behind the end of a sequence that was cut before them."""
    real = getattr(SequenceTable, name)

    def careless(self: SequenceTable, slot: int, *args: object, **others: object) -> object:
        ends = self.tables.hole_ends[slot].copy()
        answer = real(self, slot, *args, **others)
        self.tables.hole_ends[slot if answer is None else answer] = ends
        return answer

    monkeypatch.setattr(SequenceTable, name, careless)
    with pytest.raises(AssertionError):
        _run_until_wrong(has_tail=True)


def test_a_hit_that_reads_before_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a hit takes all that the first group has, whether or not the windows behind it are there."""

    def usable(self: NodeBlocks, nodes: Int32Array, is_filling: object = None) -> Int32Array:
        return nodes

    monkeypatch.setattr(NodeBlocks, "usable", usable)
    with pytest.raises(AssertionError):
        _run_until_wrong()


def test_a_window_that_drops_a_token_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SpanDrops.drop_outside

    def early(self: SpanDrops, owner: object, slots: object) -> None:
        seqs = self._sequences
        spans = seqs.group_spans
        seqs.group_spans = make_spans(*(max(span.num_tokens - seqs.block_size, 1) if span.num_tokens else 0 for span in spans))
        real(self, owner, slots)  # type: ignore[arg-type]
        seqs.group_spans = spans

    monkeypatch.setattr(SpanDrops, "drop_outside", early)
    with pytest.raises(AssertionError):
        _run_until_wrong()


@pytest.mark.parametrize("size", _CHUNK_SIZES)
def test_chunks_taken_for_windows_are_found(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The planted bug: what a chunk reads is given back as if it were a window of half the size."""

    def first_read_of_window(span: ReadSpan, positions: Int64Array) -> Int64Array:
        return np.maximum(positions - span.num_tokens // 2 + 1, 0) if span.num_tokens else np.zeros_like(positions)

    monkeypatch.setattr(ReadSpan, "firsts", first_read_of_window)
    with pytest.raises(AssertionError):
        _run_until_wrong((*make_spans(0), ReadSpan(size, is_chunk=True)))


def test_a_hit_that_ends_in_a_chunk_needs_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a hit needs its last block alone of a group with chunks."""
    monkeypatch.setattr(NodeBlocks, "first_entry", lambda self, num_entries, group: num_entries - 1 if group else 0)
    with pytest.raises(AssertionError):
        _run_until_wrong((*make_spans(0), ReadSpan(12, is_chunk=True)))


def _run_until_wrong(spans: tuple[ReadSpan, ...] = make_spans(0, 9), *, has_tail: bool = False) -> None:
    for seed in range(5):
        world = GroupedWorld(seed, spans, 60, 4, "lru", has_tail=has_tail)
        for _ in range(250):
            world.run_step()


def test_the_longest_usable_match_is_where_every_window_is_whole() -> None:
    """Against the plain definition, over random gaps."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        sizes = generator.integers(0, 14, generator.integers(1, 4)).tolist()
        spans = (*make_spans(0), *(ReadSpan(size, is_chunk=bool(size and generator.integers(2))) for size in sizes))
        index, count = PrefixIndex(64, 4, group_spans=spans), int(generator.integers(0, 12))
        nodes = np.arange(1, count + 1, dtype=np.int32)
        for of_node in index.held.group_blocks:
            of_node[nodes] = generator.random(count) < 0.7
        expected = 0
        for length in range(count + 1):
            reads = [range(first_read(span, length * 4), length * 4) for span in spans[1:]]
            if all(
                of_node[nodes[at // 4]] for of_node, places in zip(index.held.group_blocks, reads, strict=True) for at in places
            ):
                expected = length
        assert len(index.held.usable(nodes)) == expected
