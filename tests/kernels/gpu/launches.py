"""Every launch that is compiled: the wrappers, called with tensors of a real model's shapes that have no memory."""

from collections.abc import Callable

import torch

from kernels.copy_blocks import copy_blocks
from kernels.layout import KvLayout
from kernels.store_kv import store_kv
from tests.kernels.gpu.pretend import nowhere

LAUNCHES: dict[str, Callable[[], object]] = {}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_BLOCKS, _NUM_LAYERS = 20_000, 32


def _arena(head_dim: int, block_size: int, dtype: torch.dtype, num_kv_heads: int = 8) -> torch.Tensor:
    layout = KvLayout(_NUM_LAYERS, num_kv_heads, head_dim, dtype, block_size)
    return nowhere(_NUM_BLOCKS, *layout.view_shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return nowhere(*shape, dtype=torch.int32)


def _store(head_dim: int, num_tokens: int, dtype: torch.dtype) -> None:
    layer = _arena(head_dim, 16, dtype)[:, 1]
    qkv = nowhere(num_tokens, 48 * head_dim, dtype=dtype)
    k, v = (qkv[:, first * head_dim : (first + 8) * head_dim].unflatten(1, (8, head_dim)) for first in (32, 40))
    store_kv(k, v, layer, _ints(num_tokens))


for head_dim in (64, 80, 96, 128, 256):
    for num_tokens in (64, 4096):
        for label, dtype in DTYPES.items():
            LAUNCHES[f"store_kv d{head_dim} t{num_tokens} {label}"] = lambda d=head_dim, t=num_tokens, y=dtype: _store(d, t, y)
LAUNCHES["copy_blocks"] = lambda: copy_blocks(_arena(128, 16, torch.bfloat16), [(1, 2), (3, 4)])
