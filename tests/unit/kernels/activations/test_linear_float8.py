"""Products of 8-bit floats: how rows and weights are rounded, and what comes out, on a CPU and in the interpreter."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations import linear_float8
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_float8 import Float8Weight, fits_float8, quantise_float8, quantise_rows
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight
from tests.support.stand_ins.host_reads import HostReads
from tests.unit.kernels.gpu.pretend import PretendCuda, on_cuda

PLACES = ["cpu", "cuda"]
SIZES = torch.tensor([1e-6, 1.0, 1e4, 3.0, 0.0, 1e-3, 40.0])[:, None]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    torch.manual_seed(0)


def there(place, *tensors):
    return on_cuda(*tensors) if place == "cuda" else list(tensors)


def quantised(place, data, bias=None):
    found = quantise_float8(LinearWeight(*there(place, data), bias))
    assert isinstance(found.codes, PretendCuda) == (place == "cuda")
    return found


def meant(weight):
    """The float64 weight [O, I] that codes and scales stand for."""
    codes, scales = (each.as_subclass(torch.Tensor) for each in (weight.codes, weight.scales))
    return codes.double() * scales.double().T


def relative_error(found, expected):
    return float(((found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)).max())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [16, 48, 1024, 9008])  # the last one is read in two parts
def test_rows_are_rounded_each_by_itself(place, dtype, length):
    x = (torch.randn(7, length) * SIZES).to(dtype)
    codes, scales = (each.as_subclass(torch.Tensor) for each in quantise_rows(*there(place, x)))
    expected_codes, expected_scales = reference.quantise_rows(x)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.float().abs().amax(1), torch.where(x.float().abs().amax(1) > 0, 448.0, 0.0))
    off = (codes.double() * scales.double() - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    assert bool((off <= torch.maximum(x.double().abs() / 15.99, largest / 448 / 1023)).all())  # half a step


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (48, 64), (160, 528)])
def test_a_product_is_that_of_what_is_rounded(place, shape, bias):
    weight = quantised(place, torch.randn(shape) * torch.rand(shape[0], 1), torch.randn(shape[0]) if bias else None)
    assert weight.codes.itemsize == 1
    for num_rows in (1, 7, 33):
        x = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
        found = linear(*there(place, x), weight).as_subclass(torch.Tensor)
        torch.testing.assert_close(found, reference.linear_float8(x, weight), rtol=1e-5, atol=1e-4)
    assert linear(*there(place, torch.randn(0, shape[1])), weight).shape == (0, shape[0])
    x = torch.randn(2, 3, shape[1])
    found = linear(*there(place, x), weight).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, reference.linear_float8(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_each_row_is_near_the_exact_product_whatever_its_size(place):
    """Rows and outputs of very different size: e4m3 has 3 bits behind the first, of which each rounding costs half of one."""
    data = torch.randn(64, 512) * 10.0 ** torch.randint(-3, 3, (64, 1))
    weight, x = quantised(place, data), torch.randn(7, 512) * SIZES
    found, expected = linear(*there(place, x), weight).as_subclass(torch.Tensor), x.double() @ data.double().T
    assert torch.equal(found[4], torch.zeros(64))
    own = data.double().norm(dim=1) * x.double().norm(dim=1, keepdim=True) / 512**0.5
    off = ((found - expected) / own)[[0, 1, 2, 3, 5, 6]]
    assert float(off.square().mean(1).sqrt().min()) > 0.01
    assert float(off.square().mean(1).sqrt().max()) < 0.05
    assert float(off.square().mean(0).sqrt().max()) < 0.08


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("place", PLACES)
def test_a_row_depends_on_no_other_and_one_that_is_not_finite_spoils_no_other(place):
    weight = quantised(place, torch.randn(32, 64))
    x = torch.randn(7, 64) * SIZES
    together = linear(*there(place, x), weight).as_subclass(torch.Tensor)
    for row in range(7):
        alone = linear(*there(place, x[row : row + 1]), weight).as_subclass(torch.Tensor)
        assert float((alone[0] - together[row]).norm()) <= 1e-5 * float(together[row].norm())  # sums may be in another order
    spoiled = x.clone()
    spoiled[0, -1], spoiled[1, 40], spoiled[3, 0] = float("inf"), float("-inf"), float("nan")
    found = linear(*there(place, spoiled), weight).as_subclass(torch.Tensor)
    assert not found[[0, 1, 3]].isfinite().any()
    assert torch.equal(found[[2, 4, 5, 6]], together[[2, 4, 5, 6]])


def test_the_host_waits_for_nothing():
    weight, x, reads = quantised("cuda", torch.randn(32, 64), torch.randn(32)), on_cuda(torch.randn(5, 64))[0], HostReads()
    with reads.watched():
        linear(x, weight)
    assert reads.count == 0


def by_row(data):
    return data.abs().amax(1, keepdim=True) / 448


def by_tensor(data):
    return (data.abs().max() / 448).expand(len(data), 1)


def by_row_in_16_bits(data):
    return by_row(data).bfloat16().float()


@pytest.mark.parametrize("scales_of", [by_row, by_tensor, by_row_in_16_bits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_restored_from_8_bit_floats_keeps_its_codes(scales_of, dtype):
    data = torch.randn(96, 1024) * (torch.rand(96, 1) + 0.01)
    scales = scales_of(data)
    codes = (data / scales).to(torch.float8_e4m3fn)
    weight = quantised("cpu", (codes.float() * scales).to(dtype))
    powers = (scales / weight.scales.T).log2().round()  # a row's codes may all be so many times larger
    assert torch.equal(weight.codes.float(), codes.float() * 2**powers)
    assert float((scales / weight.scales.T / 2**powers - 1).abs().max()) < (1e-6 if dtype is torch.float32 else 2**-9)


def test_blocks_whose_scales_are_powers_of_two_are_kept_and_others_rounded_once_more():
    data = torch.randn(256, 512) * 0.02
    scales = data.view(2, 128, 4, 128).abs().amax((1, 3)) / 448 * torch.tensor([1.0, 0.7, 0.4, 0.9])
    found = []
    for each in (scales.log2().ceil().exp2(), scales):
        spread = each.repeat_interleave(128, 0).repeat_interleave(128, 1)
        stored = (data / spread).clamp(-448, 448).to(torch.float8_e4m3fn).float() * spread
        found.append(float((meant(quantised("cpu", stored)) - stored.double()).norm() / stored.norm()))
    assert found[0] < 1e-6
    assert 0.02 < found[1] < 0.03


def test_outputs_are_quantised_a_few_at_a_time(monkeypatch):
    data = torch.cat([torch.randn(32, 64), torch.zeros(16, 64)]).bfloat16()
    at_once = quantised("cpu", data)
    monkeypatch.setattr(linear_float8, "_AT_A_TIME", 5 * 64)
    by_parts = quantised("cpu", data)
    assert torch.equal(by_parts.codes.view(torch.uint8), at_once.codes.view(torch.uint8))
    assert torch.equal(by_parts.scales, at_once.scales)
    assert relative_error(meant(at_once)[:32], data[:32]) < 0.03
    assert torch.equal(meant(at_once)[32:], torch.zeros(16, 64).double())


def test_refusals(monkeypatch):
    assert not any(map(fits_float8, map(LinearWeight, (torch.randn(2, 16, 16), torch.randn(16, 24), torch.randn(8, 16)))))
    for data in (torch.randn(16, 16).double(), torch.randn(16, 24), torch.randn(16, 16, 16), torch.full((16, 16), torch.nan)):
        with pytest.raises(KernelArgumentError):
            quantised("cpu", data)
    weight = quantised("cuda", torch.randn(16, 32))
    for x in (torch.randn(2, 16), torch.randn(2, 32).double()):
        with pytest.raises(KernelArgumentError, match="does not fit"):
            linear(*on_cuda(x), weight)
    with pytest.raises(KernelArgumentError, match="on CUDA"):
        linear(torch.randn(2, 32), weight)
    for x in (torch.randn(16, 2).T, torch.randn(2), torch.randn(2, 16).double()):
        with pytest.raises(KernelArgumentError, match="contiguous"):
            quantise_rows(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(UnsupportedDeviceError, match=r"below 8\.9"):
        quantised("cuda", torch.randn(16, 16))
    assert isinstance(quantised("cpu", torch.randn(16, 16)), Float8Weight)
