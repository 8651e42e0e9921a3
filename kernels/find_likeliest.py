"""find_likeliest: the likeliest token of each row of logits, and whether they are numbers, in one pass over them."""

from typing import Final

import torch

from .checks import on_cuda, require

_OP: Final = "find_likeliest"
NOT_FINITE: Final = -1  # in the place of a token: the logits are not finite


def find_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Look at each row once.

    Args:
        logits: float32 [R, V], contiguous in its last dimension. -inf is a token that must not be drawn.

    Returns:
        int64 [R], the first of the likeliest tokens, some token where the logits are not finite; and int64 [R], the same but
        for NOT_FINITE where one of them is NaN or +inf, or all are -inf.

    Raises:
        KernelArgumentError: a shape, stride or dtype that does not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, logits)
    fits = logits.dim() == 2 and logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.shape[1] > 0
    require(fits, _OP, "logits", "must be float32 [R, V], is {} {}", logits.dtype, logits.shape)
    if cuda:
        from .gpu.find_likeliest import find_likeliest as on_device

        return on_device(logits, NOT_FINITE)
    likeliest = logits.argmax(dim=1)
    is_finite = torch.isfinite(logits.amax(dim=1))  # NaN and +inf win a maximum; -inf only if all are
    return likeliest, torch.where(is_finite, likeliest, NOT_FINITE)
