"""Attention over stored K and V against the references on the same numbers, on both paths of a CPU; all else is poison."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS
from tests.support.slices import scaled
from tests.unit.kernels.quantised.worlds import as_numbers, make_stored
from tests.unit.kernels.worlds import edge_lengths, random_queries

pytestmark = pytest.mark.usefixtures("kernel_path")
SCALE = 0.3
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [1, *edge_lengths(4)]


def tails_of(lengths, *, newest=2, block_size=4):
    """The newest entries of each sequence; of the last one, which is the longest, pages in the middle."""
    ends = [-(-length // block_size) for length in lengths]
    tails = [(max(end - newest, 0), end) for end in ends]
    return [*tails[:-1], (1, max(ends[-1] - 1, 1))]


def check(world, num_queries=None, group=2, window=None, soft_cap=None, sink_logits=None):
    heads, dtype = group * world.layout.num_kv_heads, world.layout.dtype
    plain, tables = as_numbers(world)
    options = {"scale": SCALE, "window": window, "soft_cap": soft_cap, "sink_logits": sink_logits}
    if num_queries is None:
        q = random_queries(len(world.seq_lens), heads, world.layout.head_dim, dtype)
        rows = plan_rows(world.block_tables, world.tail_tables, world.seq_lens, None, world.layer)
        found = quantised_decode(q, world.layer, rows, **options)
        expected = reference.paged_attention_decode(q, plain, tables, world.seq_lens, **options)
    else:
        locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        q = random_queries(int(locs[-1]), heads, world.layout.head_dim, dtype)
        rows = plan_rows(world.block_tables, world.tail_tables, world.seq_lens, locs, world.layer)
        found = quantised_prefill(q, world.layer, rows, **options)
        expected = reference.paged_attention_prefill(q, plain, tables, world.seq_lens, locs, **options)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_each_format_at_edge_lengths(name, has_tail, window):
    tails = tails_of(LENGTHS) if has_tail else None
    world = make_stored(LENGTHS, name, tails=tails)
    check(world, window=window)
    check(world, [-(-length // 2) for length in LENGTHS], window=window)


@pytest.mark.parametrize("head_dim", [4, 16, 64, 80])
@pytest.mark.parametrize("group", [1, 5])
def test_head_dims_and_groups(head_dim, group):
    for name in ("int8", "int4"):
        check(make_stored([3, 9, 140], name, tails=tails_of([3, 9, 140]), head_dim=head_dim), group=group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_of_the_computation(dtype):
    for name in ("int8", "int4", "fp8"):
        world = make_stored([3, 9], name, tails=tails_of([3, 9]), dtype=dtype)
        check(world)
        check(world, [2, 9])


def test_capped_scores_and_sequences_without_tokens():
    check(make_stored([0, 9, 0], "int8"), soft_cap=0.5)
    check(make_stored([7, 9], "int8"), [3, 9], soft_cap=0.5)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_key_without_a_value_for_each_head(name):
    """Far above all scores, among them, and far below; over several tiles, pages and windows."""
    world = make_stored([1, 9, 300, 0], name, tails=[*tails_of([1, 9, 300, 0])[:3], (0, 0)])
    logits = torch.tensor([40.0, 0.5, -1.0, -40.0])
    check(world, sink_logits=logits)
    check(world, window=7, soft_cap=0.5, sink_logits=logits)
    filled = make_stored([1, 9, 300], name, tails=tails_of([1, 9, 300]))
    check(filled, [1, 4, 80], sink_logits=logits)
    check(filled, [1, 0, 80], window=7, soft_cap=0.5, sink_logits=logits)
    with pytest.raises(KernelArgumentError, match="sink_logits"):
        check(world, sink_logits=logits[:3])


@settings(max_examples=scaled(25), deadline=None)
@given(st.data())
def test_ragged_rows_with_any_pages(data):
    size = data.draw(st.integers(1, 5), label="block_size")
    lengths = data.draw(st.lists(st.integers(1, 22), min_size=1, max_size=4), label="lengths")
    ends = [-(-length // size) for length in lengths]
    tails = [tuple(sorted((data.draw(st.integers(0, end)), data.draw(st.integers(0, end))))) for end in ends]
    world = make_stored(lengths, data.draw(st.sampled_from(["int8", "int4"])), tails=tails, block_size=size)
    window = data.draw(st.none() | st.integers(1, 23), label="window")
    check(world, window=window)
    check(world, [data.draw(st.integers(0, length)) for length in lengths], window=window)


def test_what_is_not_finite_stays_so():
    world = make_stored([9, 5], "int8")
    world.layer.scales[world.block_tables[0, 1], 0, 1, 0] = 0x7FC0
    rows = plan_rows(world.block_tables, None, world.seq_lens, None, world.layer)
    found = quantised_decode(random_queries(2, 2, 8), world.layer, rows, scale=SCALE)
    assert not found[0, 0].isfinite().any()
    assert found[0, 1].isfinite().all()
    assert found[1].isfinite().all()


def test_refusals_name_the_argument():
    world = make_stored([9, 4], "int8", tails=[(1, 3), (0, 1)])
    good = (world.block_tables, world.tail_tables, world.seq_lens, None, world.layer)
    rows = plan_rows(*good)
    for idx, value, problem in (
        (0, world.block_tables[:, :2], "tail_tables"),
        (0, world.block_tables + 100, "outside"),
        (1, world.tail_tables - 100, "outside"),
        (1, None, "tail_tables"),
        (2, world.seq_lens + 4, "too short"),
        (3, torch.tensor([0, 5, 4]), "must rise"),
        (3, torch.tensor([0, 0, 5]), "count the queries"),
    ):
        with pytest.raises(KernelArgumentError, match=problem):
            plan_rows(*good[:idx], value, *good[idx + 1 :])
    with pytest.raises(KernelArgumentError, match="q must be"):
        quantised_decode(random_queries(2, 4, 8).half(), world.layer, rows, scale=SCALE)
    with pytest.raises(KernelArgumentError, match="does not fit"):
        quantised_decode(random_queries(2, 3, 8), world.layer, rows, scale=SCALE)
