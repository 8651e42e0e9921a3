"""8-bit floats e4m3 by integer arithmetic, which rounds alike on every device and in Triton's interpreter."""

import triton
import triton.language as tl


@triton.jit
def e4m3_bits(x):
    """Bits of the nearest e4m3 of numbers that are 448 at most, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0  # the sum's last bit is e4m3's smallest step
    small = shifted.to(tl.int32, bitcast=True) - (141 << 23)
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    return sign | tl.where(magnitude < (121 << 23), small & 0x7F, normal)
