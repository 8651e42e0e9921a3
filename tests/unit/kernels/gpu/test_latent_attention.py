"""Attention over latents, and their store, on the Triton path against the references, interpreted."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.latent_attention import latent_attention_decode, latent_attention_prefill, latent_layer
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.store_latent import store_latent
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.gpu.test_attention import small_device, spare, split_prefill
from tests.unit.kernels.worlds import make_latents, random_queries

pytestmark = pytest.mark.each_value
__all__ = ["small_device"]  # a fixture of all tests here
SCALE = 0.2
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}


def check_decode(world, num_heads, latent):
    width, dtype = world.layout.head_dim, world.layout.dtype
    q = random_queries(len(world.seq_lens), num_heads, width, dtype)
    expected = reference.latent_attention_decode(q, world.layer, world.block_tables, world.seq_lens, scale=SCALE, latent=latent)
    args = on_cuda(q, world.layer, world.block_tables, world.seq_lens)
    found = latent_attention_decode(*args, scale=SCALE, latent=latent).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
    return found


def check_prefill(world, queries, num_heads, latent):
    locs = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = random_queries(int(locs[-1]), num_heads, world.layout.head_dim, world.layout.dtype)
    args = (q, world.layer, world.block_tables, world.seq_lens, locs)
    expected = reference.latent_attention_prefill(*args, scale=SCALE, latent=latent)
    found = latent_attention_prefill(*on_cuda(*args), scale=SCALE, latent=latent).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[world.layout.dtype])
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_heads", "latent", "rope"), [(2, 24, 8), (20, 32, 16), (70, 16, 4)])
def test_decode_at_the_edges_of_tiles(dtype, num_heads, latent, rope):
    world = make_latents([0, 1, 15, 16, 17, 63, 64, 65, 130], latent=latent, rope=rope, block_size=16, dtype=dtype)
    check_decode(world, num_heads, latent)


def test_the_number_of_items_does_not_matter(monkeypatch):
    world, found = make_latents([0, 1, 193, 320], latent=24, rope=8, block_size=16), []
    for num_extra in (0, 1, 3, 20):
        spare(monkeypatch, num_extra)
        found.append(check_decode(world, 3, 24))
        assert not found[-1][0].any()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=2e-6)


def test_sequences_with_blocks_in_common(monkeypatch):
    spare(monkeypatch, 3)
    world = make_latents([290] * 16, latent=24, rope=8, block_size=16)  # enough of them for a work list of what they share
    world.block_tables[1:, :17] = world.block_tables[0, :17]
    check_decode(world, 3, 24)


@pytest.mark.parametrize("num_heads", [2, 20])
def test_prefill_with_and_without_a_prefix(monkeypatch, num_heads):
    monkeypatch.setattr("kvkeeper.kernels.gpu.latent_attention._SEQS_AT_ONCE", 4)
    lengths, queries = [20, 1, 70, 64, 65, 17], [20, 1, 6, 0, 3, 16]
    check_prefill(make_latents(lengths, latent=24, rope=8, block_size=16), queries, num_heads, 24)


@pytest.mark.parametrize(("dtype", "num_heads"), [(torch.float16, 3), (torch.float32, 70)])  # of two programs
def test_the_number_of_splits_of_a_prefill_does_not_matter(monkeypatch, dtype, num_heads):
    world, found = make_latents([270, 3, 65], latent=16, rope=4, block_size=16, dtype=dtype), []
    for num_splits in (1, 3, 7):
        split_prefill(monkeypatch, num_splits)
        found.append(check_prefill(world, [2, 0, 1], num_heads, 16))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_latents_are_stored_in_their_slots(dtype):
    layout = KvLayout(3, 1, 28, dtype, 4, is_latent=True)
    arenas = [layout.view(torch.zeros(5 * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan")) for _ in range(2)]
    latent, rope = torch.randn(4, 40)[:, :20].to(dtype), torch.randn(4, 2, 8)[:, 1].to(dtype)
    slots = torch.tensor([7, -1, 12, 4], dtype=torch.int32)
    layers = [latent_layer(arena[:, 1]) for arena in arenas]
    reference.store_latent(latent, rope, layers[0], slots)
    store_latent(*on_cuda(latent, rope, layers[1], slots))
    assert torch.equal(arenas[0].view(torch.uint8), arenas[1].view(torch.uint8))
