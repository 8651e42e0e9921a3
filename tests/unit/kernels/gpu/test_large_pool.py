"""Blocks beyond 2^31 elements of a pool: offsets are 64 bit. The pool is a file with holes; a few blocks are touched."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from kvkeeper.kernels.store_kv import store_kv
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.worlds import random_queries

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float16, block_size=64)
ELEMENTS = LAYOUT.block_bytes // 2
FAR = (1 << 31) // ELEMENTS + 1  # the first block wholly beyond


@pytest.fixture
def arena(tmp_path, monkeypatch):
    for kernels in ("decode_work", "paged_attention_prefill"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{kernels}.num_multiprocessors", lambda device: 1)
    num_bytes = (FAR + 3) * LAYOUT.block_bytes
    return LAYOUT.view(torch.from_file(str(tmp_path / "pool"), shared=True, size=num_bytes, dtype=torch.uint8))


def test_every_op_reaches_the_far_end(arena):
    layer, tables, lens = arena[:, 1], torch.tensor([[FAR, FAR + 2]], dtype=torch.int32), torch.tensor([70])
    k, v = torch.randn(2, 70, 2, 64).half()
    slots = (torch.cat((torch.arange(64), torch.arange(128, 134))) + FAR * 64).int()
    store_kv(*on_cuda(k, v, layer, slots))
    assert torch.equal(layer[FAR], torch.stack((k[:64], v[:64])))
    assert torch.equal(layer[FAR + 2, :, :6], torch.stack((k[64:], v[64:])))
    q = random_queries(3, 4, 64, torch.float16)
    for op, expected_by, args in (
        (paged_attention_decode, reference.paged_attention_decode, [q[:1], layer, tables, lens]),
        (paged_attention_prefill, reference.paged_attention_prefill, [q, layer, tables, lens, torch.tensor([0, 3])]),
    ):
        found = op(*on_cuda(*args), scale=0.1).as_subclass(torch.Tensor)
        torch.testing.assert_close(found, expected_by(*args, scale=0.1), rtol=0, atol=4e-3)
    copy_blocks(*on_cuda(arena), [(FAR, FAR + 1), (FAR + 2, 1)])
    assert torch.equal(arena[FAR + 1], arena[FAR])
    assert torch.equal(arena[1], arena[FAR + 2])
    still = torch.ones(1, 64).half()
    rotary_store_kv(*on_cuda(torch.cat((q[:1], k[:1]), 1), v[:1], still, still * 0, layer, slots[-1:]))
    assert torch.equal(layer[FAR + 2, :, 5], torch.stack((k[0], v[0])))
