"""K and V as numbers on the service's side: to the bit what the kernels store, in each type and format."""

import numpy as np
import pytest
import torch

from kvkeeper.cache_service.memory.kv_numbers import dequantise, quantise, to_elements, to_numbers
from kvkeeper.kernels.quantised import formats

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORMATS = ["fp8", "int8", "int4"]


def heads() -> np.ndarray:
    """[64, 12] of many magnitudes, with heads of zeros, of one element, below what is stored, and not finite ones."""
    rng = np.random.default_rng(5)
    numbers = (rng.standard_normal((64, 12)) * 10.0 ** rng.integers(-6, 6, (64, 1))).astype(np.float32)
    numbers[0], numbers[1, 1:], numbers[2] = 0, 0, 1e-32
    numbers[3, 4], numbers[4, 0], numbers[5, 11] = np.nan, np.inf, -np.inf
    numbers[6] = np.arange(-6, 6) / 2  # halves, which are rounded to even
    numbers[6, 0] = 127 / 2
    return numbers


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_what_the_kernels_store(name: str) -> None:
    kv_format = formats.FORMATS[name]
    elements, scales = quantise(heads(), name)
    wanted, wanted_scales = formats.quantise(torch.from_numpy(heads()), kv_format)
    np.testing.assert_array_equal(scales.view(np.int16), wanted_scales.numpy())
    np.testing.assert_array_equal(elements, wanted.numpy())
    back = formats.dequantise(wanted, wanted_scales, kv_format, torch.float32).numpy()
    np.testing.assert_array_equal(dequantise(elements, scales, name), back)
    assert np.isnan(back[3:6]).all(), "a head that is not finite stays so"


def test_each_byte_of_e4m3_is_its_number_and_back() -> None:
    codes = np.arange(256, dtype=np.uint8)
    one = np.full(256, 0x3F80, np.uint16)
    numbers = dequantise(codes[:, None], one, "fp8")[:, 0]
    np.testing.assert_array_equal(numbers, torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())
    finite = np.flatnonzero(np.isfinite(numbers))
    rows = np.stack((numbers[finite], np.full(len(finite), 448, np.float32)), -1)  # a scale of 1
    np.testing.assert_array_equal(quantise(rows, "fp8")[0][:, 0], codes[finite])


@pytest.mark.parametrize("name", list(DTYPES))
def test_numbers_are_rounded_as_torch_rounds_them(name: str) -> None:
    numbers = heads()
    numbers[7, :4] = 65503, 65519, 1 + 2**-8, 1 + 3 * 2**-8  # two that float16 has no room for, two ties of bfloat16
    whole = torch.from_numpy(numbers)
    if name == "float16":
        whole = whole.clamp(-65504, 65504)
    wanted = whole.to(DTYPES[name])
    elements = to_elements(numbers, name)
    got = torch.from_numpy(elements).view(DTYPES[name]).float().numpy()
    np.testing.assert_array_equal(got, wanted.float().numpy())
    np.testing.assert_array_equal(to_numbers(elements, name), wanted.float().numpy())
