"""What reaches every variant of a kernel, held to the launchers: no launch takes a variant that the lists leave out."""

from itertools import product

import pytest
import torch

from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.attention.latent_attention import latent_attention_prefill, latent_layer
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.gpu.variants import MANY_STORED, MOST_SPLITS, group_tokens, num_splits, prefill_lens
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.attention import quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.store_kv import store_kv
from kvkeeper.kernels.types import LinearWeight, QuantisedRows
from tests.support.slices import todays
from tests.unit.kernels.gpu.launches import VARIANTS, integers_of
from tests.unit.kernels.gpu.pretend import nowhere
from tests.unit.kernels.gpu.specialised import note_launches

pytestmark = pytest.mark.each_value
# Heads of queries, of K and V, and their dimensions.
HEADS = [(2, 1, 64), (24, 8, 128), (32, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128), (96, 8, 128), (64, 8, 64),
         (16, 1, 256), (71, 1, 64), (32, 1, 128), (33, 1, 64), (8, 8, 128), (64, 64, 128), (128, 1, 64)]  # fmt: skip
FEATURES = {"plain": {}, "window": {"window": 512}, "long window": {"window": 4096}, "crowded": {"soft_cap": 30.0}}
BLOCK_SIZE, NO_KEYS, MANY_KEYS = 16, 0, 8192
MORE_KEYS = 16 * 1024  # of which few queries have 16 splits: a multiple of 16 is a number that Triton may compile anew for
LENS = [*range(2, 15), 16, 17, 18, 21, 22, 23, 32, 33, 34, 64, 65, 66, 128, 129, 257, 511, 512, 513, 2048]
NUM_SEQS = [1, 2, 7, 64]
# Experts, and those of a token: gpt-oss (20 and 120 billion), Mixtral, Qwen3-30B-A3B, both of Llama 4, DeepSeek-V3, others.
EXPERTS = [(32, 4), (128, 4), (8, 2), (128, 8), (16, 1), (128, 1), (256, 8), (4, 4), (5, 3)]


