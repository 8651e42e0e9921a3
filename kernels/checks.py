"""Argument checks shared by the wrappers. They run once per op and layer, so they touch metadata only, never values."""

import torch

from .errors import KernelArgumentError, UnsupportedDeviceError


def require(condition: bool, op: str, argument: str, problem: str, *values: object) -> None:
    """Raise KernelArgumentError unless `condition` holds.

    `problem` is formatted with `values` only then: building the text costs more than all the checks of an op.
    """
    if not condition:
        shown = (tuple(value) if isinstance(value, torch.Size) else value for value in values)
        raise KernelArgumentError(op, argument, problem.format(*shown))


def on_cuda(op: str, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is for the Triton path. Raise UnsupportedDeviceError if it is neither there nor on the CPU."""
    if tensor.is_cpu:
        return False
    if tensor.is_cuda:
        return True
    raise UnsupportedDeviceError(op, str(tensor.device))


def require_index(op: str, argument: str, tensor: torch.Tensor, num_dims: int) -> None:
    """Raise unless `tensor` is an int32 or int64 tensor of `num_dims` dimensions."""
    fits = tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == num_dims
    problem = "must be an int32 or int64 tensor of {} dimensions, is {} {}"
    require(fits, op, argument, problem, num_dims, tensor.dtype, tensor.shape)


def require_arena(op: str, arena_bytes: torch.Tensor, block_bytes: int) -> None:
    """Raise unless `arena_bytes` is contiguous uint8 of one dimension, and a whole number of blocks, at least one."""
    flat = arena_bytes.dtype is torch.uint8 and arena_bytes.dim() == 1 and arena_bytes.is_contiguous()
    problem = "must be contiguous uint8 of one dimension, is {} {}"
    require(flat, op, "arena_bytes", problem, arena_bytes.dtype, arena_bytes.shape)
    num_bytes = arena_bytes.numel()
    whole = num_bytes > 0 and num_bytes % block_bytes == 0
    require(whole, op, "arena_bytes", "must be whole blocks of {} bytes, has {}", block_bytes, num_bytes)


def require_kv_layer(op: str, kv_layer: torch.Tensor) -> None:
    """Raise unless `kv_layer` is a layer's view [num_blocks, 2, block_size, num_kv_heads, head_dim] of an arena.

    The slots of one block must be contiguous per K and V, and the other strides whole multiples of a slot, so that
    every slot of every block is a row of one two-dimensional view (see slot_rows).
    """
    problem = "must be [num_blocks, 2, block_size, num_kv_heads, head_dim], is {}"
    require(kv_layer.dim() == 5 and kv_layer.shape[1] == 2, op, "kv_layer", problem, kv_layer.shape)
    _, _, _, num_kv_heads, head_dim = kv_layer.shape
    block_stride, kv_stride, slot_stride, head_stride, dim_stride = kv_layer.stride()
    slot = num_kv_heads * head_dim
    dense = dim_stride == 1 and head_stride == head_dim and slot_stride == slot
    rows = block_stride % slot == 0 and kv_stride % slot == 0
    require(dense and rows, op, "kv_layer", "must be a layer of a block-major arena, has stride {}", kv_layer.stride())


def require_sink_logits(op: str, sink_logits: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise unless there are none, or one in float32 for each head of q [..., num_heads, head_dim], on its device."""
    if sink_logits is not None:
        fits = sink_logits.shape == q.shape[1:2] and sink_logits.dtype is torch.float32 and sink_logits.is_contiguous()
        problem = "must be contiguous float32 [{}], is {} {}"
        require(fits, op, "sink_logits", problem, q.shape[1], sink_logits.dtype, sink_logits.shape)
        require(sink_logits.device == q.device, op, "sink_logits", "must be on the queries' device")


def slot_rows(kv_layer: torch.Tensor, row_len: int) -> torch.Tensor:
    """View a layer as rows of `row_len` elements [num_rows, row_len], where row_len divides a slot.

    Row r starts r * row_len elements after the layer's first K slot. The rows of the other layers lie in between, so
    an index built from the layer's strides stays right for every layer of the arena: it is built once per step.
    """
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    reach = (num_blocks - 1) * kv_layer.stride(0) + kv_layer.stride(1) + block_size * num_kv_heads * head_dim
    return kv_layer.as_strided((reach // row_len, row_len), (row_len, 1))
