"""A key without a value in every head's softmax, on the Triton path, interpreted: taken once, however keys are split."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.gpu.test_attention import SCALE, columns, pair_of_queries, pretended, small_device, spare, split_prefill
from tests.unit.kernels.worlds import make_world

pytestmark = pytest.mark.each_value
__all__ = ["small_device"]  # a fixture of all tests here
LOGITS = torch.tensor([0.5, -3.0, 4.0, 60.0])
TOLERANCE = 3e-6


def check(world, num_queries, *, kept=None, **options):
    tables = [world.layer, world.block_tables, world.seq_lens]
    locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for op, oracle, count, more in (
        (paged_attention_decode, reference.paged_attention_decode, len(num_queries), []),
        (paged_attention_prefill, reference.paged_attention_prefill, int(locs[-1]), [locs]),
    ):
        q, q_sink = pair_of_queries(world, count, 4, kept is not None)
        tensors, extra = [q, *tables, *more], [None if kept is None else columns(kept), q_sink]
        expected = oracle(*tensors, scale=SCALE, retention=extra[0], q_sink=extra[1], sink_logits=LOGITS, **options)
        retention, q_sink = pretended(extra)
        logits = on_cuda(LOGITS)[0]
        tensors = pretended(tensors)
        found = op(*tensors, scale=SCALE, retention=retention, q_sink=q_sink, sink_logits=logits, **options)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (17, None), (65, 0.5)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_it_is_taken_once(monkeypatch, num_parts, window, soft_cap):
    spare(monkeypatch, num_parts - 1)
    split_prefill(monkeypatch, num_parts)
    world = make_world([1, 16, 33, 140], block_size=16)
    check(world, [1, 3, 33, 4], window=window, soft_cap=soft_cap)


def test_beside_sinks_of_retention(monkeypatch):
    spare(monkeypatch, 2)
    split_prefill(monkeypatch, 2)
    check(make_world([150, 40], block_size=16), [10, 3], kept=[(4, 20), (0, 16)])
