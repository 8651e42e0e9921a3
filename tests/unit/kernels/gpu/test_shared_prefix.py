"""Decode of sequences that share blocks, on the Triton path, interpreted: what is found to be shared, and the output."""

import numpy as np
import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode, plan_decode
from kvkeeper.kernels.gpu import shared_prefix
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.gpu.test_stored import pretended
from tests.unit.kernels.quantised.worlds import as_numbers, make_stored
from tests.unit.kernels.worlds import make_world, random_queries

pytestmark = pytest.mark.each_value
BLOCK, TILE = 16, 64
SCALE = 0.2


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """Two multiprocessors; items of a tile, rows of three or four members, and any number of sequences."""
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.num_multiprocessors", lambda device: 2)
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.FEWEST_ITEM_TOKENS", TILE)
    for module in ("decode_work", "paged_attention_decode"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.tile_tokens", lambda head_dim: TILE)
    monkeypatch.setattr(shared_prefix, "FEWEST_SHARED_TOKENS", TILE)
    monkeypatch.setattr(shared_prefix, "FEWEST_MEMBERS", 2)
    monkeypatch.setattr(shared_prefix, "_FEWEST_SEQS", 2)
    monkeypatch.setattr(shared_prefix, "_SEQS_AT_ONCE", 4)
    monkeypatch.setattr(shared_prefix, "_BLOCKS_AT_ONCE", 4)
    for module in ("shared_prefix", "paged_attention_decode", "quantised_decode", "quantised_shared"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.MEMBERS", 4)


def make_shared_world(lengths, groups, **options):
    """Sequences of these lengths; each group is (sequences, blocks that they have in common)."""
    world = make_world(lengths, block_size=BLOCK, **options)
    for seqs, num_blocks in groups:
        world.block_tables[seqs[1:], :num_blocks] = world.block_tables[seqs[0], :num_blocks]
    return world


def plan(world):
    tensors = on_cuda(world.block_tables, world.seq_lens, world.layer)
    return plan_decode(*tensors, world.layout.dtype, None).work


def check(world, num_heads, soft_cap=None, sink_logits=None):
    """Decode is right, and the plan's tiles are each sequence's, once each. The work list."""
    q = random_queries(len(world.seq_lens), num_heads, world.layout.head_dim, world.layout.dtype)
    tensors = [q, world.layer, world.block_tables, world.seq_lens]
    expected = reference.paged_attention_decode(*tensors, scale=SCALE, soft_cap=soft_cap, sink_logits=sink_logits)
    found = paged_attention_decode(*on_cuda(*tensors), scale=SCALE, soft_cap=soft_cap, sink_logits=sink_logits).as_subclass(
        torch.Tensor
    )
    tolerance = 4e-3 if world.layout.dtype is torch.float16 else 3e-6
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    work = plan(world)
    assert tiles_of(work) == once_each(world)
    return work


def once_each(world):
    """As tiles_of."""
    return {(seq, tile): 1 for seq, length in enumerate(world.seq_lens.tolist()) for tile in range(-(-length // TILE))}


def check_stored(name, lengths, groups, tails=None, *, num_heads=2, dtype=torch.float32, **options):
    """The same of K and V in few bits. tails: entries [first, end) of each sequence with pages."""
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 32}
    world = make_stored(lengths, name, tails=tails, dtype=dtype, **sizes)
    for seqs, num_blocks in groups:
        world.block_tables[seqs[1:], :num_blocks] = world.block_tables[seqs[0], :num_blocks]
    plain, tables = as_numbers(world)
    q = random_queries(len(lengths), num_heads, 32, dtype)
    expected = reference.paged_attention_decode(q, plain, tables, world.seq_lens, scale=SCALE, **options)
    pages = None if world.tail_tables is None else on_cuda(world.tail_tables)[0]
    rows = plan_rows(*on_cuda(world.block_tables), pages, *on_cuda(world.seq_lens), None, pretended(world.layer))
    found = quantised_decode(*on_cuda(q), pretended(world.layer), rows, scale=SCALE, **options).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-3 if dtype is torch.float16 else 5e-6)
    assert tiles_of(rows.works[None]) == once_each(world)
    return rows.works[None]


def tiles_of(work):
    """How often each (sequence, tile) is taken."""
    taken = {}
    own = [(seq, begin, end) for seq, begin, end, _ in work.items.tolist() if seq >= 0]
    if work.shared is not None:
        for place, size, begin, end in work.shared.items.tolist():
            own += [(seq, begin, end) for seq in work.shared.order[place : place + size].tolist()]
    for seq, begin, end in own:
        for tile in range(begin, end):
            taken[seq, tile] = taken.get((seq, tile), 0) + 1
    return taken


def shared_tiles(work):
    return work.shared.members[:, 0].tolist()


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.float32), (5, torch.float16), (17, torch.float16)])
def test_two_groups_strangers_and_padding(group, dtype):
    lengths = [140, 0, 200, 90, 130, 150, 64, 131, 0, 129]
    groups = [([0, 4, 7], 8), ([2, 5, 9], 5)]  # blocks; five of them are one tile and a rest
    work = check(make_shared_world(lengths, groups, num_kv_heads=1, dtype=dtype), group)
    assert shared_tiles(work) == [2, 0, 1, 0, 2, 1, 0, 2, 0, 1]


