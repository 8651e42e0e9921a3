"""K and V in few bits on the Triton path, interpreted: what is stored, and attention over blocks and pages, against a CPU's."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.formats import FORMATS, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayer, QuantisedLayout, get_layer
from kvkeeper.kernels.quantised.store import plan_slots, store_quantised
from tests.unit.kernels.gpu.pretend import on_cuda
from tests.unit.kernels.gpu.test_attention import split_prefill
from tests.unit.kernels.quantised.worlds import as_numbers, make_stored
from tests.unit.kernels.worlds import random_queries

pytestmark = pytest.mark.each_value
SCALE = 0.2
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
SCALED = ["int8", "int4", "fp8"]


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """One with two multiprocessors; items of a single tile."""
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.num_multiprocessors", lambda device: 2)
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.FEWEST_ITEM_TOKENS", 64)
    monkeypatch.setattr("kvkeeper.kernels.gpu.paged_attention_prefill.num_multiprocessors", lambda device: 2)


def pretended(layer):
    parts = [layer.elements, layer.scales] + ([] if layer.tail is None else [layer.tail])
    elements, scales, *tail = on_cuda(*parts)
    return QuantisedLayer(layer.layout, elements, scales, tail[0] if tail else None)


def check(world, num_queries=None, group=2, **options):
    plain, tables = as_numbers(world)
    heads, dtype = group * world.layout.num_kv_heads, world.layout.dtype
    tensors = [world.block_tables, world.seq_lens] + ([] if world.tail_tables is None else [world.tail_tables])
    block_tables, seq_lens, *tails = on_cuda(*tensors)
    layer, locs = pretended(world.layer), None
    if num_queries is None:
        q = random_queries(len(world.seq_lens), heads, world.layout.head_dim, dtype)
        expected = reference.paged_attention_decode(q, plain, tables, world.seq_lens, scale=SCALE, **options)
    else:
        locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        q = random_queries(int(locs[-1]), heads, world.layout.head_dim, dtype)
        expected = reference.paged_attention_prefill(q, plain, tables, world.seq_lens, locs, scale=SCALE, **options)
        locs = on_cuda(locs)[0]
    rows = plan_rows(block_tables, tails[0] if tails else None, seq_lens, locs, layer)
    op = quantised_decode if num_queries is None else quantised_prefill
    if "sink_logits" in options:
        options["sink_logits"] = on_cuda(options["sink_logits"])[0]
    found = op(on_cuda(q)[0], layer, rows, scale=SCALE, **options).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SCALED)
def test_decode_reads_blocks_and_pages_in_one_launch(name, dtype):
    lengths = [0, 1, 16, 33, 130]
    tails = [(0, 0), (0, 1), (0, 0), (1, 3), (5, 9)]
    world = make_stored(lengths, name, tails=tails, block_size=16, num_kv_heads=1, head_dim=32, dtype=dtype)
    check(world)
    check(world, window=20, soft_cap=3.0)


@pytest.mark.parametrize("name", SCALED)
def test_decode_without_a_tail(name):
    check(make_stored([5, 70], name, block_size=8, num_kv_heads=2, head_dim=80), group=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SCALED)
def test_prefill_reads_blocks_and_pages_in_one_launch(name, dtype):
    world = make_stored(
        [20, 3, 90], name, tails=[(0, 2), (0, 0), (4, 6)], block_size=16, num_kv_heads=1, head_dim=32, dtype=dtype
    )
    check(world, [7, 3, 40])
    check(world, [1, 0, 2], window=20, soft_cap=3.0)


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.float32), ("int4", torch.float16), ("fp8", torch.float32)])
def test_the_number_of_splits_of_a_prefill_does_not_matter(monkeypatch, name, dtype):
    tails = [(6, 17), (0, 0), (0, 5)]
    world, found = make_stored([270, 3, 65], name, tails=tails, block_size=16, num_kv_heads=1, head_dim=32, dtype=dtype), []
    for num_splits in (1, 3, 7):
        split_prefill(monkeypatch, num_splits)
        found.append(check(world, [17, 3, 1]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 65, "soft_cap": 0.5}, {"window": 200}])
def test_a_split_prefill_with_a_window(monkeypatch, options):
    split_prefill(monkeypatch, 3)
    world = make_stored([170, 3, 300], "int8", tails=[(7, 11), (0, 1), (14, 19)], block_size=16, num_kv_heads=1, head_dim=32)
    check(world, [40, 2, 9], **options)


def test_a_split_prefill_without_a_tail(monkeypatch):
    split_prefill(monkeypatch, 2)
    check(make_stored([5, 150], "int4", block_size=8, num_kv_heads=2, head_dim=80), [2, 9], group=5)


def test_a_key_without_a_value_counts_once_however_many_splits_a_prefill_has(monkeypatch):
    world = make_stored([5, 270], "int8", tails=[(0, 1), (13, 17)], block_size=16, num_kv_heads=1, head_dim=32)
    for num_splits in (2, 7):
        split_prefill(monkeypatch, num_splits)
        check(world, [3, 20], sink_logits=torch.tensor([1.5, -0.5]))


def test_a_key_without_a_value_counts_once_however_many_items_a_sequence_has():
    world = make_stored([0, 5, 130], "int8", tails=[(0, 0), (0, 1), (5, 9)], block_size=16, num_kv_heads=1, head_dim=32)
    logits = torch.tensor([1.5, -0.5])
    check(world, sink_logits=logits)
    check(world, window=20, sink_logits=logits)
    world = make_stored([5, 90], "int4", tails=[(0, 1), (3, 5)], block_size=16, num_kv_heads=1, head_dim=32)
    check(world, [3, 40], sink_logits=logits)


def test_small_values_keep_their_digits_in_16_bits():
    """The scale of a value is a hundredth of it, which float16 could not hold beside a weight."""
    world = make_stored([40], "int8", block_size=16, num_kv_heads=1, head_dim=32, dtype=torch.float16)
    world.layer.scales[:, 1] = torch.full((1,), 1e-6).to(torch.bfloat16).view(torch.int16)
    plain, tables = as_numbers(world)
    layer, q = pretended(world.layer), random_queries(1, 2, 32, torch.float16)
    rows = plan_rows(*on_cuda(world.block_tables), None, *on_cuda(world.seq_lens), None, layer)
    found = quantised_decode(on_cuda(q)[0], layer, rows, scale=SCALE).as_subclass(torch.Tensor).float()
    wide = plain.float()
    exact = reference.paged_attention_decode(q.float(), wide, tables, world.seq_lens, scale=SCALE)
    assert float((found - exact).abs().max()) < 0.05 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SCALED)
def test_what_is_stored_are_the_bits_of_the_definition(name, dtype):
    layout = QuantisedLayout(2, 3, 20, 4, FORMATS[name], dtype, tail_layers=1)
    view = layout.view(torch.full((9 * layout.block_bytes,), 0x55, dtype=torch.uint8))
    expected = view.clone()
    layer, twin = get_layer(view, layout, 1), get_layer(expected, layout, 1)
    k, v = torch.randn(2, 6, 3, 20, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype)
    k[1], k[2] = torch.linspace(-448, 448, 20).to(dtype), 0
    k[3, 1, 4], v[3, 2, 0] = torch.nan, torch.inf
    slots, tail_slots = torch.tensor([4, 9, 10, 17, -1, 18]), torch.tensor([20, -1, 22, 33, 34, 25])
    elements, scales = quantise(torch.stack((k, v), 1), layout.kv_format)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            twin.elements[slot // 4, :, slot % 4], twin.scales[slot // 4, :, slot % 4] = elements[row], scales[row]
        if (page := int(tail_slots[row])) >= 0:
            twin.tail[page // 4, :, page % 4] = torch.stack((k[row], v[row]))
    store_quantised(*on_cuda(k, v), pretended(layer), plan_slots(*on_cuda(slots, tail_slots), layer))
    torch.testing.assert_close(layer.scales, twin.scales, rtol=0, atol=0)
    finite = (twin.scales != 0x7FC0)[..., None]
    assert torch.equal(layer.elements * finite, twin.elements * finite)
    assert torch.equal(layer.tail[5:].nan_to_num(), twin.tail[5:].nan_to_num())  # the pages; before them are stored blocks
