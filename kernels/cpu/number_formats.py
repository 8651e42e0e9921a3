"""Numbers of few bits for compiled kernels: halves, bfloat16 and e4m3, to float32 and back."""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from .kernel_parts import float_of_bits, floats_at, helper, pointer_at


@intrinsic
def bits_of_float(typing_context, number):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def float_of_half(typing_context, bits):
    """The number of the bits of an IEEE half."""

    def generate(context, builder, signature, arguments):
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def half_of_float(typing_context, number):
    """The bits of the nearest IEEE half."""

    def generate(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), generate


@helper
def uint8s_at(address, count):
    return carray(pointer_at(address, np.uint8(0)), (count,))


@helper
def uint16s_at(address, count):
    return carray(pointer_at(address, np.uint16(0)), (count,))


@helper
def float_of_brain(bits):
    return float_of_bits(np.int32(np.uint32(bits) << np.uint32(16)))


@helper
def brain_of_float(number):
    """The bits of the nearest bfloat16, ties to even."""
    bits = np.uint32(bits_of_float(number))
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@helper
def float_of_integer(element):
    return np.float32(element)


@helper
def part_of_e4m3(byte):
    """A 256th of the number. Its bits are those of a half, one place up, whose exponent counts from 8 lower."""
    bits = np.uint16(byte)
    return float_of_half(np.uint16(((bits & np.uint16(0x80)) << np.uint16(8)) | ((bits & np.uint16(0x7F)) << np.uint16(7))))


@helper
def e4m3_of_float(number):
    """The nearest e4m3 of a number that is 448 at most, ties to even, as torch has it."""
    bits = np.uint32(bits_of_float(number))
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    bits &= np.uint32(0x7FFFFFFF)
    if bits < np.uint32(121 << 23):
        shifted = float_of_bits(np.int32(bits)) + np.float32(2.0**14)  # the sum's last bit is e4m3's smallest step
        return np.uint8(sign | ((np.uint32(bits_of_float(shifted)) - np.uint32(141 << 23)) & np.uint32(0x7F)))
    bits = bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1)) - np.uint32(120 << 23)
    return np.uint8(sign | (bits >> np.uint32(20)))


@helper
def _same(number):
    return number


_FLOAT32 = 4, floats_at, _same, _same
_BFLOAT16 = 2, uint16s_at, float_of_brain, brain_of_float


def element_of_file(module_name):
    """The kind of number that a file of kernels is loaded for, see compiled.load_kernels.

    Bytes of an element, its row at an address, its number as a float32, and the element of such a number.
    """
    return _BFLOAT16 if module_name.endswith("bfloat16") else _FLOAT32
