"""Paged attention against its references, with NaN in all memory that belongs to no sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode, plan_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from tests.support.slices import scaled
from tests.unit.kernels.worlds import edge_lengths, make_world, random_queries

pytestmark = pytest.mark.usefixtures("kernel_path")
SCALE = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_decode(world, num_heads, window=None, soft_cap=None):
    q = random_queries(len(world.seq_lens), num_heads, world.layout.head_dim, world.layout.dtype)
    args = (q, world.layer, world.block_tables, world.seq_lens)
    longer = max(1.0, world.layout.head_dim / 256)
    scale = SCALE / longer**0.5  # of longer heads the scores are no larger, and of more numbers each
    expected = reference.paged_attention_decode(*args, scale=scale, window=window, soft_cap=soft_cap)
    found = paged_attention_decode(*args, scale=scale, window=window, soft_cap=soft_cap)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, expected, rtol=0, atol=longer * TOLERANCE[world.layout.dtype])


def check_prefill(world, num_queries, num_heads, window=None, soft_cap=None):
    locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = random_queries(int(locs[-1]), num_heads, world.layout.head_dim, world.layout.dtype)
    args = (q, world.layer, world.block_tables, world.seq_lens, locs)
    expected = reference.paged_attention_prefill(*args, scale=SCALE, window=window, soft_cap=soft_cap)
    found = paged_attention_prefill(*args, scale=SCALE, window=window, soft_cap=soft_cap)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[world.layout.dtype])


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 8])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_decode_at_edge_lengths(group, window):
    check_decode(make_world([1, *edge_lengths(4)]), 2 * group, window)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512])
def test_decode_at_head_dims(head_dim):
    check_decode(make_world([3, 9], head_dim=head_dim), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_both_in_each_dtype_and_block_size(dtype, block_size):
    lengths = edge_lengths(block_size)
    check_decode(make_world(lengths, block_size=block_size, dtype=dtype), 4)
    check_prefill(make_world(lengths, block_size=block_size, dtype=dtype), [-(-n // 2) for n in lengths], 4)


def test_decode_without_any_token_is_zero():
    check_decode(make_world([0, 0]), 4)


def test_one_plan_serves_every_layer_and_number_of_heads():
    """The next layer reads nothing of the layer before, though they share memory."""
    one, other = make_world([9, 4, 13], seed=1), make_world([9, 4, 13], seed=2)
    other.block_tables.copy_(one.block_tables)
    plan = plan_decode(one.block_tables, one.seq_lens, one.layer, torch.float32, None)
    for world, num_heads in ((one, 4), (other, 4), (one, 2), (one, 4)):
        world.layer.nan_to_num_()
        args = (random_queries(3, num_heads, 8), world.layer, one.block_tables, one.seq_lens)
        expected = reference.paged_attention_decode(*args, scale=SCALE)
        torch.testing.assert_close(paged_attention_decode(*args, scale=SCALE, plan=plan), expected, rtol=0, atol=2e-6)


def test_decode_of_an_empty_sequence_is_zero_and_reads_nothing():
    world = make_world([5, 0])
    q = random_queries(2, 4, 8)
    found = paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=SCALE)
    assert not found[1].any()
    assert found[0].any()


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("num_queries", [1, 2, 5])
def test_prefill_with_a_cached_prefix(num_queries, window):
    lengths = [n for n in edge_lengths(4) if n >= num_queries]
    check_prefill(make_world(lengths), [num_queries] * len(lengths), 4, window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_capped_scores(window, soft_cap):
    check_decode(make_world([1, *edge_lengths(4)]), 4, window, soft_cap)
    check_prefill(make_world(edge_lengths(4)), edge_lengths(4), 4, window, soft_cap)
    lengths = [length + 3 for length in edge_lengths(4)]
    check_prefill(make_world(lengths), [2] * len(lengths), 4, window, soft_cap)


@pytest.mark.parametrize("window", [None, 4])
def test_prefill_from_the_start(window):
    check_prefill(make_world(edge_lengths(4)), edge_lengths(4), 4, window)


@settings(max_examples=scaled(40), deadline=None)
@given(st.data())
def test_ragged_batches_in_any_blocks(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4), label="lengths")
    queries = [data.draw(st.integers(0, n), label="queries") for n in lengths]
    window = data.draw(st.none() | st.integers(1, 13), label="window")
    world = make_world(lengths, block_size=data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 9)))
    check_decode(world, 4, window)
    check_prefill(world, queries, 4, window)


def test_block_ids_do_not_matter():
    lengths = edge_lengths(4)
    one, other = make_world(lengths, seed=1), make_world(lengths, seed=1)
    permutation = torch.cat((torch.zeros(1, dtype=torch.long), torch.randperm(one.arena.shape[0] - 1) + 1))
    other.arena[permutation] = one.arena.clone()
    q = random_queries(len(lengths), 4, 8)
    first = paged_attention_decode(q, one.layer, one.block_tables, one.seq_lens, scale=SCALE)
    tables = permutation[one.block_tables.long()].int()
    assert torch.equal(first, paged_attention_decode(q, other.layer, tables, one.seq_lens, scale=SCALE))


@pytest.mark.parametrize("num_queries", [7, 8, 9, 16, 17])
@pytest.mark.parametrize("window", [None, 3, 12])
def test_prefill_in_several_calls(monkeypatch, num_queries, window):
    monkeypatch.setattr("kvkeeper.kernels.attention.gathered._MOST_QUERIES", 8)
    for context in (0, 1, 11):
        check_prefill(make_world([num_queries + context, 3]), [num_queries, 3], 4, window)
    check_prefill(make_world([num_queries + 5]), [num_queries], 4, window, soft_cap=0.5)


def test_chunks_give_what_one_prefill_gives():
    world = make_world([13])
    q = random_queries(13, 4, 8)

    def attend(first, last):
        locs = torch.tensor([0, last - first], dtype=torch.int32)
        lens = torch.tensor([last], dtype=torch.int32)
        return paged_attention_prefill(q[first:last], world.layer, world.block_tables, lens, locs, scale=SCALE)

    whole = attend(0, 13)
    for size in (1, 3, 4, 5):
        parts = torch.cat([attend(at, min(at + size, 13)) for at in range(0, 13, size)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


def test_a_dropped_token_shows():
    world = make_world([9])
    q = random_queries(1, 4, 8)
    right = paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=SCALE)
    wrong = paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens - 1, scale=SCALE)
    assert float((right - wrong).abs().max()) > 1e-3


def test_refusals_name_the_argument():
    world = make_world([9, 4])
    q = random_queries(2, 4, 8)
    decode = (q, world.layer, world.block_tables, world.seq_lens)
    with pytest.raises(KernelArgumentError, match="too short"):
        paged_attention_decode(q, world.layer, world.block_tables[:, :2], world.seq_lens, scale=SCALE)
    with pytest.raises(KernelArgumentError, match="outside"):
        paged_attention_decode(q, world.layer, world.block_tables + 100, world.seq_lens, scale=SCALE)
    with pytest.raises(KernelArgumentError, match="outside"):
        paged_attention_decode(q, world.layer, -1 - world.block_tables, world.seq_lens, scale=SCALE)
    with pytest.raises(KernelArgumentError, match="q "):
        paged_attention_decode(q[:, :3], *decode[1:], scale=SCALE)
    with pytest.raises(KernelArgumentError, match="q must be"):
        paged_attention_decode(q.half(), *decode[1:], scale=SCALE)
    with pytest.raises(KernelArgumentError, match="count the queries"):
        paged_attention_prefill(*decode, torch.tensor([0, 0, 5], dtype=torch.int32), scale=SCALE)
    with pytest.raises(KernelArgumentError, match="queries of 2"):
        paged_attention_prefill(*decode, torch.tensor([0, 1, 3], dtype=torch.int32), scale=SCALE)
    with pytest.raises(UnsupportedDeviceError):
        paged_attention_decode(q.to("meta"), *decode[1:], scale=SCALE)
