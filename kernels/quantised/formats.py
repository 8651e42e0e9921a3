"""Formats: what a stored element is, and the arithmetic between it and a number. Kernels follow this definition.

Scaled formats have one scale for each token and KV head, of K and of V each (as vLLM's per-token-head caches). An element
times the scale is the number. The scale is the head's greatest magnitude divided by that of the format's least element, as a
bfloat16 that is rounded up, so that every machine comes to the same bits. A head that is not finite has a scale that is not a
number, so that it stays so. A head below 1e-30 is stored as zeros.

int4 has one more element below zero than above. A head's number of the greatest magnitude gets that one: its scale is negative
where the number is positive, as in llama.cpp's q4_0. So steps are an eighth smaller, and a number near the other end may be
cut off by less than a step.
"""

from dataclasses import dataclass
from typing import Final

import torch

from ..checks import require

_LEAST: Final = 1e-30  # of a scale before it is rounded; its reciprocal is finite
_NAN_BITS: Final = 0x7FC00000
_INF_BITS: Final = 0x7F800000


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format.

    Attributes:
        name: as in --kv-dtype.
        code: by which compiled kernels know it.
        bits: of an element.
        least, most: the least element and the greatest; 0: numbers are stored as they are, without a scale.
        dtype: of torch, that an element has by itself; None: two elements share a byte.
    """

    name: str
    code: int
    bits: int
    least: float
    most: float
    dtype: torch.dtype | None

    @property
    def scale_bytes(self) -> int:
        return 2 if self.most else 0

    def row_bytes(self, head_dim: int) -> int:
        """The bytes of the elements of one head of one token. Raises KernelArgumentError for an odd number of elements."""
        step = 4 if self.bits == 4 else 2
        require(
            head_dim % step == 0, "KvFormat", "head_dim", "must be a multiple of {} for {}, is {}", step, self.name, head_dim
        )
        return head_dim * self.bits // 8


FP16: Final = KvFormat("fp16", 0, 16, 0, 0, torch.float16)
BF16: Final = KvFormat("bf16", 1, 16, 0, 0, torch.bfloat16)
FP8: Final = KvFormat("fp8", 2, 8, -448, 448, torch.float8_e4m3fn)
INT8: Final = KvFormat("int8", 3, 8, -127, 127, torch.int8)
INT4: Final = KvFormat("int4", 4, 4, -8, 7, None)
FORMATS: Final = {each.name: each for each in (FP16, BF16, FP8, INT8, INT4)}


def compute_scales(x: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    """Bits of the bfloat16 scales, int16 [...], of heads x [..., head_dim]."""
    greatest = x.float().abs().amax(-1)
    raw = greatest / greatest.new_full((), -kv_format.least)  # by a number of Python a CUDA device multiplies by its reciprocal
    magnitudes = raw.view(torch.int32) & 0x7FFFFFFF
    bits = torch.where(magnitudes >= _INF_BITS, _NAN_BITS, (magnitudes + 0xFFFF) & 0x7FFF0000)
    bits = torch.where(raw < _LEAST, 0, bits) >> 16
    if -kv_format.least > kv_format.most:
        is_negative = (x.amax(-1) > -x.amin(-1)) & (bits > 0) & (magnitudes < _INF_BITS)
        bits = torch.where(is_negative, bits - 0x8000, bits)
    return bits.to(torch.int16)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32, of their bits."""
    return (scales.to(torch.int32) << 16).view(torch.float32)


def quantise(x: torch.Tensor, kv_format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, uint8 [..., row_bytes], and bits of scales, int16 [...], of heads x [..., head_dim]."""
    if not kv_format.most:
        return x.to(kv_format.dtype).contiguous().view(torch.uint8), torch.zeros(
            x.shape[:-1], dtype=torch.int16, device=x.device
        )
    scales = compute_scales(x, kv_format)
    values = scale_values(scales)
    factors = torch.where(values.abs() > 0, (1 / values.double()).float(), 0.0)[..., None]
    scaled = (x.float() * factors).nan_to_num(0.0, 0.0, 0.0).clamp(kv_format.least, kv_format.most)
    if kv_format is FP8:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
    whole = scaled.round().to(torch.int8)
    if kv_format is INT8:
        return whole.view(torch.uint8), scales
    low, high = (whole + 8).view(torch.uint8).chunk(2, -1)  # both halves of a head, so that no kernel has to interleave
    return low | (high << 4), scales


def dequantise(elements: torch.Tensor, scales: torch.Tensor, kv_format: KvFormat, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., head_dim] of elements, uint8 [..., row_bytes], and bits of scales, int16 [...]."""
    if kv_format.dtype is None:
        numbers = torch.cat((elements & 15, elements >> 4), -1).to(torch.float32) - 8
    else:
        stored = elements.view(kv_format.dtype)
        if not kv_format.most:
            return stored.to(dtype)
        numbers = stored.to(torch.float32)
    return (numbers * scale_values(scales)[..., None]).to(dtype)