def step_of(heads, num_tokens, num_seqs, num_keys):
    """Queries, tables, lengths and starts."""
    shapes = (num_seqs, -(-num_keys // BLOCK_SIZE)), (num_seqs,), (num_seqs + 1,)
    return nowhere(num_tokens, heads[0], heads[2]), [nowhere(*shape, dtype=torch.int32) for shape in shapes]


def prefill(heads, num_tokens, num_seqs, num_keys, features):
    _, num_kv_heads, head_dim = heads
    q, ints = step_of(heads, num_tokens, num_seqs, num_keys)
    layer = nowhere(99, *KvLayout(2, num_kv_heads, head_dim, torch.bfloat16, BLOCK_SIZE).view_shape)[:, 1]
    options = {"scale": 0.1, "window": None, "soft_cap": None} | features
    if "soft_cap" in features:
        options |= {"retention": (ints[1], ints[1]), "q_sink": q}
    paged_attention_prefill(q, layer, *ints, **options)


def stored_prefill(heads, num_tokens, num_seqs, num_keys, features):
    _, num_kv_heads, head_dim = heads
    q, (tables, lens, locs) = step_of(heads, num_tokens, num_seqs, num_keys)
    layout = QuantisedLayout(2, num_kv_heads, head_dim, BLOCK_SIZE, FORMATS["int8"], torch.bfloat16, 2)
    layer = get_layer(nowhere(99, layout.block_bytes, dtype=torch.uint8), layout, 1)
    quantised_prefill(q, layer, QuantisedRows(tables, tables, lens, locs), scale=0.1, **features)


def latent_prefill(heads, num_tokens, num_seqs, num_keys, features):
    width = heads[2]
    q, ints = step_of(heads, num_tokens, num_seqs, num_keys)
    layer = latent_layer(nowhere(99, *KvLayout(2, 1, width, torch.bfloat16, BLOCK_SIZE, is_latent=True).view_shape)[:, 1])
    latent_attention_prefill(q, layer.as_subclass(type(q)), *ints, scale=0.1, latent=width // 9 * 8, **features)


def reach(op, heads, features, multiprocessors, monkeypatch):
    """What the warm-up's prompts launch, once it is seen that no others launch more."""
    monkeypatch.setattr("kvkeeper.kernels.gpu.paged_attention_prefill.num_multiprocessors", lambda device: multiprocessors)
    seen = note_launches(monkeypatch)
    for num_tokens, num_keys in product(prefill_lens([heads[0] // heads[1]]), (NO_KEYS, MANY_KEYS)):
        op(heads, num_tokens, 1, num_tokens + num_keys, features)
    reached = set(seen)
    for num_tokens, num_seqs, num_keys in product(LENS, NUM_SEQS, (NO_KEYS, MANY_KEYS, MORE_KEYS)):
        if num_tokens >= 2 * num_seqs:
            op(heads, num_tokens, num_seqs, num_tokens + num_keys, features)
    assert seen == reached
    return sorted(name for name, _ in reached)


@pytest.mark.parametrize("multiprocessors", [8, 132])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_few_prompts_reach_all_variants_of_prefill(heads, features, multiprocessors, monkeypatch):
    assert reach(prefill, heads, features, multiprocessors, monkeypatch)


@pytest.mark.parametrize("window", [None, 512, 4096])
@pytest.mark.parametrize("heads", [(32, 8, 128), (96, 8, 128), (33, 1, 64), (64, 64, 128), (16, 1, 256)], ids=str)
def test_few_prompts_reach_all_variants_of_a_prefill_of_stored_keys(heads, window, monkeypatch):
    kernels = ["quantised_prefill_kernel"] if window == 512 else ["merge_items_kernel", *["quantised_prefill_kernel"] * 2]
    assert reach(stored_prefill, heads, {"window": window}, 132, monkeypatch) == kernels


@pytest.mark.parametrize("num_heads", [16, 40, 128])
def test_few_prompts_reach_all_variants_of_a_prefill_of_latents(num_heads, monkeypatch):
    kernels = [*["latent_attention_kernel"] * 2, "merge_items_kernel"]
    assert reach(latent_prefill, (num_heads, 1, 576), {}, 132, monkeypatch) == kernels


@pytest.mark.parametrize("experts", todays(EXPERTS, 3), ids=str)
def test_few_steps_reach_all_variants_of_grouped_products(experts, monkeypatch):
    num_experts, num_chosen = experts
    weight = LinearWeight(nowhere(num_experts, 64, 64), None)
    starts = nowhere(num_experts + 1, dtype=torch.int32)
    seen, fewest = note_launches(monkeypatch), []
    for num_tokens in range(1, 70 * num_experts // num_chosen):
        before = len(seen)
        grouped_linear(nowhere(num_tokens * num_chosen, 64), weight, starts)
        if len(seen) > before:
            fewest.append(num_tokens)
    assert fewest == group_tokens(num_experts, num_chosen)
    grouped_linear(nowhere(9999 * num_chosen, 64), weight, starts)
    assert len(seen) == len(fewest)


def test_a_product_is_split_into_as_many_parts_as_are_added_up():
    for rows, num_programs, num_slabs in product((16, 32, 64, 128), (1, 3, 32, 128, 129, 200, 1000), (1, 7, 16, 100, 512)):
        parts = num_splits(rows, num_programs, num_slabs)
        assert 1 <= parts <= min(num_slabs, MOST_SPLITS)
        assert parts == 1 or num_programs * parts <= 400
    assert num_splits(16, 32, 112) == 12
    assert num_splits(16, 1, 112) == 14


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "shape", todays([(64, 64), (4096, 14336), (28672, 4096), (16384, 2048), (16385, 4096), (2880, 2880)], 3)
)
def test_few_steps_reach_all_variants_of_products_with_integers(shape, bits, monkeypatch):
    weight, seen, fewest = integers_of(bits, *shape), note_launches(monkeypatch), []
    for num_rows in (*range(1, 140), 256, 300, 512, 2048, 2049, 9999):
        before = len(seen)
        linear(nowhere(num_rows, shape[1]), weight)
        if len(seen) > before:
            fewest.append(num_rows)
    assert fewest == group_tokens(1, 1)


def test_a_store_has_one_variant_for_few_tokens_and_one_for_many(monkeypatch):
    layer = nowhere(99, *KvLayout(2, 8, 128, torch.bfloat16, BLOCK_SIZE).view_shape)[:, 1]
    seen, counts = note_launches(monkeypatch), []
    for num_tokens in (1, 2, 16, MANY_STORED - 1, MANY_STORED, 4 * MANY_STORED):
        k = nowhere(num_tokens, 8, 128)
        store_kv(k, k, layer, nowhere(num_tokens, dtype=torch.int32))
        counts.append(len(seen))
    assert counts == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("most", "launches"), VARIANTS.values(), ids=VARIANTS)
def test_no_kernel_is_compiled_anew_for_other_widths_and_numbers_of_rows(most, launches, monkeypatch):
    seen = note_launches(monkeypatch)
    for launch in launches:
        launch()
    assert len(seen) == most
