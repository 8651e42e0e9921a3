"""What is written into stored blocks and pages: the definition's bits in the named slots, on both paths, and nothing else."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.quantised.formats import FORMATS, dequantise, quantise
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.quantised.store import plan_slots, rotary_store_quantised, store_quantised
from tests.unit.kernels.quantised.test_formats import MOST_ERROR

pytestmark = pytest.mark.usefixtures("kernel_path")
NUM_HEADS, NUM_KV_HEADS, DIM, SIZE = 6, 2, 16, 4


def arena(name, dtype=torch.float32, tail_layers=2):
    layout = QuantisedLayout(3, NUM_KV_HEADS, DIM, SIZE, FORMATS[name], dtype, tail_layers)
    view = layout.view(torch.full((9 * layout.block_bytes,), 0x55, dtype=torch.uint8))
    return view, get_layer(view, layout, 1)


def rows(num_tokens, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM, generator=generator) * 3
    qkv = qkv.to(dtype).unflatten(1, (-1, DIM))
    angle = torch.randn(num_tokens, DIM // 2, generator=generator)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    return qkv[:, : NUM_HEADS + NUM_KV_HEADS], qkv[:, NUM_HEADS + NUM_KV_HEADS :], cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slots", [[7, 4, 17, 9, 10], [5], [7, -1, 17, 9, -7], []], ids=["all", "one", "padding", "none"])
def test_exactly_the_named_slots_are_written(name, slots, dtype):
    (view, layer), (expected, twin) = arena(name, dtype), arena(name, dtype)
    qk, v, _, _ = rows(len(slots), dtype)
    k = qk[:, NUM_HEADS:]
    tail_slots = [slot + 16 if slot % 2 else -1 for slot in slots]
    for row, (slot, tail_slot) in enumerate(zip(slots, tail_slots, strict=True)):
        both = torch.stack((k[row], v[row]))
        if slot >= 0:
            elements, scales = quantise(both, layer.layout.kv_format)
            twin.elements[slot // SIZE, :, slot % SIZE] = elements
            if layer.layout.kv_format.scale_bytes:
                twin.scales[slot // SIZE, :, slot % SIZE] = scales
        if tail_slot >= 0:
            twin.tail[tail_slot // SIZE, :, tail_slot % SIZE] = both
    where = plan_slots(torch.tensor(slots, dtype=torch.long), torch.tensor(tail_slots, dtype=torch.long), layer)
    store_quantised(k, v, layer, where)
    assert torch.equal(view, expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_queries_and_keys_are_rotated_and_normalised_first(name):
    _, layer = arena(name)
    qk, v, cos, sin = rows(3)
    weight = torch.rand(NUM_HEADS + NUM_KV_HEADS, DIM)
    where = plan_slots(torch.tensor([4, 9, 18]), torch.tensor([20, -1, 33]), layer)
    found = rotary_store_quantised(qk, v, cos, sin, layer, where, (weight, 1e-5))
    turned = reference.rotary(rms_norm(qk, weight, 1e-5)[0], cos, sin)
    torch.testing.assert_close(found, turned[:, :NUM_HEADS], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.tail[5, 0, 0], turned[0, NUM_HEADS:], rtol=1e-6, atol=1e-6)
    assert torch.equal(layer.tail[8, 1, 1], v[2])
    stored = dequantise(layer.elements[1, 0, 0], layer.scales[1, 0, 0], layer.layout.kv_format, torch.float32)
    greatest = turned[0, NUM_HEADS:].abs().amax(-1, keepdim=True)
    assert bool(((stored - turned[0, NUM_HEADS:]).abs() <= 1.01 * MOST_ERROR[name] * greatest).all())


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_odd_heads_are_stored_as_the_definition_says(name):
    """Zeros, tiny and huge numbers, ties, and numbers that are not finite."""
    _, layer = arena(name, tail_layers=0)
    k = torch.zeros(6, NUM_KV_HEADS, DIM)
    k[0] = 1e-33
    k[1] = torch.linspace(-448, 448, DIM)
    k[2, 0, 3] = torch.nan
    k[3, 1, 0] = -torch.inf
    k[4] = torch.arange(DIM) - 7.5
    k[4, :, -1] = 127
    k[5] = 3e38
    where = plan_slots(torch.arange(4, 10), None, layer)
    store_quantised(k, -k, layer, where)
    elements, scales = quantise(torch.stack((k, -k), 1), layer.layout.kv_format)
    blocks, offsets = torch.arange(4, 10) // SIZE, torch.arange(4, 10) % SIZE
    assert torch.equal(layer.scales[blocks, :, offsets], scales)
    finite = torch.tensor([0, 1, 4, 5])
    assert torch.equal(layer.elements[blocks, :, offsets][finite], elements[finite])
    back = dequantise(layer.elements[blocks, :, offsets], layer.scales[blocks, :, offsets], layer.layout.kv_format, k.dtype)
    assert back[2, :, 0].isnan().all()
    assert back[3, :, 1].isnan().all()
    assert back[finite].isfinite().all()
    assert not back[0].any()


def test_each_e4m3_is_torch_s():
    """Every number near an e4m3 and every tie between two."""
    _, layer = arena("fp8", tail_layers=0)
    steps = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.cat((steps, (steps[1:] + steps[:-1]) / 2, torch.nextafter(steps, torch.tensor(448.0))))
    numbers = torch.cat((numbers, -numbers))
    for part in numbers.split(DIM - 1):
        k = torch.zeros(1, NUM_KV_HEADS, DIM)
        k[0, :, : len(part)] = part
        k[0, :, DIM - 1] = 448  # so that the scale is 1
        store_quantised(k, k, layer, plan_slots(torch.tensor([4]), None, layer))
        found = layer.elements[1, 0, 0, 0, : len(part)].view(torch.float8_e4m3fn)
        assert torch.equal(found.view(torch.uint8), part.to(torch.float8_e4m3fn).view(torch.uint8))


def test_refusals_name_the_argument():
    _, layer = arena("int8")
    qk, v, _, _ = rows(2)
    slots = torch.tensor([4, 5])
    with pytest.raises(KernelArgumentError, match="slot 40"):
        plan_slots(torch.tensor([4, 40]), slots, layer)
    with pytest.raises(KernelArgumentError, match="tail"):
        plan_slots(slots, None, layer)
    with pytest.raises(KernelArgumentError, match="tail must be"):
        plan_slots(slots, slots[:1], layer)
    where = plan_slots(slots, slots + 8, layer)
    with pytest.raises(KernelArgumentError, match="k and v must be"):
        store_quantised(qk[:1, NUM_HEADS:], v, layer, where)
    with pytest.raises(KernelArgumentError, match="float32"):
        store_quantised(qk[:, NUM_HEADS:].half(), v.half(), layer, where)
    with pytest.raises(KernelArgumentError, match="multiple of 4"):
        QuantisedLayout(1, 1, 6, 4, FORMATS["int4"], torch.float32)
