"""Sizes of a launch, in plain integers.

Triton's own cdiv and next_power_of_2 serve kernels too, and pay for it on the host: ten times what the arithmetic costs, some
twenty times a layer.
"""

_WARP_ELEMENTS = 256  # 16 bytes a thread, of 16-bit elements
_MOST_WARPS = 4


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def aligned(num_elements: int) -> int:
    """The least number of elements of 4 bytes from there on that ends at 16 bytes.

    Triton compiles a kernel anew for a pointer that is not at a multiple of 16 bytes. So what shares memory is cut there.
    """
    return -(-num_elements // 4) * 4


def power_of_2(least: int) -> int:
    """The smallest power of two that is not below `least`, which is 1 or more."""
    return 1 << (least - 1).bit_length()


def warps_for(num_elements: int) -> int:
    """The warps of a program that moves memory: as many as give a thread 16 bytes at a time. num_elements: a power of two."""
    return min(max(num_elements // _WARP_ELEMENTS, 1), _MOST_WARPS)
