"""Paged attention on the Triton path against its references, interpreted, with NaN in all memory of no sequence."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode, plan_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.gpu.decode_work import num_extra_items, plan_work
from kvkeeper.kernels.gpu.paged_attention_prefill import num_splits_for
from kvkeeper.kernels.scratch import Scratch
from tests.support.slices import todays
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import make_world, random_queries

pytestmark = pytest.mark.each_value
SCALE = 0.2
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}
FLOATS = [torch.float32, torch.float16]
TILE = 128  # tokens; items are cut at tiles


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """One with two multiprocessors; items of a single tile."""
    module = "kvkeeper.kernels.gpu.decode_work."
    monkeypatch.setattr(module + "num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(module + "FEWEST_ITEM_TOKENS", TILE)
    monkeypatch.setattr("kvkeeper.kernels.gpu.paged_attention_prefill.num_multiprocessors", lambda device: 2)


def spare(monkeypatch, num_items):
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.num_extra_items", lambda *shapes: num_items)


def pair_of_queries(world, num_tokens, num_heads, with_sink):
    both = random_queries(2 * num_tokens, num_heads, world.layout.head_dim, world.layout.dtype)
    return both[:num_tokens], both[num_tokens:] if with_sink else None


def columns(kept):
    sinks, windows = zip(*kept, strict=True)
    return torch.tensor(sinks, dtype=torch.int32), torch.tensor(windows, dtype=torch.int32)


def pretended(tensors):
    """The same tensors, also within tuples, claiming to be on CUDA."""
    return [None if t is None else tuple(on_cuda(*t)) if isinstance(t, tuple) else on_cuda(t)[0] for t in tensors]


def check_decode(world, num_heads, *, kept=None, scratch=None, **options):
    q, q_sink = pair_of_queries(world, len(world.seq_lens), num_heads, kept is not None)
    tensors = [q, world.layer, world.block_tables, world.seq_lens]
    extra = [None if kept is None else columns(kept), q_sink]
    expected = reference.paged_attention_decode(*tensors, scale=SCALE, retention=extra[0], q_sink=extra[1], **options)
    tensors, (retention, q_sink) = pretended(tensors), pretended(extra)
    plan = plan_decode(*tensors[2:], tensors[1], q.dtype, options.get("window"), scratch, retention)
    found = paged_attention_decode(*tensors, scale=SCALE, retention=retention, q_sink=q_sink, plan=plan, **options)
    found = found.as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[world.layout.dtype])
    return found


def check_prefill(world, num_queries, num_heads, *, kept=None, **options):
    locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, q_sink = pair_of_queries(world, int(locs[-1]), num_heads, kept is not None)
    tensors = [q, world.layer, world.block_tables, world.seq_lens, locs]
    extra = [None if kept is None else columns(kept), q_sink]
    expected = reference.paged_attention_prefill(*tensors, scale=SCALE, retention=extra[0], q_sink=extra[1], **options)
    tensors, (retention, q_sink) = pretended(tensors), pretended(extra)
    found = paged_attention_prefill(*tensors, scale=SCALE, retention=retention, q_sink=q_sink, **options)
    found = found.as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[world.layout.dtype])
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_decode_at_the_edges_of_blocks_tiles_and_splits(dtype, block_size):
    lengths = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257]
    check_decode(make_world(lengths, block_size=block_size, num_kv_heads=1, dtype=dtype), 2, window=None, soft_cap=None)


@pytest.mark.parametrize("group", [1, 2, 4, 8, 5, 17])
def test_decode_packs_the_heads_of_a_group(group):
    check_decode(make_world([5, 70], block_size=16), 2 * group)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_both_at_head_dims(head_dim):
    world = make_world([3, 67], block_size=32, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    check_decode(world, 2)
    check_prefill(world, [2, 5], 2)


@pytest.mark.parametrize("dtype", todays(FLOATS, 1))
def test_the_number_of_items_does_not_matter(monkeypatch, dtype):
    world = make_world([0, 1, 64, 193, 320], block_size=16, num_kv_heads=1, dtype=dtype)
    scratch, found = Scratch(), []
    for num_extra in (0, 1, 2, 3, 5, 40):
        scratch.take(1 << 16, torch.float32).fill_(float("nan"))
        spare(monkeypatch, num_extra)
        found.append(check_decode(world, 2, scratch=scratch))
        assert not found[-1][0].any()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=TOLERANCE[dtype] / 2)


def test_more_items_than_are_merged_at_once(monkeypatch):
    spare(monkeypatch, 25)
    check_decode(make_world([33, 20 * TILE + 5], block_size=64, num_kv_heads=1, dtype=torch.float16), 2)


def test_extra_items_fill_the_device_and_no_more():
    assert num_extra_items(1, 8, 1 << 20, 132) == 33
    assert num_extra_items(64, 8, 1 << 20, 132) == 33
    assert num_extra_items(1, 1, 1 << 20, 132) == 264
    assert num_extra_items(1, 8, 2 * TILE + 1, 132) == 3
    assert num_extra_items(256, 8, TILE, 132) == 0


def work_by_hand(num_tiles, num_extra):
    """The items that sequences of so many tiles get, and each one's first item and their number."""
    per_item = max(-(-sum(num_tiles) // num_extra), 1)
    items, runs = [], []
    for seq, tiles in enumerate(num_tiles):
        begins = range(0, max(tiles, 1), per_item)
        runs.append([len(items), len(begins)])
        items += [[seq, begin, min(begin + per_item, tiles), int(len(begins) > 1)] for begin in begins]
    return items, runs


def check_work_list(monkeypatch, num_tiles, num_extra):
    spare(monkeypatch, num_extra)
    seq_lens = torch.tensor([tiles * TILE - tiles % 3 for tiles in num_tiles], dtype=torch.int32)
    layer = torch.empty(1, 2, 16, 2, 64)
    work = plan_work(*pretended([torch.empty(len(num_tiles), 10, dtype=torch.int32), seq_lens, layer]), None, None, TILE)
    items, runs = work_by_hand(num_tiles, num_extra)
    assert len(work.items) == len(num_tiles) + num_extra >= len(items)
    assert work.items[: len(items)].tolist() == items
    assert (work.items[len(items) :, 0] == -1).all()
    assert work.runs.tolist() == runs


@pytest.mark.parametrize("num_tiles", [[1], [2048, *[4] * 63], [3, 0, 5, 0, 0, 1], list(range(40))])
@pytest.mark.parametrize("num_extra", [1, 2, 7, 33, 100])
def test_the_work_list_gives_every_tile_to_one_program(monkeypatch, num_tiles, num_extra):
    check_work_list(monkeypatch, num_tiles, num_extra)


def test_so_does_the_work_list_of_more_sequences_than_are_looked_at_once(monkeypatch):
    check_work_list(monkeypatch, [*[1] * 257, 9], 33)


def test_one_long_sequence_among_many_short_ones_fills_the_device(monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.num_multiprocessors", lambda device: 132)
    seq_lens = torch.tensor([131072] + [256] * 63, dtype=torch.int32)
    tensors = [torch.empty(64, 8192, dtype=torch.int32), seq_lens, torch.empty(1, 2, 16, 8, 128)]
    work = plan_work(*pretended(tensors), None, None, TILE)
    first, num_items = work.runs[0].tolist()
    assert (first, num_items) == (0, 30)
    assert num_items * 8 > 132, "programs of the long one, with its eight heads"
    assert (work.runs[1:, 1] == 1).all()
    longest = int((work.items[:, 2] - work.items[:, 1])[work.items[:, 0] >= 0].max())
    assert longest * TILE <= 131072 // 29


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (17, None), (64, 0.5), (65, None), (None, 30.0), (500, 0.5)])
def test_decode_with_a_window_and_capped_scores(window, soft_cap):
    lengths = [1, 16, 65, 128, 200]
    check_decode(make_world(lengths, block_size=16, num_kv_heads=1), 2, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize(("group", "block_size", "dtype"), [(1, 16, FLOATS[0]), (4, 64, FLOATS[1]), (3, 32, FLOATS[1])])
def test_prefill_from_the_start_and_with_a_cached_prefix(group, block_size, dtype):
    lengths, queries = [40, 1, 70, 64, 65, 129, 17, 130], [40, 1, 6, 0, 65, 1, 16, 66]
    check_prefill(make_world(lengths, block_size=block_size, num_kv_heads=1, dtype=dtype), queries, group)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (20, 0.5), (65, None), (None, 30.0), (500, None)])
