"""A key without a value in every head's softmax, in all paths of a CPU, against the references."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.errors import KernelArgumentError
from tests.unit.kernels.worlds import edge_lengths, make_world, random_queries

pytestmark = pytest.mark.usefixtures("kernel_path")
SCALE = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
LOGITS = torch.tensor([0.5, -3.0, 4.0, 60.0])  # the last takes nearly all of its head's weight


def check_both(world, num_queries, logits=LOGITS, **options):
    dtype, lengths = world.layout.dtype, world.seq_lens
    args = (world.layer, world.block_tables, lengths)
    locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for name, count, more in (("decode", len(lengths), ()), ("prefill", int(locs[-1]), (locs,))):
        q = random_queries(count, 4, world.layout.head_dim, dtype)
        op = paged_attention_decode if name == "decode" else paged_attention_prefill
        expected = getattr(reference, f"paged_attention_{name}")(q, *args, *more, scale=SCALE, sink_logits=logits, **options)
        found = op(q, *args, *more, scale=SCALE, sink_logits=logits, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
        without = op(q, *args, *more, scale=SCALE, **options)
        assert float((found - without).abs().amax((0, 2)).min()) > 1e-3, "every head has felt it"


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_at_edge_lengths(window, soft_cap):
    lengths = [1, *edge_lengths(4), 300]
    check_both(make_world(lengths), [-(-n // 2) for n in lengths], window=window, soft_cap=soft_cap)


def test_another_dtype():
    check_both(make_world([3, 9, 12], dtype=torch.bfloat16), [3, 1, 7])


def test_the_sum_of_weights_is_less_than_one_by_its_share():
    world = make_world([6])
    world.layer[:, 1] = 1.0  # every value is 1: what comes out is the weights' sum
    q = torch.zeros(1, 4, 8)  # every score is 0
    found = paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=SCALE, sink_logits=LOGITS)
    torch.testing.assert_close(found[0, :, 0], 6 / (6 + LOGITS.exp()))


def test_an_empty_sequence_stays_zero():
    world = make_world([0, 5])
    q = random_queries(2, 4, 8)
    found = paged_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=SCALE, sink_logits=LOGITS)
    assert not found[0].any()
    assert found[1].any()


def test_refusals():
    world = make_world([5])
    args = (random_queries(1, 4, 8), world.layer, world.block_tables, world.seq_lens)
    for wrong in (LOGITS[:3], LOGITS.double(), LOGITS[None]):
        with pytest.raises(KernelArgumentError, match="sink_logits"):
            paged_attention_decode(*args, scale=SCALE, sink_logits=wrong)
