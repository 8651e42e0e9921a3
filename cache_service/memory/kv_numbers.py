"""K and V as numbers: between the bytes of an element type and float32, with a scale for each head where the type has few bits.

The service moves blocks as bytes; what needs numbers comes here: blocks that are kept in few bits below the device, and K and V
that are read or written by call. The arithmetic is that of KV_LAYOUT_SCALED, to the bit: the scale of a head is its greatest
magnitude over that of the format's least element, as a bfloat16 that is rounded up, and in int4 negative where the number of
the greatest magnitude is positive; a head that is not finite has a scale that is not a number; one below 1e-30 is stored as
zeros. Knows no blocks and no layout.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
UInt16Array = npt.NDArray[np.uint16]

ITEM_BYTES: Final = {"float16": 2, "bfloat16": 2, "float32": 4}
SCALE_BYTES: Final = 2
_BOUNDS: Final = {"fp8": (-448.0, 448.0), "int8": (-127.0, 127.0), "int4": (-8.0, 7.0)}  # the least element and the greatest
_LEAST: Final = np.float32(1e-30)  # of a scale before it is rounded
_NAN_BITS: Final = 0x7FC00000
_INF_BITS: Final = 0x7F800000
_MOST_HALF: Final = 65504.0


def to_numbers(elements: ByteArray, element_type: str) -> Float32Array:
    """[..., n] of elements, uint8 [..., n * item bytes], of a type without scales."""
    if element_type == "bfloat16":
        return (elements.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return elements.view("<f2" if element_type == "float16" else "<f4").astype(np.float32)


def to_elements(numbers: Float32Array, element_type: str) -> ByteArray:
    """Elements, uint8 [..., n * item bytes], of numbers [..., n], rounded to the nearest of the type, ties to even.

    Finite numbers stay finite in float16: rounding to few bits may have put one past its greatest.
    """
    if element_type == "float16":
        with np.errstate(over="ignore"):
            return np.clip(numbers, -_MOST_HALF, _MOST_HALF).astype("<f2").view(np.uint8)
    if element_type == "float32":
        return np.ascontiguousarray(numbers, "<f4").view(np.uint8)
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    rounded = np.where((bits & 0x7FFFFFFF) > _INF_BITS, (bits >> 16) | 0x40, rounded)
    return np.ascontiguousarray(rounded.astype("<u2")).view(np.uint8)


def quantise(numbers: Float32Array, kv_format: str) -> tuple[ByteArray, UInt16Array]:
    """Elements, uint8 [..., row bytes], and bits of scales, uint16 [...], of heads [..., head_dim]."""
    least, most = _BOUNDS[kv_format]
    with np.errstate(invalid="ignore", over="ignore"):
        raw = np.abs(numbers).max(-1) / np.float32(-least)
        bits = raw.view(np.uint32) & np.uint32(0x7FFFFFFF)
        bits = np.where(bits >= _INF_BITS, np.uint32(_NAN_BITS), (bits + np.uint32(0xFFFF)) & np.uint32(0x7FFF0000))
        bits = np.where(raw < _LEAST, np.uint32(0), bits)
        if -least > most:
            is_negative = (numbers.max(-1) > -numbers.min(-1)) & (bits > 0) & (bits < _INF_BITS)
            bits = np.where(is_negative, bits | np.uint32(1 << 31), bits)
        values = bits.view(np.float32)
        is_scaled = np.abs(values) > 0
        factors = np.where(is_scaled, (1 / np.where(is_scaled, values, 1).astype(np.float64)).astype(np.float32), np.float32(0))
        scaled = np.nan_to_num(numbers * factors[..., None], nan=0.0, posinf=0.0, neginf=0.0).clip(least, most)
    scales = (bits >> 16).astype(np.uint16)
    if kv_format == "fp8":
        return _to_e4m3(scaled), scales
    whole = np.rint(scaled).astype(np.int8)
    if kv_format == "int8":
        return whole.view(np.uint8), scales
    low, high = np.split((whole + np.int8(8)).view(np.uint8), 2, -1)  # both halves of a head share bytes
    return low | (high << 4), scales


def dequantise(elements: ByteArray, scales: UInt16Array, kv_format: str) -> Float32Array:
    """Numbers [..., head_dim] of elements, uint8 [..., row bytes], and bits of scales, uint16 [...]."""
    if kv_format == "int4":
        numbers = np.concatenate((elements & 15, elements >> 4), -1).astype(np.float32) - np.float32(8)
    elif kv_format == "int8":
        numbers = elements.view(np.int8).astype(np.float32)
    else:
        numbers = _E4M3[elements]
    with np.errstate(invalid="ignore"):
        return numbers * (scales.astype(np.uint32) << 16).view(np.float32)[..., None]


def _e4m3_numbers() -> Float32Array:
    """The number of each byte: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are not numbers."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -sizes, sizes).astype(np.float32)


_E4M3: Final = _e4m3_numbers()
_BETWEEN: Final = (_E4M3[:126] + _E4M3[1:127]) / 2  # [126] halfway to the next greater number


def _to_e4m3(numbers: Float32Array) -> ByteArray:
    """Rounds numbers from -448 to 448 to the nearest, of two that are as near to the even one."""
    sizes = np.abs(numbers)
    codes = np.searchsorted(_BETWEEN, sizes, "left")
    is_tie = _BETWEEN[np.minimum(codes, 125)] == sizes
    codes += is_tie & (codes & 1 == 1)
    return (codes | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)