def test_prefill_with_a_window_and_capped_scores(window, soft_cap):
    world = make_world([70, 3, 200], block_size=16, num_kv_heads=1)
    check_prefill(world, [70, 2, 50], 2, window=window, soft_cap=soft_cap)


def split_prefill(monkeypatch, num_splits):
    monkeypatch.setattr("kvkeeper.kernels.gpu.paged_attention_prefill.num_splits_for", lambda *shapes: num_splits)


@pytest.mark.parametrize("dtype", todays(FLOATS, 1))
def test_the_number_of_splits_of_a_prefill_does_not_matter(monkeypatch, dtype):
    world, found = make_world([270, 3, 65, 20 * TILE], block_size=16, num_kv_heads=1, dtype=dtype), []
    for num_splits in (1, 2, 3, 20):
        split_prefill(monkeypatch, num_splits)
        found.append(check_prefill(world, [17, 3, 1, 2], 2))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=TOLERANCE[dtype] / 2)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (65, 0.5), (200, None)])
def test_a_split_prefill_with_a_window(monkeypatch, window, soft_cap):
    split_prefill(monkeypatch, 3)
    world = make_world([170, 3, 300], block_size=16, num_kv_heads=1)
    check_prefill(world, [40, 2, 9], 2, window=window, soft_cap=soft_cap)


