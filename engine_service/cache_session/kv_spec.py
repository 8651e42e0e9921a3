"""The KV spec of a model, which the cache service compares before engines share a pool."""

from hashlib import sha256

import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.quantised.layout import QuantisedLayout

from ..compute.served_model import ServedModel
from ..model.layer_groups import LayerGroup

_KV_DTYPES = {
    torch.float16: pb.KV_DTYPE_FLOAT16,
    torch.bfloat16: pb.KV_DTYPE_BFLOAT16,
    torch.float32: pb.KV_DTYPE_FLOAT32,
}

_STORED_DTYPES = {
    "fp16": pb.KV_DTYPE_FLOAT16,
    "bf16": pb.KV_DTYPE_BFLOAT16,
    "fp8": pb.KV_DTYPE_FLOAT8_E4M3,
    "int8": pb.KV_DTYPE_INT8,
    "int4": pb.KV_DTYPE_INT4,
}
_HOST_FORMATS = {number: name for name, number in _STORED_DTYPES.items()} | {pb.KV_DTYPE_UNSPECIFIED: ""}


def get_host_format(pool: pb.PoolInfo) -> str:
    """The format of --kv-dtype that the pool's host tier keeps blocks in; empty: as they are on the device."""
    return _HOST_FORMATS[pool.host_kv_dtype]


def make_kv_spec(model: ServedModel, block_size: int) -> pb.KvSpec:
    """What must be equal in another engine's model for the two to share K and V."""
    layout, groups = model.layout(block_size), model.groups
    num_layers = sum(len(group.layers) for group in groups) or layout.num_layers
    spec = pb.KvSpec(
        model_id=model.model_id,
        revision=model.revision,
        block_size=block_size,
        rope_parameters=model.rope_parameters,
        compute_dtype=model.compute_dtype,
        tensor_parallel_size=model.num_ranks,
    )
    if isinstance(layout, KvLayout) and layout.is_latent:
        # A latent is K and V at once, so to the cache service a block is an opaque page, and reading K and V of it is refused.
        # The digest is of what the page is, in words: engines that agree in them lay out the same bytes.
        words = f"latent and rotated key, {list(layout.view_shape)} {str(layout.dtype).removeprefix('torch.')}"
        page = pb.PageLayout(page_bytes=layout.block_bytes, digest=sha256(words.encode()).hexdigest())
        if not groups:
            spec.layout = pb.KV_LAYOUT_OPAQUE  # a latent is whole on every rank, so that each has the same pages
            spec.page.CopyFrom(page)
            return spec
        spec.layout, spec.num_layers = pb.KV_LAYOUT_GROUPED, num_layers
        spec.groups.extend(_group(group, layout) for group in groups)
        spec.groups[0].page.CopyFrom(page)  # the others have states
        return spec
    spec.num_kv_heads, spec.head_dim, spec.sliding_window = layout.num_kv_heads, layout.head_dim, model.sliding_window
    if isinstance(layout, QuantisedLayout):  # without scales a block is as any of that element type
        spec.num_layers, spec.kv_dtype = layout.num_layers, _STORED_DTYPES[layout.kv_format.name]
        spec.layout = pb.KV_LAYOUT_SCALED if layout.kv_format.scale_bytes else pb.KV_LAYOUT_BLOCK_MAJOR
        spec.groups.extend(_stored_group(group, _KV_DTYPES[layout.dtype]) for group in groups)
    else:
        spec.num_layers, spec.kv_dtype = num_layers, _KV_DTYPES[layout.dtype]
        spec.layout = pb.KV_LAYOUT_GROUPED if groups else pb.KV_LAYOUT_BLOCK_MAJOR
        spec.groups.extend(_group(group, layout) for group in groups)
    return spec


def _stored_group(group: LayerGroup, tail_dtype: pb.KvDtype) -> pb.LayerGroup:
    """All layers, or those of a tail, which is kept as the model computes it."""
    if not group.window:
        return pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_FULL, layer_idx=group.layers)
    return pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_TAIL, layer_idx=group.layers, window_tokens=group.window, kv_dtype=tail_dtype)


def _group(group: LayerGroup, layout: KvLayout) -> pb.LayerGroup:
    kind = pb.LAYER_GROUP_KIND_FULL if group.window is None else pb.LAYER_GROUP_KIND_SLIDING_WINDOW
    if group.is_chunked:
        kind = pb.LAYER_GROUP_KIND_CHUNKED
    if group.is_recurrent:
        kind = pb.LAYER_GROUP_KIND_RECURRENT
    is_other = group.num_kv_heads > 0 and (group.num_kv_heads, group.head_dim) != (layout.num_kv_heads, layout.head_dim)
    return pb.LayerGroup(
        kind=kind,
        layer_idx=group.layers,
        window_tokens=group.window or 0,
        state_bytes=group.state_bytes,
        checkpoint_blocks=group.checkpoint_blocks,
        num_kv_heads=group.num_kv_heads if is_other else 0,
        head_dim=group.head_dim if is_other else 0,
    )
