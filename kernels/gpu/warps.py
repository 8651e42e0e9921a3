"""The number of warps of a program that moves memory."""

_WARP_ELEMENTS = 256  # 16 bytes a thread, of 16-bit elements
_MOST_WARPS = 4


def warps_for(num_elements: int) -> int:
    """As many as give every thread 16 bytes at a time; num_elements is a power of two."""
    return min(max(num_elements // _WARP_ELEMENTS, 1), _MOST_WARPS)
