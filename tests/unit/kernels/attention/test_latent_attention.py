"""Attention over latents on a CPU: absorbed against the references, expanded against absorbed, and where they are stored."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.latent_attention import (
    expanded_prefill,
    latent_attention_decode,
    latent_attention_prefill,
    latent_layer,
)
from kvkeeper.kernels.attention.latent_widths import LatentWidths
from kvkeeper.kernels.attention.paged_attention_prefill import plan_prefill
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.store_latent import store_latent
from tests.unit.kernels.worlds import edge_lengths, make_latents, random_queries

pytestmark = pytest.mark.usefixtures("kernel_path")
SCALE = 0.3
WIDTHS = LatentWidths(latent=24, rope=8, key=12, value=10)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


def locs_of(num_queries):
    return torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_absorbed_attention_is_that_of_one_key_for_all_heads(dtype, num_heads):
    lengths = [1, *edge_lengths(4), 150]
    world = make_latents(lengths, latent=24, rope=8, dtype=dtype)
    q, tables = random_queries(len(lengths), num_heads, 32, dtype), (world.block_tables, world.seq_lens)
    found = latent_attention_decode(q, world.layer, *tables, scale=SCALE, latent=24)
    expected = reference.latent_attention_decode(q, world.layer, *tables, scale=SCALE, latent=24)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
    locs = locs_of([-(-n // 2) for n in lengths])
    q = random_queries(int(locs[-1]), num_heads, 32, dtype)
    found = latent_attention_prefill(q, world.layer, *tables, locs, scale=SCALE, latent=24)
    expected = reference.latent_attention_prefill(q, world.layer, *tables, locs, scale=SCALE, latent=24)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


def test_expanded_keys_and_values_give_the_same():
    lengths, queries, heads = [5, 70, 130, 8], [5, 3, 130, 0], 3
    world = make_latents(lengths, latent=24, rope=8)
    tables, locs = (world.block_tables, world.seq_lens), locs_of(queries)
    up = torch.randn(heads, WIDTHS.key + WIDTHS.value, WIDTHS.latent, generator=torch.Generator().manual_seed(0)) / 4
    q = random_queries(int(locs[-1]), heads, WIDTHS.key + WIDTHS.rope)
    absorbed = torch.einsum("tnk,nkr->tnr", q[..., : WIDTHS.key], up[:, : WIDTHS.key])
    absorbed = torch.cat((absorbed, q[..., WIDTHS.key :]), 2)
    latents = reference.latent_attention_prefill(absorbed, world.layer, *tables, locs, scale=SCALE, latent=24)
    expected = torch.einsum("tnr,nvr->tnv", latents, up[:, WIDTHS.key :])
    plan = plan_prefill(*tables, locs, world.layer, torch.float32, None)
    found = expanded_prefill(q, world.layer, up, WIDTHS, scale=SCALE, plan=plan)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_long_prompt_is_expanded_and_a_short_one_behind_many_tokens_is_not():
    deepseek = LatentWidths(latent=512, rope=64, key=128, value=128)
    assert deepseek.prefers_expanded([(1024, 1024)])
    assert deepseek.prefers_expanded([(512, 4096)])
    assert deepseek.prefers_expanded([(5, 5), (6, 6)])
    assert not deepseek.prefers_expanded([(16, 4096)])
    assert not deepseek.prefers_expanded([(5, 5), (16, 4096)])
    assert deepseek.prefers_expanded([(16, 4096), (1024, 1024), (1024, 1024)])


def test_latents_are_stored_once_and_nowhere_else():
    layout = KvLayout(3, 1, 32, torch.float32, 4, is_latent=True)
    assert layout.block_bytes == 3 * 4 * 32 * 4, "no room for V"
    arena = layout.view(torch.zeros(5 * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    latent, rope = torch.randn(3, 40)[:, :24], torch.randn(3, 2, 8)[:, 1]
    store_latent(latent, rope, latent_layer(arena[:, 1]), torch.tensor([7, -1, 12], dtype=torch.int32))
    assert torch.equal(arena[1, 1, 0, 3, 0], torch.cat((latent[0], rope[0])))
    assert torch.equal(arena[3, 1, 0, 0, 0], torch.cat((latent[2], rope[2])))
    assert int(arena.isfinite().sum()) == 64


def test_refusals():
    world = make_latents([5], latent=24, rope=8)
    q, tables = random_queries(1, 2, 32), (world.block_tables, world.seq_lens)
    for call in (
        lambda: latent_attention_decode(q[..., :31], world.layer, *tables, scale=SCALE, latent=24),
        lambda: latent_attention_decode(q, world.layer, *tables, scale=SCALE, latent=32),
        lambda: latent_attention_decode(q, world.layer.contiguous(), *tables, scale=SCALE, latent=24),
        lambda: store_latent(q[:, 0, :24], q[:, 0, :9], world.layer, torch.tensor([4])),
        lambda: store_latent(q[:, 0, :24].half(), q[:, 0, :8].half(), world.layer, torch.tensor([4])),
        lambda: store_latent(q[:, 0, :24], q[:, 0, :8], world.layer, torch.tensor([400])),
    ):
        with pytest.raises(KernelArgumentError):
            call()