def test_a_split_prefill_with_sinks(monkeypatch):
    split_prefill(monkeypatch, 3)
    kept = [(4, 20), (0, 16), (16, 100), (0, 0), (70, 30)]
    check_prefill(make_world([150, 40, 181, 50, 200], block_size=16, num_kv_heads=1), [10, 3, 17, 2, 66], 2, kept=kept)


def test_few_queries_on_a_long_prefix_fill_the_device_and_no_more():
    assert num_splits_for(17, 2 * 8, 32768, 132) == 16
    assert num_splits_for(17, 2 * 8, 2048, 132) == 2
    assert num_splits_for(17, 2 * 8, 256, 132) == 1
    assert num_splits_for(512, 17 * 8, 32768, 132) == 1
    assert num_splits_for(8192, 8, 1 << 20, 132) == 1


def test_many_sequences_find_their_queries(monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.paged_attention_prefill._SEQS_AT_ONCE", 4)
    queries = [2, 0, 0, 65, 1, 3, 0, 30, 2, 0, 1]
    check_prefill(make_world([n + 3 for n in queries], block_size=16, num_kv_heads=1), queries, 2)


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sinks_and_windows_and_no_hole(block_size, soft_cap):
    kept = [(4, 20), (0, 16), (16, 1), (0, 0), (70, 30), (3, 300), (65, 64)]
    lengths, queries = [150, 40, 81, 50, 200, 90, 140], [10, 3, 17, 2, 5, 40, 66]
    for check, num_queries in ((check_decode, [1] * len(kept)), (check_prefill, queries)):
        world = make_world(lengths, block_size=block_size, num_kv_heads=1)
        for seq, ((sink, window), computed) in enumerate(zip(kept, num_queries, strict=True)):
            last_gone = (lengths[seq] - computed - window) // block_size if window else 0
            for index in range(-(-sink // block_size), last_gone):
                world.arena[world.block_tables[seq, index]] = float("nan")
                world.block_tables[seq, index] = 0
        args = [world] if check is check_decode else [world, num_queries]
        check(*args, 2, kept=kept, soft_cap=soft_cap)


def test_block_ids_do_not_matter():
    one, other = (make_world([70, 33], block_size=16, seed=1) for _ in range(2))
    permutation = torch.cat((torch.zeros(1, dtype=torch.long), torch.randperm(one.arena.shape[0] - 1) + 1))
    other.arena[permutation] = one.arena.clone()
    other.block_tables[:] = permutation[one.block_tables.long()].int()
    assert torch.equal(check_decode(one, 2), check_decode(other, 2))
    assert torch.equal(check_prefill(one, [9, 33], 2), check_prefill(other, [9, 33], 2))


def test_queries_may_be_a_slice_of_a_projection():
    world = make_world([20, 9], block_size=16)
    rows = torch.randn(2, 3, 4, 8)
    args = [world.layer, world.block_tables, world.seq_lens]
    for q in (rows[:, 1], rows[:, 1].transpose(1, 2).contiguous().transpose(1, 2)):
        found = paged_attention_decode(*on_cuda(q, *args), scale=SCALE)
        expected = reference.paged_attention_decode(q, *args, scale=SCALE)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=3e-6)