def test_more_members_than_a_row_has():
    lengths = [80 + 3 * seq for seq in range(11)]
    world = make_shared_world(lengths, [(list(range(11)), 4)], num_kv_heads=1)
    work = check(world, 2, soft_cap=0.7, sink_logits=torch.tensor([0.5, 2.0]))  # a logit counts once for each sequence
    assert shared_tiles(work) == [1] * 11
    assert sorted(size for _, size, _, _ in work.shared.items.tolist() if size) == [3, 4, 4]


def test_a_long_prefix_is_cut_into_items():
    work = check(make_shared_world([8 * TILE + 1, 8 * TILE + 70, 8 * TILE + 30], [([0, 1, 2], 32)], num_kv_heads=1), 2)
    parts = (work.shared.order, work.shared.members, work.shared.items, work.shared.runs)
    assert all(part.data_ptr() % 16 == 0 for part in parts), "else kernels are compiled anew"
    assert shared_tiles(work) == [8, 8, 8]
    spans = [(begin, end) for _, size, begin, end in work.shared.items.tolist() if size]
    assert len(spans) > 2
    assert {end - begin for begin, end in spans[:-1]} == {-(-8 // (len(work.shared.items) - 1))}


def test_the_last_full_block_may_be_written_by_nobody_and_is_shared():
    """A sequence whose query is the first token of a block shares all blocks before it; one that ends a block does not."""
    work = check(make_shared_world([TILE + 1, TILE + 1, 2 * TILE], [([0, 1, 2], 4)], num_kv_heads=1), 2)
    assert shared_tiles(work) == [1, 1, 1]
    world = make_shared_world([2 * TILE, TILE, TILE], [([0, 1, 2], 4)], num_kv_heads=1)
    assert shared_tiles(plan(world)) == [0, 0, 0]


def test_a_member_that_leaves_the_others_early_makes_the_prefix_shorter():
    world = make_shared_world([300, 310, 320], [([0, 1, 2], 4), ([0, 2], 16)], num_kv_heads=1)
    assert shared_tiles(check(world, 2)) == [1, 1, 1]


def test_what_is_not_worth_it_or_not_the_same_is_not_shared(monkeypatch):
    lengths = [200, 200, 200, 200]
    assert shared_tiles(check(make_shared_world(lengths, [([0, 1], 3)], num_kv_heads=1), 2)) == [0] * 4
    swapped = make_shared_world(lengths, [([0, 1], 8)], num_kv_heads=1)
    swapped.block_tables[1, 1] = swapped.block_tables[2, 1]  # the same block at the key, another one before it
    assert shared_tiles(check(swapped, 2)) == [0] * 4
    monkeypatch.setattr(shared_prefix, "FEWEST_MEMBERS", 3)
    assert shared_tiles(plan(make_shared_world(lengths, [([0, 1], 8)], num_kv_heads=1))) == [0] * 4
    monkeypatch.setattr(shared_prefix, "_FEWEST_SEQS", 5)
    assert plan(make_shared_world(lengths, [([0, 1], 8)], num_kv_heads=1)).shared is None


TAILS = [(8, 9), (0, 0), (5, 13), (0, 6), (8, 9), (6, 10), (0, 0), (8, 9), (0, 0), (6, 9)]


@pytest.mark.parametrize(
    ("name", "num_heads", "dtype", "tails"),
    [("int8", 1, torch.float32, TAILS), ("int4", 5, torch.float16, TAILS), ("fp8", 17, torch.float16, None)],
)
def test_stored_keys_that_two_groups_share_are_read_once(name, num_heads, dtype, tails):
    lengths = [140, 0, 200, 90, 130, 150, 64, 131, 0, 129]
    work = check_stored(name, lengths, [([0, 4, 7], 8), ([2, 5, 9], 5)], tails, num_heads=num_heads, dtype=dtype)
    assert shared_tiles(work) == [2, 0, 1, 0, 2, 1, 0, 2, 0, 1]


@pytest.mark.parametrize("owner", [0, 2])
@pytest.mark.parametrize(("first_page", "num_shared"), [(8, 2), (7, 1), (3, 0), (0, 0)])
def test_what_a_sequence_reads_from_its_tail_is_not_shared(owner, first_page, num_shared):
    """The one that the others are compared with, or another one."""
    tails = [(10, 11)] * 3
    tails[owner] = (first_page, 11)
    work = check_stored("int8", [165, 170, 163], [([0, 1, 2], 10)], tails)
    assert shared_tiles(work) == [num_shared] * 3


def test_a_key_without_a_value_counts_once_where_stored_keys_are_shared():
    lengths = [80 + 3 * seq for seq in range(11)]
    options = {"soft_cap": 0.7, "sink_logits": torch.tensor([0.5, 2.0])}
    check_stored("fp8", [5 * TILE] * 3, [([0, 1, 2], 18)], **options)  # of several items
    work = check_stored("int8", lengths, [(list(range(11)), 4)], **options)
    assert shared_tiles(work) == [1] * 11
    assert sorted(size for _, size, _, _ in work.shared.items.tolist() if size) == [3, 4, 4]


def test_stored_keys_within_a_window_are_not_shared():
    world = make_stored([200] * 3, "int8", block_size=BLOCK, num_kv_heads=1, head_dim=32)
    rows = plan_rows(*on_cuda(world.block_tables), None, *on_cuda(world.seq_lens), None, pretended(world.layer))
    quantised_decode(*on_cuda(random_queries(3, 2, 32)), pretended(world.layer), rows, scale=SCALE, window=90)
    assert rows.works[90].shared is None


def test_plans_of_random_tables_take_each_tile_once():
    rng = np.random.default_rng(3)
    for _ in range(2):
        lengths = rng.integers(0, 400, 9).tolist()
        seqs = rng.permutation(9)
        groups = [(sorted(seqs[:4].tolist()), int(rng.integers(1, 20))), (sorted(seqs[4:7].tolist()), int(rng.integers(1, 20)))]
        world = make_world(lengths, block_size=BLOCK, num_kv_heads=1, head_dim=2, num_layers=1)
        for members, num_blocks in groups:
            world.block_tables[members[1:], :num_blocks] = world.block_tables[members[0], :num_blocks]
        expected = {(seq, tile): 1 for seq, length in enumerate(lengths) for tile in range(-(-length // TILE))}
        assert tiles_of(plan(world)) == expected
