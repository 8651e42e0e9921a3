"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

A number is a function of its key and counter alone, so a row's draw depends neither on the rows beside it nor on earlier draws.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from .checks import on_cuda, require

_OP: Final = "uniforms_there"
UInt64Array = npt.NDArray[np.uint64]

_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Ten rounds on counters [4, n] and keys [2, n] of 32-bit words in 64-bit cells; returns words [4, n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: UInt64Array, sample_idxs: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a multiple of 2^-53, for uint64 seeds, sample indices and positions, each [n]."""
    counter = np.stack((positions & _LOW, positions >> _SHIFT, sample_idxs & _LOW, sample_idxs >> _SHIFT))
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _SHIFT)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) / float(1 << 53)


def uniforms_there(numbers: torch.Tensor) -> torch.Tensor:
    """The same, where the numbers are.

    Args:
        numbers: int64 [3, n], the bits of seeds, sample indices and positions; contiguous in its last dimension.

    Returns:
        float64 [n].

    Raises:
        KernelArgumentError: a shape or dtype that does not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, numbers)
    fits = numbers.dim() == 2 and len(numbers) == 3 and numbers.dtype is torch.int64
    require(fits, _OP, "numbers", "must be int64 [3, n], are {} {}", numbers.dtype, numbers.shape)
    if cuda:
        from .gpu.philox import uniforms_there as on_device

        require(numbers.stride(1) == 1, _OP, "numbers", "must be contiguous in their last dimension")
        return on_device(numbers)
    return torch.from_numpy(uniforms(*numbers.numpy().view(np.uint64)))
